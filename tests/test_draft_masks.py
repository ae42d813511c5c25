"""Draft trees held to token masks, and drafters with a vocabulary of their own held to a trie or to masks: brute force,
engines against each other, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_cases import assert_invariants, assert_same_trees, paths, random_logits, to_bfloat16

pytest.importorskip("flashtrie_cli._native")  # compiles and opens masks

from flashtrie_cli.build import build_index
from flashtrie_cli.engine.reference_masks import ReferenceMasks
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.index import Index
from flashtrie_cli.query.draft import (
    NO_STATE,
    STATUS_BAD_ROW,
    STATUS_TRUNCATED,
    DraftTrees,
    build_draft_trees,
)
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import NORMAL, SPECIAL, TokenBytes

PIECES = ["a", "b", "c", "ab", "bc", "abc", "ca", "aa"]
EOS = (0, 9)  # below and above the pieces
VOCABULARY = TokenBytes.from_tokens(
    [(SPECIAL, b"<s>"), *((NORMAL, piece.encode()) for piece in PIECES), (SPECIAL, b"</s>")]
)
SCORINGS = ("global", "renorm")
Legal = Callable[[tuple[int, ...]], Iterable[int]]


@pytest.fixture(params=["reference", "cpu"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def masks_of(members: Iterable[str], vocab_size: int | None = None) -> TokenMasks:
    return TokenMasks.from_strings(sorted(members), VOCABULARY, eos=EOS, vocab_size=vocab_size)


def by_masks(members: Iterable[str], after: Sequence[int] = ()) -> Legal:
    """Which tokens may follow a prefix, by the definition of masks."""
    masks = ReferenceMasks([member.encode() for member in members], VOCABULARY, EOS)

    def legal(prefix: tuple[int, ...]) -> list[int]:
        state: bytes | None = b""
        for token in (*after, *prefix):
            allowed, state = masks.advance(state, token)
            assert allowed
        return masks.allowed(state)

    return legal


def by_keys(keys: Iterable[tuple[int, ...]], end_token: int | None) -> Legal:
    """Which tokens may follow a prefix of keys."""
    whole = {(*key, end_token) if end_token is not None else key for key in keys}
    prefixes = {key[:length] for key in whole | set(keys) for length in range(len(key) + 1)}
    return lambda prefix: [
        longer[-1] for longer in prefixes if len(longer) == len(prefix) + 1 and longer[:-1] == prefix
    ]


def best_prefixes(
    legal: Legal, rows: np.ndarray, mapping: Sequence[int], num_nodes: int, top_k: int, scoring: str
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Every legal prefix, scored on its own in float64; ``mapping``: the token of each of the drafter's ids."""
    scored: list[tuple[float, tuple[int, ...]]] = []
    id_of = {token: i for i, token in enumerate(mapping)}

    def visit(prefix: tuple[int, ...], score: float) -> None:
        scored.append((score, prefix))
        if len(prefix) == len(rows):
            return
        row = rows[len(prefix)].astype(np.float64)
        ids = sorted(id_of[token] for token in legal(prefix) if token in id_of)
        ids = [i for i in ids if math.isfinite(row[i])]
        if not ids:
            return
        pool = row[ids] if scoring == "renorm" else row[np.isfinite(row)]
        lse = float(np.log(np.exp(pool - pool.max()).sum()) + pool.max())
        for i in sorted(ids, key=lambda i: (-row[i], i))[:top_k]:
            visit((*prefix, mapping[i]), score + row[i] - lse)

    visit((), 0.0)
    scored.sort(key=lambda pair: -pair[0])
    return [score for score, _ in scored[:num_nodes]], [prefix for _, prefix in scored[:num_nodes]]


def assert_best(trees: DraftTrees, scores: list[float], wanted: list[tuple[int, ...]]) -> None:
    valid = int(trees.valid_counts[0])
    assert valid == len(scores)
    np.testing.assert_allclose(trees.node_scores[0, :valid], scores, rtol=0, atol=1e-5)
    if valid < 2 or np.diff(scores).max() < -1e-4:
        assert paths(trees, 0) == wanted


def random_members(rng: np.random.Generator) -> set[str]:
    return {"".join(rng.choice(list("abc"), rng.integers(0, 7))) for _ in range(int(rng.integers(1, 12)))}


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(20))
def test_masks_against_brute_force(engine: str, scoring: str, seed: int) -> None:
    """Several end-of-sequence ids, several spellings of a member, logits narrower or wider than the masks."""
    rng = np.random.default_rng(seed)
    members, vocab = random_members(rng), int(rng.integers(7, 14))
    masks = masks_of(members, max(vocab, len(VOCABULARY)))
    logits = random_logits(rng, 1, int(rng.integers(2, 6)), vocab)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    num_nodes, top_k = int(rng.integers(1, 40)), int(rng.integers(1, vocab + 1))
    trees = build_draft_trees(logits, [50], [5], num_nodes, top_k, trie=masks, scoring=scoring, engine=engine)
    assert_invariants(trees, num_nodes, [5])
    assert_best(
        trees, *best_prefixes(by_masks(members), logits[0, 1:], range(vocab), num_nodes, top_k, scoring)
    )
    for node in range(int(trees.valid_counts[0])):
        state = 0
        for token in paths(trees, 0)[node]:
            after, allowed = masks.advance([state], [token])
            assert allowed[0]
            state = int(after[0])
        assert trees.node_states[0, node] == state
    assert (trees.node_states[0, int(trees.valid_counts[0]) :] == NO_STATE).all()


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", ["trie", "masks"])
def test_own_vocabulary_against_brute_force(
    engine: str, scoring: str, seed: int, kind: str, tmp_path: Path
) -> None:
    """Keys of full tokens, logits over the drafter's ids, in any order; some tokens are not the drafter's."""
    rng = np.random.default_rng(100 + seed)
    tokens = len(VOCABULARY)
    mapping = [int(token) for token in rng.permutation(tokens)[: int(rng.integers(3, tokens + 1))]]
    mapping += [1 << 30] if rng.random() < 0.5 else []  # far beyond all keys
    end_token = int(rng.integers(0, tokens)) if kind == "trie" and rng.random() < 0.5 else None
    members = random_members(rng)
    keys = {tuple(map(int, rng.integers(0, tokens, rng.integers(0, 5)))) for _ in range(12)}
    keys = {key for key in keys if end_token not in key}
    if kind == "masks":
        trie: Any = masks_of(members)
        legal = by_masks(members)
    else:
        build_index([list(key) for key in sorted(keys)], str(tmp_path / "keys.ft"))
        trie = Index.open(str(tmp_path / "keys.ft"))
        legal = by_keys(keys, end_token)
    logits = (
        np.round(random_logits(rng, 1, 4, len(mapping)) * 2) / 2
        if seed % 2
        else random_logits(rng, 1, 4, len(mapping))
    )
    num_nodes, top_k = int(rng.integers(1, 30)), int(rng.integers(1, len(mapping) + 1))
    options = {"trie": trie, "scoring": scoring, "end_token": end_token, "vocab_map": mapping}
    trees = build_draft_trees(logits, [50], [5], num_nodes, top_k, engine=engine, **options)
    assert_invariants(trees, num_nodes, [5])
    assert_best(trees, *best_prefixes(legal, logits[0, 1:], mapping, num_nodes, top_k, scoring))


def test_ties_go_to_the_lower_id_of_the_drafter(engine: str) -> None:
    """Not to the lower token: "a" is 1 and "b" is 2, the drafter numbers them the other way round."""
    masks = masks_of(["a", "b"])
    logits = np.zeros((1, 2, 3), np.float32)
    mapping = [2, 9, 1]
    trees = build_draft_trees(logits, [50], [5], 3, 3, trie=masks, vocab_map=mapping, engine=engine)
    assert trees.node_token_ids[0].tolist() == [50, 2, 1]
    assert trees.verify_token_ids[0].tolist() == [50, 2, 1]  # the root is not mapped


def test_end_of_sequence_ids_lead_to_the_end(engine: str) -> None:
    masks = masks_of(["ab"])
    logits = np.zeros((1, 4, len(VOCABULARY)), np.float32)
    trees = build_draft_trees(logits, [50], [5], 9, 8, trie=masks, engine=engine)
    # "ab" by one token or two; at its end both ids, the lower first; nothing follows them.
    a, b, ab = 1, 2, 4
    assert sorted(paths(trees, 0)) == sorted(
        [(), (a,), (ab,), (a, b), (ab, 0), (ab, 9), (a, b, 0), (a, b, 9)]
    )
    ends = [node for node, path in enumerate(paths(trees, 0)) if path and path[-1] in EOS]
    assert {int(trees.node_states[0, node]) for node in ends} == {masks.ended}


def test_start_states_of_masks(engine: str) -> None:
    members = ["abc", "ca", "cab"]
    masks, logits = masks_of(members), random_logits(np.random.default_rng(3), 4, 4, len(VOCABULARY))
    inside = int(masks.walk([[3]])[0])  # behind "c"
    starts = [0, inside, masks.ended, NO_STATE]
    options = {"trie": masks, "start_states": starts, "engine": engine, "scoring": "renorm"}
    trees = build_draft_trees(logits, np.zeros(4, int), np.zeros(4, int), 12, 5, **options)
    assert_invariants(trees, 12, np.zeros(4, int))
    assert trees.node_states[:, 0].tolist() == starts
    assert trees.valid_counts[2:].tolist() == [1, 1]
    legal = by_masks(members, after=(3,))
    _, wanted = best_prefixes(legal, logits[1, 1:], range(len(VOCABULARY)), 12, 5, "renorm")
    assert paths(trees, 1) == wanted
    with pytest.raises(InputError, match="start_states"):
        build_draft_trees(
            logits, np.zeros(4, int), np.zeros(4, int), 12, 5, **options | {"start_states": [99] * 4}
        )


def test_status_of_masks(engine: str) -> None:
    masks, logits = masks_of(["a", "b", "c"]), np.zeros((1, 2, len(VOCABULARY)), np.float32)
    assert build_draft_trees(logits, [1], [1], 9, 3, trie=masks, engine=engine).status[0] == 0
    assert build_draft_trees(logits, [1], [1], 9, 2, trie=masks, engine=engine).status[0] == STATUS_TRUNCATED
    logits[0, 1, 2] = np.nan
    assert build_draft_trees(logits, [1], [1], 9, 3, trie=masks, engine=engine).status[0] == STATUS_BAD_ROW
    logits[0, 1, 2], logits[0, 1, 4] = (
        0,
        np.nan,
    )  # no member begins with it: never looked at, unless whole rows are
    for scoring, status in (("renorm", 0), ("global", STATUS_BAD_ROW)):
        trees = build_draft_trees(logits, [1], [1], 9, 3, trie=masks, scoring=scoring, engine=engine)
        assert trees.status[0] == status


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("logit_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mapped", [False, True])
def test_engines_agree_on_dense_masks(scoring: str, logit_type: str, mapped: bool) -> None:
    """A root that allows many tokens, and hops too far for an entry."""
    rng = np.random.default_rng(4)
    letters = [chr(ord("a") + i) for i in range(26)]
    words = ["".join(word) for length in (1, 2, 3) for word in itertools.product(letters[:15], repeat=length)]
    vocabulary = TokenBytes.from_tokens([(SPECIAL, b"</s>"), *((NORMAL, word.encode()) for word in words)])
    members = ["".join(rng.choice(letters[:15], rng.integers(1, 9))) for _ in range(3_000)]
    masks = TokenMasks.from_strings(members, vocabulary, eos=[0])
    assert len(masks.allowed(0)) > 1_500
    vocab = len(words) - 100
    logits = random_logits(rng, 4, 5, vocab)
    halves = logits.astype(np.float16) if logit_type == "float16" else to_bfloat16(logits)
    given = logits if logit_type == "float32" else halves
    options: dict[str, Any] = {"trie": masks, "scoring": scoring, "logit_type": logit_type}
    if mapped:
        options["vocab_map"] = rng.permutation(len(words))[:vocab]
    found, wanted = (
        build_draft_trees(given, np.zeros(4, int), np.zeros(4, int), 64, 8, engine=name, **options)
        for name in ("cpu", "reference")
    )
    assert_same_trees(found, wanted)
    assert found.valid_counts.min() > 30


def test_refusals() -> None:
    logits, masks = np.zeros((1, 3, 10), np.float32), masks_of(["a"])
    with pytest.raises(UsageError, match="their own end-of-sequence ids"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=masks, end_token=3)
    with pytest.raises(InputError, match="gives token 4 to two"):
        build_draft_trees(logits, [0], [0], 4, 2, trie=masks, vocab_map=[4, 1, 2, 3, 4, 5, 6, 7, 8, 9])
