"""The CUDA engine: the search on a GPU behind the common protocol; everything else by the C++ engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine import cuda_native
from flashtrie_cli.engine.cpu import CpuEngine
from flashtrie_cli.engine.cuda_arrays import DeviceGrids, DeviceResults, DeviceSearch
from flashtrie_cli.engine.cuda_loader import open_device, require_driver
from flashtrie_cli.engine.cuda_pinned import pinned_empty
from flashtrie_cli.engine.cuda_pipeline import HostPipeline
from flashtrie_cli.engine.cuda_single import SingleQuery
from flashtrie_cli.engine.cuda_slabs import SlabPool
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults
from flashtrie_cli.trie.stored import StoredTrie

_KEPT_PIPELINES = 4
_TOKEN_TYPES = ("uint16", "uint32", "int32", "int64")
_LOGPROB_TYPES = ("float16", "float32")


class CudaEngine(CpuEngine):
    """See ``TrieEngine``. The index is uploaded once, into the primary context of device number ``device``.

    Raises EngineUnavailable where there is no usable GPU, or no room on it.
    """

    name = "cuda"

    def __init__(self, stored: StoredTrie, *, threads: int = 1, device: int = 0):
        require_driver()
        super().__init__(stored, threads=threads)  # while the driver starts (``cuda_start``)
        self.device = open_device(device)
        self._upload()

    def _upload(self) -> None:
        self.device_trie = DeviceTrie(self.trie, self.device)
        self._times_kernels = False
        self._slabs = SlabPool()
        self._copies = cuda_native.copy_pool(self.threads)
        self._pipelines: dict[Any, HostPipeline | SingleQuery] = {}
        self._device_searches: dict[Any, DeviceSearch] = {}
        self._last: tuple[Any, HostPipeline | SingleQuery] | None = (
            None  # shapes, types and plan of the last call
        )

    @property
    def times_kernels(self) -> bool:
        """Whether searches record GPU events around their kernels, a few microseconds a call."""
        return self._times_kernels

    @times_kernels.setter
    def times_kernels(self, wanted: bool) -> None:
        self._times_kernels = wanted
        self._last = None

    @property
    def last_kernel_ns(self) -> int | None:
        """What the kernels of the last search took; None where that is not recorded."""
        return self._last[1].last_kernel_ns if self._last is not None and self._times_kernels else None

    def search(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan) -> SearchResults:
        """As in ``TrieEngine``, from host arrays; uint16 to int64 tokens and float16 log-probs go over as they are."""
        last = self._last
        if (
            last is not None
            and last[0] == (tokens.shape, tokens.dtype, logprobs.shape, logprobs.dtype, plan)
            and tokens.flags.c_contiguous
            and logprobs.flags.c_contiguous
        ):
            try:  # as the call before
                return last[1].search(tokens, logprobs)
            except Exception as error:
                _explain(error)
                raise
        tokens, logprobs = _as_kernel_types(tokens, logprobs)
        return self._search(tokens, logprobs, plan)

    def _search(
        self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan
    ) -> SearchResults:
        num_queries, num_steps, num_slots = tokens.shape
        if num_queries == 0 or num_steps == 0 or num_slots == 0:
            return _nothing(num_queries)
        types = (tokens.dtype.str, logprobs.dtype.str)
        kind = SingleQuery if SingleQuery.suits(tokens, logprobs) else HostPipeline
        key = (kind, num_steps, num_slots, *types, plan, self._times_kernels)
        pipeline = self._pipelines.get(key)
        try:
            if pipeline is None or not pipeline.holds(num_queries):
                while len(self._pipelines) >= _KEPT_PIPELINES:
                    self._pipelines.pop(next(iter(self._pipelines)))
                pipeline = self._pipelines[key] = self._make(kind, tokens, logprobs, plan)
            self._last = (tokens.shape, tokens.dtype, logprobs.shape, logprobs.dtype, plan), pipeline
            return pipeline.search(tokens, logprobs)
        except Exception as error:
            _explain(error)
            raise

    def _make(
        self, kind: type, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan
    ) -> HostPipeline | SingleQuery:
        if kind is SingleQuery:
            return SingleQuery(self.device_trie, tokens, logprobs, plan, times_kernels=self._times_kernels)
        return HostPipeline(
            self.device_trie, tokens, logprobs, plan, slabs=self._slabs, copies=self._copies,
            times_kernels=self._times_kernels,
        )  # fmt: skip

    def search_arrays(
        self, tokens: Any, logprobs: Any, plan: SearchPlan, *, stream: Any = None
    ) -> DeviceResults:
        """Search grids that are on the device, [queries, steps, slots], anything with ``__cuda_array_interface__``.

        Only enqueues, on ``stream`` (of torch, cupy, PyCUDA, or a handle; default: the default stream), and leaves
        the answer on the device. Once called for a shape and plan, it can be captured into a CUDA graph. The answer
        is overwritten by the next call for the same shape and plan. Bad log-probs are told by ``bad_slots`` alone.
        """
        grid = DeviceGrids(tokens, logprobs, self.device)
        key = (grid.shape, grid.token_bytes, grid.logprob_bytes, plan)
        search = self._device_searches.get(key)
        if search is None:
            if len(self._device_searches) >= _KEPT_PIPELINES:
                self._device_searches.pop(next(iter(self._device_searches)))
            search = self._device_searches[key] = DeviceSearch(self.device_trie, grid, plan)
        return search(grid, stream)

    def pinned_grids(
        self,
        num_queries: int,
        num_steps: int,
        num_slots: int,
        token_dtype: Any = np.uint32,
        logprob_dtype: Any = np.float32,
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Two arrays [queries, steps, slots] in pinned memory: grids in them go over without a copy on the host."""
        shape = (num_queries, num_steps, num_slots)
        return pinned_empty(shape, token_dtype), pinned_empty(shape, logprob_dtype)


def _as_kernel_types(
    tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    if tokens.dtype.name not in _TOKEN_TYPES or not tokens.flags.c_contiguous:
        tokens = np.ascontiguousarray(tokens, np.uint32 if tokens.itemsize <= 4 else np.int64)
    if logprobs.dtype.name not in _LOGPROB_TYPES or not logprobs.flags.c_contiguous:
        logprobs = np.ascontiguousarray(logprobs, np.float32)
    if tokens.shape != logprobs.shape or tokens.ndim != 3:
        raise InputError(
            f"tokens are {tokens.shape} and log-probs {logprobs.shape}, not queries, steps, slots alike"
        )
    return tokens, logprobs


def _nothing(num_queries: int) -> SearchResults:
    return SearchResults(
        np.zeros(num_queries + 1, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.float32), np.zeros(0, np.float32),
        np.zeros(1, np.int64), np.zeros(0, np.uint32),
    )  # fmt: skip


def _explain(error: Exception) -> None:
    """Raise an error of PyCUDA's as one clear line; nothing happens for others."""
    import pycuda.driver as cuda

    if isinstance(error, cuda.MemoryError):
        raise EngineUnavailable(
            f"the GPU is out of memory: {error}", hint="a smaller batch, or --engine cpu"
        ) from error
    if isinstance(error, cuda.Error):
        raise EngineUnavailable(
            f"the GPU failed during the search: {error}",
            hint="--engine cpu; please report it with the driver's version",
        ) from error
