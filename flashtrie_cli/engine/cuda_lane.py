"""A lane of the batch pipeline: one stream, and the buffers of the chunk that is under way on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import NO_SLOT, PACKED
from flashtrie_cli.engine.cuda_native import copy_arrays
from flashtrie_cli.engine.cuda_pinned import pinned
from flashtrie_cli.engine.cuda_session import GridType, SearchSession
from flashtrie_cli.engine.cuda_slabs import Slab, SlabParts
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.engine.protocol import bad_logprob_message
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

_HIT_ARRAYS = ("key_ids", "scores", "normalised_scores")
_ARRAYS = ("hit_offsets", *_HIT_ARRAYS, "token_offsets", "tokens")


def answer_parts(num_queries: int, num_hits: int, depth: int) -> SlabParts:
    """The arrays of so large an answer in a slab."""
    parts = SlabParts()
    parts.add("hit_offsets", num_queries + 1, np.int64)
    parts.add("key_ids", num_hits, np.uint32)
    parts.add("scores", num_hits, np.float32)
    parts.add("normalised_scores", num_hits, np.float32)
    parts.add("token_offsets", num_hits + 1, np.int64)
    parts.add("tokens", num_hits * depth, np.uint32)
    return parts


class Answer:
    """The answer to some queries of a batch, put together in a slab from chunks in order.

    ``first_query`` and ``before``, hits and tokens: what came before them in the batch, from where offsets go on.
    """

    def __init__(self, slab: Slab, parts: SlabParts, first_query: int, before: tuple[int, int]):
        self.arrays = parts.arrays(slab)
        self.addresses = parts.addresses(slab.address)
        self.arrays["hit_offsets"][0], self.arrays["token_offsets"][0] = before
        self.first_query, self.hits_before, self.tokens_before = first_query, *before
        self.num_hits = self.num_tokens = 0

    def results(self) -> SearchResults:
        """Its arrays, once all chunks are there."""
        hits, arrays = self.num_hits, self.arrays
        return SearchResults(
            arrays["hit_offsets"], arrays["key_ids"][:hits], arrays["scores"][:hits],
            arrays["normalised_scores"][:hits], arrays["token_offsets"][: hits + 1],
            arrays["tokens"][: self.num_tokens],
        )  # fmt: skip


class Lane:
    """Its stream takes the grids of a chunk over, searches them, packs the answers and takes back as much as there is.

    Hits and tokens of the batch are counted from chunk to chunk on the device: packing waits for the chunk before.
    """

    def __init__(
        self, trie: DeviceTrie, num_queries: int, num_steps: int, num_slots: int, plan: SearchPlan,
        types: tuple[np.dtype[Any], np.dtype[Any]], *, threads: int,
    ):  # fmt: skip
        import pycuda.driver as cuda

        self._cuda, self._threads = cuda, threads
        self.stream = cuda.Stream()
        self._staged, self._packed = (cuda.Event(cuda.event_flags.DISABLE_TIMING) for _ in range(2))
        grid = GridType(*(dtype.itemsize for dtype in types))
        self.session = SearchSession(trie, num_queries, num_steps, num_slots, plan, grid)
        self._size, self._types = num_queries * num_steps * num_slots, types
        self._staging: tuple[npt.NDArray[Any], ...] | None = None
        hits = num_queries * self.session.result_capacity
        parts = answer_parts(num_queries, hits, self.session.depth)
        parts.add("grid_tokens", self._size, types[0])
        parts.add("grid_logprobs", self._size, types[1])
        parts.add("totals", 6, np.uint64)  # zeros; then two that take turns, for a lane may come after itself
        try:
            self._memory = cuda.mem_alloc(parts.num_bytes)
        except cuda.MemoryError:
            raise EngineUnavailable(
                f"the GPU has no {parts.num_bytes >> 20} MiB left for a batch", hint="a smaller batch"
            ) from None
        self._at = at = parts.addresses(int(self._memory))
        cuda.memset_d8(at["totals"], 0, 48)
        self._turn = 0
        self._told, told = pinned(2, np.uint64)
        self._bad_slots, bad_slots = pinned(num_queries, np.uint32)
        self._bad_slots[:] = NO_SLOT
        self._is_direct = False
        self._record = np.zeros((), PACKED)
        self._record["told"], self._record["bad_slots"] = told, bad_slots
        for name in _ARRAYS:
            self._record[name] = at[name]
        self._first_query, self._logprobs = 0, np.zeros((0, 1, 1), types[1])

    def start(
        self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], first_query: int, previous: Lane | None,
        *, are_pinned: bool, answer: Answer | None = None, reserved: int = 0, begun: Any = None, ended: Any = None,
    ) -> None:  # fmt: skip
        """Enqueue the search of these grids, [queries, steps, slots]; both must stay as they are until ``deliver``.

        ``first_query``: its number in the batch; ``previous``: the lane with the chunk before, None for the first one.
        ``answer``, of the whole batch: where to pack straight into, since nothing else is to be done meanwhile.
        ``reserved``: multiprocessors to leave alone. ``begun``, ``ended``: events to record around the kernels.
        """
        stream = self.stream
        self._first_query, self._logprobs = first_query, logprobs
        if not are_pinned:
            tokens, logprobs = self._stage(tokens, logprobs)
        to_tokens, to_logprobs = self._at["grid_tokens"], self._at["grid_logprobs"]
        self._cuda.memcpy_htod_async(to_tokens, tokens, stream)
        self._cuda.memcpy_htod_async(to_logprobs, logprobs, stream)
        if not are_pinned:
            self._staged.record(stream)
        if begun is not None:
            begun.record(stream)
        count = len(self._logprobs)
        self.session.launch(to_tokens, to_logprobs, count, stream, reserved=reserved)
        if previous is not None:
            stream.wait_for_event(previous.packed)
        self.session.pack(self._packing(previous, answer), count, stream)
        if ended is not None:
            ended.record(stream)
        self._packed.record(stream)

    def _packing(self, previous: Lane | None, answer: Answer | None) -> npt.NDArray[Any]:
        record, zeros = self._record, self._at["totals"]
        before = zeros if previous is None else previous.totals
        self._is_direct = answer is not None
        if answer is None:
            record["begin"] = before
        else:
            record, to = record.copy(), answer.addresses
            for name in _HIT_ARRAYS:
                record[name] = to[name]
            record["hit_offsets"] = to["hit_offsets"] + 8 * (1 + self._first_query)  # they begin with a 0
            record["token_offsets"], record["tokens"] = to["token_offsets"] + 8, to["tokens"]
            record["begin"] = zeros
        self._turn ^= 1
        record["before"], record["after"] = before, self.totals
        return record

    @property
    def packed(self) -> Any:
        """The event of the packed answers."""
        return self._packed

    @property
    def totals(self) -> int:
        """Device address of the hits and tokens of the batch up to the chunk on this lane."""
        return self._at["totals"] + 16 * (1 + self._turn)

    def _stage(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], ...]:
        """Copies of grids in pinned memory."""
        if self._staging is None:
            self._staging = tuple(pinned(self._size, dtype)[0] for dtype in self._types)
        else:
            self._staged.synchronize()
        grids = tokens.reshape(-1), logprobs.reshape(-1)
        copies = tuple(to[: tokens.size] for to in self._staging)
        copy_arrays(copies, grids, self._threads)
        return copies

    def deliver(self, answer: Answer) -> None:
        """Wait for the packed answers and enqueue their way to where they belong. InputError for a bad log-prob."""
        self._packed.synchronize()
        count = len(self._logprobs)
        if self._bad_slots[:count].min() != NO_SLOT:
            self._refuse(count)
        hits, tokens = self._told.tolist()
        begin, end = answer.num_hits, hits - answer.hits_before
        token_begin, token_end = answer.num_tokens, tokens - answer.tokens_before
        answer.num_hits, answer.num_tokens = end, token_end
        if self._is_direct:
            return
        copy, stream, at, to = self._cuda.memcpy_dtoh_async, self.stream, self._at, answer.arrays
        first = self._first_query - answer.first_query
        copy(to["hit_offsets"][first + 1 : first + count + 1], at["hit_offsets"], stream)
        if end > begin:
            for name in _HIT_ARRAYS:
                copy(to[name][begin:end], at[name], stream)
            copy(to["token_offsets"][begin + 1 : end + 1], at["token_offsets"], stream)
            copy(to["tokens"][token_begin:token_end], at["tokens"], stream)

    def _refuse(self, count: int) -> None:
        bad_slots = self._bad_slots[:count]
        query = int(np.argmax(bad_slots != NO_SLOT))
        slot = int(bad_slots[query])
        bad_slots[:] = NO_SLOT
        grid = self._logprobs[query]
        shape = (self._first_query + count, *grid.shape)
        flat = (self._first_query + query) * grid.size + slot
        raise InputError(bad_logprob_message(flat, shape, float(grid.reshape(-1)[slot])))
