"""What a draft-tree build is given and what it returns, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from flashtrie_cli.errors import InputError

STATUS_BAD_ROW = 1
"""A logits row that was read holds NaN or +inf; it offers no candidates."""
STATUS_TRUNCATED = 2
"""Some node has all its ``top_k`` children in the tree although more tokens were legal there: a better
sibling may have been left out, and a larger ``top_k`` would say."""

NO_STATE = 0xFFFF_FFFF
"""The trie state of a node that no trie node stands behind (padding, or past the end token)."""

LOGIT_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
"""Names of the logits' types, with their codes in the native engines. bfloat16 travels as uint16 in numpy."""
SCORINGS = ("global", "renorm")


@dataclass(frozen=True)
class DraftPlan:
    """The sizes of one build, already checked (`flashtrie_cli.query.draft` is the door)."""

    batch_size: int
    block_size: int
    vocab_size: int
    num_nodes: int
    top_k: int
    first_row: int = 1
    self_padding: bool = False
    logit_type: str = "float32"

    @property
    def num_depths(self) -> int:
        """Depths that can hold a node, the root's not counted: a tree of N nodes is at most N - 1 deep, so
        deeper rows of the block are never read."""
        return min(self.block_size, self.num_nodes) - 1

    @property
    def mask_words(self) -> int:
        return (self.num_nodes + 31) // 32

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the output array ``name``."""
        sizes = {"B": self.batch_size, "N": self.num_nodes, "W": self.mask_words}
        return tuple(sizes[letter] for letter in OUTPUTS[name][1])


OUTPUTS: dict[str, tuple[str, str]] = {
    "node_token_ids": ("int32", "BN"),
    "node_depths": ("int32", "BN"),
    "parent_ids": ("int32", "BN"),
    "node_scores": ("float32", "BN"),
    "valid_counts": ("int32", "B"),
    "verify_token_ids": ("int32", "BN"),
    "verify_position_ids": ("int32", "BN"),
    "packed_ancestor_mask": ("int32", "BNW"),
    "ancestor_mask": ("int8", "BNN"),
    "context_lengths": ("int32", "B"),
    "select_token_indices": ("int64", "BN"),
    "status": ("int32", "B"),
    "node_states": ("uint32", "BN"),
}
"""Name of every output -> its type and dimensions (B batch rows, N nodes, W = ceil(N / 32) mask words)."""


@dataclass
class DraftTrees:
    """Draft trees of a batch: numpy arrays, or device arrays where the logits were on a device.

    The eleven arrays of TensorRT-Edge-LLM's DDTree kernels, in its shapes and types, then ours. Node 0 is
    the root; nodes stand in order of score, so a parent always precedes its children. Rows at and past
    ``valid_counts`` are padding: token 0, parent -1, score -inf, position 0, an empty mask row (with
    ``padding="self"``: itself).
    """

    node_token_ids: Any
    node_depths: Any
    parent_ids: Any
    node_scores: Any
    valid_counts: Any
    verify_token_ids: Any
    verify_position_ids: Any
    packed_ancestor_mask: Any
    ancestor_mask: Any
    context_lengths: Any
    select_token_indices: Any
    status: Any
    """int32 [B]: STATUS_BAD_ROW and STATUS_TRUNCATED, added."""
    node_states: Any = None
    """uint32 [B, N], only of constrained builds: each node's trie node, NO_STATE for padding and the end
    token."""

    def arrays(self) -> dict[str, Any]:
        """Every array that is there, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: array for name, array in found.items() if array is not None}


def allocate(plan: DraftPlan, constrained: bool) -> DraftTrees:
    """Numpy arrays for one build, not initialised: an engine writes every element."""
    names = [name for name in OUTPUTS if constrained or name != "node_states"]
    return DraftTrees(**{name: np.empty(plan.shape(name), OUTPUTS[name][0]) for name in names})


class TokenTrie(Protocol):
    """What the reference engine asks of a trie over token ids; states are any integers, NO_STATE excepted."""

    def children(self, state: int) -> tuple[Sequence[int], Sequence[int]]:
        """The tokens that may follow, ascending, and the state each leads to."""

    def is_terminal(self, state: int) -> bool:
        """Whether a key ends here."""


@dataclass(frozen=True)
class DraftConstraint:
    """A token trie, or token masks, that the tree must not leave.

    ``scoring``: "global" keeps the drafter's log-probs over the whole vocabulary, "renorm" renormalises
    them over each node's legal tokens. ``start_states`` int64 [B]: the trie node behind each root.
    ``end_token`` is legal wherever a key ends, and nothing follows it; None: keys end without a token.
    ``trie``: a `TokenTrie` for the reference engine, the opened index's trie or masks for the others. Masks have ends
    of their own, and no ``end_token``.
    """

    trie: Any
    scoring: str
    start_states: Any
    end_token: int | None = None


@dataclass(frozen=True)
class DraftInputs:
    """The arrays of one build: numpy arrays for the host engines, device arrays for the cuda engine.

    ``logits`` [B, block, V]; ``roots`` and ``base_lengths`` int32 [B]; ``vocab_map`` int32 [V]. A constraint speaks of
    the map's tokens, the logits of the drafter's own ids.
    """

    logits: Any
    roots: Any
    base_lengths: Any
    vocab_map: Any = None
    constraint: DraftConstraint | None = None


def check_one_to_one(vocab_map: np.ndarray[Any, Any]) -> None:
    """InputError where two of the drafter's ids stand for one token, so that a token would have two probabilities."""
    ordered = np.sort(vocab_map)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise InputError(
            f"gives token {int(ordered[twice[0]])} to two of the drafter's ids",
            file="vocab_map",
            hint="a constrained tree needs each token once",
        )


def draft_ids(vocab_map: np.ndarray[Any, Any], num_tokens: int) -> np.ndarray[Any, Any]:
    """The drafter's id of each token below ``num_tokens``, uint32, NO_STATE where there is none: ``vocab_map`` int32
    [V] the other way round. Raises InputError."""
    check_one_to_one(vocab_map)
    ids = np.full(max(num_tokens, 1), NO_STATE, np.uint32)
    inside = np.flatnonzero((vocab_map >= 0) & (vocab_map < num_tokens))
    ids[vocab_map[inside]] = inside
    return ids
