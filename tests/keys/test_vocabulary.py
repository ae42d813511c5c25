"""Vocabularies of words: ids, order, look-up and text again."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrie_cli.errors import IndexFileError, InputError
from flashtrie_cli.inputs.native import native
from flashtrie_cli.keys import vocabulary as module
from flashtrie_cli.keys.vocabulary import FrozenVocabulary, WordVocabulary

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(
    lambda word: word.split() == [word]
)


@pytest.fixture(params=["native", "python"])
def twin(request, monkeypatch) -> str:
    """Every test runs on both."""
    if request.param == "python":
        monkeypatch.setattr(module, "native", lambda: None)
    elif native() is None:
        pytest.skip("the extension is not built")
    return request.param


def freeze(words: list[str]) -> FrozenVocabulary:
    vocabulary = WordVocabulary()
    for word in words:
        vocabulary.add(word)
    return FrozenVocabulary(*vocabulary.sorted()[1:])


def pack(words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(b"".join(words), np.uint8), np.cumsum([0, *map(len, words)])


@given(words=st.lists(WORDS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_sorted_depends_on_the_set_alone(words: list[str]) -> None:
    for table in ("native", "python"):
        if table == "native" and native() is None:
            continue
        vocabulary = WordVocabulary()
        if table == "python":
            vocabulary._table = module._PythonTable()
        ids = [vocabulary.add(word) for word in words]
        assert ids == [list(dict.fromkeys(words)).index(word) for word in words]
        new_ids, text, offsets = vocabulary.sorted()
        assert (new_ids.dtype, text.dtype, offsets.dtype) == (np.uint32, np.uint8, np.int64)
        expected = sorted({word.encode() for word in words})
        assert [text[a:b].tobytes() for a, b in pairwise(offsets)] == expected
        assert [expected[new_ids[at]] for at in ids] == [word.encode() for word in words]


@given(st.lists(WORDS, max_size=40), st.lists(WORDS, max_size=5))
@settings(max_examples=150, deadline=None)
def test_frozen_finds_its_words_and_no_other(words: list[str], others: list[str]) -> None:
    vocabulary = freeze(words)
    known = sorted(set(words), key=str.encode)
    assert len(vocabulary) == len(known)
    assert [vocabulary.id(word) for word in known] == list(range(len(known)))
    assert vocabulary.words(list(range(len(known)))) == known
    for word in others:
        assert vocabulary.id(word) == (known.index(word) if word in known else None)
    many = (known + others) * (300 if words else 1)  # past the point where the table is filled
    expected = [known.index(word) if word in known else 0xFFFFFFFF for word in known + others]
    assert vocabulary.ids(many).tolist() == expected * (300 if words else 1)
    assert vocabulary.ids(known + others).tolist() == expected


def test_text_and_back(twin: str) -> None:
    vocabulary = freeze(["the", "quick", "brown", "fox", "é", "€"])
    texts = ["the fox", "", "  the\n quick \t brown\r", "é \u20ac", "the dog", ""]
    for repeat in (1, 500):
        tokens, offsets = vocabulary.encode_batch(texts * repeat)
        counts = np.diff(offsets)
        assert counts.tolist() == [2, 0, 3, 2, 2, 0] * repeat
        assert (tokens == 0xFFFFFFFF).sum() == repeat
    tokens, offsets = vocabulary.encode_batch(texts[:4])
    assert vocabulary.decode_batch(tokens, offsets) == ["the fox", "", "the quick brown", "é \u20ac"]
    assert vocabulary.decode_batch(tokens, offsets[2:]) == ["the quick brown", "é \u20ac"]
    assert vocabulary.decode_batch(tokens[:0], offsets[:1]) == []
    assert vocabulary.encode_batch([])[1].tolist() == [0]


def test_growing_encode_batch(twin: str) -> None:
    vocabulary = WordVocabulary()
    tokens, offsets = vocabulary.encode_batch(["a b", "", "b\nc", "a\r"])
    assert tokens.tolist() == [0, 1, 1, 2, 0]
    assert offsets.tolist() == [0, 2, 2, 4, 5]
    assert len(vocabulary) == 3
    with pytest.raises(InputError, match="surrogate"):
        vocabulary.encode_batch(["\ud800"])
    for word in ("", " ", "a b", "a\n"):
        with pytest.raises(ValueError, match="not one word"):
            vocabulary.add(word)


def test_decode_checks_tokens(twin: str) -> None:
    vocabulary = freeze(["a", "b"])
    with pytest.raises(IndexError, match="token 2 "):
        vocabulary.decode_batch(np.array([0, 2], np.uint32), np.array([0, 2]))
    with pytest.raises(IndexError, match="token 4294967295 "):
        vocabulary.decode_batch(np.array([0xFFFFFFFF], np.uint32), np.array([0, 1]))
    with pytest.raises(IndexError):
        vocabulary.word(2)
    with pytest.raises(IndexError):
        vocabulary.word(-1)


@pytest.mark.parametrize(
    "words",
    [
        [b"b", b"a"],
        [b"a", b"a"],
        [b"", b"a"],
        [b"a b"],
        [b"a", b"b\n"],
        [b"a", b"\xe3\x80\x80"],
        [b"\xff"],
        [b"\xc3", b"\xc3\xa9"],
        [b"\xed\xa0\x80"],
    ],
)
def test_damaged_words(words: list[bytes], twin: str) -> None:
    with pytest.raises(IndexFileError, match=r"x\.ft: damaged vocabulary: word "):
        FrozenVocabulary(*pack(words), source="x.ft")


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 1], [0, 3], [0, 2, 1, 2], [0, 1 << 62, 2], [-1, 2]])
def test_damaged_offsets(offsets: list[int], twin: str) -> None:
    with pytest.raises(IndexFileError, match="damaged vocabulary: its offsets"):
        FrozenVocabulary(np.frombuffer(b"ab", np.uint8), np.array(offsets, dtype=np.int64))


def test_no_words(twin: str) -> None:
    vocabulary = FrozenVocabulary(*WordVocabulary().sorted()[1:])
    assert len(vocabulary) == 0
    assert vocabulary.id("a") is None
    assert vocabulary.ids(["a"] * 300).tolist() == [0xFFFFFFFF] * 300


def test_order_of_words_with_equal_heads() -> None:
    """The native sort compares 8 bytes first; words that agree there must still come out in byte order."""
    words = ["sameprefix" + "".join(random.Random(n).choices("ab\0", k=n % 7)) for n in range(300)]
    words += ["a\0", "a", "a\0\0", "\U0010ffff", "\u007f", "\u0080", "\uffff"]
    vocabulary = freeze(words)
    assert vocabulary.words(list(range(len(vocabulary)))) == sorted(set(words), key=str.encode)
