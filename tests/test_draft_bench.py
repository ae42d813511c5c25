"""The benchmark of draft trees measures what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashtrie_cli.bench.draft_constraint import METHODS, Drafts, lines, measure
from flashtrie_cli.build import build_index
from flashtrie_cli.index import Index
from flashtrie_cli.query.draft import build_draft_trees

pytest.importorskip("flashtrie_cli._native")

KEYS = [(1, 2, 3), (1, 2, 4), (1, 3), (2, 5), (2, 5, 6, 7)]
END = 9


@pytest.fixture
def index(tmp_path: Path) -> Index:
    build_index([list(key) for key in KEYS], str(tmp_path / "keys.ft"))
    return Index.open(str(tmp_path / "keys.ft"), engine="cpu")


def drafts(num_queries: int, truths: list[list[int]]) -> Drafts:
    rng = np.random.default_rng(0)
    tokens = np.stack([[rng.permutation(10)[:6] for _ in range(5)] for _ in range(num_queries)])
    log_probs = np.sort(np.log(rng.dirichlet(np.ones(8), (num_queries, 5))[..., :6]))[..., ::-1]
    return Drafts(tokens, log_probs, truths, 10, END)


def test_outcomes(index: Index) -> None:
    made = drafts(4, [[1, 2, 3], [2, 5, 6, 7], [8, 8], [1, 3]])
    outcomes = {(o.method, o.num_nodes): o for o in measure(index, made, (3, 6, 20), top_k=5)}
    assert {method for method, _ in outcomes} == set(METHODS)
    for (method, size), outcome in outcomes.items():
        assert outcome.num_queries == 3  # one true key is not in the index
        assert (outcome.illegal_share == 0) == (method != "free")
        assert outcome.expected <= outcomes["renorm", size].expected + 1e-6
    # With room for every legal continuation the tree always reaches the true key's end.
    assert outcomes["renorm", 20].accepted == pytest.approx((3 + 4 + 2) / 3)
    assert len(list(lines(list(outcomes.values())))) == 2 + 9


def test_expected_is_the_sum_of_the_tree_s_own_probabilities(index: Index) -> None:
    """For a renormalised tree the masked target's probabilities are the tree's."""
    made = drafts(1, [[1, 2, 3]])
    (outcome,) = (o for o in measure(index, made, (6,), top_k=5) if o.method == "renorm")
    rest = np.log(np.maximum(1 - np.exp(made.log_probs).sum(2, keepdims=True), 1e-6) / 4)
    block = np.broadcast_to(rest, (1, 5, 10)).astype(np.float32).copy()
    np.put_along_axis(block, made.tokens, made.log_probs.astype(np.float32), 2)
    start = index.engine.find_nodes(np.array([1], np.uint32), np.array([0, 1], np.int64))
    trees = build_draft_trees(block, [1], [0], 6, 5, trie=index, start_states=start, end_token=END)
    valid = int(trees.valid_counts[0])
    assert outcome.expected == pytest.approx(float(np.exp(trees.node_scores[0, 1:valid]).sum()), abs=1e-4)


def test_workload(flashtrie: Callable[..., Any], tmp_path: Path) -> None:
    export, report = tmp_path / "draft.json", tmp_path / "draft.md"
    arguments = ["--vocabulary", 1000, "--batch", "1,2", "--passes", 2, "--queries", 4, "-q"]
    done = flashtrie("bench", "--workload", "draft", *arguments, "--export", export, "--report", report)
    assert done.returncode == 0, done.stderr
    made = json.loads(export.read_text())
    assert made["is_complete"]
    assert {row["batch_size"] for row in made["drafts"]} == {1, 2}
    assert all(len(row["samples_us"]) >= 2 for row in made["drafts"])
    assert b"draft trees" in done.stdout
    assert "draft trees" in report.read_text()
