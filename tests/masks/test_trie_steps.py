"""Single steps of a token trie, against a Python set of keys; and a model that says keys only."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from masks_world import bits_of

from flashtrie_cli.errors import UsageError
from flashtrie_cli.index import Index

VOCAB_SIZE, EOS = 90_000, 89_999
RNG = random.Random(2)
KEYS = {tuple(RNG.choice([1, 2, 3, 70_000, 80_123]) for _ in range(RNG.randrange(1, 6))) for _ in range(300)}
KEYS |= {(number,) for number in range(0, 60_000, 7)}


@pytest.fixture(scope="module")
def index(flashtrie, tmp_path_factory) -> Index:
    path: Path = tmp_path_factory.mktemp("steps") / "keys.ft"
    lines = "".join(" ".join(map(str, key)) + "\n" for key in KEYS)
    done = flashtrie("build", "-", "-o", path, "--input", "ids", stdin=lines.encode())
    assert done.returncode == 0, done.stderr
    return Index.open(str(path))


def next_tokens(prefix: tuple[int, ...]) -> list[int]:
    return sorted(
        {key[len(prefix)] for key in KEYS if key[: len(prefix)] == prefix and len(key) > len(prefix)}
    )


def test_every_step_against_the_keys(index):
    steps = index.steps(eos=[EOS], vocab_size=VOCAB_SIZE)
    prefixes = [()] + [
        key[:end] for key in sorted(KEYS, key=len, reverse=True)[:200] for end in range(1, len(key) + 1)
    ]
    states = [int(steps.walk([prefix])[0]) if prefix else 0 for prefix in prefixes]
    bitmask = steps.bitmask(len(states))
    steps.fill(states, bitmask)
    for prefix, state, row in zip(prefixes, states, bitmask, strict=True):
        want = next_tokens(prefix)
        tokens, nodes, offsets = index.step([state])
        assert tokens.tolist() == want
        assert offsets.tolist() == [0, len(want)]
        ends = [EOS] if prefix in KEYS else []
        assert steps.allowed(state).tolist() == sorted(want + ends) == bits_of(row)
        after, allowed = steps.advance([state] * len(want), want)
        assert allowed.all()
        assert after.tolist() == nodes.tolist()
        after, allowed = steps.advance([state] * 3, [EOS, 5, -1])
        assert allowed.tolist() == [prefix in KEYS, 5 in want, False]
        assert (after[0] == steps.ended) == (prefix in KEYS)
    assert steps.walk([[1, 2, 3, 4, 5, 6]])[0] == 0xFFFF_FFFF
    assert steps.allowed(steps.ended).tolist() == []
    tokens, nodes, offsets = index.step(states)
    assert len(tokens) == len(nodes) == offsets[-1]


def test_what_does_not_fit_is_refused(index):
    with pytest.raises(UsageError, match="outside the vocabulary"):
        index.steps(eos=[], vocab_size=1000)
    with pytest.raises(UsageError, match="end-of-sequence"):
        index.steps(eos=[VOCAB_SIZE], vocab_size=VOCAB_SIZE)
    with pytest.raises(ValueError, match="outside the trie"):
        index.step([index.num_nodes + 1])


def test_an_end_token_that_is_a_label_ends_where_a_key_ends(index):
    steps = index.steps(eos=[7], vocab_size=VOCAB_SIZE)
    after, allowed = steps.advance([0, int(steps.walk([[7]])[0])], [7, 7])
    assert allowed.all()
    assert after[0] != steps.ended
    assert after[1] == steps.ended


@pytest.mark.parametrize(
    "options", [{"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "num_return_sequences": 30}]
)
def test_a_model_says_keys_only(index, options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from flashtrie_cli.query.hf_masks import MaskLogitsProcessor, prefix_allowed_tokens

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=32, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=EOS,
        pad_token_id=EOS,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    steps = index.steps(eos=[EOS], vocab_size=VOCAB_SIZE)
    prompt = torch.tensor([[1, 2, 3]])
    common = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, **options}
    torch.manual_seed(1)
    output = model.generate(prompt, logits_processor=[MaskLogitsProcessor(steps, 3)], **common)
    for row in output[:, 3:].tolist():
        assert tuple(row[: row.index(EOS)]) in KEYS
    torch.manual_seed(1)
    same = model.generate(prompt, prefix_allowed_tokens_fn=prefix_allowed_tokens(steps, 3), **common)
    assert torch.equal(output, same)


def test_steps_of_many_states_are_those_of_each(index):
    steps = index.steps(eos=[EOS], vocab_size=VOCAB_SIZE)
    states = np.random.default_rng(0).integers(0, index.num_nodes + 1, 500).astype(np.uint32)
    ids, offsets = steps.allowed_lists(states)
    for at, state in enumerate(states.tolist()):
        assert ids[offsets[at] : offsets[at + 1]].tolist() == steps.allowed(state).tolist()
