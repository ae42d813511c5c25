"""Every form of every kernel of token masks and token-trie steps under compute-sanitizer: memcheck, then racecheck.
Needs a GPU, PyCUDA and nvcc.

usage: sanitize_masks.py     (from the checkout)

Every byte is compared with the CPU's answers. A chain of advance and apply with nothing between shows what happens when
states that a kernel knew early were not the last. Exit 1 where a tool reports an error, or an answer differs.
"""

from __future__ import annotations

import random
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from compute_sanitizer import under_tools

from flashtrie_cli import BuildOptions, Index, build_index
from flashtrie_cli.engine.cuda_tokens import CudaTokens
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.query.token_masks import TokenMasks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/masks"))
from masks_world import EOS, EOT, trap_vocabulary

LOGITS: dict[str, tuple[Any, int]] = {
    "<f4": (np.uint32, 0xFF800000), "<f2": (np.uint16, 0xFC00), "<V2": (np.uint16, 0xFF80),
}  # fmt: skip
"""By what a device array says of itself (V2: bfloat16): the raw type, and what minus infinity is in it."""
FORMS = (("v1", 1, 0), ("v2", 2, 0), ("v4", 4, 0), ("long4", 4, 3))


class OnDevice:
    """A numpy array copied to the device."""

    def __init__(self, array: Any, typestr: str | None = None):
        import pycuda.driver as cuda

        self._array = np.ascontiguousarray(array)
        self._memory = cuda.mem_alloc(max(self._array.nbytes, 4))
        cuda.memcpy_htod(self._memory, self._array)
        self.__cuda_array_interface__ = {
            "typestr": typestr or self._array.dtype.str, "shape": self._array.shape,
            "data": (int(self._memory), False), "strides": None, "version": 3,
        }  # fmt: skip

    def copied_back(self) -> Any:
        import pycuda.driver as cuda

        cuda.Context.synchronize()
        copy = np.empty_like(self._array)
        cuda.memcpy_dtoh(copy, self._memory)
        return copy


def kept(answers: Any, states: Any, width: int) -> Any:
    """bool [states, width]."""
    ids, offsets = answers.allowed_lists(np.minimum(states, answers.ended))
    allowed = np.zeros((len(states), width), bool)
    allowed[np.repeat(np.arange(len(states)), np.diff(offsets)), ids] = True
    return allowed


def check_apply(answers: Any, states: Any) -> None:
    device, rng = answers.on_device(), np.random.default_rng(3)
    for width in (answers.vocab_size, answers.vocab_size + 71):
        allowed = kept(answers, states, width)
        for typestr, (dtype, infinity) in LOGITS.items():
            for form in FORMS if isinstance(answers, TokenMasks) else FORMS[:3]:
                device._form = lambda *sizes, form=form: form
                raw = rng.integers(1, 30_000, allowed.shape).astype(dtype)
                logits = OnDevice(raw, typestr)
                device.apply(logits, OnDevice(states))
                assert np.array_equal(logits.copied_back(), np.where(allowed, raw, dtype(infinity))), form
                order = rng.permutation(len(states)).astype(np.uint32)
                logits, want = OnDevice(raw, typestr), np.empty_like(raw)
                device.apply(logits, OnDevice(states), rows=OnDevice(order))
                want[order] = np.where(allowed, raw[order], dtype(infinity))
                assert np.array_equal(logits.copied_back(), want), (form, "rows")
    device._form = CudaTokens._form.__get__(device)


def check_rest(answers: Any, states: Any, rng: random.Random) -> None:
    device, num_words = answers.on_device(), answers.num_words
    words, want = (
        OnDevice(np.full((len(states), num_words), -1, np.int32)),
        answers.bitmask(len(states)),
    )
    device.fill(OnDevice(states), words)
    answers.fill(np.minimum(states, answers.ended), want)
    assert np.array_equal(words.copied_back(), want)
    inside = states[states <= answers.ended]
    tokens = np.array([drawn(answers, state, rng) for state in inside])
    held, allowed = OnDevice(inside), OnDevice(np.full(len(inside), 9, np.uint8))
    device.advance(held, OnDevice(tokens), allowed)
    after, is_allowed = answers.advance(inside, tokens)
    assert np.array_equal(held.copied_back(), after)
    assert np.array_equal(allowed.copied_back(), is_allowed)
    walks = np.array([[drawn(answers, 0, rng) for _ in range(3)] for _ in range(40)])
    held = OnDevice(np.zeros(40, np.uint32))
    device.walk(OnDevice(walks), held)
    assert np.array_equal(held.copied_back(), answers.walk(walks))


def check_chain(answers: Any, rng: random.Random) -> None:
    device, states = answers.on_device(), np.zeros(33, np.uint32)
    steps = []
    for _ in range(4):
        tokens = np.array([rng.choice(answers.allowed(state).tolist() or [0]) for state in states.tolist()])
        states, _ = answers.advance(states, tokens)
        raw = np.full((33, answers.vocab_size), 7, np.uint32)
        want = np.where(kept(answers, states, answers.vocab_size), raw, np.uint32(0xFF800000))
        steps.append((OnDevice(tokens), OnDevice(raw, "<f4"), want))
    held = OnDevice(np.zeros(33, np.uint32))
    for token_row, logits, _ in steps:
        device.advance(held, token_row)
        device.apply(logits, held)
    for _, logits, want in steps:
        assert np.array_equal(logits.copied_back(), want)


def check_children(steps: Any, states: Any) -> None:
    wanted, _, offsets = steps.children(states)
    for capacity in (1, 900):
        tokens, nodes = (OnDevice(np.full((len(states), capacity), 7, np.uint32)) for _ in range(2))
        counts = OnDevice(np.zeros(len(states), np.uint32))
        steps.on_device().children(OnDevice(states), tokens, nodes, counts)
        assert np.array_equal(counts.copied_back(), np.diff(offsets))
        found = tokens.copied_back()
        for row, (begin, end) in enumerate(pairwise(offsets.tolist())):
            listed = wanted[begin : min(end, begin + capacity)]
            assert np.array_equal(found[row, : len(listed)], listed)
            assert (found[row, len(listed) :] == 7).all()


def drawn(answers: Any, state: int, rng: random.Random) -> int:
    """An allowed token, or any."""
    allowed = answers.allowed(int(state)).tolist()
    return rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(answers.vocab_size)


def some_masks(rng: random.Random) -> TokenMasks:
    members: list[str | bytes] = [
        "".join(rng.choices(["a", "ab", "yes", "under", "ö", " "], k=6)) for _ in range(300)
    ]
    members += [bytes([first, second]) for first in range(256) for second in (7, 200)]
    vocabulary = trap_vocabulary()
    return TokenMasks.from_strings(members, vocabulary, eos=[EOS, EOT], vocab_size=len(vocabulary) + 9)


def some_steps(rng: random.Random) -> Any:
    keys = {tuple(rng.choice([1, 2, 3, 700]) for _ in range(rng.randrange(1, 6))) for _ in range(300)}
    keys |= {(number,) for number in range(0, 2100, 3)} | {(1, 1, number) for number in range(64, 700)}
    tokens = np.array([token for key in sorted(keys) for token in key], np.uint32)
    offsets = np.cumsum([0, *(len(key) for key in sorted(keys))]).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/keys.ft"
        build_index(
            [KeyBatch(tokens, offsets, None, None, "random")], path, options=BuildOptions(codec="raw")
        )
        return Index.open(path).steps(eos=[5, 2200], vocab_size=2201)


def worker() -> None:
    rng = random.Random(1)
    for name, answers in (("masks", some_masks(rng)), ("trie steps", some_steps(rng))):
        states = [0, 0, answers.ended, 0xFFFF_FFFF, *(rng.randrange(answers.ended) for _ in range(29))]
        check_apply(answers, np.array(states, np.uint32))
        check_rest(answers, np.array(states, np.uint32), rng)
        check_chain(answers, rng)
        if name == "trie steps":
            check_children(answers, np.array(states[4:], np.uint32))
        print(f"{name}: all equal", flush=True)


def main() -> int:
    return under_tools(__file__, keep="equal")


if __name__ == "__main__":
    sys.exit(worker() if "--worker" in sys.argv else main())
