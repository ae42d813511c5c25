"""The paper's GPU search and its ablations (``cuda/kernels/paper.cu``), for the benchmark, over the cuda engine's trie.

Inputs go through pinned host memory and mirrors on the device, answers come back through pinned memory, workspaces are
allocated once: as the paper's system does it (appendix D). The launch is cooperative, which PyCUDA does not offer.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine import cuda_sources
from flashtrie_cli.engine.cuda import CudaEngine
from flashtrie_cli.engine.cuda_launch import KernelModule, check, driver
from flashtrie_cli.engine.cuda_layout import fill_plan
from flashtrie_cli.engine.cuda_paper_layout import (
    ANSWERS,
    BARRIER_BYTES,
    PAPER,
    PHASES,
    THREADS,
    PaperShape,
    join_answers,
    position_lists,
)
from flashtrie_cli.engine.cuda_pinned import pinned
from flashtrie_cli.errors import EngineUnavailable, UsageError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

KERNELS = {
    "flashtrie-paper": "flashtrie_paper",
    "ppt": "ppt",
    "linear-probe": "linear_probe",
    "two-pointer": "two_pointer",
    "per-child": "per_child",
    "hash-transitions": "hash_transitions",
}
MAPPED_BYTES = 256 << 10
"""Grids up to this size are read from pinned host memory by the kernel, once: cheaper than waiting for a copy."""
MAX_PPT_STEPS = 255


class PaperSystem:
    """One of `KERNELS` behind ``search``. ``blocks_per_multiprocessor``: None takes the better of one and two."""

    def __init__(self, engine: CudaEngine, name: str, *, blocks_per_multiprocessor: int | None = None):
        self.name = name
        self._engine, self._trie = engine, engine.device_trie
        compiled = cuda_sources.packaged_kernel("paper") or cuda_sources.cached_kernel(
            "paper", engine.device.arch
        )
        self._module = KernelModule(compiled.read_bytes())
        self.blocks_per_multiprocessor = blocks_per_multiprocessor
        self.resident_size = self._trie.size
        self.last_kernel_ns: int | None = None
        self.record_phases = False
        self.last_phases: dict[str, int] = {}
        self._tables: dict[str, int] = {}
        self._memory: list[Any] = []
        self._lane: _Lane | None = None
        if name == "hash-transitions":
            self._build_transitions()

    def search(
        self, tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], plan: SearchPlan
    ) -> SearchResults:
        """See ``TrieEngine.search``: the same bytes, but for ppt, whose hits need not be keys (ids all ones)."""
        self._engine.check_logprobs(logprobs)
        key = (len(tokens), tokens.shape[1:], plan)
        if self._lane is None or self._lane.key != key:
            self._lane = None  # frees its memory first
            self._lane = _Lane(
                self, key, len(tokens), PaperShape(plan.beam_width, plan.result_limit, *tokens.shape[1:])
            )
        results = self._lane.search(tokens, logprobs)
        self.last_kernel_ns = self._lane.kernel_ns()
        return results

    def _build_transitions(self) -> None:
        import pycuda.driver as cuda

        log2_size = max(4, int(1.5 * self._trie.num_nodes).bit_length())
        keys, children = self.allocate(8 << log2_size), self.allocate(4 << log2_size)
        cuda.memset_d32(keys, 0xFFFF_FFFF, 2 << log2_size)
        self._tables = {"hash_keys": keys, "hash_children": children, "log2_hash": log2_size}
        self.resident_size += 12 << log2_size
        view = np.frombuffer(self._trie.view.tobytes(), np.uint8).copy()
        arguments: list[npt.NDArray[Any]] = [
            view,
            np.array([keys], np.uint64),
            np.array([children], np.uint64),
            np.array([log2_size], np.int32),
        ]
        addresses = (ctypes.c_void_p * 4)(*(argument.ctypes.data for argument in arguments))
        function = self._module.kernel("build_transitions", 0)
        code = driver().cuLaunchKernel(
            function,
            4 * self._engine.device.num_multiprocessors,
            1,
            1,
            256,
            1,
            1,
            0,
            None,
            ctypes.byref(addresses),
            None,
        )
        check(code, "cuLaunchKernel(build_transitions)")
        self._engine.device.context.synchronize()

    def position_tables(self, num_steps: int) -> dict[str, int]:
        """PPT's lists on the device, made once for the most steps that a trie can have."""
        if "valid_tokens" not in self._tables:
            lists = position_lists(self._engine.trie, max(num_steps, min(self._trie.depth, MAX_PPT_STEPS)))
            names = ("valid_tokens", "valid_flags", "valid_offsets")
            self._tables.update({name: self.upload(array) for name, array in zip(names, lists, strict=True)})
            self.resident_size = sum(array.nbytes for array in lists)
        return self._tables

    def tables(self, num_steps: int) -> dict[str, int]:
        return self.position_tables(num_steps) if self.name == "ppt" else self._tables

    def allocate(self, num_bytes: int) -> int:
        """Device memory for as long as this system lives."""
        self._memory.append(allocate(num_bytes))
        return int(self._memory[-1])

    def upload(self, array: npt.NDArray[Any]) -> int:
        import pycuda.driver as cuda

        address = self.allocate(array.nbytes)
        if array.nbytes:
            cuda.memcpy_htod(address, np.ascontiguousarray(array))
        return address


class _Lane:
    """Buffers and a launch for batches of one size, shape and plan."""

    def __init__(self, system: PaperSystem, key: Any, num_queries: int, shape: PaperShape):
        import pycuda.driver as cuda

        shape.check()
        self.key, self._system, self._shape, self._num_queries = key, system, shape, num_queries
        self._cuda = cuda
        self._memory: list[Any] = []
        self._stream, self._begin, self._end = cuda.Stream(), cuda.Event(), cuda.Event()
        self._batch = np.zeros((), PAPER)
        # With what the kernels hold statically, even less than 48 KiB must be allowed for.
        self._function = system._module.kernel(KERNELS[system.name], max(shape.shared_bytes, (48 << 10) + 16))
        # Measured on an H200: one a multiprocessor answers a query 15 % sooner, two answer 20 % more queries a second.
        wanted = system.blocks_per_multiprocessor or (1 if num_queries <= 4 else 2)
        num_blocks = min(wanted * system._engine.device.num_multiprocessors, self._most_blocks())
        groups = min(num_queries, num_blocks)
        self._fill(groups, num_blocks // groups)
        self._parameters = np.zeros(PAPER.itemsize, np.uint8)
        self._addresses = (ctypes.c_void_p * 1)(self._parameters.ctypes.data)

    def _most_blocks(self) -> int:
        """Blocks that run at once with this much shared memory: a cooperative launch takes no more."""
        count = ctypes.c_int()
        code = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), self._function, THREADS, ctypes.c_size_t(self._shape.shared_bytes)
        )
        check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        if count.value == 0:
            raise UsageError(
                f"the paper's kernels need {self._shape.shared_bytes >> 10} KiB of shared memory"
            )
        return count.value * self._system._engine.device.num_multiprocessors

    def _fill(self, groups: int, blocks_per_group: int) -> None:
        cuda, batch, shape, plan = self._cuda, self._batch, self._shape, self.key[2]
        batch["trie"] = self._system._trie.view
        factors = plan.length_factors(shape.num_steps)
        fill_plan(batch["search"], plan, self._allocate(factors.nbytes))
        cuda.memcpy_htod(int(batch["search"]["length_factors"]), factors)
        batch["workspace"], batch["workspace_bytes"] = (
            self._allocate(shape.workspace_bytes * groups),
            shape.workspace_bytes,
        )
        batch["candidate_capacity"], batch["result_capacity"] = (
            shape.candidate_capacity,
            shape.result_capacity,
        )
        for name, value in self._system.tables(shape.num_steps).items():
            batch[name] = value
        batch["barriers"], batch["phases"] = (
            self._allocate(BARRIER_BYTES * groups),
            self._allocate(8 * len(PHASES)),
        )
        cuda.memset_d8(int(batch["barriers"]), 0, BARRIER_BYTES * groups)
        self._answers = {}
        sizes = shape.answer_sizes(self._num_queries)
        for name, dtype in ANSWERS:
            self._answers[name], batch[name] = pinned(sizes[name], np.dtype(dtype))
        size = self._num_queries * shape.num_steps * shape.num_slots
        self._tokens, batch["tokens"] = pinned(size, np.uint32)
        self._logprobs, batch["logprobs"] = pinned(size, np.float32)
        self._is_mapped = 8 * size <= MAPPED_BYTES
        if not self._is_mapped:
            batch["tokens"], batch["logprobs"] = self._allocate(4 * size), self._allocate(4 * size)
        batch["num_queries"], batch["num_steps"], batch["num_slots"] = (
            self._num_queries,
            shape.num_steps,
            shape.num_slots,
        )
        batch["num_groups"], batch["blocks_per_group"] = groups, blocks_per_group

    def _allocate(self, num_bytes: int) -> int:
        self._memory.append(allocate(num_bytes))
        return int(self._memory[-1])

    def search(self, tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32]) -> SearchResults:
        cuda, batch, shape = self._cuda, self._batch, self._shape
        np.copyto(self._tokens, tokens.reshape(-1))
        np.copyto(self._logprobs, logprobs.reshape(-1))
        if not self._is_mapped:
            cuda.memcpy_htod_async(int(batch["tokens"]), self._tokens, self._stream)
            cuda.memcpy_htod_async(int(batch["logprobs"]), self._logprobs, self._stream)
        if self._system.record_phases:
            cuda.memset_d32_async(int(batch["phases"]), 0, 2 * len(PHASES), self._stream)
        self._begin.record(self._stream)
        self._launch()
        self._end.record(self._stream)
        self._end.synchronize()
        if self._system.record_phases:
            cycles = np.zeros(len(PHASES), np.uint64)
            cuda.memcpy_dtoh(cycles, int(batch["phases"]))
            self._system.last_phases = dict(zip(PHASES, cycles.tolist(), strict=True))
        return join_answers(self._answers, self._num_queries, shape.num_results, shape.num_steps)

    def _launch(self) -> None:
        batch = self._batch
        self._parameters[:] = np.frombuffer(batch.tobytes(), np.uint8)
        num_blocks = int(batch["num_groups"]) * int(batch["blocks_per_group"])
        code = driver().cuLaunchCooperativeKernel(
            self._function, num_blocks, 1, 1, THREADS, 1, 1, self._shape.shared_bytes,
            ctypes.c_void_p(self._stream.handle), ctypes.byref(self._addresses),
        )  # fmt: skip
        check(code, f"cuLaunchCooperativeKernel({self._system.name})")

    def kernel_ns(self) -> int:
        return int(1e6 * self._end.time_since(self._begin))


def allocate(num_bytes: int) -> Any:
    """Device memory that is freed with the object; EngineUnavailable where there is none left."""
    import pycuda.driver as cuda

    try:
        return cuda.mem_alloc(max(num_bytes, 16))
    except cuda.MemoryError:
        raise EngineUnavailable(
            f"the GPU has no {num_bytes >> 20} MiB left for the paper's system", hint="a smaller batch"
        ) from None
