"""Tails: whether unbranched ends are cut off is a matter of bytes on disk; no answer changes by it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Key, Oracle, built, flat, scratch
from strategies import LARGEST, grids, key_lists, plans, probes

from flashtrie_cli import BuildOptions, Index, build, build_index
from flashtrie_cli.engine import cpu
from flashtrie_cli.errors import IndexFileError, UsageError
from flashtrie_cli.format import layout
from flashtrie_cli.inspect import verify
from flashtrie_cli.trie import tails
from flashtrie_cli.trie.tails import MIN_TAIL

make_builder = build.make_builder


@st.composite
def keys_with_tails(draw: st.DrawFn, min_size: int = 0) -> list[Key]:
    """Keys of which many end in runs without branches, some of these like one another."""
    keys = draw(key_lists(min_size=min_size, max_size=30))
    token = st.sampled_from(draw(st.sampled_from(((0, 1), (255, 256), (65535, 65536, LARGEST)))))
    ends = draw(st.lists(st.lists(token, max_size=9).map(tuple), min_size=1, max_size=4))
    fronts = draw(st.lists(st.sampled_from([*keys, ()]), max_size=12))
    return keys + [(*front, number, *draw(st.sampled_from(ends))) for number, front in enumerate(fronts)]


def saved(keys: list[Key], values: list[Any] | None = None, **options: Any) -> bytes:
    return Path(built(keys, values, **options)).read_bytes()


def without_native() -> Any:
    return mock.patch.object(cpu, "is_available", return_value=False)


@given(keys_with_tails(), st.sampled_from(("raw", "zstd")), st.sampled_from(("on", "auto")))
def test_both_builders_write_the_same_bytes(keys: list[Key], codec: str, tail: str) -> None:
    with without_native():
        expected = saved(keys, tail=tail, codec=codec)
    assert saved(keys, tail=tail, codec=codec, threads=2) == expected
    assert saved(sorted(keys), tail=tail, codec=codec, is_sorted=True) == expected
    with mock.patch.object(build, "make_builder", lambda **o: make_builder(**{**o, "memory": 1 << 12})):
        assert saved(keys, tail=tail, codec=codec) == expected


@given(st.data(), keys_with_tails(), st.sampled_from(("raw", "zstd")))
def test_answers_are_those_of_the_whole_trie(data: st.DataObject, keys: list[Key], codec: str) -> None:
    whole = Index.open(built(keys, codec="raw"))
    path = scratch("tails.ft")
    Path(path).write_bytes(saved(keys, codec=codec, tail="on"))
    grid = data.draw(grids(keys))
    plan = data.draw(plans(keys))
    tokens, offsets = flat(data.draw(probes(keys)))
    for engine in ("cpu", "reference"):
        index = Index.open(path, engine=engine)
        verify(index)
        if index.file.version == layout.TAILS_VERSION:
            compare_arrays(index, whole)
        assert (index.lookup(tokens, offsets) == whole.lookup(tokens, offsets)).all()
        assert dumped(index) == dumped(whole) == sorted(set(keys))
        if grid and grid[0]:
            ids = np.array([[token for token, _ in row] for row in grid], np.int64)
            logprobs = np.array([[logprob for _, logprob in row] for row in grid], np.float32)
            ids[ids == 2**32 - 1] = -1
            ours, theirs = index.search(ids, logprobs, plan), whole.search(ids, logprobs, plan)
            assert [hit for query in ours for hit in query] == [hit for query in theirs for hit in query]


def compare_arrays(index: Index, whole: Index) -> None:
    """Unfolded, the trie is the one that was never cut, bit by bit."""
    for name, spare in (
        ("louds", 4),
        ("terminal", 0),
        ("label_low", 0),
        ("high_flags", 0),
        ("label_high", 4),
    ):
        ours, theirs = getattr(index.stored, name), getattr(whole.stored, name)
        assert len(ours) == len(theirs), name
        size = max(len(ours) - spare, 0)
        assert (ours[:size] == theirs[:size]).all(), name


def dumped(index: Index) -> list[Key]:
    return [
        tuple(keys.tokens[a:b].tolist())
        for keys in index.keys()
        for a, b in zip(keys.offsets, keys.offsets[1:], strict=False)
    ]


@pytest.mark.parametrize("rule", ["first", "all"])
def test_values_stay_with_their_keys(rule: str) -> None:
    keys = [(1, 2, 3, 4, 4), (1, 2), (5, 6, 7, 8, 9), (5,), (7, 7, 7), (1, 2, 3, 4, 4), (9, 3, 4)]
    values = list(range(len(keys)))
    index = Index.open(built(keys, values, tail="on", duplicates=rule))
    assert index.file.version == layout.TAILS_VERSION
    assert index.meta["num_links"] == 4
    for key, value in zip(keys[:5], values, strict=False):
        expected: Any = value if rule == "first" else [0, 5] if key == keys[0] else [value]
        assert index.value_of(int(index.lookup(key)[0])) == expected
    assert {key: int(index.lookup(key)[0]) for key in keys} == Oracle(keys).key_ids


def test_what_is_cut_and_what_is_shared() -> None:
    """``20 1 2 3`` and ``30 2 3`` share the end ``2 3``; ``40 5`` is too short; nothing is cut above a key."""
    assert MIN_TAIL == 2
    keys = [(20, 1, 2, 3), (30, 2, 3), (40, 5), (50,), (50, 2, 2, 3), (60, 1), (60, 2, 9, 9)]
    index = Index.open(built(keys, tail="on", codec="raw"))
    meta, file = index.meta, index.file
    # Tails: 1 2 3 of 20, 2 3 of 30, 2 3 of 50 2, 9 9 of 60 2; stored: 1 2 3 and 9 9.
    assert (meta["num_links"], meta["num_tail_nodes"], meta["num_tail_labels"]) == (4, 9, 5)
    assert file.array(layout.TAIL_LABELS, np.uint8).tolist() == [1, 2, 3, 9, 9]
    assert file.array(layout.TAIL_ENDS, np.uint64).tolist() == [0b10100]
    assert file.array(layout.LINK_FLAGS, np.uint64).tolist() == [0b101011]
    # Places 0, 1, 1, 3, three bits each.
    assert file.array(layout.TAIL_LINKS, np.uint64).tolist() == [0 | 1 << 3 | 1 << 6 | 3 << 9]


def test_nothing_to_cut_is_a_file_like_any_other() -> None:
    keys = [(1,), (2, 3), (2, 4)]
    assert saved(keys, tail="on") == saved(keys, tail="auto") == saved(keys)


def test_many_tails_spilled_and_not() -> None:
    source = random.Random(5)
    ends = [tuple(source.choices(range(30), k=source.randrange(12))) for _ in range(200)]
    keys = [
        (*source.choices((0, 1, 5, 70_000, LARGEST), k=source.randrange(6)), *source.choice(ends))
        for _ in range(20_000)
    ]
    expected = saved(keys, tail="on")
    with mock.patch.object(build, "make_builder", lambda **o: make_builder(**{**o, "memory": 1 << 12})):
        assert saved(keys, tail="on", threads=2) == expected
    with without_native():
        assert saved(keys, tail="on") == expected
    path = scratch("tails.ft")
    Path(path).write_bytes(expected)
    assert dumped(Index.open(path)) == Oracle(keys).keys


def test_an_index_that_unfolds_too_far_is_not_built(tmp_path: Path) -> None:
    keys = [(number, *range(300)) for number in range(1000, 1040)]
    path = str(tmp_path / "i.ft")
    with mock.patch.object(tails, "MAX_UNFOLDING", 30):
        with pytest.raises(UsageError, match="--tail off"):
            build_index(keys, path, options=BuildOptions(tail="on"))
        build_index(keys, path, options=BuildOptions(tail="auto"))
        assert Index.open(path).file.version == layout.VERSION
    build_index(keys, path, options=BuildOptions(tail="on", force=True))
    assert Index.open(path).file.version == layout.TAILS_VERSION
    with (
        mock.patch.object(tails, "MAX_UNFOLDING", 30),
        pytest.raises(IndexFileError, match="tails out of range"),
    ):
        Index.open(path)


def test_the_command_line(flashtrie: Any, tmp_path: Path) -> None:
    """What the build found, and that neither dump nor a bad rule says anything else."""
    lines = "".join(f"{number} 7 8 9 7 8 9\n" for number in range(50)).encode()
    dumps, found = set(), {}
    for rule in ("off", "on", "auto"):
        path = tmp_path / f"{rule}.ft"
        done = flashtrie("build", "-", "-o", path, "--input", "ids", "--tail", rule, "--json", stdin=lines)
        found[rule] = json.loads(done.stdout)
        dumps.add(flashtrie("dump", path).stdout)
    assert len(dumps) == 1
    assert [found[rule]["has_tails"] for rule in found] == [False, True, True]
    assert (found["on"]["num_links"], found["on"]["num_tail_labels"]) == (50, 6)
    assert found["auto"]["folding_ratio"] < 0.5
    assert b"--tail" in flashtrie("build", "--help").stdout
    done = flashtrie("build", "-", "-o", tmp_path / "x.ft", "--input", "ids", "--tail", "maybe", stdin=lines)
    assert (done.returncode, b"off, on, auto" in done.stderr) == (2, True)
