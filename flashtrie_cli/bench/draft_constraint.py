"""What a trie buys a drafter: how much of a tree's budget goes to nodes that no key allows, and what is accepted.

The drafter's block are the log-probs of output positions 1 to 8 of a non-autoregressive model; the root is the true
key's first token, and the trie goes on from there. Three trees of each query and size:

  free      grown without the trie
  global    held to the trie, with the drafter's own scores
  renorm    held to the trie, scores renormalised over the legal tokens of each node

The target is masked by the same trie. "expected" is the number of drafted tokens it accepts when its probabilities are
the drafter's, renormalised over the legal tokens: the sum of the legal nodes' probabilities. "accepted" is how far the
tree follows the true key, its end token included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import UsageError
from flashtrie_cli.index import Index
from flashtrie_cli.query.draft import NO_STATE, DraftTrees, build_draft_trees

METHODS = ("free", "global", "renorm")
BATCH = 32


@dataclass(frozen=True)
class Drafts:
    """A drafter's proposals: ``tokens`` and ``log_probs`` [Q, positions, slots], and each query's true tokens."""

    tokens: npt.NDArray[Any]
    log_probs: npt.NDArray[Any]
    truths: Sequence[Sequence[int]]
    vocab_size: int
    end_token: int


@dataclass(frozen=True)
class Outcome:
    """Means over the queries, for one method and tree size."""

    method: str
    num_nodes: int
    num_queries: int
    illegal_share: float
    """Share of the nodes beside the root that no key allows."""
    expected: float
    accepted: float
    mean_nodes: float


class LegalWalk:
    """Children in an index's trie by node, from its level-order bits."""

    def __init__(self, index: Index):
        stored = index.stored
        count = stored.num_nodes
        bits = np.unpackbits(
            np.ascontiguousarray(stored.louds).view(np.uint8), bitorder="little", count=2 * count - 1
        )
        self._ends = np.flatnonzero(bits == 0) - np.arange(count) + 1
        self._index = index
        self._labels = index.engine.trie.label_low  # type: ignore[attr-defined]
        if index.engine.trie.high_width:  # type: ignore[attr-defined]
            raise UsageError("this workload takes indexes whose tokens are below 65,536")

    def children(self, node: int) -> tuple[npt.NDArray[np.uint16], int]:
        """Labels of the children, ascending, and the first child's node."""
        first = 1 if node == 0 else int(self._ends[node - 1])
        return self._labels[first : int(self._ends[node])], first

    def is_terminal(self, node: int, path: Sequence[int]) -> bool:
        return int(self._index.lookup(np.array(path, np.uint32))[0]) >= 0


def measure(index: Index, drafts: Drafts, sizes: Sequence[int], *, top_k: int = 8) -> list[Outcome]:
    """Outcomes of every method and size; queries whose true key is not in the index are left out."""
    walk = LegalWalk(index)
    kept = [
        q
        for q, truth in enumerate(drafts.truths)
        if len(truth) and index.lookup(np.array(truth, np.uint32))[0] >= 0
    ]
    sums: dict[tuple[str, int], npt.NDArray[np.float64]] = {}
    for begin in range(0, len(kept), BATCH):
        queries = kept[begin : begin + BATCH]
        logits = _block(drafts, queries)
        roots = np.array([drafts.truths[q][0] for q in queries], np.int32)
        starts = index.engine.find_nodes(roots.astype(np.uint32), np.arange(len(roots) + 1, dtype=np.int64))
        known = [
            _Probabilities(walk, logits[row], [int(root)], int(start), drafts)
            for row, (root, start) in enumerate(zip(roots, starts, strict=True))
        ]
        for size in sizes:
            for method in METHODS:
                trees = _trees(index, method, logits, roots, starts, size, top_k, drafts.end_token)
                for row, query in enumerate(queries):
                    found = _judge(trees, row, known[row], drafts.truths[query], drafts.end_token)
                    key = (method, size)
                    sums[key] = sums.get(key, np.zeros(4)) + found
    outcomes = []
    for (method, size), total in sums.items():
        illegal, expected, accepted, nodes = total.tolist()
        count = len(kept)
        outcomes.append(
            Outcome(
                method,
                size,
                count,
                illegal / max(nodes, 1),
                expected / count,
                accepted / count,
                nodes / count,
            )
        )
    return outcomes


def _block(drafts: Drafts, queries: Sequence[int]) -> npt.NDArray[np.float32]:
    """Log-probs [q, positions, V]; what the slots leave of the probability is spread over the other tokens."""
    tokens, log_probs = drafts.tokens[queries].astype(np.int64), drafts.log_probs[queries].astype(np.float32)
    rest = np.maximum(1 - np.exp(log_probs).sum(axis=2, keepdims=True), 1e-6)
    others = np.log(rest / (drafts.vocab_size - tokens.shape[2])).astype(np.float32)
    block = np.broadcast_to(others, (*tokens.shape[:2], drafts.vocab_size)).copy()
    np.put_along_axis(block, tokens, log_probs, axis=2)
    return block


def _trees(
    index: Index,
    method: str,
    logits: npt.NDArray[np.float32],
    roots: npt.NDArray[np.int32],
    starts: npt.NDArray[np.uint32],
    size: int,
    top_k: int,
    end_token: int,
) -> DraftTrees:
    held: dict[str, Any] = {}
    if method != "free":
        held = {"trie": index, "scoring": method, "start_states": starts, "end_token": end_token}
    return build_draft_trees(logits, roots, np.zeros(len(roots), np.int32), size, top_k, engine="cpu", **held)


class _Probabilities:
    """The masked target's probability of each legal continuation of one query, computed when first asked for."""

    def __init__(
        self, walk: LegalWalk, rows: npt.NDArray[np.float32], path: list[int], start: int, drafts: Drafts
    ):
        self._walk, self._rows, self._drafts, self._root = walk, rows, drafts, path
        self._states: dict[tuple[int, ...], int] = {(): start}
        self._children: dict[tuple[int, ...], dict[int, tuple[float, int]]] = {}

    def of(self, prefix: tuple[int, ...], token: int) -> float:
        """Probability of ``token`` behind a legal prefix; 0 where it is illegal."""
        found = self._children.get(prefix)
        if found is None:
            found = self._children[prefix] = self._legal(prefix)
        probability, state = found.get(token, (0.0, NO_STATE))
        if probability > 0:
            self._states[(*prefix, token)] = state
        return probability

    def _legal(self, prefix: tuple[int, ...]) -> dict[int, tuple[float, int]]:
        state = self._states[prefix]
        if state == NO_STATE:
            return {}
        labels, first = self._walk.children(state)
        tokens = labels.astype(np.int64).tolist()
        states = list(range(first, first + len(tokens)))
        if self._walk.is_terminal(state, [*self._root, *prefix]):
            tokens.append(self._drafts.end_token)
            states.append(NO_STATE)
        if not tokens:
            return {}
        row = self._rows[len(prefix) + 1][tokens].astype(np.float64)
        weights = np.exp(row - row.max())
        weights /= weights.sum()
        return {token: (p, at) for token, p, at in zip(tokens, weights.tolist(), states, strict=True)}


def _judge(
    trees: DraftTrees, row: int, target: _Probabilities, truth: Sequence[int], end_token: int
) -> npt.NDArray[np.float64]:
    """(illegal nodes, expected accepted, tokens of the true key accepted, nodes) of one tree, the root not counted."""
    wanted = (*truth[1:], end_token)
    paths: list[tuple[int, ...]] = [()]
    chances = [1.0]
    illegal, accepted = 0, 0
    for node in range(1, int(trees.valid_counts[row])):
        parent, token = int(trees.parent_ids[row, node]), int(trees.node_token_ids[row, node])
        paths.append((*paths[parent], token))
        chance = chances[parent] * target.of(paths[parent], token) if chances[parent] > 0 else 0.0
        chances.append(chance)
        illegal += chance == 0.0
        if paths[node] == wanted[: len(paths[node])]:
            accepted = max(accepted, len(paths[node]))
    return np.array([illegal, sum(chances[1:]), accepted, len(paths) - 1], np.float64)


def lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The outcomes as a Markdown table."""
    yield "| nodes | tree | nodes grown | illegal | expected accepted | accepted of the true title |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for outcome in sorted(outcomes, key=lambda o: (o.num_nodes, METHODS.index(o.method))):
        yield (
            f"| {outcome.num_nodes} | {outcome.method} | {outcome.mean_nodes + 1:.1f} | {outcome.illegal_share:.1%} "
            f"| {outcome.expected:.3f} | {outcome.accepted:.3f} |"
        )
