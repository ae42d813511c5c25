"""Searches from host arrays to host arrays: pinned buffers, two streams that take turns, answers packed on the GPU."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import NO_SLOT, PACKED
from flashtrie_cli.engine.cuda_pinned import is_pinned, pinned
from flashtrie_cli.engine.cuda_session import GridType, SearchSession
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.engine.protocol import bad_logprob_message
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

_CHUNK_QUERIES = 4096
_CHUNK_BYTES = 32 << 20
"""Of a chunk's grids, and of its answers at most: enough to hide the launch, little enough to pin."""


class _Answers:
    """Where the answers of consecutive chunks are put together, each copied once. ``num_queries`` in all."""

    def __init__(self, num_queries: int, result_limit: int, depth: int):
        hits = num_queries * result_limit
        # Memory that is not written to is not taken, so room for the most that there can be costs nothing.
        self.hit_offsets = np.zeros(num_queries + 1, np.int64)
        self.key_ids, self.scores = np.empty(hits, np.uint32), np.empty(hits, np.float32)
        self.normalised_scores = np.empty(hits, np.float32)
        self.token_offsets = np.empty(hits + 1, np.int64)
        self.token_offsets[0] = 0
        self.tokens = np.empty(hits * depth, np.uint32)
        self.num_queries = num_queries
        self.num_hits = self.num_tokens = 0
        self._own_references = self._references()

    def _references(self) -> list[int]:
        return [sys.getrefcount(value) for value in vars(self).values() if isinstance(value, np.ndarray)]

    def reuse(self, num_queries: int) -> bool:
        """Begin anew, where the size is right and nobody holds an array of the answer before any more."""
        if num_queries != self.num_queries or self._references() != self._own_references:
            return False
        self.num_hits = self.num_tokens = 0
        return True

    def take(self, first_query: int, count: int, lane: _Lane) -> None:
        hit_offsets, key_ids, scores, normalised_scores, token_offsets, tokens = lane.answers.values()
        hits = int(hit_offsets[count])
        length = int(token_offsets[hits])
        begin, end = self.num_hits, self.num_hits + hits
        np.add(
            hit_offsets[1 : count + 1], begin, out=self.hit_offsets[first_query + 1 : first_query + count + 1]
        )
        self.key_ids[begin:end] = key_ids[:hits]
        self.scores[begin:end] = scores[:hits]
        self.normalised_scores[begin:end] = normalised_scores[:hits]
        np.add(token_offsets[1 : hits + 1], self.num_tokens, out=self.token_offsets[begin + 1 : end + 1])
        self.tokens[self.num_tokens : self.num_tokens + length] = tokens[:length]
        self.num_hits, self.num_tokens = end, self.num_tokens + length

    def result(self) -> SearchResults:
        hits = self.num_hits
        return SearchResults(
            self.hit_offsets, self.key_ids[:hits], self.scores[:hits], self.normalised_scores[:hits],
            self.token_offsets[: hits + 1], self.tokens[: self.num_tokens],
        )  # fmt: skip


class _Lane:
    """One stream with a session and its pinned buffers: a chunk of queries under way at a time."""

    def __init__(
        self, trie: DeviceTrie, num_queries: int, num_steps: int, num_slots: int, plan: SearchPlan, grid: GridType,
        token_dtype: Any, logprob_dtype: Any, *, times_kernels: bool = False,
    ):  # fmt: skip
        import pycuda.driver as cuda

        self._cuda = cuda
        self.stream, self.done = cuda.Stream(), cuda.Event(cuda.event_flags.DISABLE_TIMING)
        self._clock = (cuda.Event(), cuda.Event()) if times_kernels else None
        self.session = SearchSession(trie, num_queries, num_steps, num_slots, plan, grid)
        self._size = num_queries * num_steps * num_slots
        self._dtypes = token_dtype, logprob_dtype
        self._staging: tuple[Any, ...] | None = None
        self._on_device: tuple[Any, Any] | None = None
        hits = num_queries * self.session.result_capacity
        self.counts, counts_mapped = pinned(3 * num_queries, np.uint32)
        answers = {
            "hit_offsets": (num_queries + 1, np.int64), "key_ids": (hits, np.uint32), "scores": (hits, np.float32),
            "normalised_scores": (hits, np.float32), "token_offsets": (hits + 1, np.int64),
            "tokens": (hits * self.session.depth, np.uint32),
        }  # fmt: skip
        self.answers: dict[str, npt.NDArray[Any]] = {}
        self._packed = np.zeros((), PACKED)
        for name, (length, dtype) in answers.items():
            self.answers[name], self._packed[name] = pinned(length, dtype)
        outputs = {
            name: counts_mapped + 4 * num_queries * i
            for i, name in enumerate(("num_hits", "num_tokens", "bad_slots"))
        }
        self.answers["token_offsets"][0] = 0
        self.session.set_outputs(outputs)
        self._totals = cuda.mem_alloc(64)
        cuda.memset_d8(int(self._totals), 0, 64)
        self._packed["before"], self._packed["after"] = int(self._totals), int(self._totals) + 16
        self._packed["told"] = int(self._totals) + 32
        self._bad, self._packed["bad_slots"] = pinned(num_queries, np.uint32)
        self.capacity = num_queries
        self.first_query, self.num_queries = 0, 0
        self._logprobs: npt.NDArray[Any] = self.answers["scores"]

    def start(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], first_query: int) -> None:
        """Enqueue the search of these grids, [queries, steps, slots]; both must stay as they are until ``finish``."""
        count = len(tokens)
        self.first_query, self.num_queries = first_query, count
        self._logprobs = logprobs
        if is_pinned(tokens) and is_pinned(logprobs):
            addresses = self._upload(tokens, logprobs)
        else:
            addresses = self._upload(*self._stage(tokens, logprobs))
        if self._clock:
            self._clock[0].record(self.stream)
        self.session.launch(*addresses, count, self.stream)
        self.session.pack(self._packed, count, self.stream)
        if self._clock:
            self._clock[1].record(self.stream)
        self.done.record(self.stream)

    def _stage(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
        """Copies of grids in pinned memory."""
        if self._staging is None:
            self._staging = tuple(pinned(self._size, dtype)[0] for dtype in self._dtypes)
        copies = tuple(to[: tokens.size] for to in self._staging)
        copies[0][:], copies[1][:] = tokens.reshape(-1), logprobs.reshape(-1)
        return copies

    def _upload(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> tuple[int, int]:
        cuda = self._cuda
        if self._on_device is None:
            try:
                sizes = (max(self._size * np.dtype(dtype).itemsize, 16) for dtype in self._dtypes)
                self._on_device = cuda.mem_alloc(next(sizes)), cuda.mem_alloc(next(sizes))
            except cuda.MemoryError:
                raise EngineUnavailable(
                    "the GPU has no memory left for a batch", hint="a smaller batch"
                ) from None
        to_tokens, to_logprobs = self._on_device
        cuda.memcpy_htod_async(to_tokens, tokens, self.stream)
        cuda.memcpy_htod_async(to_logprobs, logprobs, self.stream)
        return int(to_tokens), int(to_logprobs)

    def kernel_ns(self) -> int:
        """Time of the kernels of the chunk that ``finish`` has waited for; 0 where it is not taken."""
        return int(1e6 * self._clock[1].time_since(self._clock[0])) if self._clock else 0

    def finish(self, num_steps: int, num_slots: int) -> int:
        """Wait for the chunk under way; the number of its queries. InputError for the first bad log-prob."""
        self.done.synchronize()
        count, self.num_queries = self.num_queries, 0
        bad_slots = self.counts[2 * self.capacity : 2 * self.capacity + count]
        if bad_slots.min() != NO_SLOT:
            query = int(np.argmax(bad_slots != NO_SLOT))
            slot = int(bad_slots[query])
            value = float(self._logprobs.reshape(-1)[query * num_steps * num_slots + slot])
            shape = (self.first_query + count, num_steps, num_slots)
            flat = (self.first_query + query) * num_steps * num_slots + slot
            raise InputError(bad_logprob_message(flat, shape, value))
        return count


class HostPipeline:
    """Searches of one shape and plan from host arrays, in chunks on two lanes, so that copies and kernels overlap."""

    def __init__(
        self, trie: DeviceTrie, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan,
        *, times_kernels: bool = False,
    ):  # fmt: skip
        num_queries, self._num_steps, self._num_slots = tokens.shape
        depth = min(self._num_steps, trie.depth)
        grid_bytes = self._num_steps * self._num_slots * (tokens.itemsize + logprobs.itemsize)
        answer_bytes = plan.result_limit * (20 + 4 * depth)
        most = max(min(_CHUNK_QUERIES, _CHUNK_BYTES // max(grid_bytes, answer_bytes)), 1)
        # A large batch is cut in pieces, so that the copies of one overlap with the search of another.
        self.chunk = max(min(most, -(-num_queries // 4) if num_queries >= 1024 else num_queries), 1)
        self._result_limit, self._depth = plan.result_limit, depth
        # Nothing here refers back to the pipeline, or to the first batch: device memory goes when its last owner goes,
        # and not when cycles are collected, maybe on a thread where the driver has no context.
        self._make = partial(
            _Lane, trie, self.chunk, self._num_steps, self._num_slots, plan,
            GridType(tokens.itemsize, logprobs.itemsize), tokens.dtype, logprobs.dtype, times_kernels=times_kernels,
        )  # fmt: skip
        self._lanes = [self._make()]
        self._answers: _Answers | None = None
        self._chunks_ns: int | None = None  # of a search in chunks

    @property
    def last_kernel_ns(self) -> int:
        """Time of the last search's kernels, summed over its chunks; 0 where it is not taken."""
        return self._lanes[0].kernel_ns() if self._chunks_ns is None else self._chunks_ns

    def holds(self, num_queries: int) -> bool:
        """Whether the buffers suit a batch of this size."""
        return num_queries <= self.chunk or self.chunk >= 256

    def search(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> SearchResults:
        """Results of grids [queries, steps, slots] of the shape and types that the pipeline was made for."""
        num_queries = len(tokens)
        if num_queries > self.chunk and len(self._lanes) == 1:
            self._lanes.append(self._make())
        # Memory written to before costs no page faults: at a thousand hits a query they are most of the copying.
        answers = self._answers
        if answers is None or not answers.reuse(num_queries):
            answers = self._answers = _Answers(num_queries, self._result_limit, self._depth)
        pending: list[_Lane] = []
        self._chunks_ns = 0

        def collect() -> None:
            lane = pending.pop(0)
            answers.take(lane.first_query, lane.finish(self._num_steps, self._num_slots), lane)
            self._chunks_ns = (self._chunks_ns or 0) + lane.kernel_ns()

        try:
            for at, first in enumerate(range(0, num_queries, self.chunk)):
                if len(pending) == len(self._lanes):
                    collect()
                last = min(first + self.chunk, num_queries)
                lane = self._lanes[at % len(self._lanes)]
                pending.append(lane)
                lane.start(tokens[first:last], logprobs[first:last], first)
            while pending:
                collect()
        finally:
            for lane in pending:  # an error or Ctrl-C: leave nothing running that writes to these buffers
                lane.stream.synchronize()
        return answers.result()
