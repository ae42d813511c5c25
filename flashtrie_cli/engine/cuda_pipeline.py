"""Searches from host arrays to host arrays: pinned buffers, two streams that take turns, answers packed on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import NO_SLOT, PACKED
from flashtrie_cli.engine.cuda_session import GridType, SearchSession
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.engine.protocol import bad_logprob_message
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

_CHUNK_QUERIES = 4096
_CHUNK_BYTES = 48 << 20
"""Of a chunk's grids, and of its answers at most: enough to hide the launch, little enough to pin."""

_MAPPED_BYTES = 256 << 10
"""Grids up to this size are read by the kernel from the host's memory: cheaper than the latency of a copy."""


def _pinned(shape: int, dtype: Any) -> tuple[npt.NDArray[Any], int]:
    """A pinned array that the GPU can reach, and its device address."""
    import pycuda.driver as cuda

    try:
        array = cuda.pagelocked_empty(max(shape, 1), dtype, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
    except cuda.Error as error:
        raise EngineUnavailable(f"no memory to pin for the GPU: {error}", hint="a smaller batch") from None
    return array, int(array.base.get_device_pointer())


class _Lane:
    """One stream with a session and its pinned buffers: a chunk of queries under way at a time."""

    def __init__(
        self, trie: DeviceTrie, num_queries: int, num_steps: int, num_slots: int, plan: SearchPlan, grid: GridType,
        token_dtype: Any, logprob_dtype: Any,
    ):  # fmt: skip
        import pycuda.driver as cuda

        self._cuda = cuda
        self.stream, self.done = cuda.Stream(), cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self.session = SearchSession(trie, num_queries, num_steps, num_slots, plan, grid)
        size = num_queries * num_steps * num_slots
        self.tokens, self._tokens_mapped = _pinned(size, token_dtype)
        self.logprobs, self._logprobs_mapped = _pinned(size, logprob_dtype)
        self._on_device: tuple[Any, Any] | None = None
        hits = num_queries * self.session.result_capacity
        self.counts, counts_mapped = _pinned(3 * num_queries, np.uint32)
        answers = {
            "hit_offsets": (num_queries + 1, np.int64), "key_ids": (hits, np.uint32), "scores": (hits, np.float32),
            "normalised_scores": (hits, np.float32), "token_offsets": (hits + 1, np.int64),
            "tokens": (hits * self.session.depth, np.uint32),
        }  # fmt: skip
        self.answers: dict[str, npt.NDArray[Any]] = {}
        self._packed = np.zeros((), PACKED)
        for name, (length, dtype) in answers.items():
            self.answers[name], self._packed[name] = _pinned(length, dtype)
        names = ("num_hits", "num_tokens", "bad_slots")
        self.session.set_outputs({name: counts_mapped + 4 * num_queries * i for i, name in enumerate(names)})
        self.capacity = num_queries
        self.first_query, self.num_queries = 0, 0

    def start(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], first_query: int) -> None:
        """Enqueue the search of these grids, [queries, steps, slots]."""
        count, size = len(tokens), tokens.size
        np.copyto(self.tokens[:size], tokens.reshape(-1))
        np.copyto(self.logprobs[:size], logprobs.reshape(-1))
        self.first_query, self.num_queries = first_query, count
        addresses = self._tokens_mapped, self._logprobs_mapped
        if tokens.nbytes + logprobs.nbytes > _MAPPED_BYTES:
            addresses = self._upload(size)
        self.session.launch(*addresses, count, self.stream)
        self.session.pack(self._packed, count, self.stream)
        self.done.record(self.stream)

    def _upload(self, size: int) -> tuple[int, int]:
        cuda = self._cuda
        if self._on_device is None:
            try:
                self._on_device = cuda.mem_alloc(self.tokens.nbytes), cuda.mem_alloc(self.logprobs.nbytes)
            except cuda.MemoryError:
                raise EngineUnavailable(
                    "the GPU has no memory left for a batch", hint="a smaller batch"
                ) from None
        tokens, logprobs = self._on_device
        cuda.memcpy_htod_async(tokens, self.tokens[:size], self.stream)
        cuda.memcpy_htod_async(logprobs, self.logprobs[:size], self.stream)
        return int(tokens), int(logprobs)

    def finish(self, num_steps: int, num_slots: int) -> SearchResults:
        """Wait for the chunk under way; its answer. InputError for the first bad log-prob."""
        self.done.synchronize()
        count = self.num_queries
        self.num_queries = 0
        bad_slots = self.counts[2 * self.capacity : 2 * self.capacity + count]
        bad = np.flatnonzero(bad_slots != NO_SLOT)
        if len(bad):
            query, slot = int(bad[0]), int(bad_slots[bad[0]])
            value = float(self.logprobs[query * num_steps * num_slots + slot])
            shape = (self.first_query + count, num_steps, num_slots)
            flat = (self.first_query + query) * num_steps * num_slots + slot
            raise InputError(bad_logprob_message(flat, shape, value))
        answers = self.answers
        num_hits = int(answers["hit_offsets"][count])
        num_tokens = int(answers["token_offsets"][num_hits])
        lengths = (count + 1, num_hits, num_hits, num_hits, num_hits + 1, num_tokens)
        return SearchResults(*(array[:n].copy() for array, n in zip(answers.values(), lengths, strict=True)))


class HostPipeline:
    """Searches of one shape and plan from host arrays, in chunks on two lanes, so that copies and kernels overlap."""

    def __init__(
        self, trie: DeviceTrie, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan
    ):
        num_queries, self._num_steps, self._num_slots = tokens.shape
        depth = min(self._num_steps, trie.depth)
        grid_bytes = self._num_steps * self._num_slots * (tokens.itemsize + logprobs.itemsize)
        answer_bytes = plan.result_limit * (20 + 4 * depth)
        most = max(min(_CHUNK_QUERIES, _CHUNK_BYTES // max(grid_bytes, answer_bytes)), 1)
        # A batch that fills both lanes is cut in two at least.
        self.chunk = most if num_queries > most else max(num_queries, 1)
        self._make = lambda: _Lane(
            trie, self.chunk, self._num_steps, self._num_slots, plan,
            GridType(tokens.itemsize, logprobs.itemsize), tokens.dtype, logprobs.dtype,
        )  # fmt: skip
        self._lanes = [self._make()]

    def holds(self, num_queries: int) -> bool:
        """Whether the buffers suit a batch of this size."""
        return num_queries <= self.chunk or self.chunk >= 256

    def search(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> SearchResults:
        """Results of grids [queries, steps, slots] of the shape and types that the pipeline was made for."""
        num_queries = len(tokens)
        if num_queries > self.chunk and len(self._lanes) == 1:
            self._lanes.append(self._make())
        parts: list[SearchResults] = []
        pending: list[_Lane] = []
        try:
            for at, first in enumerate(range(0, num_queries, self.chunk)):
                lane = self._lanes[at % len(self._lanes)]
                if lane in pending:
                    pending.remove(lane)
                    parts.append(lane.finish(self._num_steps, self._num_slots))
                last = min(first + self.chunk, num_queries)
                lane.start(tokens[first:last], logprobs[first:last], first)
                pending.append(lane)
            for lane in list(pending):
                pending.remove(lane)
                parts.append(lane.finish(self._num_steps, self._num_slots))
        finally:
            for lane in pending:  # an error or Ctrl-C: leave nothing running that writes to these buffers
                lane.stream.synchronize()
        return join(parts)


def join(parts: list[SearchResults]) -> SearchResults:
    """The answers of consecutive batches as one."""
    if len(parts) == 1:
        return parts[0]
    offsets = {"hit_offsets": [np.zeros(1, np.int64)], "token_offsets": [np.zeros(1, np.int64)]}
    for name, pieces in offsets.items():
        base = 0
        for part in parts:
            ends = getattr(part, name)
            pieces.append(ends[1:] + base)
            base += int(ends[-1])
    flat = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("key_ids", "scores", "normalised_scores", "tokens")
    }
    joined = {name: np.concatenate(pieces) for name, pieces in offsets.items()}
    return SearchResults(
        joined["hit_offsets"], flat["key_ids"], flat["scores"], flat["normalised_scores"], joined["token_offsets"],
        flat["tokens"],
    )  # fmt: skip
