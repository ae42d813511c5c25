"""Draft trees held to a trie: the worked example, brute force, ties, the end token, and what top-k may not
lose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_cases import assert_invariants, assert_same_trees, paths, random_logits, to_bfloat16

from flashtrie_cli.build import build_index
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.index import Index
from flashtrie_cli.query.draft import (
    NO_STATE,
    STATUS_BAD_ROW,
    STATUS_TRUNCATED,
    DraftTrees,
    build_draft_trees,
)

Keys = Sequence[tuple[int, ...]]
SCORINGS = ("global", "renorm")


class PlainTrie:
    """A trie of nested dicts; states number the prefixes in order of appearance."""

    def __init__(self, keys: Keys):
        self.states: dict[tuple[int, ...], int] = {(): 0}
        self.keys = set(keys)
        for key in keys:
            for length in range(1, len(key) + 1):
                self.states.setdefault(key[:length], len(self.states))
        self.prefixes = list(self.states)

    def children(self, state: int) -> tuple[list[int], list[int]]:
        here = self.prefixes[state]
        longer = [p for p in self.prefixes if len(p) == len(here) + 1 and p[:-1] == here]
        longer.sort()
        return [p[-1] for p in longer], [self.states[p] for p in longer]

    def is_terminal(self, state: int) -> bool:
        return self.prefixes[state] in self.keys


def index_of(keys: Iterable[tuple[int, ...]], folder: Path) -> Index:
    path = folder / f"{len(list(folder.iterdir()))}.ft"
    build_index([list(key) for key in keys], str(path))
    return Index.open(str(path))


@pytest.fixture(params=["plain", "reference", "cpu"])
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("flashtrie_cli._native")
    return str(request.param)


def build(
    engine: str, keys: Keys, folder: Path, logits: np.ndarray, num_nodes: int, **options: Any
) -> DraftTrees:
    trie = PlainTrie(keys) if engine == "plain" else index_of(keys, folder)
    batch = len(logits)
    roots, bases = np.arange(batch) + 50, np.arange(batch) * 5
    options.setdefault("top_k", min(logits.shape[2], 32))
    trees = build_draft_trees(
        logits,
        roots,
        bases,
        num_nodes,
        trie=trie,
        engine="reference" if engine == "plain" else engine,
        **options,
    )
    assert_invariants(trees, num_nodes, bases)
    return trees


def best_legal_prefixes(
    keys: Keys, rows: np.ndarray, num_nodes: int, top_k: int, scoring: str, end_token: int | None
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Every legal prefix, scored on its own in float64; the best ``num_nodes``. Independent of the
    engines."""
    whole = set(keys)
    ended = {(*key, end_token) for key in whole if end_token is not None}
    prefixes = {key[:length] for key in whole | ended for length in range(len(key) + 1)}
    scored: list[tuple[float, tuple[int, ...]]] = []

    def visit(prefix: tuple[int, ...], score: float) -> None:
        scored.append((score, prefix))
        if len(prefix) == len(rows) or prefix in ended:
            return
        row = rows[len(prefix)].astype(np.float64)
        legal = sorted(t for t in range(len(row)) if (*prefix, t) in prefixes and math.isfinite(row[t]))
        pool = row[legal] if scoring == "renorm" else row[np.isfinite(row)]
        if not legal:
            return
        lse = float(np.log(np.exp(pool - pool.max()).sum()) + pool.max())
        for token in sorted(legal, key=lambda t: (-row[t], t))[:top_k]:
            visit((*prefix, token), score + row[token] - lse)

    visit((), 0.0)
    scored.sort(key=lambda pair: -pair[0])
    return [score for score, _ in scored[:num_nodes]], [prefix for _, prefix in scored[:num_nodes]]


EXAMPLE_KEYS = [(1, 3), (1, 4), (2, 3), (2, 5)]
EXAMPLE_LOGITS = np.array([[[9.0] * 6, [3, 2, 1, 0, 0, 0], [4, 0, 0, 1, 2, 3]]], np.float32)


def test_worked_example_global(engine: str, tmp_path: Path) -> None:
    trees = build(engine, EXAMPLE_KEYS, tmp_path, EXAMPLE_LOGITS, 6, scoring="global")
    assert trees.node_token_ids[0].tolist() == [50, 1, 2, 4, 5, 3]
    assert trees.parent_ids[0].tolist() == [-1, 0, 0, 1, 2, 1]
    expected = [0, -1.50234, -2.50234, -3.96584, -3.96584, -4.96584]
    np.testing.assert_allclose(trees.node_scores[0], expected, atol=1e-5)


def test_worked_example_renorm(engine: str, tmp_path: Path) -> None:
    trees = build(engine, EXAMPLE_KEYS, tmp_path, EXAMPLE_LOGITS, 8, scoring="renorm")
    assert trees.valid_counts[0] == 7
    assert trees.node_token_ids[0, :7].tolist() == [50, 1, 4, 2, 5, 3, 3]
    assert trees.parent_ids[0, :7].tolist() == [-1, 0, 1, 0, 3, 1, 3]
    expected = [0, -0.31326, -0.62652, -1.31326, -1.44019, -1.62652, -3.44019]
    np.testing.assert_allclose(trees.node_scores[0, :7], expected, atol=1e-5)
    assert trees.status[0] == 0


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(25))
def test_brute_force(engine: str, scoring: str, seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    vocab, block = int(rng.integers(2, 12)), int(rng.integers(2, 7))
    keys = list(
        {tuple(map(int, rng.integers(0, vocab, rng.integers(0, 6)))) for _ in range(rng.integers(1, 30))}
    )
    end_token = int(rng.integers(0, vocab)) if rng.random() < 0.5 else None
    logits = random_logits(rng, 1, block, vocab)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    num_nodes, top_k = int(rng.integers(1, 40)), int(rng.integers(1, vocab + 1))
    options = {"scoring": scoring, "end_token": end_token, "top_k": top_k}
    trees = build(engine, keys, tmp_path, logits, num_nodes, **options)
    # A key that holds the end token itself is walked as a key, which the enumeration of prefixes does as
    # well.
    scores, wanted = best_legal_prefixes(keys, logits[0, 1:], num_nodes, top_k, scoring, end_token)
    if end_token is not None and any(end_token in key for key in keys):
        return
    valid = int(trees.valid_counts[0])
    assert valid == len(scores)
    np.testing.assert_allclose(trees.node_scores[0, :valid], scores, rtol=0, atol=1e-5)
    if valid < 2 or np.diff(scores).max() < -1e-4:
        assert paths(trees, 0) == wanted


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("logit_type", ["float32", "float16", "bfloat16"])
def test_engines_agree(scoring: str, logit_type: str, tmp_path: Path) -> None:
    """Wide and narrow nodes, labels above 16 bits, start states, and vocabularies smaller than the trie's
    labels."""
    pytest.importorskip("flashtrie_cli._native")
    rng = np.random.default_rng(1)
    vocab = 70_000
    keys = {tuple(map(int, rng.integers(0, 71_000, rng.integers(1, 5)))) for _ in range(3_000)}
    keys |= {(5, *map(int, rng.integers(0, 9, 4))) for _ in range(500)}
    index = index_of(sorted(keys), tmp_path)
    logits = random_logits(rng, 6, 5, vocab)
    logits[:, :, 0:9] += 5
    logits[3, 1, 7] = np.nan
    halves = logits.astype(np.float16) if logit_type == "float16" else to_bfloat16(logits)
    given = logits if logit_type == "float32" else halves
    nodes = index.engine.find_nodes(np.array([5, 5, 1], np.uint32), np.array([0, 1, 3], np.int64))
    starts = np.array([0, nodes[0], 0, 0, nodes[1], NO_STATE])
    found, wanted = (
        build_draft_trees(
            given,
            np.zeros(6, int),
            np.zeros(6, int),
            64,
            8,
            trie=index,
            scoring=scoring,
            start_states=starts,
            end_token=60_000,
            engine=name,
            logit_type=logit_type,
        )
        for name in ("cpu", "reference")
    )
    assert_same_trees(found, wanted)
    assert np.array_equal(found.node_states[0], wanted.node_states[0])
    assert found.valid_counts[5] == 1
    assert found.status[3] & STATUS_BAD_ROW or scoring == "renorm"


def test_no_legal_child_is_lost_to_top_k(engine: str, tmp_path: Path) -> None:
    """The only legal token is the worst of all."""
    logits = np.arange(100, 0, -1, dtype=np.float32)[None, None].repeat(3, axis=1)
    trees = build(engine, [(99, 99)], tmp_path, logits, 4, scoring="renorm", top_k=1)
    assert trees.node_token_ids[0].tolist() == [50, 99, 99, 0]
    assert trees.node_scores[0, :3].tolist() == [0, 0, 0]
    assert trees.status[0] == 0


def test_forced_chain_is_free_and_ties_follow_the_parent(engine: str, tmp_path: Path) -> None:
    keys = [(1, 2, 3), (4, 5)]
    logits = np.zeros((1, 4, 6), np.float32)
    trees = build(engine, keys, tmp_path, logits, 6, scoring="renorm")
    # Both branches cost ln 2 and stay there: the root offers its second child before node 1 goes on.
    assert trees.node_token_ids[0].tolist() == [50, 1, 4, 2, 5, 3]
    assert trees.parent_ids[0].tolist() == [-1, 0, 0, 1, 2, 3]


def test_end_token(engine: str, tmp_path: Path) -> None:
    """Legal where a key ends, at its place among the children, and nothing follows it."""
    logits = np.zeros((1, 4, 6), np.float32)
    trees = build(engine, [(3,), (3, 2), (3, 5)], tmp_path, logits, 10, end_token=4)
    assert paths(trees, 0) == [(), (3,), (3, 2), (3, 4), (3, 5), (3, 2, 4), (3, 5, 4)]
    states = trees.node_states[0]
    assert states[0] == 0
    assert states[3] == states[5] == states[9] == NO_STATE
    assert NO_STATE not in (states[1], states[2], states[4])


def test_truncated_counts_legal_tokens_only(engine: str, tmp_path: Path) -> None:
    logits = random_logits(np.random.default_rng(2), 1, 2, 50)
    keys = [(token,) for token in range(10, 14)]
    assert build(engine, keys, tmp_path, logits, 9, top_k=4).status[0] == 0
    assert build(engine, keys, tmp_path, logits, 9, top_k=3).status[0] == STATUS_TRUNCATED


def test_bad_logits(engine: str, tmp_path: Path) -> None:
    logits = random_logits(np.random.default_rng(3), 1, 3, 20)
    logits[0, 2, 7] = np.inf
    keys = [(1, 7), (2, 8)]
    assert build(engine, keys, tmp_path, logits, 9, scoring="global").status[0] == STATUS_BAD_ROW
    renormalised = build(engine, keys, tmp_path, logits, 9, scoring="renorm")
    assert renormalised.status[0] == STATUS_BAD_ROW
    assert sorted(paths(renormalised, 0)) == [(), (1,), (2,), (2, 8)]
    untouched = build(engine, [(1, 9), (2, 8)], tmp_path, logits, 9, scoring="renorm")
    assert untouched.status[0] == 0  # that logit was never asked for


def test_empty_trie_and_empty_key(engine: str, tmp_path: Path) -> None:
    logits = np.zeros((1, 3, 4), np.float32)
    assert build(engine, [], tmp_path, logits, 5).valid_counts[0] == 1
    trees = build(engine, [()], tmp_path, logits, 5, end_token=2)
    assert paths(trees, 0) == [(), (2,)]


def test_refusals(tmp_path: Path) -> None:
    logits = np.zeros((1, 3, 4), np.float32)
    index = index_of([(1,)], tmp_path)
    with pytest.raises(InputError, match="gives token 7 to two"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=index, vocab_map=[7, 1, 7, 3])
    with pytest.raises(InputError, match="start_states"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=index, start_states=[2])
    with pytest.raises(InputError, match="start_states"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=index, start_states=[0, 0])
    with pytest.raises(UsageError, match="end token"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=index, end_token=-1)
    with pytest.raises(UsageError, match="needs an opened index"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=object())
