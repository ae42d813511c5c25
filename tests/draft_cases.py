"""Draft-tree cases, oracles and comparisons that several test files share."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli.engine import reference_draft
from flashtrie_cli.query.draft import DraftTrees

INTEGER_OUTPUTS = ("node_token_ids", "node_depths", "parent_ids", "valid_counts", "status")
SCORE_GAP = 2e-5
"""Scores closer than this may change places between engines: their log-sum-exps may differ by an ulp."""
SCORE_TOLERANCE = 1e-5
SCORE_RELATIVE = 1e-6
"""Some units in the last place, for sums of many steps."""


@dataclass
class Case:
    """One worked example: what goes in and, per batch row, what must come out."""

    name: str
    logits: np.ndarray
    arguments: dict[str, Any]
    expected: list[dict[str, Any]]


def vectors() -> list[Case]:
    path = Path(__file__).parent / "data" / "draft_tree_vectors.json"
    cases = []
    for entry in json.loads(path.read_text()):
        logits = [[[-np.inf if x is None else x for x in row] for row in block] for block in entry["logits"]]
        arguments = {
            "roots": entry["root"],
            "base_lengths": entry["base"],
            "num_nodes": entry["N"],
            "top_k": entry["K"],
            "first_row": entry["first_row"],
            "vocab_map": entry["vocab_map"],
        }
        cases.append(Case(entry["name"], np.array(logits, np.float32), arguments, entry["out"]))
    return cases


def random_logits(
    rng: np.random.Generator, batch: int, block: int, vocab: int, scale: float = 3.0
) -> np.ndarray:
    return (rng.standard_normal((batch, block, vocab)) * scale).astype(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits of float32 values cut to bfloat16, as uint16."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def assert_invariants(trees: DraftTrees, num_nodes: int, bases: Any, padding: str = "zero") -> None:
    """What holds for every tree: order, depths, positions, and masks recomputed from the parents."""
    for batch in range(len(trees.valid_counts)):
        valid = int(trees.valid_counts[batch])
        parents, depths = trees.parent_ids[batch], trees.node_depths[batch]
        scores = trees.node_scores[batch]
        mask = np.zeros((num_nodes, num_nodes), np.int8)
        assert 1 <= valid <= num_nodes
        assert (parents[0], depths[0], scores[0]) == (-1, 0, 0.0)
        for i in range(1, valid):
            assert 0 <= parents[i] < i
            assert depths[i] == depths[parents[i]] + 1
            assert scores[i] <= scores[i - 1]
        for i in range(num_nodes):
            if i < valid:
                mask[i] = mask[parents[i]] if i else 0
                mask[i, i] = 1
            else:
                mask[i, i] = padding == "self"
        assert np.array_equal(trees.ancestor_mask[batch], mask)
        words = trees.packed_ancestor_mask.shape[2]
        bits = np.zeros((num_nodes, words * 32), np.uint8)
        bits[:, :num_nodes] = mask
        packed = np.packbits(bits, axis=1, bitorder="little").view("<i4")
        assert np.array_equal(trees.packed_ancestor_mask[batch], packed)
        assert np.array_equal(trees.verify_position_ids[batch, :valid], bases[batch] + depths[:valid])
        for name, blank in (
            ("node_token_ids", 0),
            ("node_depths", 0),
            ("parent_ids", -1),
            ("node_scores", -np.inf),
            ("verify_position_ids", 0),
        ):
            assert (getattr(trees, name)[batch, valid:] == blank).all(), name
        assert trees.context_lengths[batch] == bases[batch] + num_nodes
    assert np.array_equal(trees.verify_token_ids, trees.node_token_ids)
    assert (trees.select_token_indices == np.arange(num_nodes)).all()


def assert_same_trees(found: DraftTrees, wanted: DraftTrees) -> None:
    """Exact where no two scores are near; otherwise the same scores within the tolerance."""
    for batch in range(len(wanted.valid_counts)):
        assert found.valid_counts[batch] == wanted.valid_counts[batch]
        valid = int(wanted.valid_counts[batch])
        ours, theirs = found.node_scores[batch, :valid], wanted.node_scores[batch, :valid]
        np.testing.assert_allclose(np.sort(ours), np.sort(theirs), rtol=SCORE_RELATIVE, atol=SCORE_TOLERANCE)
        if valid > 1 and np.diff(theirs).max() > -SCORE_GAP:
            continue
        for name in INTEGER_OUTPUTS:
            assert np.array_equal(getattr(found, name)[batch], getattr(wanted, name)[batch]), name


def best_prefixes(rows: np.ndarray, top_k: int, num_nodes: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """All prefixes of at most ``top_k`` tokens a depth, scored one by one; the best ``num_nodes``, the root
    included."""
    lists = []
    for row in rows:
        if np.isnan(row).any() or np.isposinf(row).any():
            break
        lse = reference_draft.log_sum_exp(row)
        ids = sorted((i for i in range(len(row)) if np.isfinite(row[i])), key=lambda i: (-row[i], i))[:top_k]
        if not ids:
            break
        lists.append([(i, min(np.float32(row[i] - lse), np.float32(0))) for i in ids])
    scored: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for depth in range(1, len(lists) + 1):
        for path in itertools.product(*lists[:depth]):
            score = np.float32(0)
            for _, log_prob in path:
                score = np.float32(score + log_prob)
            scored.append((float(score), tuple(token for token, _ in path)))
    scored.sort(key=lambda pair: -pair[0])
    kept = scored[:num_nodes]
    return [score for score, _ in kept], [path for _, path in kept]


def paths(trees: DraftTrees, batch: int) -> list[tuple[int, ...]]:
    """The tokens from the root's child to each node."""
    found: list[tuple[int, ...]] = [()]
    for i in range(1, int(trees.valid_counts[batch])):
        found.append((*found[trees.parent_ids[batch, i]], int(trees.node_token_ids[batch, i])))
    return found
