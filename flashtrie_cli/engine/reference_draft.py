"""Draft trees in plain Python, with a heap: the oracle that the other engines are compared with.

Best-first growth as in DDTree (arXiv 2604.12989): every node of the tree offers its best child that is not yet in it;
the best offer (score descending, then lower parent index) is appended until the tree is full or nobody offers.
Scores are float32 sums from the root on. Each log-sum-exp is taken in float64 and rounded once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.draft_plan import (
    NO_STATE,
    STATUS_BAD_ROW,
    STATUS_TRUNCATED,
    DraftConstraint,
    DraftInputs,
    DraftPlan,
    DraftTrees,
    TokenTrie,
)
from flashtrie_cli.engine.reference import ReferenceEngine
from flashtrie_cli.trie.stored import StoredTrie

Row = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Candidates:
    """What one node may offer, best first; at most ``top_k`` of the ``num_legal`` tokens."""

    ids: Sequence[int] = ()
    log_probs: Sequence[np.float32] = ()
    states: Sequence[int] = ()
    is_bad: bool = False
    num_legal: int = 0


@dataclass
class Node:
    token: int
    depth: int
    parent: int
    score: np.float32
    state: int
    candidates: Candidates = field(default_factory=Candidates)
    num_taken: int = 0


def build(plan: DraftPlan, inputs: DraftInputs, out: DraftTrees) -> None:
    """Fill ``out`` from numpy inputs."""
    logits = as_float32(plan, inputs.logits)
    for batch in range(plan.batch_size):
        rows = logits[batch, plan.first_row : plan.first_row + plan.num_depths]
        offers, is_bad = _offers(plan, rows, inputs)
        start = NO_STATE if inputs.constraint is None else int(inputs.constraint.start_states[batch])
        nodes = _grow(plan, Node(int(inputs.roots[batch]), 0, -1, np.float32(0), start), offers)
        out.status[batch] = _status(plan, nodes, is_bad)
        if inputs.vocab_map is not None:
            for node in nodes[1:]:
                node.token = int(inputs.vocab_map[node.token])
        _write(plan, nodes, int(inputs.base_lengths[batch]), out, batch)


def as_float32(plan: DraftPlan, logits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """The logits in float32; exact for all three types."""
    if plan.logit_type == "bfloat16":
        return (logits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return logits.astype(np.float32, copy=False)


def log_sum_exp(values: Row) -> np.float32:
    """Log of the sum of exponentials, float64 inside; -inf for an empty or wholly -inf row."""
    peak = float(np.max(values, initial=-np.inf))
    if peak == -math.inf:
        return np.float32(-np.inf)
    return np.float32(peak + math.log(float(np.exp(values.astype(np.float64) - peak).sum())))


def _has_bad(values: Row) -> bool:
    return bool(np.isnan(values).any() or np.isposinf(values).any())


def _best(
    ids: npt.NDArray[np.int64], values: Row, states: Sequence[int], lse: np.float32, top_k: int
) -> Candidates:
    """The ``top_k`` largest finite values, ties to the lower id; ``ids`` ascend."""
    order = [int(at) for at in np.argsort(-values, kind="stable") if np.isfinite(values[at])]
    kept = order[:top_k]
    return Candidates(
        [int(ids[at]) for at in kept],
        [min(np.float32(values[at] - lse), np.float32(0)) for at in kept],
        [states[at] for at in kept] if len(states) else [NO_STATE] * len(kept),
        num_legal=len(order),
    )


def _offers(
    plan: DraftPlan, rows: npt.NDArray[np.float32], inputs: DraftInputs
) -> tuple[Callable[[Node], Candidates], bool]:
    """The function that gives a node's candidates, and whether a row was found bad at once."""
    constraint = inputs.constraint
    if constraint is not None and constraint.scoring == "renorm":
        return _legal_offers(plan, rows, constraint, inputs.vocab_map, None), False
    bad = [_has_bad(row) for row in rows]
    if constraint is not None:
        sums = [
            np.float32(np.nan) if is_bad else log_sum_exp(row) for row, is_bad in zip(rows, bad, strict=True)
        ]
        return _legal_offers(plan, rows, constraint, inputs.vocab_map, sums), any(bad)
    ids = np.arange(plan.vocab_size)
    shared = [
        Candidates() if is_bad else _best(ids, row, (), log_sum_exp(row), plan.top_k)
        for row, is_bad in zip(rows, bad, strict=True)
    ]
    # More tokens than top_k count as legal whatever their logits: the fast engines don't count finite logits.
    shared = [Candidates(c.ids, c.log_probs, c.states, num_legal=plan.vocab_size) for c in shared]
    return lambda node: shared[node.depth], any(bad)


def _legal_offers(
    plan: DraftPlan,
    rows: npt.NDArray[np.float32],
    constraint: DraftConstraint,
    vocab_map: npt.NDArray[np.int32] | None,
    sums: Sequence[np.float32] | None,
) -> Callable[[Node], Candidates]:
    """Candidates among the children in the trie; ``sums``: each row's log-sum-exp, None to renormalise."""
    id_of = None if vocab_map is None else {int(token): i for i, token in enumerate(vocab_map)}

    def offers(node: Node) -> Candidates:
        tokens, states = legal_tokens(constraint.trie, node.state, constraint.end_token)
        known = tokens if id_of is None else [id_of.get(token, plan.vocab_size) for token in tokens]
        inside = [at for at in np.argsort(known, kind="stable") if known[at] < plan.vocab_size]
        ids = np.array([known[at] for at in inside], np.int64)
        values = rows[node.depth][ids]
        if sums is None:
            if _has_bad(values):
                return Candidates(is_bad=True)
            lse = log_sum_exp(values)
        else:
            lse = sums[node.depth]
            if np.isnan(lse):
                return Candidates()
        return _best(ids, values, [states[at] for at in inside], lse, plan.top_k)

    return offers


class ReferenceTrie:
    """A stored trie as a `TokenTrie`."""

    def __init__(self, stored: StoredTrie):
        self._engine = ReferenceEngine(stored)

    def children(self, state: int) -> tuple[Sequence[int], Sequence[int]]:
        first, last = self._engine.first_child[state], self._engine.first_child[state + 1]
        return self._engine.labels[first:last], range(first, last)

    def is_terminal(self, state: int) -> bool:
        return bool(self._engine.terminal[state])


class ReferenceMaskTrie:
    """Token masks as a `TokenTrie` whose keys never end: the end-of-sequence ids are tokens like others, and lead to
    the masks' own state after the end."""

    def __init__(self, masks: Any):
        self._masks = masks

    def children(self, state: int) -> tuple[Sequence[int], Sequence[int]]:
        tokens = self._masks.allowed(state)
        states, _ = self._masks.advance(np.full(len(tokens), state, np.uint32), tokens)
        return tokens.tolist(), states.tolist()

    def is_terminal(self, state: int) -> bool:
        return False


def token_trie(trie: Any) -> TokenTrie | None:
    """What the reference engine walks: a `TokenTrie` as it is, or the trie or the masks of an opened index."""
    if hasattr(trie, "allowed") and hasattr(trie, "ended"):
        return ReferenceMaskTrie(trie)
    if hasattr(trie, "stored"):
        return ReferenceTrie(trie.stored)
    return trie if hasattr(trie, "children") and hasattr(trie, "is_terminal") else None


def legal_tokens(trie: TokenTrie, state: int, end_token: int | None) -> tuple[list[int], list[int]]:
    """Tokens that may follow ``state``, ascending, the end token among them where a key ends, and their
    states."""
    if state == NO_STATE:
        return [], []
    tokens, states = trie.children(state)
    pairs = {int(token): int(child) for token, child in zip(tokens, states, strict=True)}
    if end_token is not None and trie.is_terminal(state):
        pairs.setdefault(end_token, NO_STATE)
    ordered = sorted(pairs)
    return ordered, [pairs[token] for token in ordered]


def _grow(plan: DraftPlan, root: Node, offers: Callable[[Node], Candidates]) -> list[Node]:
    nodes: list[Node] = []
    heap: list[tuple[float, int]] = []  # (minus the offered child's score, the offering node)

    def offer(index: int) -> None:
        node = nodes[index]
        if node.num_taken < len(node.candidates.ids):
            score = np.float32(node.score + node.candidates.log_probs[node.num_taken])
            heapq.heappush(heap, (-float(score), index))

    def append(node: Node) -> None:
        nodes.append(node)
        if node.depth < plan.num_depths:
            node.candidates = offers(node)
            offer(len(nodes) - 1)

    append(root)
    while heap and len(nodes) < plan.num_nodes:
        negated, index = heapq.heappop(heap)
        parent, rank = nodes[index], nodes[index].num_taken
        found = parent.candidates
        parent.num_taken += 1
        append(Node(found.ids[rank], parent.depth + 1, index, np.float32(-negated), found.states[rank]))
        offer(index)
    return nodes


def _status(plan: DraftPlan, nodes: Sequence[Node], is_bad: bool) -> int:
    status = STATUS_BAD_ROW if is_bad or any(node.candidates.is_bad for node in nodes) else 0
    if any(node.num_taken == plan.top_k < node.candidates.num_legal for node in nodes):
        status |= STATUS_TRUNCATED
    return status


def _write(plan: DraftPlan, nodes: Sequence[Node], base_length: int, out: DraftTrees, batch: int) -> None:
    masks: list[int] = []
    for i in range(plan.num_nodes):
        node = nodes[i] if i < len(nodes) else None
        padding_mask = 1 << i if plan.self_padding else 0
        masks.append(padding_mask if node is None else (masks[node.parent] if i else 0) | 1 << i)
        out.node_token_ids[batch, i] = out.verify_token_ids[batch, i] = node.token if node else 0
        out.node_depths[batch, i] = node.depth if node else 0
        out.parent_ids[batch, i] = node.parent if node else -1
        out.node_scores[batch, i] = node.score if node else -np.inf
        out.verify_position_ids[batch, i] = base_length + node.depth if node else 0
        out.select_token_indices[batch, i] = i
        if out.node_states is not None:
            out.node_states[batch, i] = node.state if node else NO_STATE
        for word in range(plan.mask_words):
            bits = masks[i] >> (32 * word) & 0xFFFF_FFFF
            out.packed_ancestor_mask[batch, i, word] = bits - (1 << 32) if bits >> 31 else bits
        out.ancestor_mask[batch, i] = [masks[i] >> key & 1 for key in range(plan.num_nodes)]
    out.valid_counts[batch] = len(nodes)
    out.context_lengths[batch] = base_length + plan.num_nodes
