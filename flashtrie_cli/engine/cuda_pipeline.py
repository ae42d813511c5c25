"""Searches of batches from host arrays to host arrays: three lanes take turns, so that copies and kernels overlap.

Answers come to pinned memory that the caller then owns (``cuda_slabs``), each array at its place in the answer of the
whole batch: the host copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_lane import Answer, Lane, answer_parts
from flashtrie_cli.engine.cuda_native import copy_arrays
from flashtrie_cli.engine.cuda_pinned import is_pinned
from flashtrie_cli.engine.cuda_slabs import LENT_SLABS, SlabParts, SlabPool
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

_NUM_LANES = 3
_CHUNK_QUERIES = 1056
_CHUNK_BYTES = 32 << 20
"""Of a chunk's grids, and of its answers at most: enough to hide the launch and to fill the bus."""

_ROUND_BYTES = 1 << 30
"""Of the answers at most that are in pinned memory at once; a larger batch goes in rounds, and is copied."""

_MIN_LENT_BYTES = 256 << 10
"""A smaller answer is copied, and its slab free for the next one."""

_RESERVED = 2
"""Multiprocessors that the search of a chunk leaves alone: it would take every place there is as the chunk before ends,
and keep the packing of that one waiting (measured on an H200)."""


def chunks(num_queries: int, first: int, most: int) -> Iterator[int]:
    """How a batch is cut: small chunks at both ends, since nothing hides the first copies and the last ones.

    ``first``: queries that the GPU works on at once; ``most``: that a chunk may have. Sizes double towards the middle.
    """
    first = min(first, most)
    ramp: list[int] = []
    size, left = first, num_queries
    while size < most and left >= 3 * size:
        ramp.append(size)
        left -= 2 * size
        size = min(2 * size, most)
    pieces = max(-(-left // most), 1 if ramp or num_queries < 2 * first else 2)
    yield from ramp
    yield from (left * (piece + 1) // pieces - left * piece // pieces for piece in range(pieces))
    yield from reversed(ramp)


class HostPipeline:
    """Searches of batches of one shape and plan. ``threads`` copy what has to be copied on the host."""

    def __init__(
        self, trie: DeviceTrie, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan,
        *, slabs: SlabPool, threads: int = 1, times_kernels: bool = False,
    ):  # fmt: skip
        num_queries, num_steps, num_slots = tokens.shape
        self._slabs, self._threads = slabs, threads
        self._hits, self._depth = plan.result_limit, min(num_steps, trie.depth)
        grid_bytes = num_steps * num_slots * (tokens.itemsize + logprobs.itemsize)
        self._answer_bytes = plan.result_limit * (20 + 4 * self._depth)
        self._most = max(min(_CHUNK_QUERIES, _CHUNK_BYTES // max(grid_bytes, self._answer_bytes)), 1)
        self._capacity = min(num_queries, self._most)
        # Nothing here refers back to the pipeline, or to the first batch: device memory goes when its last owner goes,
        # and not when cycles are collected, maybe on a thread where the driver has no context.
        self._make = partial(
            Lane,
            trie,
            self._capacity,
            num_steps,
            num_slots,
            plan,
            (tokens.dtype, logprobs.dtype),
            threads=threads,
        )
        self._lanes = [self._make()]
        self._first_chunk = self._lanes[0].session.num_groups(self._most, reserved=_RESERVED)
        self._parts: dict[int, SlabParts] = {}  # of the number of queries that there were last
        self._small: tuple[int, Answer] | None = (
            None  # the last small answer's room, and for how many queries
        )
        self._last: Lane | None = None  # with the last chunk of the rounds so far
        self._clock: tuple[Any, Any] | tuple[None, None] = None, None
        if times_kernels:
            import pycuda.driver as cuda

            self._clock = cuda.Event(), cuda.Event()

    @property
    def last_kernel_ns(self) -> int:
        """From the beginning of the last search's first kernel to the end of its last; 0 where it is not taken."""
        begun, ended = self._clock
        return int(1e6 * ended.time_since(begun)) if ended is not None else 0

    def holds(self, num_queries: int) -> bool:
        """Whether the buffers suit a batch of this size."""
        return num_queries <= self._capacity or self._capacity == self._most

    def search(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> SearchResults:
        """Results of grids [queries, steps, slots] of the shape and types that the pipeline was made for."""
        at_once = max(_ROUND_BYTES // self._answer_bytes, 1)
        self._last = None
        if len(tokens) > at_once:
            return self._in_rounds(tokens, logprobs, at_once)
        results = self._round(tokens, logprobs, 0, (0, 0))
        if len(tokens) * self._answer_bytes <= _MIN_LENT_BYTES:
            return SearchResults(*(array.copy() for array in vars(results).values()))
        used = results.num_hits * 20 + 4 * len(results.tokens)
        room = len(tokens) * self._answer_bytes
        if used >= max(room // 2, _MIN_LENT_BYTES) and self._slabs.num_lent <= LENT_SLABS:
            return results
        copies = [np.empty_like(array) for array in vars(results).values()]
        copy_arrays(copies, vars(results).values(), self._threads)
        return SearchResults(*copies)

    def _in_rounds(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], at_once: int) -> SearchResults:
        """A batch whose answers are not to be in pinned memory all at the same time."""
        num_queries = len(tokens)
        most = num_queries * self._hits
        # Memory that is not written to is not taken, so room for the most that there can be costs nothing.
        hit_offsets, token_offsets = np.zeros(num_queries + 1, np.int64), np.zeros(most + 1, np.int64)
        key_ids, flat = np.empty(most, np.uint32), np.empty(most * self._depth, np.uint32)
        scores, normalised_scores = np.empty(most, np.float32), np.empty(most, np.float32)
        hits = length = 0
        for first in range(0, num_queries, at_once):
            last = min(first + at_once, num_queries)
            found = self._round(tokens[first:last], logprobs[first:last], first, (hits, length))
            end, token_end = hits + found.num_hits, length + len(found.tokens)
            targets = (
                hit_offsets[first : last + 1], key_ids[hits:end], scores[hits:end], normalised_scores[hits:end],
                token_offsets[hits : end + 1], flat[length:token_end],
            )  # fmt: skip
            copy_arrays(targets, vars(found).values(), self._threads)
            hits, length = end, token_end
        return SearchResults(
            hit_offsets, key_ids[:hits], scores[:hits], normalised_scores[:hits], token_offsets[: hits + 1],
            flat[:length],
        )  # fmt: skip

    def _round(
        self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], first_query: int, before: tuple[int, int]
    ) -> SearchResults:
        """Search these grids; the batch has ``first_query`` queries before them, with so many hits and tokens."""
        num_queries = len(tokens)
        sizes = list(chunks(num_queries, self._first_chunk, self._most))
        while len(self._lanes) < min(len(sizes), _NUM_LANES):
            self._lanes.append(self._make())
        are_pinned = is_pinned(tokens) and is_pinned(logprobs)
        reserved = _RESERVED if len(sizes) > 1 else 0
        answer: Answer | None = None  # made once the GPU has begun to work
        under_way: list[Lane] = []
        begin = 0
        try:
            for number, size in enumerate(sizes):
                is_last = number + 1 == len(sizes)
                if answer is None and (is_last or number == _NUM_LANES):
                    answer = self._answer(num_queries, first_query, before)
                if answer is not None and len(under_way) == len(self._lanes):
                    under_way.pop(0).deliver(answer)
                lane, end = self._lanes[number % len(self._lanes)], begin + size
                under_way.append(lane)
                lane.start(
                    tokens[begin:end], logprobs[begin:end], first_query + begin, self._last, are_pinned=are_pinned,
                    answer=answer if is_last and first_query == 0 else None, reserved=reserved,
                    begun=self._clock[0] if self._last is None else None, ended=self._clock[1] if is_last else None,
                )  # fmt: skip
                self._last, begin = lane, end
            assert answer is not None
            while under_way:
                under_way.pop(0).deliver(answer)
        finally:  # for the last answers; or after an error or Ctrl-C, so that nothing goes on writing to these buffers
            for lane in self._lanes[: len(sizes)]:
                lane.stream.synchronize()
        return answer.results()

    def _answer(self, num_queries: int, first_query: int, before: tuple[int, int]) -> Answer:
        """Room for the answer to so many queries: on loan, but for small ones, which are always copied."""
        if self._small is not None and self._small[0] == num_queries:
            self._small[1].num_hits = self._small[1].num_tokens = 0
            return self._small[1]
        parts = self._parts.get(num_queries)
        if parts is None:
            self._parts.clear()
            parts = self._parts[num_queries] = answer_parts(
                num_queries, num_queries * self._hits, self._depth
            )
        is_small = num_queries * self._answer_bytes <= _MIN_LENT_BYTES and first_query == 0
        slabs = SlabPool() if is_small else self._slabs
        answer = Answer(slabs.take(parts.num_bytes), parts, first_query, before)
        if is_small:
            self._small = num_queries, answer
        return answer
