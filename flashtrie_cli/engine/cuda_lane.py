"""A lane of the batch pipeline: two streams, and the buffers of the chunk that is under way on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_native
from flashtrie_cli.engine.cuda_layout import NO_SLOT
from flashtrie_cli.engine.cuda_pinned import pinned
from flashtrie_cli.engine.cuda_session import GridType, SearchSession
from flashtrie_cli.engine.cuda_slabs import Slab, SlabParts
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.errors import EngineUnavailable
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

ARRAYS = ("hit_offsets", "key_ids", "scores", "normalised_scores", "token_offsets", "tokens")


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
    """Room for the answer to some queries in a slab.

    ``addresses``: of its arrays, in the order of ``ARRAYS``. With ``is_kept`` they are copied to ordinary memory as
    they come, to the addresses ``kept``, and the slab is free for the next answer.
    """

    def __init__(self, slab: Slab, parts: SlabParts, *, is_kept: bool = False):
        self._slab, self.is_kept = slab, is_kept
        # One block: numpy has large ones in huge pages, and what is not written to is not taken.
        memory: Any = np.empty(parts.num_bytes, np.uint8) if is_kept else slab
        self._arrays = parts.arrays(memory)
        self.addresses = _places(parts, slab.address)
        self.kept = _places(parts, memory.ctypes.data) if is_kept else []
        self._arrays["hit_offsets"][0] = self._arrays["token_offsets"][0] = 0

    def settle(self, num_hits: int, num_tokens: int) -> None:
        """All chunks are there: so much of it is ``results``."""
        arrays = self._arrays
        self.results = SearchResults(
            arrays["hit_offsets"], arrays["key_ids"][:num_hits], arrays["scores"][:num_hits],
            arrays["normalised_scores"][:num_hits], arrays["token_offsets"][: num_hits + 1],
            arrays["tokens"][:num_tokens],
        )  # fmt: skip


def _places(parts: SlabParts, begin: int) -> list[int]:
    addresses = parts.addresses(begin)
    return [addresses[name] for name in ARRAYS]


class Lane:
    """Buffers for chunks of up to ``num_queries``. ``session`` searches what is at ``grids``, device addresses."""

    def __init__(
        self, trie: DeviceTrie, num_queries: int, num_steps: int, num_slots: int, plan: SearchPlan,
        types: tuple[np.dtype[Any], np.dtype[Any]],
    ):  # fmt: skip
        import pycuda.driver as cuda

        grid = GridType(*(dtype.itemsize for dtype in types))
        self.session = SearchSession(trie, num_queries, num_steps, num_slots, plan, grid, is_persistent=False)
        self._streams = cuda_native.NativeStream(), cuda_native.NativeStream(is_urgent=True)
        self._events = [cuda_native.NativeEvent() for _ in range(4)]
        self._size, self._types = num_queries * num_steps * num_slots, types
        parts = answer_parts(num_queries, num_queries * self.session.result_capacity, self.session.depth)
        parts.add("grid_tokens", self._size, types[0])
        parts.add("grid_logprobs", self._size, types[1])
        try:
            self._memory = cuda.mem_alloc(parts.num_bytes)
        except cuda.MemoryError:
            raise EngineUnavailable(
                f"the GPU has no {parts.num_bytes >> 20} MiB left for a batch", hint="a smaller batch"
            ) from None
        at = parts.addresses(int(self._memory))
        self.grids = at["grid_tokens"], at["grid_logprobs"]
        self._told, told = pinned(2, np.uint64)
        self._bad_slots, bad_slots = pinned(num_queries, np.uint32)
        self._bad_slots[:] = NO_SLOT
        self._staging: list[Any] = []
        self.addresses = [
            *(stream.handle for stream in self._streams), *(event.handle for event in self._events),
            *self.grids, *(at[name] for name in ARRAYS), told, bad_slots,
        ]  # fmt: skip

    def stage(self) -> list[int]:
        """Pinned memory for tokens and log-probs that are in ordinary memory."""
        self._staging = self._staging or [pinned(self._size, dtype) for dtype in self._types]
        return [address for _, address in self._staging]
