"""The processor driven as vLLM's engine drives one: its batch updates, in its order."""

from __future__ import annotations

import enum
import random
from collections import namedtuple

import pytest
from masks_world import EOS, EOT, trap_vocabulary

from flashtrie_cli.query.token_masks import TokenMasks

torch = pytest.importorskip("torch")

from flashtrie_cli.query.vllm_masks import MaskLogitsProcessor  # noqa: E402

VOCABULARY = trap_vocabulary()
SETS = {
    "answers": ["yes", "yes no", "no", "a", "ab", "abc", ""],
    "names": [f"account.List{number}" for number in range(40)],
}
WIDTH = len(VOCABULARY) + 5

# As in vllm/v1/sample/logits_processor/interface.py.
MoveDirectionality = enum.Enum("MoveDirectionality", "UNIDIRECTIONAL SWAP")
BatchUpdate = namedtuple("BatchUpdate", "batch_size removed added moved")
SamplingParams = namedtuple("SamplingParams", "extra_args")


@pytest.fixture
def processor(tmp_path, monkeypatch):
    parts = []
    for name, members in SETS.items():
        path = str(tmp_path / f"{name}.ftrie")
        TokenMasks.from_strings(members, VOCABULARY, eos=[EOS, EOT], vocab_size=WIDTH).save(path)
        parts.append(f"{name}={path}")
    monkeypatch.setenv("FLASHTRIE_MASKS", ":".join(parts))
    return MaskLogitsProcessor(None, torch.device("cpu"), False)


def test_parameters_are_checked(processor):
    for args in (None, {}, {"other": 1}, {"flashtrie_masks": "names"}):
        MaskLogitsProcessor.validate_params(SamplingParams(args))
    for bad in ("unknown", 7, ["names"], "/etc/passwd"):
        with pytest.raises(ValueError, match="is not one of answers, names"):
            MaskLogitsProcessor.validate_params(SamplingParams({"flashtrie_masks": bad}))
    assert not processor.is_argmax_invariant()


def test_a_changing_batch_generates_members_only(processor):
    """Requests come, finish, are swapped and compacted as in vLLM's persistent batch."""
    rng = random.Random(3)
    torch.manual_seed(3)
    slots: list[tuple[str | None, list[int]]] = []
    finished = {name: set() for name in SETS}
    waiting = [rng.choice([None, *SETS]) for _ in range(120)]
    while waiting or slots:
        removed, added, moved = [], [], []
        for index, (name, output) in enumerate(slots):
            if output and (output[-1] in (EOS, EOT) or (name is None and len(output) > 3)):
                removed.append(index)
                if name is not None:
                    finished[name].add(b"".join(VOCABULARY[token] for token in output[:-1]).decode())
        free = list(removed)
        while waiting and (free or len(slots) < 8):
            index = free.pop(0) if free else len(slots)
            if index in removed:
                removed.remove(index)  # an added request replaces the one at its index
            name, output = waiting.pop(), []
            slots[index : index + 1] = [(name, output)]
            added.append((index, SamplingParams({"flashtrie_masks": name} if name else None), [1, 2], output))
        for index in sorted(free, reverse=True):  # holes are filled from the end
            last = len(slots) - 1
            if index != last:
                slots[index] = slots[last]
                moved.append((last, index, MoveDirectionality.UNIDIRECTIONAL))
            slots.pop()
        if len(slots) > 2 and rng.random() < 0.5:
            a, b = rng.sample(range(len(slots)), 2)
            slots[a], slots[b] = slots[b], slots[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        update = BatchUpdate(len(slots), removed, added, moved)
        processor.update_state(update if removed or added or moved else None)
        if not slots:
            break
        logits = torch.randn(len(slots), WIDTH)
        before = logits.clone()
        after = processor.apply(logits)
        assert after is logits
        for index, (name, output) in enumerate(slots):
            if name is None:
                assert torch.equal(after[index], before[index])
            output.append(int(torch.multinomial(after[index].softmax(-1), 1)))
    assert all(found <= set(SETS[name]) for name, found in finished.items())
    assert all(len(found) > 3 for found in finished.values())


def test_tokens_taken_back(processor):
    output = [VOCABULARY_ID["yes"]]
    processor.update_state(
        BatchUpdate(1, [], [(0, SamplingParams({"flashtrie_masks": "answers"}), [], output)], [])
    )
    first = allowed(processor)
    assert EOS in first
    output.append(EOS)
    assert allowed(processor) == {EOS, EOT}
    output[:] = []
    assert EOS in allowed(processor)  # the empty member
    output.append(VOCABULARY_ID["yes"])
    assert allowed(processor) == first


def allowed(processor) -> set[int]:
    return set(torch.isfinite(processor.apply(torch.zeros(1, WIDTH))).nonzero()[:, 1].tolist())


VOCABULARY_ID = {"yes": next(token for token in range(len(VOCABULARY)) if VOCABULARY[token] == b"yes")}
