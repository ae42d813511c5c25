"""Buffers and a launch, prepared once for searches of one shape: what repeats costs one kernel call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import BATCH, PACKED, Launch, Shape, fill_plan, plan_launch, scan_limit
from flashtrie_cli.engine.cuda_loader import load_kernels
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.errors import EngineUnavailable
from flashtrie_cli.query.plan import SearchPlan

_KEPT_LAUNCHES = 64

_ANY_BATCH = 1 << 30

_GROUP_MEMORY = 64 << 20
"""Of all groups of a launch: with a group a query that takes more, groups take queries in turn instead."""


@dataclass(frozen=True)
class GridType:
    """Bytes of a token and of a log-prob in a grid."""

    token_bytes: int = 4
    logprob_bytes: int = 4


def launch_planner(
    trie: DeviceTrie, num_steps: int, num_slots: int, plan: SearchPlan, kernel: str | None = None
) -> Callable[[int], Launch]:
    """``plan_launch`` by the number of queries alone."""
    device = trie.device
    shape = Shape(plan.beam_width, plan.result_limit, num_slots, min(num_steps, trie.depth))
    return partial(
        plan_launch, shape, arch=device.arch, num_multiprocessors=device.num_multiprocessors,
        shared_bytes=device.shared_memory_bytes, kernel=kernel, fan_out=trie.fan_out,
    )  # fmt: skip


class SearchSession:
    """Searches of up to ``num_queries`` grids of one shape and plan; results stay on the device.

    ``launch`` only enqueues, allocates nothing and waits for nothing, so that it can be captured into a CUDA graph.
    One launch at a time: the buffers are the session's. ``is_persistent``: groups take queries in turn; else each has
    one, and leaves its place to whatever launch comes next, or is more urgent. Raises UsageError for what the kernels
    cannot hold and EngineUnavailable where the device is out of memory.
    """

    def __init__(
        self, trie: DeviceTrie, num_queries: int, num_steps: int, num_slots: int, plan: SearchPlan,
        grid: GridType = GridType(), *, kernel: str | None = None, module: Any = None, is_persistent: bool = True,
    ):  # fmt: skip
        self.trie = trie
        self.num_queries, self.num_steps, self.num_slots = num_queries, num_steps, num_slots
        self.depth = min(num_steps, trie.depth)
        self._is_persistent = is_persistent
        self._plan_for = launch_planner(trie, num_steps, num_slots, plan, kernel)
        self._module = module or load_kernels("search", trie.device)
        self._is_given = module is not None
        self._launches: dict[tuple[int, int], Launch] = {}
        self._ready: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self._functions: dict[str, Any] = {}
        self._memory: list[Any] = []
        launch = self._plan_for(max(num_queries, 1))
        self.result_capacity = launch.result_capacity
        self._batch = np.zeros((), BATCH)
        self._fill(plan, grid, launch)
        self._pack = self._module.get_function("pack_hits")
        self._pack.prepare([BATCH, PACKED])

    def _allocate(self, num_bytes: int) -> int:
        import pycuda.driver as cuda

        try:
            memory = cuda.mem_alloc(max(num_bytes, 16))
        except cuda.MemoryError:
            raise EngineUnavailable(
                f"the GPU has no {num_bytes >> 20} MiB left for a batch of {self.num_queries} queries",
                hint="a smaller batch, or --engine cpu",
            ) from None
        self._memory.append(memory)
        return int(memory)

    def _fill(self, plan: SearchPlan, grid: GridType, launch: Launch) -> None:
        import pycuda.driver as cuda

        batch, trie = self._batch, self.trie
        launch.fill(batch)
        batch["trie"] = trie.view
        factors = plan.length_factors(self.num_steps)
        fill_plan(batch["search"], plan, self._allocate(factors.nbytes))
        cuda.memcpy_htod(int(batch["search"]["length_factors"]), factors)
        batch["root_table"], batch["root_shift"], batch["root_places"] = (
            trie.root_table, trie.root_shift, trie.root_places,
        )  # fmt: skip
        batch["root_last"], batch["tags"], batch["heads"] = trie.root_last, trie.tags, trie.heads
        batch["children"] = trie.children
        batch["scan_limit"] = scan_limit(self.num_slots)
        batch["num_steps"], batch["num_slots"], batch["max_depth"] = (
            self.num_steps,
            self.num_slots,
            self.depth,
        )
        batch["token_bytes"], batch["logprob_bytes"] = grid.token_bytes, grid.logprob_bytes
        batch["counters"] = self._allocate(8)
        cuda.memset_d8(int(batch["counters"]), 0, 8)
        history = 4 * launch.beam_capacity * max(self.depth - 1, 0)
        # Or by what a larger batch, of which this is a chunk, is searched.
        workspace = max(launch.workspace_bytes, self._plan_for(_ANY_BATCH).workspace_bytes)
        groups = min(trie.device.num_multiprocessors * 2, max(self.num_queries, 1))
        if not self._is_persistent:
            groups = max(groups, min(self.num_queries, _GROUP_MEMORY // max(history + workspace, 1)))
        self._most_groups = groups
        self._history = self._allocate(history * groups) if history else 0
        self._workspace = self._allocate(workspace * groups) if workspace else 0
        hits = self.num_queries * launch.result_capacity
        for name in ("num_hits", "num_tokens", "bad_slots"):
            batch[name] = self._allocate(4 * self.num_queries)
        for name in ("key_ids", "scores", "normalised_scores", "token_ends"):
            batch[name] = self._allocate(4 * hits)
        batch["hit_tokens"] = self._allocate(4 * hits * self.depth)

    def address(self, name: str) -> int:
        """Device address of one of the answer's arrays, as named in SearchBatch."""
        return int(self._batch[name])

    def set_outputs(self, addresses: dict[str, int]) -> None:
        """Lets the kernel write some arrays of its answer elsewhere, say into mapped host memory."""
        for name, address in addresses.items():
            self._batch[name] = address
        self._ready.clear()

    def set_per_query(self, *, beam_widths: int = 0, result_limits: int = 0, step_counts: int = 0) -> None:
        """Device addresses of uint32 [num_queries]; none may exceed what the session was made for. 0: the plan's."""
        self._batch["beam_widths"], self._batch["result_limits"] = beam_widths, result_limits
        self._batch["step_counts"] = step_counts
        self._ready.clear()

    def stage_bytes(self) -> int:
        """Of the memory that ``launch`` fetches a grid to."""
        slots = self.num_steps * self.num_slots
        return sum(-(-slots * int(self._batch[name]) // 16) * 16 for name in ("token_bytes", "logprob_bytes"))

    def set_phases(self, address: int) -> None:
        """Where an instrumented build adds its cycles, int64 [8]."""
        self._batch["phases"] = address
        self._ready.clear()

    def launch(
        self,
        tokens: int,
        logprobs: int,
        num_queries: int,
        stream: Any = None,
        *,
        stage: int = 0,
        batch_size: int = 0,
    ) -> None:
        """Enqueue the search of the first ``num_queries`` grids at these device addresses, on a stream of PyCUDA's.

        ``stage``: for one query whose grid lies in mapped host memory, both addresses multiples of 16: device memory
        of ``stage_bytes``, to which the kernel fetches the grid first. ``batch_size``: as for ``prepare``.
        """
        if num_queries == 0:
            return
        key = (tokens, logprobs, num_queries, stage, batch_size)
        ready = self._ready.get(key)
        if ready is None:  # the same buffers again, as in a service, cost one call
            launch, record = self.prepare(tokens, logprobs, num_queries, stage=stage, batch_size=batch_size)
            if len(self._ready) >= _KEPT_LAUNCHES:
                self._ready.clear()
            ready = self._ready[key] = (
                self._function(launch.kernel).prepared_async_call, (launch.num_groups * launch.blocks_per_group, 1),
                (launch.num_threads, 1, 1), record, launch.shared_bytes,
            )  # fmt: skip
        call, blocks, threads, record, shared_bytes = ready
        call(blocks, threads, stream, record, shared_size=shared_bytes)

    def _launch_of(self, num_queries: int, batch_size: int) -> Launch:
        """How a chunk of a batch is launched: by the kernel that suits the batch."""
        key = num_queries, batch_size
        launch = self._launches.get(key)
        if launch is None:
            launch = self._plan_for(batch_size)
            takes_turns = self._is_persistent or num_queries > self._most_groups
            groups = min(num_queries, launch.num_groups) if takes_turns else num_queries
            launch = self._launches[key] = replace(launch, num_groups=groups)
        return launch

    def prepare(
        self, tokens: int, logprobs: int, num_queries: int, *, stage: int = 0, batch_size: int = 0
    ) -> tuple[Launch, bytes]:
        """What ``launch`` would launch: the kernel with its sizes, and its one parameter.

        ``batch_size``: of the whole, where these queries are a chunk of a batch.
        """
        launch = self._launch_of(num_queries, max(batch_size, num_queries))
        batch = self._batch
        launch.fill(batch)
        batch["history"] = self._history if launch.history_words else 0
        batch["workspace"] = self._workspace
        batch["tokens"], batch["logprobs"], batch["num_queries"] = tokens, logprobs, num_queries
        batch["stage"] = stage
        return launch, batch.tobytes()

    def pack(self, packed: npt.NDArray[Any], num_queries: int, stream: Any = None) -> None:
        """Enqueue the packing of the last launch's answers into flat arrays; ``packed``: a PACKED record."""
        self._batch["num_queries"] = num_queries
        self._pack.prepared_async_call(
            (num_queries, 1), (128, 1, 1), stream, self._batch.tobytes(), packed.tobytes(), shared_size=16
        )

    def _function(self, kernel: str) -> Any:
        import pycuda.driver as cuda

        function = self._functions.get(kernel)
        if function is None:
            module = self._module
            if kernel.startswith("pairs_") and not self._is_given:
                module = load_kernels("search_pairs", self.trie.device)
            function = self._functions[kernel] = module.get_function(kernel)
            function.prepare([BATCH])
            # The function is every session's: as much as there is, not as much as this one needs.
            most = self.trie.device.shared_memory_bytes
            function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
        return function
