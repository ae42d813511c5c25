"""The processor within `transformers`' own generate(), on a tiny model with random weights."""

from __future__ import annotations

import numpy as np
import pytest
from masks_world import EOS, PAD, trap_vocabulary

from flashtrie_cli.query.token_masks import TokenMasks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flashtrie_cli.query.hf_masks import MaskLogitsProcessor, prefix_allowed_tokens  # noqa: E402

VOCABULARY = trap_vocabulary()
MEMBERS = ["yes", "yes no", "no", "account.List", "account.Lis", "öabc", "under_score", "a", "ab", "abc"]
WIDTH = len(VOCABULARY) + 13


@pytest.fixture(scope="module")
def masks() -> TokenMasks:
    return TokenMasks.from_strings(MEMBERS, VOCABULARY, eos=[EOS], vocab_size=WIDTH)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WIDTH,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=2,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return transformers.GPT2LMHeadModel(config).eval()


def answers(output, prompt_length: int) -> list[str]:
    texts = []
    for row in output[:, prompt_length:].tolist():
        assert EOS in row, "an answer that never ended"
        texts.append(b"".join(VOCABULARY[token] for token in row[: row.index(EOS)]).decode())
    return texts


@pytest.mark.parametrize("options", [
    {"do_sample": False},
    {"do_sample": True, "num_return_sequences": 25, "temperature": 3.0},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 3, "do_sample": True, "num_return_sequences": 3},
])  # fmt: skip
def test_generations_are_members(model, masks, options):
    prompts = torch.tensor([[PAD, PAD, 20, 21, 22], [30, 31, 32, 33, 34]])
    mask = (prompts != PAD).long()
    output = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=20,
        logits_processor=[MaskLogitsProcessor(masks, 5)],
        **options,
    )
    found = answers(output, 5)
    assert len(found) == 2 * options.get("num_return_sequences", 1)
    assert set(found) <= set(MEMBERS)


def test_many_samples_reach_every_member(model, masks):
    processor = MaskLogitsProcessor(masks, 1)
    torch.manual_seed(1)
    output = model.generate(
        torch.full((300, 1), 2), attention_mask=torch.ones(300, 1, dtype=torch.long), do_sample=True,
        temperature=5.0, max_new_tokens=20, logits_processor=[processor],
    )  # fmt: skip
    assert set(answers(output, 1)) == set(MEMBERS)


def test_beam_search_finds_what_scoring_every_member_finds(model, masks):
    """With as many beams as prefixes there are, beam search is exhaustive."""
    short = ["yes", "no", "a", "ab", "abc"]
    few = TokenMasks.from_strings(short, VOCABULARY, eos=[EOS], vocab_size=WIDTH)
    prompt = torch.tensor([[2, 40]])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=60, num_return_sequences=1, max_new_tokens=8,
        length_penalty=0.0, logits_processor=[MaskLogitsProcessor(few, 2)], early_stopping=False,
    )  # fmt: skip
    best = max(paths(few), key=lambda path: log_probability(model, prompt[0].tolist(), path))
    assert output[0, 2 : 2 + len(best)].tolist() == best


def paths(masks: TokenMasks, state: int = 0) -> list[list[int]]:
    found = []
    for token in masks.allowed(state).tolist():
        after = int(masks.advance([state], [token])[0][0])
        found += [[token]] if after == masks.ended else [[token, *rest] for rest in paths(masks, after)]
    return found


def log_probability(model, prompt: list[int], path: list[int]) -> float:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + path])).logits[0].log_softmax(-1)
    return float(sum(logits[len(prompt) - 1 + at, token] for at, token in enumerate(path)))


def test_rows_may_be_reordered_between_calls(masks):
    processor = MaskLogitsProcessor(masks, 2)
    rng = np.random.default_rng(0)
    rows = torch.tensor([[9, 9, *path[:2]] for path in paths(masks) if len(path) > 2][:40])
    scores = torch.randn(len(rows), WIDTH)
    want = processor(rows, scores)
    for _ in range(5):
        order = torch.from_numpy(rng.permutation(len(rows)))
        assert torch.equal(processor(rows[order], scores[order]), want[order])
    assert torch.isinf(want).any()
    kept = ~torch.isinf(want)
    assert torch.equal(want[kept], scores[kept])


def test_prefix_function_is_the_same(model, masks):
    prompt = torch.tensor([[2, 40, 41]])
    common = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 20, "num_beams": 3}
    one = model.generate(prompt, prefix_allowed_tokens_fn=prefix_allowed_tokens(masks, 3), **common)
    other = model.generate(prompt, logits_processor=[MaskLogitsProcessor(masks, 3)], **common)
    assert torch.equal(one, other)


def test_half_precision_and_a_wider_model(masks):
    processor = MaskLogitsProcessor(masks, 0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = torch.randn(1, WIDTH + 50).to(dtype)
        out = processor(torch.zeros((1, 0), dtype=torch.long), scores)
        assert out.dtype == dtype
        assert torch.isfinite(out).nonzero()[:, 1].tolist() == masks.allowed(0).tolist()


def test_torch_tensors_are_filled_in_place(masks):
    bitmask = torch.full((3, masks.num_words), -1, dtype=torch.int32)
    matcher = masks.matcher()
    matcher.fill(bitmask, 1)
    masks.fill([0], bitmask)
    want = masks.bitmask()
    matcher.fill(want)
    assert torch.equal(bitmask[0], torch.from_numpy(want[0]))
    assert torch.equal(bitmask[1], bitmask[0])
    assert (bitmask[2] == -1).all()
    for bad in (bitmask.long(), bitmask.float(), bitmask.T):
        with pytest.raises(TypeError):
            matcher.fill(bad)
