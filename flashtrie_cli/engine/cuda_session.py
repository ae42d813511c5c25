"""Buffers and a launch, prepared once for searches of one shape: what repeats costs one kernel call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import BATCH, PACKED, Launch, Shape, fill_plan, plan_launch
from flashtrie_cli.engine.cuda_loader import load_kernels
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.errors import EngineUnavailable
from flashtrie_cli.query.plan import SearchPlan

_MIN_SCAN_LIMIT = 1 << 14
_SCAN_PER_SLOT = 64
"""A fan-out beyond this many times the slots is searched once per proposal: scanned labels are that much cheaper."""


_KEPT_LAUNCHES = 64


@dataclass(frozen=True)
class GridType:
    """Bytes of a token and of a log-prob in a grid."""

    token_bytes: int = 4
    logprob_bytes: int = 4


class SearchSession:
    """Searches of up to ``num_queries`` grids of one shape and plan; results stay on the device.

    ``launch`` only enqueues, allocates nothing and waits for nothing, so that it can be captured into a CUDA graph.
    One launch at a time: the buffers are the session's. Raises UsageError for what the kernels cannot hold and
    EngineUnavailable where the device is out of memory.
    """

    def __init__(
        self, trie: DeviceTrie, num_queries: int, num_steps: int, num_slots: int, plan: SearchPlan,
        grid: GridType = GridType(), *, kernel: str | None = None, module: Any = None,
    ):  # fmt: skip
        self.trie = trie
        self.num_queries, self.num_steps, self.num_slots = num_queries, num_steps, num_slots
        self.depth = min(num_steps, trie.depth)
        device = trie.device
        shape = Shape(plan.beam_width, plan.result_limit, num_slots, self.depth)
        self._plan_for = lambda count, reserved=0: plan_launch(
            shape, count, arch=device.arch, num_multiprocessors=max(device.num_multiprocessors - reserved, 1),
            shared_bytes=device.shared_memory_bytes, kernel=kernel, fan_out=trie.fan_out,
        )  # fmt: skip
        self._module = module or load_kernels("search", device)
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
        batch["scan_limit"] = max(_MIN_SCAN_LIMIT, _SCAN_PER_SLOT * self.num_slots)
        batch["num_steps"], batch["num_slots"], batch["max_depth"] = (
            self.num_steps,
            self.num_slots,
            self.depth,
        )
        batch["token_bytes"], batch["logprob_bytes"] = grid.token_bytes, grid.logprob_bytes
        batch["counters"] = self._allocate(8)
        cuda.memset_d8(int(batch["counters"]), 0, 8)
        groups = trie.device.num_multiprocessors * 2
        groups = min(groups, max(self.num_queries, 1))
        most_history = 4 * launch.beam_capacity * max(self.depth - 1, 0) * groups
        self._history = self._allocate(most_history) if most_history else 0
        self._workspace = self._allocate(launch.workspace_bytes * groups) if launch.workspace_bytes else 0
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
        reserved: int = 0,
    ) -> None:
        """Enqueue the search of the first ``num_queries`` grids at these device addresses, on a stream of PyCUDA's.

        ``stage``: for one query whose grid lies in mapped host memory, both addresses multiples of 16: device memory
        of ``stage_bytes``, to which the kernel fetches the grid first. ``reserved``: multiprocessors to leave alone.
        """
        if num_queries == 0:
            return
        key = (tokens, logprobs, num_queries, stage, reserved)
        ready = self._ready.get(key)
        if ready is None:  # the same buffers again, as in a service, cost one call
            launch, record = self.prepare(tokens, logprobs, num_queries, stage=stage, reserved=reserved)
            if len(self._ready) >= _KEPT_LAUNCHES:
                self._ready.clear()
            ready = self._ready[key] = (
                self._function(launch.kernel).prepared_async_call, (launch.num_groups * launch.blocks_per_group, 1),
                (launch.num_threads, 1, 1), record, launch.shared_bytes,
            )  # fmt: skip
        call, blocks, threads, record, shared_bytes = ready
        call(blocks, threads, stream, record, shared_size=shared_bytes)

    def num_groups(self, num_queries: int, *, reserved: int = 0) -> int:
        """Queries of such a batch that the GPU works on at once."""
        return self._plan_for(num_queries, reserved).num_groups

    def prepare(
        self, tokens: int, logprobs: int, num_queries: int, *, stage: int = 0, reserved: int = 0
    ) -> tuple[Launch, bytes]:
        """What ``launch`` would launch: the kernel with its sizes, and its one parameter."""
        launch = self._launches.get((num_queries, reserved))
        if launch is None:
            launch = self._launches[num_queries, reserved] = self._plan_for(num_queries, reserved)
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
            if kernel.startswith("parts_") and not self._is_given:
                module = load_kernels("search_parts", self.trie.device)
            function = self._functions[kernel] = module.get_function(kernel)
            function.prepare([BATCH])
            # The function is every session's: as much as there is, not as much as this one needs.
            most = self.trie.device.shared_memory_bytes
            function.set_attribute(cuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
        return function
