"""Draft trees without a constraint: the worked examples, random cases against oracles, and the door's
checks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from draft_cases import (
    Case,
    assert_invariants,
    assert_same_trees,
    best_prefixes,
    paths,
    random_logits,
    to_bfloat16,
    vectors,
)

from flashtrie_cli.engine.draft_plan import OUTPUTS, DraftPlan, allocate
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.query.draft import STATUS_BAD_ROW, STATUS_TRUNCATED, DraftTrees, build_draft_trees

ENGINES = ("reference", "cpu")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        pytest.importorskip("flashtrie_cli._native")
    return str(request.param)


def build(engine: str, logits: np.ndarray, num_nodes: int, top_k: int, **options: Any) -> DraftTrees:
    batch = len(logits)
    roots = options.pop("roots", np.arange(batch) + 7)
    bases = options.pop("base_lengths", np.arange(batch) * 3 + 10)
    trees = build_draft_trees(logits, roots, bases, num_nodes, top_k, engine=engine, **options)
    assert_invariants(trees, num_nodes, bases, options.get("padding", "zero"))
    return trees


@pytest.mark.parametrize("case", vectors(), ids=lambda case: case.name)
def test_vectors(engine: str, case: Case) -> None:
    trees = build_draft_trees(case.logits, engine=engine, **case.arguments)
    assert_invariants(trees, case.arguments["num_nodes"], case.arguments["base_lengths"])
    for batch, expected in enumerate(case.expected):
        assert trees.valid_counts[batch] == expected["valid"]
        assert trees.node_token_ids[batch].tolist() == expected["tokens"]
        assert trees.node_depths[batch].tolist() == expected["depths"]
        assert trees.parent_ids[batch].tolist() == expected["parents"]
        assert trees.verify_position_ids[batch].tolist() == expected["positions"]
        assert trees.packed_ancestor_mask[batch].tolist() == expected["packed"]
        assert trees.context_lengths[batch] == expected["context"]
        scores = [-np.inf if score is None else score for score in expected["scores"]]
        np.testing.assert_allclose(trees.node_scores[batch], scores, rtol=0, atol=1e-6)


def test_three_candidates_seven_nodes(engine: str) -> None:
    logits = np.broadcast_to(-8 - np.arange(12, dtype=np.float32), (1, 4, 12)).copy()
    for depth in (1, 2, 3):
        logits[0, depth, 3 * depth - 2 : 3 * depth + 1] = (6, 5, 4)
    trees = build(engine, logits, 7, 3, roots=[90], base_lengths=[20])
    assert trees.node_token_ids[0].tolist() == [90, 1, 4, 7, 2, 5, 4]
    assert trees.parent_ids[0].tolist() == [-1, 0, 1, 2, 0, 1, 4]
    assert trees.packed_ancestor_mask[0, :, 0].tolist() == [1, 3, 7, 15, 17, 35, 81]
    expected = [0, -0.407607, -0.815213, -1.222820, -1.407607, -1.815213, -1.815213]
    np.testing.assert_allclose(trees.node_scores[0], expected, atol=2e-6)


def test_chain_crosses_mask_words(engine: str) -> None:
    rng = np.random.default_rng(1)
    trees = build(engine, random_logits(rng, 1, 41, 50), 40, 1, base_lengths=[1000])
    assert trees.packed_ancestor_mask[0, 31].tolist() == [-1, 0]
    assert trees.packed_ancestor_mask[0, 32].tolist() == [-1, 1]
    assert trees.packed_ancestor_mask[0, 39].tolist() == [-1, 255]
    assert trees.verify_position_ids[0, 39] == 1039


@pytest.mark.parametrize("seed", range(40))
def test_brute_force(engine: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block, vocab = int(rng.integers(2, 6)), int(rng.integers(1, 7))
    top_k, num_nodes = int(rng.integers(1, min(vocab, 4) + 1)), int(rng.integers(1, 40))
    first_row = int(rng.integers(0, 2))
    logits = random_logits(rng, 1, block, vocab)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    trees = build(engine, logits, num_nodes, top_k, first_row=first_row)
    scores, wanted = best_prefixes(logits[0, first_row : first_row + block - 1], top_k, num_nodes)
    valid = int(trees.valid_counts[0])
    assert valid == len(scores)
    np.testing.assert_allclose(trees.node_scores[0, :valid], scores, rtol=0, atol=1e-6)
    if len(scores) < 2 or np.diff(scores).max() < -1e-5:
        assert paths(trees, 0) == wanted


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 63, 64, 65, 127, 128])
@pytest.mark.parametrize(
    ("batch", "vocab", "top_k"), [(1, 50_257, 8), (3, 1_001, 32), (64, 97, 4), (2, 5, 5)]
)
def test_cpu_against_heap(num_nodes: int, batch: int, vocab: int, top_k: int) -> None:
    pytest.importorskip("flashtrie_cli._native")
    rng = np.random.default_rng(num_nodes)
    logits = random_logits(rng, batch, 9, vocab)
    found = build("cpu", logits, num_nodes, top_k)
    assert_same_trees(found, build("reference", logits, num_nodes, top_k))


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 1023, 1024, 1025, 262_144])
def test_vocabulary_sizes(vocab: int) -> None:
    pytest.importorskip("flashtrie_cli._native")
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, 2, 4, vocab)
    top_k = min(vocab, 16)
    assert_same_trees(build("cpu", logits, 30, top_k), build("reference", logits, 30, top_k))


@pytest.mark.parametrize("logit_type", ["float16", "bfloat16"])
def test_half_precision_is_exact(engine: str, logit_type: str) -> None:
    rng = np.random.default_rng(3)
    full = random_logits(rng, 2, 6, 300)
    full[0, 2, 5] = -np.inf
    full[0, 3, :40] *= 1e-7  # float16 subnormals
    if logit_type == "float16":
        halves = full.astype(np.float16)
        exact = halves.astype(np.float32)
    else:
        halves = to_bfloat16(full)
        exact = (halves.astype(np.uint32) << 16).view(np.float32)
    found = build(engine, halves, 33, 4, logit_type=logit_type)
    wanted = build(engine, exact, 33, 4)
    for name, array in wanted.arrays().items():
        assert np.array_equal(getattr(found, name), array), name


def test_ties_go_to_the_lower_id(engine: str) -> None:
    logits = np.zeros((1, 3, 5000), np.float32)
    logits[0, :, 0] = -0.0
    trees = build(engine, logits, 7, 3)
    assert trees.node_token_ids[0, 1:].tolist() == [0, 1, 2, 0, 1, 2]
    assert trees.parent_ids[0].tolist() == [-1, 0, 0, 0, 1, 1, 1]


def test_near_ties(engine: str) -> None:
    """The kernel documentation's own 128-node shape: its logits are full of near ties."""
    token, depth = np.arange(64, dtype=np.float32), np.arange(4, dtype=np.float32)
    logits = (10 - 0.01 * token[None, :] - 0.001 * depth[:, None])[None].astype(np.float32)
    trees = build(engine, logits, 128, 8)
    assert np.bincount(trees.node_depths[0]).tolist() == [1, 8, 64, 55]


@pytest.mark.parametrize("poison", [999.0, np.nan, np.inf])
@pytest.mark.parametrize("first_row", [0, 1])
def test_unused_row_is_not_read(engine: str, poison: float, first_row: int) -> None:
    rng = np.random.default_rng(4)
    logits = random_logits(rng, 2, 4, 30)
    clean = build(engine, logits, 20, 4, first_row=first_row)
    logits[:, 0 if first_row else 3] = poison
    dirty = build(engine, logits, 20, 4, first_row=first_row)
    for name, array in clean.arrays().items():
        assert np.array_equal(getattr(dirty, name), array), name


def test_rows_deeper_than_the_tree_are_not_read(engine: str) -> None:
    logits = random_logits(np.random.default_rng(5), 1, 6, 10)
    logits[0, 3:] = np.nan
    assert build(engine, logits, 3, 1).status[0] == STATUS_TRUNCATED
    assert build(engine, logits, 4, 1).status[0] == STATUS_TRUNCATED | STATUS_BAD_ROW


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_bad_row_stops_growth_and_is_reported(engine: str, poison: float) -> None:
    logits = random_logits(np.random.default_rng(6), 2, 5, 40)
    logits[1, 2, 17] = poison
    trees = build(engine, logits, 12, 4)
    assert (trees.status & STATUS_BAD_ROW).tolist() == [0, STATUS_BAD_ROW]
    assert trees.valid_counts.tolist() == [12, 5]


def test_truncated_says_when_top_k_bound(engine: str) -> None:
    logits = random_logits(np.random.default_rng(7), 1, 2, 6)
    assert build(engine, logits, 4, 3).status[0] == STATUS_TRUNCATED
    assert build(engine, logits, 3, 3).status[0] == 0  # the third candidate was never needed
    assert build(engine, logits, 7, 6).status[0] == 0  # top-k is the whole vocabulary


def test_outputs_are_rewritten_and_nothing_else(engine: str) -> None:
    """Guard bytes around every output and stale values inside."""
    logits = random_logits(np.random.default_rng(8), 3, 4, 3)
    plan = DraftPlan(3, 4, 3, 70, 2)
    wanted = build(engine, logits, 70, 2)
    guarded, arrays = {}, {}
    for name, array in allocate(plan, constrained=False).arrays().items():
        whole = np.full(array.nbytes + 128, 0xA5, np.uint8)
        guarded[name] = whole
        arrays[name] = whole[64:-64].view(array.dtype).reshape(array.shape)
    out = DraftTrees(**arrays)
    assert build(engine, logits, 70, 2, out=out) is out
    for name, whole in guarded.items():
        assert np.array_equal(getattr(out, name), getattr(wanted, name)), name
        assert (whole[:64] == 0xA5).all(), name
        assert (whole[-64:] == 0xA5).all(), name


def test_identical_rows_give_identical_trees(engine: str) -> None:
    logits = np.repeat(random_logits(np.random.default_rng(9), 1, 5, 200), 5, axis=0)
    trees = build(engine, logits, 40, 6, roots=[1] * 5, base_lengths=[2] * 5)
    for array in trees.arrays().values():
        assert (array == array[0]).all()


def test_threads_change_nothing() -> None:
    pytest.importorskip("flashtrie_cli._native")
    logits = random_logits(np.random.default_rng(10), 5, 6, 3000)
    one, many = (build("cpu", logits, 64, 8, threads=threads) for threads in (1, 4))
    for name, array in one.arrays().items():
        assert np.array_equal(getattr(many, name), array), name


def test_self_padding(engine: str) -> None:
    logits = np.array([[[0, 0], [5, 3]], [[0, 0], [3, 5]]], np.float32)
    trees = build(engine, logits, 40, 2, padding="self")
    assert trees.valid_counts.tolist() == [3, 3]
    assert trees.packed_ancestor_mask[1, 3].tolist() == [8, 0]
    assert trees.packed_ancestor_mask[1, 39].tolist() == [0, 128]


def test_duplicates_in_the_vocabulary_map(engine: str) -> None:
    logits = np.array([[[0, 0, 0], [3, 2, 1]]], np.float32)
    trees = build(engine, logits, 4, 3, vocab_map=[9, 9, 2_000_000_000])
    assert trees.node_token_ids[0, 1:].tolist() == [9, 9, 2_000_000_000]


def test_empty_batch(engine: str) -> None:
    trees = build(
        engine, np.zeros((0, 4, 9), np.float32), 5, 2, roots=np.zeros(0, int), base_lengths=np.zeros(0, int)
    )
    assert trees.node_token_ids.shape == (0, 5)


GOOD = np.zeros((2, 4, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logits": GOOD[0]}, InputError, "2 dimensions"),
        ({"logits": GOOD[:, :1]}, InputError, "block of 1"),
        ({"logits": GOOD.astype(np.float64)}, InputError, "float64"),
        ({"logits": GOOD.astype(np.uint16)}, InputError, "uint16"),
        ({"logit_type": "float16"}, InputError, "not float16"),
        ({"roots": [1, 2, 3]}, InputError, "roots"),
        ({"roots": [1.5, 2.0]}, InputError, "float64"),
        ({"roots": [1, 1 << 31]}, InputError, "int32"),
        ({"base_lengths": [1, -1]}, InputError, "base_lengths"),
        ({"base_lengths": [1, (1 << 31) - 2]}, InputError, "base_lengths"),
        ({"vocab_map": np.zeros(7, np.int32)}, InputError, "vocab_map"),
        ({"vocab_map": [0, 1, 2, 3, -4, 5, 6, 7]}, InputError, "entry 4 is negative"),
        ({"top_k": 9}, UsageError, "top-k 9"),
        ({"top_k": 0}, UsageError, "top-k 0"),
        ({"num_nodes": 0}, UsageError, "nodes 0"),
        ({"first_row": 2}, UsageError, "first row"),
        ({"padding": "one"}, UsageError, "padding"),
        ({"engine": "gpu"}, UsageError, "engine"),
        ({"scoring": "local"}, UsageError, "scoring"),
        ({"end_token": 3}, UsageError, "without a trie"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "logits": GOOD,
        "roots": [1, 2],
        "base_lengths": [3, 4],
        "num_nodes": 5,
        "top_k": 2,
    }
    with pytest.raises(error, match=message):
        build_draft_trees(**(arguments | change))


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "node_states"])
def test_bad_outputs_are_refused(name: str) -> None:
    plan = DraftPlan(2, 4, 8, 5, 2)
    out = allocate(plan, constrained=False)
    for bad in (None, getattr(out, name)[:1], getattr(out, name).astype(np.float64)):
        broken = DraftTrees(**{**out.arrays(), name: bad})
        with pytest.raises(InputError, match=name):
            build_draft_trees(GOOD, [1, 2], [3, 4], 5, 2, out=broken)
