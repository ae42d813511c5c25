"""Searches of batches from host arrays to host arrays: lanes take turns, so that copies and kernels overlap.

Answers come to pinned memory that the caller then owns (``cuda_slabs``), each array at its place in the answer of the
whole batch: the host copies nothing of two answers, and those of a caller who keeps more while they come. The extension
drives it all (``cuda/host/gpu_batch.hpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine import cuda_native
from flashtrie_cli.engine.cpu import native
from flashtrie_cli.engine.cuda_lane import Answer, Lane, answer_parts
from flashtrie_cli.engine.cuda_layout import NO_SLOT, PACKED
from flashtrie_cli.engine.cuda_session import launch_planner
from flashtrie_cli.engine.cuda_slabs import LENT_SLABS, SlabParts, SlabPool
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.engine.protocol import bad_logprob_message
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

_NUM_LANES = 4
_CHUNK_WAVES = 1
"""A chunk has so many times the queries that the GPU works on at once: enough to hide what a chunk costs the host."""

_FIRST_SHARE = 4
"""The first and the last chunk have a part of them only."""

_DIRECT_WAVES = 1
"""The last answers of a batch, of so many times those queries at most, are packed straight to their places: nothing is
left to hide their way through the copy engine, for which the host has to be told how many there are."""

_CHUNK_BYTES = 32 << 20
"""Of a chunk's grids, and of its answers at most."""

_ORDERED_BYTES = 4 << 20
"""Of a chunk's grids, from which on the chunks go over one after the other: those of several streams share the bus, and
one that was asked for later may be there first."""

_ROUND_BYTES = 1 << 30
"""Of the answers at most that are in pinned memory at once; a larger batch goes in rounds, and is copied."""

_MIN_LENT_BYTES = 256 << 10
"""A smaller answer is copied, and its slab free for the next one."""

_LENT_SHARE = 4
"""So is one that fills less than such a part of the room that it might have needed."""

_KEPT_PROGRAMS = 64
_MANY = 1 << 30


def chunks(num_queries: int, first: int, most: int) -> Iterator[int]:
    """How a batch is cut: small chunks at both ends, since nothing hides the first copies and the last ones.

    ``first``: queries of the smallest; ``most``: that a chunk may have. Sizes double towards the middle.
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
    """Searches of batches of one shape and plan. ``copies``, a CopyPool, copies what has to be copied on the host."""

    def __init__(
        self, trie: DeviceTrie, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan,
        *, slabs: SlabPool, copies: Any, times_kernels: bool = False,
    ):  # fmt: skip
        num_queries, num_steps, num_slots = tokens.shape
        self._slabs, self._copies = slabs, copies
        self._hits, self._depth = plan.result_limit, min(num_steps, trie.depth)
        grid_bytes = num_steps * num_slots * (tokens.itemsize + logprobs.itemsize)
        self._answer_bytes = plan.result_limit * (20 + 4 * self._depth)
        at_once = launch_planner(trie, num_steps, num_slots, plan)(_MANY).num_groups
        most = min(int(_CHUNK_WAVES * at_once), _CHUNK_BYTES // max(grid_bytes, self._answer_bytes))
        self._most, self._first, self._at_once = max(most, 1), max(at_once // _FIRST_SHARE, 1), at_once
        self._capacity = min(num_queries, self._most)
        types = tokens.dtype, logprobs.dtype
        self._lanes = [
            Lane(trie, self._capacity, num_steps, num_slots, plan, types)
            for _ in range(self._num_lanes(num_queries))
        ]
        self._is_staged = False  # whether there is memory to copy grids to
        self._handles: dict[str, int] = {}  # of kernels
        self._programs: dict[int, Any] = {}  # by number of queries
        self._parts: dict[int, SlabParts] = {}  # of the number of queries that there were last
        self._small: tuple[int, Answer] | None = (
            None  # the last small answer's room, and for how many queries
        )
        self._clock = cuda_native.KernelClock() if times_kernels else None
        self._native = self._open(tokens, logprobs)
        trie.device.context.synchronize()  # what was begun on the default stream, for which these do not wait

    def _open(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> Any:
        import pycuda.driver as cuda

        self._totals = cuda.mem_alloc(48)
        cuda.memset_d8(self._totals, 0, 48)
        self._recorder, self._upload_stream = cuda.Stream(), cuda_native.NativeStream()
        session, record = self._lanes[0].session, np.zeros((), PACKED)
        query = tokens[0].size
        return native().GpuBatch(
            driver=cuda_native.batch_calls(),
            lane_queries=self._capacity,
            ordered_bytes=_ORDERED_BYTES,
            upload_stream=self._upload_stream.handle,
            grid_bytes=[query * tokens.itemsize, query * logprobs.itemsize],
            totals=[int(self._totals) + 16 * at for at in range(3)],
            pack=self._handle("pack_hits", lambda stream: session.pack(record, 1, stream)),
            events=self._clock.handles if self._clock else [0, 0],
            lanes=[lane.addresses for lane in self._lanes],
            copies=self._copies,
        )

    def _handle(self, kernel: str, launch: Callable[[Any], None]) -> int:
        """The driver's handle of the kernel that this launches on a stream."""
        handle = self._handles.get(kernel)
        if handle is None:
            stream = self._recorder
            handle = cuda_native.function_handle(lambda: launch(stream), int(stream.handle))
            self._handles[kernel] = handle
        return handle

    def _sizes(self, num_queries: int) -> list[int]:
        return list(chunks(num_queries, self._first, self._most))

    def _num_lanes(self, num_queries: int) -> int:
        return min(len(self._sizes(num_queries)), _NUM_LANES)

    def holds(self, num_queries: int) -> bool:
        """Whether the buffers suit a batch of this size."""
        suits = num_queries <= self._capacity or self._capacity == self._most
        return suits and self._num_lanes(num_queries) <= len(self._lanes)

    def _program(self, num_queries: int) -> Any:
        """The launches of a batch."""
        program = self._programs.get(num_queries)
        if program is not None:
            return program
        program = native().GpuChunks()
        sizes = self._sizes(num_queries)
        left = num_queries
        for number, size in enumerate(sizes):
            lane = self._lanes[number % len(self._lanes)]
            launch, record = lane.session.prepare(*lane.grids, size, batch_size=num_queries)
            is_direct = left <= max(int(_DIRECT_WAVES * self._at_once), sizes[-1])
            left -= size
            program.add(
                num_queries=size, function=self._handle(launch.kernel, partial(_launch, lane, size, num_queries)),
                num_blocks=launch.num_groups * launch.blocks_per_group, num_threads=launch.num_threads,
                shared_bytes=launch.shared_bytes, is_direct=is_direct, record=record,
            )  # fmt: skip
        if len(self._programs) >= _KEPT_PROGRAMS:
            self._programs.clear()
        self._programs[num_queries] = program
        return program

    @property
    def last_kernel_ns(self) -> int:
        """From the beginning of the last search's first kernel to the end of its last; 0 where it is not taken."""
        return self._clock.elapsed_ns() if self._clock else 0

    def search(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> SearchResults:
        """Results of grids [queries, steps, slots] of the shape and types that the pipeline was made for."""
        num_queries = len(tokens)
        at_once = max(_ROUND_BYTES // self._answer_bytes, 1)
        if num_queries > at_once:
            return self._in_rounds(tokens, logprobs, at_once)
        answer = self._round(tokens, logprobs)
        results, room = answer.results, num_queries * self._answer_bytes
        if room <= _MIN_LENT_BYTES:
            return SearchResults(*[array.copy() for array in vars(results).values()])
        if results.num_hits * 20 + 4 * len(results.tokens) >= max(room // _LENT_SHARE, _MIN_LENT_BYTES):
            return results
        copies = [np.empty_like(array) for array in vars(results).values()]
        self._copies.copy_arrays(copies, list(vars(results).values()))
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
            found = self._round(tokens[first:last], logprobs[first:last], first, is_part=True).results
            end, token_end = hits + found.num_hits, length + len(found.tokens)
            found.hit_offsets[:] += hits
            found.token_offsets[:] += length
            targets = [
                hit_offsets[first : last + 1], key_ids[hits:end], scores[hits:end], normalised_scores[hits:end],
                token_offsets[hits : end + 1], flat[length:token_end],
            ]  # fmt: skip
            self._copies.copy_arrays(targets, list(vars(found).values()))
            hits, length = end, token_end
        return SearchResults(
            hit_offsets, key_ids[:hits], scores[:hits], normalised_scores[:hits], token_offsets[: hits + 1],
            flat[:length],
        )  # fmt: skip

    def _round(
        self,
        tokens: npt.NDArray[Any],
        logprobs: npt.NDArray[Any],
        first_query: int = 0,
        *,
        is_part: bool = False,
    ) -> Answer:
        """The answer to these grids; ``is_part``: of a batch, which begin with its query ``first_query``."""
        query, program = self._native, self._program(len(tokens))
        try:
            if not query.start(program, tokens, logprobs, self._is_staged):
                query.stage([lane.stage() for lane in self._lanes])
                self._is_staged = True
                query.start(program, tokens, logprobs, True)
            answer = self._answer(len(tokens), is_part=is_part)  # while the GPU is at work
            num_hits, num_tokens, bad_query, bad_slot = query.finish(answer.addresses, answer.kept)
        except RuntimeError as error:
            raise EngineUnavailable(f"the GPU failed during the search: {error}") from None
        except BaseException:
            query.stop()
            raise
        if bad_slot != NO_SLOT:
            self._refuse(logprobs, first_query, bad_query, bad_slot)
        answer.settle(num_hits, num_tokens)
        return answer

    def _answer(self, num_queries: int, *, is_part: bool) -> Answer:
        """Room for the answer to so many queries: on loan, but for small ones and parts, which are copied."""
        if self._small is not None and self._small[0] == num_queries:
            return self._small[1]
        parts = self._parts.get(num_queries)
        if parts is None:
            self._parts.clear()
            parts = answer_parts(num_queries, num_queries * self._hits, self._depth)
            self._parts[num_queries] = parts
        is_small = num_queries * self._answer_bytes <= _MIN_LENT_BYTES and not is_part
        slab = (SlabPool() if is_small else self._slabs).take(parts.num_bytes)
        is_kept = not is_small and not is_part and self._slabs.num_lent > LENT_SLABS
        answer = Answer(slab, parts, is_kept=is_kept)
        if is_small:
            self._small = num_queries, answer
        return answer

    def _refuse(
        self, logprobs: npt.NDArray[Any], first_query: int, bad_query: int, bad_slot: int
    ) -> NoReturn:
        """Names the first bad log-prob, ``bad_query`` of these grids."""
        grid = logprobs[bad_query]
        query = first_query + bad_query
        value = float(grid.reshape(-1)[bad_slot])
        raise InputError(bad_logprob_message(query * grid.size + bad_slot, (query + 1, *grid.shape), value))


def _launch(lane: Lane, num_queries: int, batch_size: int, stream: Any) -> None:
    lane.session.launch(*lane.grids, num_queries, stream, batch_size=batch_size)
