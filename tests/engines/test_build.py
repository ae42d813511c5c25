"""Builds: the native builder and the plain one write the same bytes, whatever the order, threads and memory."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Key, Oracle, batch_of, built, scratch
from strategies import LARGEST, key_lists

from flashtrie_cli import BuildOptions, Index, build, build_index
from flashtrie_cli.engine import cpu
from flashtrie_cli.errors import FlashtrieError, InputError
from flashtrie_cli.format import layout
from flashtrie_cli.keys.reader import KeyReader
from flashtrie_cli.keys.vocabulary import WordVocabulary
from flashtrie_cli.trie.builder import DUPLICATE_RULES

make_builder = build.make_builder


def outcome(keys: list[Key], values: list[Any] | None, **options: Any) -> bytes | str:
    """The file's bytes, or what the build says it cannot do."""
    try:
        return Path(built(keys, values, **options)).read_bytes()
    except FlashtrieError as error:
        return f"{type(error).__name__} {error}"


def plain_outcome(keys: list[Key], values: list[Any] | None, **options: Any) -> bytes | str:
    with mock.patch.object(cpu, "is_available", return_value=False):
        return outcome(keys, values, **options)


def spilled_outcome(keys: list[Key], values: list[Any] | None, **options: Any) -> bytes | str:
    """With so little memory that a hundred keys are spilled, and levels too."""
    with mock.patch.object(build, "make_builder", lambda **o: make_builder(**{**o, "memory": 1 << 12})):
        return outcome(keys, values, **options)


@given(st.data(), key_lists(), st.sampled_from(("raw", "zstd")))
def test_both_builders_write_the_same_bytes(data: st.DataObject, keys: list[Key], codec: str) -> None:
    expected = plain_outcome(keys, None, codec=codec)
    assert isinstance(expected, bytes)
    assert outcome(keys, None, codec=codec) == expected
    assert outcome(keys, None, codec=codec, threads=data.draw(st.sampled_from((2, 3)))) == expected
    assert outcome(data.draw(st.permutations(keys)), None, codec=codec) == expected
    assert outcome(sorted(keys), None, codec=codec, is_sorted=True) == expected
    assert spilled_outcome(keys, None, codec=codec) == expected


@given(
    keys=key_lists(min_size=1, max_size=30),
    rule=st.sampled_from(DUPLICATE_RULES),
    numbers=st.sampled_from(("unsigned", "float")),
    data=st.data(),
)
@settings(max_examples=150)
def test_duplicate_rules(keys: list[Key], rule: str, numbers: str, data: st.DataObject) -> None:
    number = (
        st.sampled_from((0, 1, 7, 2**63, 2**64 - 1))
        if numbers == "unsigned"
        else st.sampled_from((0.0, -0.0, 1.5, -2.25, 1e308, 0.1))
    )
    values = data.draw(st.lists(number, min_size=len(keys), max_size=len(keys)))
    result = outcome(keys, values, duplicates=rule)
    assert result == plain_outcome(keys, values, duplicates=rule)
    assert result == spilled_outcome(keys, values, duplicates=rule)
    given_values: dict[Key, list[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        given_values.setdefault(key, []).append(value)
    if isinstance(result, str):
        assert result.startswith("InputError")
        overflow = rule == "sum" and any(overflows(own) for own in given_values.values())
        assert overflow or (rule == "error" and len(given_values) < len(keys))
        return
    assert rule != "sum" or not any(overflows(own) for own in given_values.values())
    index = Index.open(built(keys, values, duplicates=rule))
    for key, own in given_values.items():
        expected = {"first": own[0], "last": own[-1], "all": own, "error": own[0]}.get(rule)
        if rule in ("min", "max"):
            expected = (min if rule == "min" else max)(own)
        if rule == "sum":
            expected = own[0]
            for value in own[1:]:
                expected += value
        assert index.value_of(int(index.lookup(key)[0])) == expected


def overflows(values: list[Any]) -> bool:
    """Whether their sum, taken in order, passes what a value can be."""
    partial_sums = itertools.accumulate(values)
    return any(not math.isfinite(total) or (type(total) is int and total >= 2**64) for total in partial_sums)


@given(key_lists(min_size=2))
def test_sorted_is_checked(keys: list[Key]) -> None:
    result = outcome(keys, None, is_sorted=True)
    assert result == plain_outcome(keys, None, is_sorted=True)
    assert isinstance(result, bytes) == (keys == sorted(keys))
    if isinstance(result, str):
        first = next(i for i in range(1, len(keys)) if keys[i] < keys[i - 1])
        assert result.startswith(f"InputError test:{first + 1}: keys are not in ascending order")
        assert f"see also line {first}" in result


def test_an_error_names_both_files(tmp_path: Path) -> None:
    batches = [batch_of([(1,), (2,)], source="a.txt"), batch_of([(3,), (1,)], source="b.txt")]
    with pytest.raises(InputError) as refusal:
        build_index(batches, str(tmp_path / "i.ft"), options=BuildOptions(duplicates="error"))
    assert (refusal.value.file, refusal.value.line) == ("b.txt", 2)
    assert "a.txt line 1" in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keys", [[(-1,)], [(1,), (2**31,)], [(0,) * 65_536]])
def test_keys_out_of_range(keys: list[Key]) -> None:
    with pytest.raises(InputError):
        build_index(keys, scratch("range.ft"), options=BuildOptions(force=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("with_values", [False, True])
def test_many_keys_spilled_and_not(threads: int, with_values: bool) -> None:
    """Random keys, a tenth of them twice: sorted by Python, by the sorter in memory, and through many runs."""
    source = random.Random(threads)
    keys = [tuple(source.choices((0, 1, 5, 70_000, LARGEST), k=source.randrange(7))) for _ in range(20_000)]
    values = [source.randrange(2**64) for _ in keys] if with_values else None
    options = {"threads": threads, "duplicates": "last"}
    whole = outcome(keys, values, **options)
    assert whole == spilled_outcome(keys, values, **options)
    assert whole == plain_outcome(keys, values, **options)
    assert [key for key in dumped(Index.open(built(keys, values, **options)))] == Oracle(keys).keys


def dumped(index: Index) -> Iterator[Key]:
    for keys in index.keys():
        yield from (
            tuple(keys.tokens[a:b].tolist()) for a, b in zip(keys.offsets, keys.offsets[1:], strict=False)
        )


@pytest.mark.parametrize("is_sorted", [False, True])
def test_batches_of_every_size(is_sorted: bool, tmp_path: Path) -> None:
    keys = [(i // 7, i % 7) for i in range(1000)]
    expected = outcome(keys, None)
    for size in (1, 3, 999, 1000):
        batches = [batch_of(keys[at : at + size]) for at in range(0, len(keys), size)]
        build_index(iter(batches), str(tmp_path / "i"), options=BuildOptions(force=True, is_sorted=is_sorted))
        assert (tmp_path / "i").read_bytes() == expected


def test_arrays_of_any_integers(tmp_path: Path) -> None:
    expected = outcome([(1, 2), (3,)], None)
    for kind in (np.int64, np.uint16, np.int8):
        build_index(
            [np.array([1, 2], kind), np.array([3], kind)],
            str(tmp_path / "i"),
            options=BuildOptions(force=True),
        )
        assert (tmp_path / "i").read_bytes() == expected


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    def build_words(codec: str) -> Path:
        words = tmp_path / "words"
        words.write_text("w" * (1 << 20))
        path = tmp_path / f"{codec}.ft"
        vocabulary = WordVocabulary()
        reader = KeyReader([str(words)], kind="text", tokenizer=vocabulary)
        build_index(reader, str(path), tokenizer=vocabulary, options=BuildOptions(codec=codec))
        return path

    with mock.patch.object(layout, "MIN_TEXT_LIMIT", 0):
        with pytest.raises(InputError, match="--codec raw"):
            build_words("zstd")
        assert not (tmp_path / "zstd.ft").exists()
        assert len(Index.open(str(build_words("raw")))) == 1
    assert len(Index.open(str(build_words("zstd")))) == 1


def test_ends_of_words_of_one_length_may_take_next_to_nothing() -> None:
    """As those of a hundred million hashes do."""
    ends = layout.Section(layout.WORD_ENDS, layout.CODEC_ZSTD, 8, 0, 1000, 8 * 10**8, 1, 0)
    assert layout.has_sound_size(ends, 10**8 + 1)
    assert not layout.has_sound_size(ends, 10**7)
