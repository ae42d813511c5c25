"""One query from host arrays to host arrays: what a caller waits for is the kernel and little else."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import BATCH, NO_SLOT
from flashtrie_cli.engine.cuda_native import KernelClock, gpu_query
from flashtrie_cli.engine.cuda_pinned import pinned
from flashtrie_cli.engine.cuda_session import GridType, SearchSession
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.engine.protocol import bad_logprob_message
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

MAPPED_BYTES = 256 << 10
"""A query's grid up to this size is fetched from the host's memory by the kernel: no copy to wait for."""

STREAM_FLAGS = 1
"""CU_STREAM_NON_BLOCKING: nothing here has to wait for the default stream, nor a launch to look."""

_NAMES = ("key_ids", "scores", "normalised_scores", "token_ends", "tokens")


class _Answer:
    """Mapped memory for the answer of one query. ``addresses``: what the kernel is told."""

    def __init__(self, hits: int, tokens: int):
        self.counts, counts_mapped = pinned(3, np.uint32)
        self.key_ids, key_ids = pinned(hits, np.uint32)
        self.scores, scores = pinned(hits, np.float32)
        self.normalised_scores, normalised_scores = pinned(hits, np.float32)
        self.token_ends, token_ends = pinned(hits, np.uint32)
        self.tokens, to_tokens = pinned(tokens, np.uint32)
        self.addresses = {
            "num_hits": counts_mapped, "num_tokens": counts_mapped + 4, "bad_slots": counts_mapped + 8,
            "key_ids": key_ids, "scores": scores, "normalised_scores": normalised_scores, "token_ends": token_ends,
            "hit_tokens": to_tokens,
        }  # fmt: skip

    def host_addresses(self) -> list[int]:
        return [getattr(self, name).ctypes.data for name in _NAMES]


class SingleQuery:
    """Searches of one query at a time, of one shape and plan.

    The grid lies in mapped memory, the caller's own if it is in ``pinned_empty``, and the kernel fetches it; the answer
    comes back the same way. The extension
    launches and waits where it can (``cuda_native``), else PyCUDA does. ``times_kernels``: with events around the
    kernel.
    """

    def __init__(
        self, trie: DeviceTrie, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any], plan: SearchPlan,
        *, times_kernels: bool = False,
    ):  # fmt: skip
        import pycuda.driver as cuda

        _, num_steps, num_slots = self._shape = tokens.shape
        self.stream = cuda.Stream(STREAM_FLAGS)
        grid = GridType(tokens.itemsize, logprobs.itemsize)
        self.session = SearchSession(trie, 1, num_steps, num_slots, plan, grid)
        self._tokens, to_tokens = pinned(tokens.size, tokens.dtype)
        self._logprobs, to_logprobs = pinned(logprobs.size, logprobs.dtype)
        self._grid = to_tokens, to_logprobs
        self._fetched = cuda.mem_alloc(self.session.stage_bytes())
        self._hits = plan.result_limit
        self._most_tokens = self._hits * self.session.depth
        room = self.session.result_capacity
        answers = [_Answer(room, room * self.session.depth) for _ in range(2)]
        self._answers = answers
        self._native: Any = None
        self._native_clock: KernelClock | None = None
        opened = self._open_native(answers, times_kernels)
        if opened is not None:
            self._native, self._native_clock = opened
        self._clock = (cuda.Event(), cuda.Event()) if times_kernels and opened is None else None
        self.session.set_outputs(answers[0].addresses)
        trie.device.context.synchronize()  # what was begun on the default stream, for which this stream does not wait

    @staticmethod
    def suits(tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> bool:
        """Whether these grids, [queries, steps, slots], are searched here."""
        return len(tokens) == 1 and tokens.nbytes + logprobs.nbytes <= MAPPED_BYTES

    def holds(self, num_queries: int) -> bool:
        """Whether a batch of this size is searched here."""
        return num_queries == 1

    def _open_native(
        self, answers: list[_Answer], times_kernels: bool
    ) -> tuple[Any, KernelClock | None] | None:
        records = []
        for answer in answers:
            self.session.set_outputs(answer.addresses)
            launch, record = self.session.prepare(*self._grid, 1, stage=int(self._fetched))
            records.append(record)
        return gpu_query(
            self._launch,
            int(self.stream.handle),
            times_kernels=times_kernels,
            shape=[launch.num_groups * launch.blocks_per_group, launch.num_threads, launch.shared_bytes],
            records=records,
            grid_at=[BATCH.fields[name][1] for name in ("tokens", "logprobs")],  # type: ignore[index]
            staging=[self._tokens.ctypes.data, self._logprobs.ctypes.data],
            staging_bytes=[self._tokens.nbytes, self._logprobs.nbytes],
            answers=[answer.host_addresses() for answer in answers],
            counts=[answer.counts.ctypes.data for answer in answers],
            most_hits=self._hits,
            most_tokens=self._most_tokens,
        )

    def _launch(self) -> None:
        self.session.launch(*self._grid, 1, self.stream, stage=int(self._fetched))

    @property
    def last_kernel_ns(self) -> int:
        """Time of the last search's kernel; 0 where it is not taken."""
        if self._native_clock is not None:
            return self._native_clock.elapsed_ns()
        return int(1e6 * self._clock[1].time_since(self._clock[0])) if self._clock else 0

    def search(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> SearchResults:
        """The answer to one grid of the shape and types that this was made for, both arrays contiguous."""
        query = self._native
        if query is None:
            return self._search_by_pycuda(tokens, logprobs)
        code = query.start(tokens, logprobs)
        if code:
            raise EngineUnavailable(f"the search could not be launched: the driver said {code}")
        # While the kernel is at work: the answer with as many hits as there can be, and mostly are.
        hits = self._hits
        key_ids, scores, normalised_scores = (
            np.empty(hits, np.uint32),
            np.empty(hits, np.float32),
            np.empty(hits, np.float32),
        )
        token_offsets, flat = np.empty(hits + 1, np.int64), np.empty(self._most_tokens, np.uint32)
        hit_offsets = np.array((0, hits), np.int64)
        results = SearchResults(hit_offsets, key_ids, scores, normalised_scores, token_offsets, flat)
        try:
            num_hits, num_tokens, bad_slot = query.finish(
                key_ids, scores, normalised_scores, token_offsets, flat
            )
        except RuntimeError as error:
            raise EngineUnavailable(f"the GPU failed during the search: {error}") from None
        if bad_slot != NO_SLOT:
            self._refuse(logprobs, bad_slot)
        if num_hits == hits:  # every microsecond from here on is one that the caller waits
            vars(results)["tokens"] = flat[:num_tokens]
            return results
        hit_offsets[1] = num_hits
        return SearchResults(
            hit_offsets, key_ids[:num_hits], scores[:num_hits], normalised_scores[:num_hits],
            token_offsets[: num_hits + 1], flat[:num_tokens],
        )  # fmt: skip

    def _search_by_pycuda(self, tokens: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> SearchResults:
        self._tokens[:], self._logprobs[:] = tokens.reshape(-1), logprobs.reshape(-1)
        if self._clock:
            self._clock[0].record(self.stream)
        self._launch()
        if self._clock:
            self._clock[1].record(self.stream)
        try:
            self.stream.synchronize()
        except KeyboardInterrupt:
            self.stream.synchronize()
            raise
        answer = self._answers[0]
        num_hits, num_tokens, bad_slot = answer.counts.tolist()
        if bad_slot != NO_SLOT:
            self._refuse(logprobs, bad_slot)
        token_offsets = np.zeros(num_hits + 1, np.int64)
        token_offsets[1:] = answer.token_ends[:num_hits]
        return SearchResults(
            np.array((0, num_hits), np.int64), answer.key_ids[:num_hits].copy(), answer.scores[:num_hits].copy(),
            answer.normalised_scores[:num_hits].copy(), token_offsets, answer.tokens[:num_tokens].copy(),
        )  # fmt: skip

    def _refuse(self, logprobs: npt.NDArray[Any], bad_slot: int) -> None:
        value = float(logprobs.reshape(-1)[bad_slot])
        raise InputError(bad_logprob_message(bad_slot, self._shape, value))
