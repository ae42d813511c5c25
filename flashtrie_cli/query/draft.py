"""Draft trees for speculative decoding: the one door to the three engines.

From one pass of a block drafter (logits for each of the next positions at once) `build_draft_trees` makes
the prefix-closed tree of the N most probable continuations, ready for one verification pass of the target
model. Under independent positions the expected number of accepted tokens is the sum of the nodes'
probabilities, which this tree maximises (DDTree, arXiv 2604.12989); held to a trie, it stays the best of
the trees that the trie allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.draft_plan import (
    LOGIT_TYPES,
    NO_STATE,
    OUTPUTS,
    SCORINGS,
    STATUS_BAD_ROW,
    STATUS_TRUNCATED,
    DraftConstraint,
    DraftInputs,
    DraftPlan,
    DraftTrees,
    allocate,
    check_one_to_one,
)
from flashtrie_cli.errors import EngineUnavailable, InputError, UsageError

if TYPE_CHECKING:
    from flashtrie_cli.engine.cuda_draft import PreparedDraft

__all__ = [
    "NO_STATE",
    "STATUS_BAD_ROW",
    "STATUS_TRUNCATED",
    "DraftPlan",
    "DraftTrees",
    "build_draft_trees",
    "draft_workspace_size",
    "prepare_draft_trees",
]

MAX_NUM_NODES = 4096
MAX_CUDA_NODES = 256
MAX_CUDA_TOP_K = 32
MAX_CUDA_VOCAB = 1 << 30
_INT32_MAX = (1 << 31) - 1
_PADDINGS = ("zero", "self")
_ENGINES = ("auto", "reference", "cpu", "cuda")


def build_draft_trees(
    logits: Any,
    roots: Any,
    base_lengths: Any,
    num_nodes: int,
    top_k: int,
    *,
    first_row: int = 1,
    vocab_map: Any = None,
    padding: str = "zero",
    logit_type: str | None = None,
    trie: Any = None,
    scoring: str = "renorm",
    start_states: Any = None,
    end_token: int | None = None,
    engine: str = "auto",
    threads: int = 0,
    out: DraftTrees | None = None,
    workspace: Any = None,
    stream: Any = None,
) -> DraftTrees:
    """Build one draft tree for every row of the batch.

    ``logits`` [B, block, V], contiguous: float32, float16 or bfloat16 (numpy has no bfloat16 of its own:
    pass ``ml_dtypes.bfloat16``, or uint16 with ``logit_type="bfloat16"``). ``roots`` int32 [B]: the last
    accepted tokens; ``base_lengths`` int32 [B]: tokens committed before verification. ``num_nodes`` counts
    the root. ``top_k``: most children of a node. ``first_row``: the row of the block that scores depth 1
    (1: row 0 belongs to the root's own position and is never read). ``vocab_map`` int32 [V]: drafter's
    token id -> full token id, for every node but the root; ties are broken before mapping.
    ``padding="self"`` lets padding nodes attend to themselves, for kernels that cannot take an empty row.

    ``trie`` (an opened `Index`, or `TokenMasks`) holds the tree to its keys from ``start_states`` [B] on (default: the
    trie's root) with ``scoring`` "renorm" (each node's legal tokens share probability 1, as when the target
    is masked the same way) or "global" (the drafter's own log-probs). All legal children are scored, so
    none is lost to ``top_k``, which then only caps the children of one node. ``end_token`` is legal where a
    key ends; masks have end-of-sequence ids of their own. With ``vocab_map`` the keys are of full tokens; those
    that the drafter has no id for are not drafted.

    Numpy arrays in, numpy arrays out, on ``engine`` "auto", "cpu", "reference" or "cuda". Device arrays
    (anything with ``__cuda_array_interface__``) stay on the device: work is queued on ``stream`` (an object
    with ``cuda_stream`` or ``ptr``, or the handle as an integer; default: the null stream) without
    synchronisation. For CUDA graphs pass ``out`` and ``workspace`` (`draft_workspace_size` bytes, zeroed
    once, used by one stream at a time).

    Raises UsageError for options out of range, InputError for arrays of the wrong type or shape.
    """
    _check_options(num_nodes, first_row, padding, scoring, engine)
    on_device = bool(getattr(logits, "is_cuda", False)) or hasattr(logits, "__cuda_array_interface__")
    plan = _plan(logits, num_nodes, top_k, first_row, padding, logit_type)
    constraint = _constraint(trie, scoring, start_states, end_token)
    inputs = DraftInputs(logits, roots, base_lengths, vocab_map, constraint)
    if not on_device:
        return _build_from_host(plan, inputs, out, engine, threads)
    if engine not in ("auto", "cuda"):
        raise UsageError(
            f"logits on a device cannot be read by the {engine} engine", hint="copy them to numpy"
        )
    _check_cuda_limits(plan)
    from flashtrie_cli.engine import cuda_draft

    return cuda_draft.build(plan, inputs, out, workspace, stream)


def prepare_draft_trees(
    logits: Any,
    roots: Any,
    base_lengths: Any,
    num_nodes: int,
    top_k: int,
    *,
    first_row: int = 1,
    vocab_map: Any = None,
    padding: str = "zero",
    logit_type: str | None = None,
    trie: Any = None,
    scoring: str = "renorm",
    start_states: Any = None,
    end_token: int | None = None,
    out: DraftTrees | None = None,
    workspace: Any = None,
) -> PreparedDraft:
    """Check device buffers once and return what builds from them as often as it is called.

    Arguments as in `build_draft_trees`. ``prepared(stream)`` queues one build of whatever the buffers then
    hold, which costs a single driver call, and returns ``prepared.trees``. In a CUDA graph, capture a call;
    the buffers, the outputs and the workspace must outlive the graph.
    """
    _check_options(num_nodes, first_row, padding, scoring, "cuda")
    plan = _plan(logits, num_nodes, top_k, first_row, padding, logit_type)
    _check_cuda_limits(plan)
    constraint = _constraint(trie, scoring, start_states, end_token)
    from flashtrie_cli.engine import cuda_draft

    inputs = DraftInputs(logits, roots, base_lengths, vocab_map, constraint)
    return cuda_draft.PreparedDraft(plan, inputs, out, workspace)


def draft_workspace_size(
    batch_size: int,
    block_size: int,
    num_nodes: int,
    vocab_size: int,
    top_k: int,
    *,
    constrained: bool = False,
) -> int:
    """Bytes of device memory that a cuda build of these sizes needs; zero them once before the first build.

    Builds leave them so, and builds of several sizes may take turns with one workspace. Constrained builds leave other
    things, too: zero it again before a build of another size.
    """
    from flashtrie_cli.engine import cuda_draft_layout

    return cuda_draft_layout.workspace_size(
        DraftPlan(batch_size, block_size, vocab_size, num_nodes, top_k), constrained
    )


def _check_options(num_nodes: int, first_row: int, padding: str, scoring: str, engine: str) -> None:
    if not isinstance(num_nodes, SupportsIndex) or not 1 <= int(num_nodes) <= MAX_NUM_NODES:
        raise UsageError(f"number of nodes {num_nodes} is not between 1 and {MAX_NUM_NODES}")
    if first_row not in (0, 1):
        raise UsageError(f"first row {first_row} is neither 0 nor 1")
    for name, value, allowed in (
        ("padding", padding, _PADDINGS),
        ("scoring", scoring, SCORINGS),
        ("engine", engine, _ENGINES),
    ):
        if value not in allowed:
            raise UsageError(f"{name} {value!r} is not one of {', '.join(allowed)}")


def _plan(
    logits: Any, num_nodes: int, top_k: int, first_row: int, padding: str, logit_type: str | None
) -> DraftPlan:
    if not hasattr(logits, "shape") or not hasattr(logits, "dtype"):
        raise InputError(f"logits are a {type(logits).__name__}, not an array")
    shape = tuple(int(size) for size in logits.shape)
    if len(shape) != 3:
        raise InputError(f"logits have {len(shape)} dimensions instead of 3 [batch, block, vocabulary]")
    batch_size, block_size, vocab_size = shape
    if block_size < 2:
        raise InputError(f"a block of {block_size} rows drafts nothing (at least 2)")
    if not 1 <= vocab_size <= _INT32_MAX:
        raise InputError(f"vocabulary of {vocab_size} tokens")
    if not isinstance(top_k, SupportsIndex) or not 1 <= int(top_k) <= vocab_size:
        raise UsageError(f"top-k {top_k} is not between 1 and the vocabulary's {vocab_size}")
    kind = _logit_type(logits, logit_type)
    return DraftPlan(
        batch_size, block_size, vocab_size, num_nodes, top_k, first_row, padding == "self", logit_type=kind
    )


def _logit_type(logits: Any, wanted: str | None) -> str:
    """float32, float16 or bfloat16: what the array is, or what a uint16 array is said to hold."""
    name = str(logits.dtype).removeprefix("torch.")
    if name == "uint16" and wanted == "bfloat16":
        return wanted
    if name not in LOGIT_TYPES:
        hint = 'pass logit_type="bfloat16" if these are its bits' if name in ("uint16", "int16") else None
        raise InputError(f"logits are {name}, not float32, float16 or bfloat16", hint=hint)
    if wanted is not None and wanted != name:
        raise InputError(f"logits are {name}, not {wanted}")
    return name


def _integers(name: str, values: Any, size: int) -> npt.NDArray[np.int32]:
    """A contiguous int32 [size] array, or InputError, whose ``file`` is the argument's name."""
    array = np.asarray(values)
    if array.shape != (size,):
        raise InputError(f"has shape {list(array.shape)} instead of [{size}]", file=name)
    if array.dtype.kind not in "iu":
        raise InputError(f"holds {array.dtype}, not int32", file=name)
    if size and not (int(array.min()) >= -_INT32_MAX - 1 and int(array.max()) <= _INT32_MAX):
        raise InputError("holds numbers that do not fit into int32", file=name)
    return np.ascontiguousarray(array, np.int32)


def _host_inputs(plan: DraftPlan, inputs: DraftInputs) -> DraftInputs:
    """The inputs as contiguous numpy arrays of the right types, every value checked."""
    roots = _integers("roots", inputs.roots, plan.batch_size)
    bases = _integers("base_lengths", inputs.base_lengths, plan.batch_size)
    if bases.size and not (bases.min() >= 0 and int(bases.max()) <= _INT32_MAX - plan.num_nodes):
        raise InputError(
            f"holds lengths that are not between 0 and {_INT32_MAX - plan.num_nodes}", file="base_lengths"
        )
    mapping = None
    if inputs.vocab_map is not None:
        mapping = _integers("vocab_map", inputs.vocab_map, plan.vocab_size)
        if mapping.min() < 0:
            raise InputError(
                f"entry {int(mapping.argmin())} is negative ({int(mapping.min())})", file="vocab_map"
            )
    constraint = inputs.constraint
    if constraint is not None:
        constraint = replace(constraint, start_states=_start_states(plan, constraint))
        if mapping is not None:
            check_one_to_one(mapping)
    return DraftInputs(np.ascontiguousarray(inputs.logits), roots, bases, mapping, constraint)


def _start_states(plan: DraftPlan, constraint: DraftConstraint) -> npt.NDArray[np.uint32]:
    if constraint.start_states is None:
        return np.zeros(plan.batch_size, np.uint32)
    starts = np.asarray(constraint.start_states)
    if starts.shape != (plan.batch_size,) or starts.dtype.kind not in "iu":
        raise InputError(
            f"holds {starts.dtype} {list(starts.shape)}, not {plan.batch_size} integers", file="start_states"
        )
    num_nodes = min(getattr(constraint.trie, "num_nodes", NO_STATE), NO_STATE)
    num_states = num_nodes + _is_masks(constraint.trie)  # masks have one after the end
    if np.any((starts != NO_STATE) & ((starts < 0) | (starts >= num_states))):
        raise InputError(
            f"holds states that are not nodes of the trie (0 to {num_states - 1})", file="start_states"
        )
    return np.ascontiguousarray(starts, np.uint32)


def _is_masks(trie: Any) -> bool:
    """Whether ``trie`` is `TokenMasks`, or what their `on_device` gives, rather than a token trie."""
    return hasattr(trie, "vocab_size") or hasattr(getattr(trie, "view", None), "hop_bits")


def _constraint(trie: Any, scoring: str, start_states: Any, end_token: int | None) -> DraftConstraint | None:
    if trie is None:
        if start_states is not None or end_token is not None:
            raise UsageError("start states and an end token mean nothing without a trie")
        return None
    if end_token is not None and _is_masks(trie):
        raise UsageError("token masks end by their own end-of-sequence ids, not by an end token")
    if end_token is not None and not 0 <= end_token <= _INT32_MAX:
        raise UsageError(f"end token {end_token} is not between 0 and {_INT32_MAX}")
    return DraftConstraint(trie, scoring, start_states, end_token)


def _checked_out(plan: DraftPlan, out: DraftTrees | None, constrained: bool) -> DraftTrees:
    if out is None:
        return allocate(plan, constrained)
    arrays = out.arrays()
    for name, (dtype, _) in OUTPUTS.items():
        array = arrays.get(name)
        if array is None:
            if name == "node_states" and not constrained:
                continue
            raise InputError(f"output {name} is missing")
        good = isinstance(array, np.ndarray) and array.dtype == dtype and array.shape == plan.shape(name)
        if not (good and array.flags.c_contiguous and array.flags.writeable):
            raise InputError(
                f"output {name} is not a writeable contiguous {dtype} array {list(plan.shape(name))}"
            )
    return out


def _build_from_host(
    plan: DraftPlan, inputs: DraftInputs, out: DraftTrees | None, engine: str, threads: int
) -> DraftTrees:
    inputs = _host_inputs(plan, inputs)
    trees = _checked_out(plan, out, inputs.constraint is not None)
    if engine == "cuda":
        _check_cuda_limits(plan)
        from flashtrie_cli.engine import cuda_draft

        cuda_draft.build_from_host(plan, inputs, trees)
        return trees
    from flashtrie_cli.engine import cpu_draft, reference_draft

    if engine == "cpu" and not cpu_draft.is_available():
        raise EngineUnavailable(
            "the native engine is not installed",
            hint="reinstall where a C++20 compiler is found, or use --engine reference",
        )
    if engine != "reference" and cpu_draft.is_available():
        native = _with_trie(inputs, cpu_draft.native_trie)
        if native is not None:
            cpu_draft.build(plan, native, trees, threads)
            return trees
        if engine == "cpu":
            raise UsageError("the cpu engine needs the trie of an opened index")
    walked = _with_trie(inputs, reference_draft.token_trie)
    if walked is None:
        raise UsageError(
            "the reference engine needs an opened index, or a trie with children and is_terminal"
        )
    reference_draft.build(plan, walked, trees)
    return trees


def _with_trie(inputs: DraftInputs, convert: Callable[[Any], Any]) -> DraftInputs | None:
    """The inputs with the constraint's trie as an engine walks it; None where it cannot."""
    if inputs.constraint is None:
        return inputs
    trie = convert(inputs.constraint.trie)
    return None if trie is None else replace(inputs, constraint=replace(inputs.constraint, trie=trie))


def _check_cuda_limits(plan: DraftPlan) -> None:
    if plan.vocab_size > MAX_CUDA_VOCAB:
        raise UsageError(
            f"{plan.vocab_size} tokens are above the cuda engine's {MAX_CUDA_VOCAB}", hint="--engine cpu"
        )
    if plan.top_k > MAX_CUDA_TOP_K:
        raise UsageError(
            f"top-k {plan.top_k} is above the cuda engine's {MAX_CUDA_TOP_K}", hint="--engine cpu"
        )
    if plan.num_nodes > MAX_CUDA_NODES:
        raise UsageError(
            f"{plan.num_nodes} nodes are above the cuda engine's {MAX_CUDA_NODES}", hint="--engine cpu"
        )
