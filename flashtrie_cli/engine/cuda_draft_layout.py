"""What the draft kernels are launched with: twins of the C++ structures, how rows are cut, sizes of the workspace
and of shared memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.engine.draft_plan import LOGIT_TYPES, OUTPUTS, DraftPlan
from flashtrie_cli.errors import UsageError

THREADS = 256
TILE_LOGITS = 8192
"""Most logits that one block reads at a time (kTileLogits)."""
SCAN_BYTES = 11_536
"""Shared memory of a block's scan (ScanShared)."""
FINISH_BYTES = 30_960
"""Shared memory of a block that merges rows and grows a tree (FinishShared), before its lists."""
LEAST_KEYS = 8
"""A chunk sends so many keys at least (kLeastKeys)."""
KEYS_AT_ONCE = 5 * 32
"""Keys of a row that a warp reads at once (32 kRegisters), those behind the row's last chunk included."""
BLOCKS_PER_MULTIPROCESSOR = 3
"""Blocks that run at once (kBlocksAtOnce)."""
FEW_ROUNDS, MANY_ROUNDS = 1.25, 16
"""Rounds of as many blocks as run at once, each with one tile."""
LEGAL_BYTES = 46_272
"""Shared memory of a block of the constrained kernel before its sort (LegalShared)."""
_LEVEL_NODE_BYTES, _CANDIDATE_BYTES = 24, 12
ALIGNMENT = 256
"""Bytes that the workspace starts on."""
_MAX_GRID_Z = 65_535

_pointer = ctypes.c_void_p


class Sizes(ctypes.Structure):
    """Twin of DraftSizes."""

    _fields_ = (
        ("batch_size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("vocab_size", ctypes.c_int32),
        ("num_nodes", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("first_row", ctypes.c_int32),
        ("self_padding", ctypes.c_int32),
        ("logit_type", ctypes.c_int32),
    )


class Outputs(ctypes.Structure):
    """Twin of DraftOutputs: the outputs in the order of OUTPUTS."""

    _fields_ = tuple((name, _pointer) for name in OUTPUTS)


class DraftParams(ctypes.Structure):
    """Twin of the kernel's DraftParams."""

    _fields_ = (
        ("sizes", Sizes),
        ("out", Outputs),
        ("rows", _pointer),
        ("row_bytes", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("roots", _pointer),
        ("base_lengths", _pointer),
        ("vocab_map", _pointer),
        ("chunk_keys", _pointer),
        ("chunk_sums", _pointer),
        ("tickets", _pointer),
        ("num_chunks", ctypes.c_int32),
        ("num_tiles", ctypes.c_int32),
        ("tile_packs", ctypes.c_int32),
        ("chunk_tiles", ctypes.c_int32),
        ("sums_only", ctypes.c_int32),
    )


class Trie(ctypes.Structure):
    """Twin of TrieView."""

    _fields_ = (
        *((name, _pointer) for name in ("louds", "lines", "wide", "label_low", "high_flags", "high_bits")),
        ("num_nodes", ctypes.c_uint32),
        ("num_keys", ctypes.c_uint32),
        ("high_width", ctypes.c_int32),
    )


class TrieRules(ctypes.Structure):
    """Twin of TrieRules."""

    _fields_ = (("trie", Trie), ("end_token", ctypes.c_int64))


class ByteTokens(ctypes.Structure):
    """Twin of ByteTokens."""

    _fields_ = (("begins", _pointer), ("tokens", _pointer))


class Masks(ctypes.Structure):
    """Twin of MaskView."""

    _fields_ = (
        *((name, _pointer) for name in ("rows", "entries", "far_entries", "far_targets", "eos")),
        ("bytes", ByteTokens),
        *((name, ctypes.c_uint32) for name in ("num_nodes", "num_far", "num_eos", "vocab_size")),
        ("hop_bits", ctypes.c_int32),
    )


class MaskRules(ctypes.Structure):
    """Twin of MaskRules."""

    _fields_ = (("masks", Masks),)


class DraftIds(ctypes.Structure):
    """Twin of DraftIds."""

    _fields_ = (("of_token", _pointer), ("num_tokens", ctypes.c_uint32))


def _constraint(rules: Any) -> Any:
    """Twin of the header's DraftConstraint."""
    fields = (
        ("rules", rules),
        ("ids", DraftIds),
        ("start_states", _pointer),
        ("renormalise", ctypes.c_int32),
    )
    return type("_Constraint", (ctypes.Structure,), {"_fields_": fields})


def _legal_params(rules: Any) -> Any:
    """Twin of the kernel's LegalParams."""
    fields = (
        ("sizes", Sizes),
        ("out", Outputs),
        ("constraint", _constraint(rules)),
        ("logits", _pointer),
        ("roots", _pointer),
        ("base_lengths", _pointer),
        ("chunk_sums", _pointer),
        ("levels", _pointer),
        ("candidates", _pointer),
        ("num_chunks", ctypes.c_int32),
    )
    return type("LegalParams", (ctypes.Structure,), {"_fields_": fields})


LEGAL_PARAMS: dict[type[ctypes.Structure], Any] = {
    rules: _legal_params(rules) for rules in (TrieRules, MaskRules)
}
"""Parameters of the constrained kernels by the rules they follow."""


def _row_packs(plan: DraftPlan, logits: int) -> tuple[int, int]:
    """16-byte packs that a row touches, and logits of a pack; rows that start between packs may need one more."""
    itemsize = 4 if plan.logit_type == "float32" else 2
    pack = 16 // itemsize
    aligned = logits % 16 == 0 and plan.vocab_size % pack == 0
    return -(-(plan.vocab_size + (0 if aligned else pack - 1)) // pack), pack


@dataclass(frozen=True)
class Tiling:
    """How a row of logits is cut: ``num_tiles`` of ``tile_packs`` packs, ``chunk_tiles`` of them to a block.
    ``has_spare``: a block of its own finishes each batch row, as there is room for it."""

    num_tiles: int
    tile_packs: int
    chunk_tiles: int
    has_spare: bool

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tiles // self.chunk_tiles)


def tiling(plan: DraftPlan, logits: int, num_multiprocessors: int) -> Tiling:
    """Cut rows into as few tiles as may be, all but the last of which every thread of a block loads alike. A block
    takes one tile where that makes little more than one round of blocks, else some in turn, so that less is merged.
    Measured on an H200: docs/benchmarks/draft.md."""
    packs, pack = _row_packs(plan, logits)
    num_tiles = -(-packs * pack // TILE_LOGITS)
    loads = -(-packs // (num_tiles * THREADS))
    is_tail_short = num_tiles > 1 and 0 < packs % (loads * THREADS) < THREADS
    if is_tail_short and (loads + 1) * THREADS * pack <= TILE_LOGITS:
        loads += 1  # a tile with too few logits for a bound takes long
    num_tiles = -(-packs // (loads * THREADS))
    blocks_at_once = BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors
    num_rounds = plan.batch_size * plan.num_depths * num_tiles / blocks_at_once
    chunk_tiles = 1 if num_rounds <= FEW_ROUNDS else 2
    if plan.logit_type != "float32" and num_rounds > MANY_ROUNDS:
        chunk_tiles = 4  # they are read in half the time
    return Tiling(num_tiles, loads * THREADS, min(chunk_tiles, num_tiles), num_rounds <= FEW_ROUNDS)


def max_chunks(vocab_size: int) -> int:
    """Most chunks of a row."""
    return -(-(vocab_size + 14) // TILE_LOGITS)


def _workspace_parts(plan: DraftPlan, constrained: bool) -> dict[str, int]:
    """Offset of each part of the workspace, and of its end; tickets come first."""
    rows = plan.batch_size * plan.num_depths
    chunks = rows * max_chunks(plan.vocab_size)
    sizes = {
        "tickets": 4 * plan.batch_size,
        "chunk_sums": 8 * chunks,
        "chunk_keys": 8 * (chunks * max(1 << (plan.top_k - 1).bit_length(), LEAST_KEYS) + KEYS_AT_ONCE),
        "levels": _LEVEL_NODE_BYTES * plan.batch_size * (plan.num_depths + 1) * plan.num_nodes
        if constrained
        else 0,
        "candidates": _CANDIDATE_BYTES * plan.batch_size * plan.num_nodes * plan.top_k if constrained else 0,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return {**offsets, "end": end}


def num_zeros(plan: DraftPlan) -> int:
    """32-bit words at the start of the workspace that must be zero at first; every build leaves them so."""
    return _workspace_parts(plan, False)["end"] // 4


def workspace_size(plan: DraftPlan, constrained: bool = False) -> int:
    """Bytes of workspace, the same for every logit type."""
    return max(_workspace_parts(plan, constrained)["end"], 1)


def kernel_name(plan: DraftPlan) -> str:
    """The kernel of kernels/draft.cu: one for each type of logits, and another one where longer lists are merged."""
    return f"draft_{plan.logit_type}{'_wide' if plan.top_k > LEAST_KEYS else ''}"


def shared_bytes(plan: DraftPlan) -> int:
    """Dynamic shared memory of a block: a chunk's lists; or the tree and its candidates."""
    candidates = 8 * (plan.num_depths + 2) * (1 << (plan.top_k + 1).bit_length())
    return max(SCAN_BYTES, FINISH_BYTES + candidates)


def legal_shared_bytes(plan: DraftPlan) -> int:
    """Dynamic shared memory of a block of the constrained kernel: its fixed part, then the keys of a level to sort."""
    places = 1 << (plan.num_nodes * plan.top_k - 1).bit_length()
    return LEGAL_BYTES + 8 * max(places, 2)


def fill_legal_params(
    plan: DraftPlan,
    pointers: dict[str, int],
    rules: ctypes.Structure,
    workspace: int,
    *,
    renormalise: bool,
    num_chunks: int = 0,
    num_mapped: int = 0,
) -> Any:
    """Parameters of the constrained kernel that follows ``rules``. ``num_mapped``: tokens of the pointer ``draft_ids``,
    the drafter's id of each, where its vocabulary is its own. ``num_chunks``: of the sums in the workspace, without
    ``renormalise``."""
    params = LEGAL_PARAMS[type(rules)]()
    _fill_common(params, plan, pointers)
    params.logits = pointers["logits"]
    params.constraint.rules = rules
    params.constraint.ids = DraftIds(pointers.get("draft_ids", 0), num_mapped)
    params.constraint.start_states = pointers.get("start_states", 0)
    params.constraint.renormalise = int(renormalise)
    parts = _workspace_parts(plan, True)
    params.levels, params.candidates = workspace + parts["levels"], workspace + parts["candidates"]
    if not renormalise:
        params.chunk_sums = workspace + parts["chunk_sums"]
        params.num_chunks = num_chunks
    return params


def trie_rules(view: Any, end_token: int | None) -> TrieRules:
    """``view``: a trie's device pointers (cuda_layout.TRIE)."""
    return TrieRules(Trie.from_buffer_copy(view.tobytes()), -1 if end_token is None else end_token)


def mask_rules(view: ctypes.Structure) -> MaskRules:
    """``view``: the device pointers of token masks."""
    return MaskRules(Masks.from_buffer_copy(view))


def _fill_common(params: Any, plan: DraftPlan, pointers: dict[str, int]) -> None:
    for name in ("batch_size", "block_size", "vocab_size", "num_nodes", "top_k", "first_row"):
        setattr(params.sizes, name, getattr(plan, name))
    params.sizes.self_padding = int(plan.self_padding)
    params.sizes.logit_type = LOGIT_TYPES[plan.logit_type]
    for name in OUTPUTS:
        setattr(params.out, name, pointers.get(name, 0))
    for name in ("roots", "base_lengths"):
        setattr(params, name, pointers.get(name, 0))


def fill_params(
    plan: DraftPlan, pointers: dict[str, int], workspace: int, num_multiprocessors: int
) -> tuple[DraftParams, tuple[int, int, int]]:
    """The kernel's parameters and its grid, from pointers by name (inputs and outputs)."""
    params = DraftParams()
    _fill_common(params, plan, pointers)
    params.vocab_map = pointers.get("vocab_map", 0)
    params.row_bytes = plan.vocab_size * (4 if plan.logit_type == "float32" else 2)
    params.block_bytes = plan.block_size * params.row_bytes
    params.rows = pointers["logits"] + plan.first_row * params.row_bytes
    parts = _workspace_parts(plan, False)
    for name in ("tickets", "chunk_sums", "chunk_keys"):
        setattr(params, name, workspace + parts[name])
    cut = tiling(plan, pointers["logits"], num_multiprocessors)
    for name in ("num_tiles", "tile_packs", "chunk_tiles", "num_chunks"):
        setattr(params, name, getattr(cut, name))
    if plan.batch_size > _MAX_GRID_Z:
        raise UsageError(f"{plan.batch_size} batch rows do not fit into one launch", hint="split the batch")
    chunks = cut.num_chunks if plan.num_depths else 1
    has_spare = cut.has_spare or plan.num_depths == 0
    return params, (chunks, plan.num_depths + has_spare, plan.batch_size)
