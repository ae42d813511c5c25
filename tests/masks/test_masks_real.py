"""Eight real vocabularies and ten real sets: against the vocabulary walked by brute force, and XGrammar."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from masks_world import SETS, TOKENIZERS, bits_of, random_states, real_set, real_vocabulary

from flashtrie_cli.engine.cpu_masks import open_automaton
from flashtrie_cli.engine.reference_masks import ReferenceMasks
from flashtrie_cli.query.token_masks import TokenMasks

pytestmark = pytest.mark.data

MEMBERS = 1_000
STATES = 130
"""States of each of the 80 pairs: 10,400 in all."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FLASHTRIE_CACHE", str(tmp_path_factory.getbasetemp() / "automata"))


@cache
def automaton(name: str):
    tokens, eos = real_vocabulary(name)
    return open_automaton(tokens, eos)


def members_of(name: str) -> list[str]:
    members = real_set(name)
    return members if len(members) <= MEMBERS else random.Random(7).sample(members, MEMBERS)


@pytest.mark.parametrize("set_name", SETS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_brute_force_agrees(tokenizer, set_name):
    tokens, eos = real_vocabulary(tokenizer)
    members = members_of(set_name)
    masks = TokenMasks.from_strings(members, automaton(tokenizer))
    oracle = ReferenceMasks([member.encode() for member in members], tokens, eos)
    for state, path in random_states(masks, random.Random(11), 12):
        text = b"".join(tokens[token] for token in path)
        assert masks.walk_bytes(text) == state
        assert masks.allowed(state).tolist() == oracle.allowed(text)


@cache
def xgrammar_compiler(tokenizer: str):
    xgrammar = pytest.importorskip("xgrammar")
    tokens, eos = real_vocabulary(tokenizer)
    is_text = tokens.is_text(eos=eos)
    # XGrammar takes every id with bytes for text, so what must never be allowed gets none.
    raw = [tokens[token] if is_text[token] else b"" for token in range(len(tokens))]
    info = xgrammar.TokenizerInfo(
        raw, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(eos)
    )
    return xgrammar, xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)


def as_ebnf(members: list[str]) -> str:
    quoted = (member.replace("\\", "\\\\").replace('"', '\\"') for member in members)
    return "root ::= " + " | ".join(f'"{member}"' for member in quoted)


@pytest.mark.parametrize("set_name", SETS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_xgrammar_agrees(tokenizer, set_name):
    xgrammar, compiler = xgrammar_compiler(tokenizer)
    members = members_of(set_name)
    masks = TokenMasks.from_strings(members, automaton(tokenizer))
    peer = xgrammar.GrammarMatcher(compiler.compile_grammar(as_ebnf(members)))
    theirs = xgrammar.allocate_token_bitmask(1, masks.vocab_size)
    ours = masks.bitmask()
    for state, path in random_states(masks, random.Random(13), STATES):
        peer.reset()
        assert all(peer.accept_token(token) for token in path)
        needed = peer.fill_next_token_bitmask(theirs)
        masks.fill([state], ours)
        assert needed
        assert bits_of(theirs[0].numpy()) == bits_of(ours[0])


@pytest.mark.parametrize("tokenizer", ["llama3_1", "gemma3"])
def test_case_23_a_flat_list_of_1000_names_keeps_every_one(tokenizer):
    masks = TokenMasks.from_strings(members_of("aws_ops"), automaton(tokenizer))
    assert_all_reachable(masks, members_of("aws_ops"), random.Random(3))


@pytest.mark.parametrize("set_name", ["aws_ops", "icd10cm_codes"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_generation_is_a_member_and_every_member_is_reachable(tokenizer, set_name):
    tokens, _ = real_vocabulary(tokenizer)
    members = real_set(set_name)
    masks = TokenMasks.from_strings(members, automaton(tokenizer))
    assert_all_reachable(masks, members, random.Random(3))
    wanted = {member.encode() for member in members}
    for text in generations(masks, tokens, np.random.default_rng(17), 10_000):
        assert text in wanted


def assert_all_reachable(masks: TokenMasks, members: list[str], rng: random.Random) -> None:
    """Each member along a random segmentation: every token allowed, and the end where it ends."""
    tokens, longest = masks.tokens, 24
    id_of: dict[bytes, int] = {}
    for token in np.flatnonzero(tokens.is_text(eos=masks.eos)).tolist():
        id_of[tokens[token]] = token
    matcher = masks.matcher()
    for member in members:
        data, at = member.encode(), 0
        matcher.reset()
        while at < len(data):
            ends = [end for end in range(at + 1, min(len(data), at + longest) + 1) if data[at:end] in id_of]
            end = rng.choice(ends)
            assert matcher.advance(id_of[data[at:end]]), (member, at, end)
            at = end
        assert matcher.is_terminal, member
        assert matcher.advance(masks.eos[-1])


def generations(masks: TokenMasks, tokens, rng: np.random.Generator, count: int) -> list[bytes]:
    """Samples with random weights on the allowed tokens, a batch at a time, as a sampler would draw them."""
    states = np.zeros(count, np.uint32)
    texts = [b""] * count
    while (alive := np.flatnonzero(states != masks.ended)).size:
        ids, offsets = masks.allowed_lists(states[alive])
        keys = rng.gumbel(size=len(ids)) * 3
        begins = offsets[:-1]
        best = np.maximum.reduceat(keys, begins)
        owner = np.repeat(np.arange(len(alive)), np.diff(offsets))
        chosen = ids[np.flatnonzero(keys == best[owner])].astype(np.int64)
        states[alive], allowed = masks.advance(states[alive], chosen)
        assert allowed.all()
        for row, token in zip(alive.tolist(), chosen.tolist(), strict=True):
            texts[row] += b"" if token in masks.eos else tokens[token]
    return texts
