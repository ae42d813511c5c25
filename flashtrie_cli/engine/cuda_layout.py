"""What the search kernels are given, and how a launch is cut: the Python twin of ``cuda/flashtrie/search_batch.cuh``.

Knows no GPU and no PyCUDA; a test compiles the header and holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.plan import SearchPlan

MAX_BEAM_WIDTH = 4096
MAX_SLOTS = 4096
NO_SLOT = 0xFFFF_FFFF
NO_TOKEN = 0xFFFF_FFFF

KERNELS = {
    "search_block": (1, 2, 512),
    "search_alone": (1, 1, 640),
    "search_cluster4": (4, 1, 640),
    "search_cluster8": (8, 1, 640),
    "search_spill": (1, 1, 512),
    "pairs_block": (1, 2, 512),
    "pairs_alone": (1, 1, 640),
    "pairs_cluster8": (8, 1, 640),
}
"""Blocks a query, blocks that share a multiprocessor, threads a block."""

_SMALL = 128
"""Beam width, results and slots up to which one block answers sooner than a cluster, where the root's children have few
children themselves (measured on an H200)."""

_BITMAP_WORDS = 2048
_BIN_WORDS = 1024
_MAX_TIES = 256
_WINDOW_PLACES = 1024
_QUEUE_PLACES = 96
_ROW_WARPS = 4
_CONTROL_BYTES = 2528
_STARTS_BEHIND = 36
_SPILL_BUDGET = 8192
_HEAVY_TURNS, _HEAVY_BEAM = 4, 6
"""Windows a warp, and beside them label groups for each beam or result that is wanted, from which on a frontier is
expanded by pairs (measured on an H200)."""
_BAR_SLOT = 3
"""The slot whose log-prob, behind a middling beam, is the bar of the first round's pairs (measured on an H200)."""
_ASK_COST = 4
"""Label groups scanned in the time of asking for one proposal."""

_SHARED_HITS = 384
"""Hits from which on it is worth a barrier that each block of a cluster writes some (measured on an H200)."""

BUCKET_PLACES, TABLE_FAN_OUT = 8, 64
"""Places of a bucket of the child table, and the fan-out from which on a node's children are in it."""

_BUSHY = 14
"""Mean fan-out of the root's children from which on the second step is worth a cluster, however narrow the
beam: titles have 59, a load of 20 M keys over 2.2 M tokens 4."""
_HEAVY_FAN_OUT, _HEAVY_BLOCK, _HEAVY_ALONE, _HEAVY_CLUSTER = 48, 700, 4_000, 10_000
"""From this mean fan-out of the root's children on, and so many label groups that a frontier of them has, the kernels
that expand it by pairs are the faster ones: a block a query of many, a block one query of a small beam, a cluster one
of others (measured on an H200)."""
_CANDIDATE_BYTES, _RESULT_BYTES = 20, 18

TRIE = np.dtype(
    [
        ("louds", "u8"), ("lines", "u8"), ("wide", "u8"), ("label_low", "u8"), ("high_flags", "u8"),
        ("high_bits", "u8"), ("num_nodes", "u4"), ("num_keys", "u4"), ("high_width", "i4"),
    ],
    align=True,
)  # fmt: skip

SEARCH = np.dtype(
    [
        ("token_threshold", "f4"), ("sequence_threshold", "f4"), ("beam_width", "u4"), ("num_results", "u4"),
        ("padding", "u4"), ("eos", "u4"), ("length_factors", "u8"),
    ],
    align=True,
)  # fmt: skip

CHILD_TABLE = np.dtype([("places", "u8"), ("num_buckets", "u4"), ("fan_out", "u4")], align=True)

BATCH = np.dtype(
    [
        ("trie", TRIE), ("search", SEARCH), ("tags", "u8"), ("heads", "u8"), ("children", CHILD_TABLE),
        ("root_table", "u8"), ("tokens", "u8"), ("logprobs", "u8"),
        ("beam_widths", "u8"), ("result_limits", "u8"), ("step_counts", "u8"), ("stage", "u8"),
        ("counters", "u8"), ("history", "u8"),
        ("workspace", "u8"), ("num_hits", "u8"), ("num_tokens", "u8"), ("bad_slots", "u8"), ("key_ids", "u8"),
        ("scores", "u8"), ("normalised_scores", "u8"), ("token_ends", "u8"), ("hit_tokens", "u8"), ("phases", "u8"),
        ("workspace_bytes", "u8"), ("root_last", "u4"), ("root_places", "u4"), ("root_shift", "i4"),
        ("scan_limit", "u4"), ("num_queries", "u4"), ("num_steps", "u4"), ("num_slots", "u4"), ("max_depth", "u4"),
        ("token_bytes", "u4"), ("logprob_bytes", "u4"), ("beam_capacity", "u4"), ("result_capacity", "u4"),
        ("candidate_places", "u4"), ("result_places", "u4"), ("log2_table", "i4"), ("heavy_groups", "u4"),
        ("bar_slot", "u4"), ("ask_cost", "u4"), ("shared_hits", "u4"),
    ],
    align=True,
)  # fmt: skip


def fill_plan(search: npt.NDArray[Any], plan: SearchPlan, length_factors: int) -> None:
    """Writes a plan into a SEARCH record; ``length_factors``: their device address."""
    search["token_threshold"], search["sequence_threshold"] = plan.token_threshold, plan.sequence_threshold
    search["beam_width"], search["num_results"] = plan.beam_width, plan.result_limit
    search["padding"], search["eos"] = plan.padding, NO_TOKEN if plan.eos is None else plan.eos
    search["length_factors"] = length_factors


PACKED = np.dtype([(name, "u8") for name in
                   ("hit_offsets", "key_ids", "scores", "normalised_scores", "token_offsets", "tokens", "begin",
                    "before", "after", "told", "bad_slots")])  # fmt: skip
"""Where a chunk's answers go, flat."""


@dataclass(frozen=True)
class Shape:
    """What a launch must fit: the largest beam width and result limit of its queries, slots a row, tokens a hit."""

    beam_width: int
    num_results: int
    num_slots: int
    max_depth: int

    def check(self) -> None:
        """UsageError for what the kernels cannot hold."""
        hint = "--engine cpu has no such limit"
        for name, value in (("beam width", self.beam_width), ("number of results", self.num_results)):
            if value > MAX_BEAM_WIDTH:
                raise UsageError(f"{name} {value} is more than the cuda engine's {MAX_BEAM_WIDTH}", hint=hint)
        if self.num_slots > MAX_SLOTS:
            raise UsageError(f"{self.num_slots} proposals a step are more than {MAX_SLOTS}", hint=hint)


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched, and the capacities that it is told."""

    kernel: str
    blocks_per_group: int
    num_threads: int
    num_groups: int
    shared_bytes: int
    beam_capacity: int
    result_capacity: int
    candidate_places: int
    result_places: int
    log2_table: int
    history_words: int
    """Of each group, in global memory; 0 where it lies in shared memory."""
    workspace_bytes: int
    """Of each group, in global memory; 0 where the pools lie in shared memory."""

    def fill(self, batch: npt.NDArray[Any]) -> None:
        """The fields of a BATCH record that this launch settles."""
        for name in ("beam_capacity", "result_capacity", "candidate_places", "result_places", "log2_table"):
            batch[name] = getattr(self, name)
        batch["workspace_bytes"] = self.workspace_bytes
        lanes = self.num_threads - 32 * _ROW_WARPS
        most = max(self.beam_capacity, self.result_capacity)
        batch["heavy_groups"] = _HEAVY_TURNS * lanes + _HEAVY_BEAM * most // self.blocks_per_group
        batch["bar_slot"] = _BAR_SLOT
        batch["ask_cost"], batch["shared_hits"] = _ASK_COST, _SHARED_HITS


def scan_limit(num_slots: int) -> int:
    """The largest fan-out that is scanned; of a larger one each of a row's proposals is asked for."""
    return max(TABLE_FAN_OUT, 8 * _ASK_COST * num_slots)


def root_end(louds: npt.NDArray[np.uint64]) -> int:
    """The node behind the root's last child: one more than the ones with which ``louds`` begins."""
    full = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
    word = 0
    while word < len(louds):
        block = louds[word : word + (1 << 16)]
        partial = np.flatnonzero(block != full)
        if len(partial):
            word += int(partial[0])
            inverted = ~int(louds[word]) & 0xFFFF_FFFF_FFFF_FFFF
            return 64 * word + (inverted & -inverted).bit_length()
        word += len(block)
    return 1


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def log2_table(num_slots: int) -> int:
    """Places of a step table: twice the slots, so that probes stay short."""
    return max(6, (2 * num_slots - 1).bit_length()) if num_slots else 6


def _fixed_bytes(num_threads: int) -> int:
    """Shared memory of a block that does not depend on the shape of its search."""
    queues = 8 * _QUEUE_PLACES * (num_threads // 32 - _ROW_WARPS)
    tables = 2 * _BITMAP_WORDS * 4 + 3 * _BIN_WORDS * 4 + _MAX_TIES * 8 + 2 * _WINDOW_PLACES
    return _CONTROL_BYTES + tables + queues + 4 * num_threads


def _beam_places(beams: int, blocks_per_group: int) -> int:
    """Beams that a block may hold: of a cluster's, each sends each its share."""
    return beams if blocks_per_group == 1 else beams // blocks_per_group + blocks_per_group


def _pool_bytes(candidate_places: int, result_places: int) -> int:
    return _CANDIDATE_BYTES * candidate_places + _RESULT_BYTES * result_places


def _frontier_bytes(beams: int, blocks_per_group: int) -> int:
    arrivals = 0 if blocks_per_group == 1 else 16 * beams
    places = _beam_places(beams, blocks_per_group)
    return 16 * places + 8 * (places + _STARTS_BEHIND) + arrivals


def _table_bytes(num_slots: int) -> int:
    return 2 * ((4 << log2_table(num_slots)) + 10 * _up(num_slots, 8))


def plan_launch(
    shape: Shape,
    num_queries: int,
    *,
    arch: int,
    num_multiprocessors: int,
    shared_bytes: int,
    kernel: str | None = None,
    fan_out: float = 0.0,
) -> Launch:
    """The kernel for a batch and its sizes. ``shared_bytes``: most that a block may have; ``kernel`` forces one.

    ``fan_out``: mean, of the root's children, so of the beams of the second step. A cluster a query while the
    device has multiprocessors to spare for it, else one block a query; frontiers by pairs where they are heavy;
    frontier and pools in global memory where they don't fit into shared memory. UsageError for what no kernel holds.
    """
    shape.check()
    name = kernel or _choose(shape, num_queries, arch, num_multiprocessors, fan_out)
    if name != "search_spill":
        launch = _in_shared(name, shape, num_queries, num_multiprocessors, shared_bytes)
        if launch is not None:
            return launch
    beams, results = _up(shape.beam_width, 32), _up(shape.num_results, 4)
    places = max(beams, results) + _SPILL_BUDGET, results + _SPILL_BUDGET
    workspace = _table_bytes(shape.num_slots) + _frontier_bytes(beams, 1) + _pool_bytes(*places)
    threads = KERNELS["search_spill"][2]
    return Launch(
        "search_spill", 1, threads, min(num_queries, num_multiprocessors), _fixed_bytes(threads), beams,
        results, *places, log2_table(shape.num_slots), _history_words(shape, beams), _up(workspace, 256),
    )  # fmt: skip


def _history_words(shape: Shape, beams: int) -> int:
    return beams * max(shape.max_depth - 1, 0)


def _in_shared(
    name: str, shape: Shape, num_queries: int, num_multiprocessors: int, shared_bytes: int
) -> Launch | None:
    blocks, resident, num_threads = KERNELS[name]
    beams, results = _up(shape.beam_width, 32), _up(shape.num_results, 4)
    fixed = _fixed_bytes(num_threads) + _table_bytes(shape.num_slots) + _frontier_bytes(beams, blocks)
    # Each resident block also costs the multiprocessor a KiB of its own.
    spare = (shared_bytes + 1024) // resident - 1024 - fixed
    budget = 2 * (
        num_threads - 32 * _ROW_WARPS
    )  # a pool's free places: all that expand may have begun to add 32
    least = _pool_bytes(max(beams, results) + budget, results + budget)
    history = _history_words(shape, _beam_places(beams, blocks))
    # The history is written once and read once; the pools matter more. A cluster's must be where all blocks reach it.
    in_shared = blocks > 1 or spare - 4 * history >= 2 * least
    if in_shared:
        spare -= 4 * history
    if spare < least:
        return None
    extra = spare - least
    candidate_places = max(beams, results) + budget + extra * 2 // 5 // _CANDIDATE_BYTES // 4 * 4
    result_places = results + budget + extra * 3 // 5 // _RESULT_BYTES // 4 * 4
    used = fixed + _pool_bytes(candidate_places, result_places) + (4 * history if in_shared else 0)
    groups = num_multiprocessors * resident if blocks == 1 else _clusters_at_once(num_multiprocessors, blocks)
    return Launch(
        name, blocks, num_threads, min(num_queries, groups), used, beams, results, candidate_places, result_places,
        log2_table(shape.num_slots), 0 if in_shared else history, 0,
    )  # fmt: skip


def _clusters_at_once(num_multiprocessors: int, blocks: int) -> int:
    """Clusters, of a block a multiprocessor, that run at once. A cluster lies in one part of the GPU, and some
    multiprocessors of each part are left over: of an H200's 132 it takes 120, 15 clusters of eight or 30 of four
    (measured)."""
    return max(num_multiprocessors * 10 // 11 // blocks, 1)


def _choose(shape: Shape, num_queries: int, arch: int, num_multiprocessors: int, fan_out: float) -> str:
    is_small = max(shape.beam_width, shape.num_results, shape.num_slots) <= _SMALL
    label_groups = fan_out * shape.beam_width / 8 if fan_out >= _HEAVY_FAN_OUT else 0.0
    kind = "pairs" if label_groups >= _HEAVY_BLOCK else "search"
    if arch >= 90 and (not is_small or (fan_out > _BUSHY and label_groups < _HEAVY_ALONE)):
        if num_queries <= _clusters_at_once(num_multiprocessors, 8):
            return "pairs_cluster8" if label_groups >= _HEAVY_CLUSTER else "search_cluster8"
        if num_queries <= _clusters_at_once(num_multiprocessors, 4) and label_groups < _HEAVY_CLUSTER:
            return "search_cluster4"
    return f"{kind}_block" if is_small and num_queries > num_multiprocessors else f"{kind}_alone"
