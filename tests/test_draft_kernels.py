"""The draft kernels' own source without a GPU, threads in random order: the answers of the cpu engine."""

from __future__ import annotations

import ctypes
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_cases import Case, assert_invariants, assert_same_trees, random_logits, to_bfloat16, vectors
from draft_emulator import Emulator, compile_library

from flashtrie_cli.build import build_index
from flashtrie_cli.engine import cuda_draft_layout
from flashtrie_cli.engine.draft_plan import NO_STATE, DraftConstraint, DraftPlan, DraftTrees
from flashtrie_cli.index import Index
from flashtrie_cli.query.draft import build_draft_trees
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import NORMAL, SPECIAL, TokenBytes

pytest.importorskip("flashtrie_cli._native")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the kernels with")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_library(tmp_path_factory.mktemp("emulation"))


def test_structures_have_the_kernels_sizes(library: ctypes.CDLL) -> None:
    assert library.draft_params_size() == ctypes.sizeof(cuda_draft_layout.DraftParams)
    for name, rules in (("legal", cuda_draft_layout.TrieRules), ("masked", cuda_draft_layout.MaskRules)):
        size = getattr(library, f"{name}_params_size")()
        assert size == ctypes.sizeof(cuda_draft_layout.LEGAL_PARAMS[rules])


@pytest.mark.parametrize("case", vectors(), ids=lambda case: case.name)
def test_vectors(library: ctypes.CDLL, case: Case) -> None:
    batch, block, vocab = case.logits.shape
    arguments = case.arguments
    plan = DraftPlan(batch, block, vocab, arguments["num_nodes"], arguments["top_k"], arguments["first_row"])
    trees = Emulator(library).build(
        plan, case.logits, arguments["roots"], arguments["base_lengths"], vocab_map=arguments["vocab_map"]
    )
    assert_invariants(trees, plan.num_nodes, arguments["base_lengths"])
    for row, expected in enumerate(case.expected):
        assert trees.node_token_ids[row].tolist() == expected["tokens"]
        assert trees.parent_ids[row].tolist() == expected["parents"]


def shaped(rng: np.random.Generator, shape: str, logits: np.ndarray) -> np.ndarray:
    """Logits that are hard to select from."""
    vocab = logits.shape[2]
    if shape == "equal":
        logits[...] = 1.5
    elif shape == "few values":
        logits = np.round(logits / 2)
    elif shape == "sparse":
        logits[rng.random(logits.shape) < 0.97] = -np.inf
    elif shape == "half":
        logits[:, :, : vocab // 2] = -np.inf
    elif shape == "bad":
        logits[0, rng.integers(logits.shape[1]), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
    return np.ascontiguousarray(logits, np.float32)


def as_type(logits: np.ndarray, logit_type: str) -> np.ndarray:
    if logit_type == "float16":
        return logits.astype(np.float16)
    return to_bfloat16(logits) if logit_type == "bfloat16" else logits


@pytest.mark.parametrize("shape", ["random", "equal", "few values", "sparse", "half", "bad"])
@pytest.mark.parametrize(
    ("vocab", "top_k", "num_nodes", "batch", "block"),
    [
        (5, 5, 1, 2, 4),
        (600, 8, 33, 2, 3),
        (8_193, 3, 64, 1, 3),
        (20_000, 32, 128, 1, 2),
        (1_500, 17, 256, 1, 6),
    ],
)
@pytest.mark.parametrize("logit_type", ["float32", "float16", "bfloat16"])
def test_random(
    library: ctypes.CDLL,
    shape: str,
    vocab: int,
    top_k: int,
    num_nodes: int,
    batch: int,
    block: int,
    logit_type: str,
) -> None:
    rng = np.random.default_rng(vocab)
    logits = as_type(shaped(rng, shape, random_logits(rng, batch, block, vocab)), logit_type)
    roots, bases, mapping = np.arange(batch) + 5, np.arange(batch) * 7, rng.integers(0, 1 << 20, vocab)
    plan = DraftPlan(batch, block, vocab, num_nodes, top_k, self_padding=True, logit_type=logit_type)
    emulator = Emulator(library, num_multiprocessors=int(rng.choice([1, 132])))
    found = emulator.build(plan, logits, roots, bases, vocab_map=mapping, shift=int(rng.integers(0, 4)))
    assert_invariants(found, num_nodes, bases, "self")
    assert_same_trees(
        found,
        build_draft_trees(
            logits,
            roots,
            bases,
            num_nodes,
            top_k,
            vocab_map=mapping,
            padding="self",
            engine="cpu",
            logit_type=logit_type,
        ),
    )


@pytest.mark.parametrize("num_nodes", [7, 32, 33, 65, 128])
@pytest.mark.parametrize(("lead", "tie"), [(12.0, False), (4.0, False), (2.0, True), (0.0, True)])
def test_deep_trees(library: ctypes.CDLL, num_nodes: int, lead: float, tie: bool) -> None:
    """A drafter that is sure of itself: trees that go to the last depth, node by node or level by level."""
    rng = np.random.default_rng(num_nodes)
    logits = random_logits(rng, 2, 20, 300, scale=1.0)
    logits[:, :, 17] += lead
    logits[:, 1::2, 23] += lead - 0.5
    if tie:
        logits = np.round(logits)
    logits[1, 14] = -np.inf  # nothing is deeper
    plan = DraftPlan(2, 20, 300, num_nodes, 5)
    found = Emulator(library).build(plan, logits, [1, 2], [3, 4])
    assert_invariants(found, num_nodes, [3, 4])
    assert_same_trees(found, build_draft_trees(logits, [1, 2], [3, 4], num_nodes, 5, engine="cpu"))
    if lead == 12 and num_nodes >= 32:
        assert found.node_depths.max(axis=1).min() >= 8


@pytest.mark.parametrize("top_k", [1, 3, 8, 15, 16])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_trees_of_every_shape(library: ctypes.CDLL, top_k: int, step: float) -> None:
    """Two levels, three, and more; from lists with and without ties, full and short."""
    rng = np.random.default_rng(top_k)
    levels = set()
    for case in range(12):
        block, vocab = int(rng.integers(2, 7)), int(rng.integers(top_k, 100))
        num_nodes = int(rng.choice([2, top_k + 1, 32, 73, 74, 128, 256]))
        logits = random_logits(rng, 2, block, vocab, scale=float(rng.choice([0.2, 1, 3])))
        if step:
            logits = np.round(logits / step) * step
        if case % 4 == 1:
            logits[rng.random(logits.shape) < 0.7] = -np.inf
        logits = np.ascontiguousarray(logits, np.float32)
        plan = DraftPlan(2, block, vocab, num_nodes, top_k)
        found = Emulator(library).build(plan, logits, [1, 2], [3, 4])
        assert_invariants(found, num_nodes, [3, 4])
        assert_same_trees(found, build_draft_trees(logits, [1, 2], [3, 4], num_nodes, top_k, engine="cpu"))
        levels |= set(found.node_depths.max(axis=1).tolist())
    assert len(levels) > 2


@pytest.mark.parametrize(
    ("top_k", "num_nodes"), [(4, 60), (8, 100), (8, 128), (8, 256), (20, 200), (32, 256)]
)
@pytest.mark.parametrize("scale", [0.5, 1.5, 4.0])
def test_trees_of_many_levels(library: ctypes.CDLL, top_k: int, num_nodes: int, scale: float) -> None:
    """Four levels and more, of few nodes and of many; more children than threads."""
    rng = np.random.default_rng(num_nodes)
    logits = random_logits(rng, 2, 9, 40, scale)
    logits[:, 1:] += scale * np.linspace(0, 6, 40, dtype=np.float32)  # some tokens are likelier than others
    logits[0, 1:3] *= 3
    found = Emulator(library).build(DraftPlan(2, 9, 40, num_nodes, top_k), logits, [1, 2], [3, 4])
    assert_invariants(found, num_nodes, [3, 4])
    assert_same_trees(found, build_draft_trees(logits, [1, 2], [3, 4], num_nodes, top_k, engine="cpu"))
    assert found.valid_counts.tolist() == [num_nodes, num_nodes]
    assert found.node_depths.max() >= (3 if scale == 0.5 else 4)


@pytest.mark.parametrize("num_nodes", [3, 10, 32, 33, 64, 77, 128, 255, 256])
@pytest.mark.parametrize("top_k", [1, 4, 8, 32])
def test_ties_between_levels(library: ctypes.CDLL, num_nodes: int, top_k: int) -> None:
    """Children as good as their parents and as other levels' nodes, also where the tree ends: the same nodes as the
    cpu engine's, bit for bit, since these logits' log-sum-exps are the same everywhere."""
    rng = np.random.default_rng(num_nodes * 100 + top_k)
    logits = -rng.integers(200, 204, (4, 12, 40)).astype(
        np.float32
    )  # they add nothing to a sum of exponentials
    for batch, depth in itertools.product(range(4), range(12)):
        likely = rng.choice(40, rng.choice([1, 2, 2, 4]), replace=False)
        logits[batch, depth, likely] = 0.0
    plan = DraftPlan(4, 12, 40, num_nodes, top_k)
    found = Emulator(library).build(plan, logits, [1, 2, 3, 4], [0, 0, 0, 0])
    assert_invariants(found, num_nodes, [0, 0, 0, 0])
    wanted = build_draft_trees(logits, [1, 2, 3, 4], [0, 0, 0, 0], num_nodes, top_k, engine="cpu")
    for name, array in wanted.arrays().items():
        assert np.array_equal(getattr(found, name), array), name


@pytest.mark.parametrize("shape", ["random", "ascending", "descending", "equal", "few values", "sparse"])
@pytest.mark.parametrize("top_k", [1, 8, 16, 32])
def test_rows_of_many_chunks(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, shape: str, top_k: int
) -> None:
    """More chunks than a warp takes at once; the best of a row in one of them, or in all."""
    monkeypatch.setattr(cuda_draft_layout, "TILE_LOGITS", 1024)
    vocab = 67 * 1024 + 5
    rng = np.random.default_rng(top_k)
    logits = random_logits(rng, 1, 3, vocab)
    if shape in ("ascending", "descending"):
        logits = np.sort(logits, axis=2)
    if shape == "descending":
        logits = np.ascontiguousarray(logits[:, :, ::-1])
    plan = DraftPlan(1, 3, vocab, 33, top_k)
    logits = shaped(rng, shape, logits)
    found = Emulator(library).build(plan, logits, [1], [3])
    wanted = build_draft_trees(logits, [1], [3], 33, top_k, engine="cpu")
    assert_invariants(found, 33, [3])
    assert_same_trees(found, wanted)
    assert np.array_equal(found.node_token_ids, wanted.node_token_ids)  # ties too: lower ids first


def test_a_third_level_ties_with_the_last_of_the_second(library: ctypes.CDLL) -> None:
    """Equal costs go by the parent: a grandchild's child comes before another child's child."""
    half = np.float32(np.log(2))
    rows = [[0, 0, 0], [0, -half, -half], [0, -np.inf, -np.inf], [0, 0, -np.inf]]
    logits = np.array([rows], np.float32)
    plan = DraftPlan(1, 4, 3, 6, 3)
    found = Emulator(library).build(plan, logits, [1], [3])
    assert found.node_scores[0, 3] == found.node_scores[0, 5], "no tie"
    assert found.parent_ids[0].tolist() == [-1, 0, 1, 0, 0, 2]


def test_order_of_threads_changes_nothing(library: ctypes.CDLL) -> None:
    logits = np.round(random_logits(np.random.default_rng(1), 2, 4, 9_000) * 2) / 2
    plan, emulator = DraftPlan(2, 4, 9_000, 40, 6), Emulator(library)
    first = emulator.build(plan, logits, [1, 2], [3, 4])
    again = emulator.build(plan, logits, [1, 2], [3, 4])
    for name, array in first.arrays().items():
        assert np.array_equal(getattr(again, name), array), name


def keys_of(rng: np.random.Generator, vocab: int, count: int) -> list[list[int]]:
    """Keys that share prefixes, with the empty key and some tokens outside the vocabulary."""
    keys = {()}
    for _ in range(count):
        top = vocab + 5 if rng.random() < 0.5 else 4
        keys.add(tuple(map(int, rng.integers(0, top, rng.integers(1, 7)))))
    return [list(key) for key in sorted(keys)]


@pytest.mark.parametrize("scoring", ["global", "renorm"])
@pytest.mark.parametrize("logit_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("vocab", "count", "top_k", "num_nodes", "shape"),
    [(8, 60, 8, 64, "random"), (300, 400, 4, 33, "few values"), (70_000, 2_500, 8, 128, "random"),
     (40, 300, 3, 2, "bad"), (40, 0, 3, 7, "random"), (3_000, 2_500, 32, 256, "equal"), (40, 300, 5, 40, "sparse")],
)  # fmt: skip
def test_held_to_a_trie(
    library: ctypes.CDLL,
    tmp_path: Path,
    scoring: str,
    logit_type: str,
    vocab: int,
    count: int,
    top_k: int,
    num_nodes: int,
    shape: str,
) -> None:
    rng = np.random.default_rng(count)
    path = tmp_path / "keys.ft"
    build_index(keys_of(rng, vocab, count), str(path))
    index: Any = Index.open(str(path), engine="cpu")
    logits = as_type(shaped(rng, shape, random_logits(rng, 3, 5, vocab)), logit_type)
    starts = np.array([0, rng.integers(index.num_nodes), NO_STATE])
    end_token = int(rng.integers(0, vocab))
    plan = DraftPlan(3, 5, vocab, num_nodes, top_k, logit_type=logit_type)
    held = DraftConstraint(index.engine.trie, scoring, starts, end_token)
    found = Emulator(library).build(plan, logits, [1, 2, 3], [4, 5, 6], constraint=held)
    assert_invariants(found, num_nodes, [4, 5, 6])
    wanted: DraftTrees = build_draft_trees(
        logits, [1, 2, 3], [4, 5, 6], num_nodes, top_k, trie=index, scoring=scoring, start_states=starts,
        end_token=end_token, engine="cpu", logit_type=logit_type,
    )  # fmt: skip
    assert_same_trees(found, wanted)
    assert found.node_states[:, 0].tolist() == wanted.node_states[:, 0].tolist()


@pytest.mark.parametrize("scoring", ["global", "renorm"])
@pytest.mark.parametrize("logit_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("num_members", "top_k", "num_nodes", "shape"),
    [(3, 4, 20, "random"), (400, 8, 128, "random"), (400, 3, 33, "few values"), (3_000, 32, 256, "equal")],
)  # fmt: skip
@pytest.mark.parametrize("mapped", [False, True])
def test_held_to_masks(
    library: ctypes.CDLL,
    scoring: str,
    logit_type: str,
    num_members: int,
    top_k: int,
    num_nodes: int,
    shape: str,
    mapped: bool,
) -> None:
    """Narrow and dense rows, two end-of-sequence ids, a drafter's own vocabulary."""
    rng = np.random.default_rng(num_members)
    letters = list("abcdefghijklmno")
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product(letters, repeat=size)]
    vocabulary = TokenBytes.from_tokens(
        [(SPECIAL, b"</s>"), *((NORMAL, word.encode()) for word in words), (SPECIAL, b"<eot>")]
    )
    members = ["".join(rng.choice(letters, rng.integers(0, 9))) for _ in range(num_members)]
    masks = TokenMasks.from_strings(members, vocabulary, eos=[0, len(words) + 1])
    vocab = len(words) - 7
    mapping = rng.permutation(len(vocabulary))[:vocab] if mapped else None
    logits = as_type(shaped(rng, shape, random_logits(rng, 3, 5, vocab)), logit_type)
    starts = np.array([0, rng.integers(masks.num_nodes), masks.ended])
    plan = DraftPlan(3, 5, vocab, num_nodes, top_k, logit_type=logit_type)
    held = DraftConstraint(masks, scoring, starts)
    found = Emulator(library).build(plan, logits, [1, 2, 3], [4, 5, 6], constraint=held, vocab_map=mapping)
    assert_invariants(found, num_nodes, [4, 5, 6])
    wanted = build_draft_trees(
        logits, [1, 2, 3], [4, 5, 6], num_nodes, top_k, trie=masks, scoring=scoring, start_states=starts,
        engine="cpu", logit_type=logit_type, vocab_map=mapping,
    )  # fmt: skip
    assert_same_trees(found, wanted)
    assert found.node_states[:, 0].tolist() == starts.tolist()


@pytest.mark.parametrize("scoring", ["global", "renorm"])
@pytest.mark.parametrize("end_token", [None, 17])
@pytest.mark.parametrize("shape", ["random", "equal"])
def test_held_to_a_trie_with_a_vocabulary_of_its_own(
    library: ctypes.CDLL, tmp_path: Path, scoring: str, end_token: int | None, shape: str
) -> None:
    rng = np.random.default_rng(9)
    build_index(keys_of(rng, 2_000, 1_500), str(tmp_path / "keys.ft"))
    index: Any = Index.open(str(tmp_path / "keys.ft"), engine="cpu")
    mapping = rng.permutation(1 << 17)[:3_000]
    mapping[:1_000] = rng.permutation(2_000)[:1_000]
    mapping = np.array([*dict.fromkeys(mapping.tolist())])
    logits = shaped(rng, shape, random_logits(rng, 2, 6, len(mapping)))
    plan = DraftPlan(2, 6, len(mapping), 90, 6)
    held = DraftConstraint(index.engine.trie, scoring, np.zeros(2, np.int64), end_token)
    found = Emulator(library).build(plan, logits, [1, 2], [4, 5], constraint=held, vocab_map=mapping)
    assert_invariants(found, 90, [4, 5])
    wanted = build_draft_trees(
        logits, [1, 2], [4, 5], 90, 6, trie=index, scoring=scoring, end_token=end_token, engine="cpu",
        vocab_map=mapping,
    )  # fmt: skip
    assert_same_trees(found, wanted)
