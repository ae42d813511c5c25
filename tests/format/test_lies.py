"""Lies under valid checksums: files that only a look at what they say can refuse."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from forge import FRAME_SIZE, Part, change, change_words, put_together, take_apart
from liars import Lie, meta, words
from lies import LIES
from samples import CODECS, SAMPLES, answers_or_none, build_sample

from flashtrie_cli import BuildOptions, Index, build_index
from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.inspect import describe, verify

ENGINES = ("cpu", "reference")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused(name: str, engine: str, tmp_path: Path) -> None:
    sample, codec, lie, says = LIES[name]
    path = tmp_path / "index.ft"
    lying = lie(build_sample(sample, codec, path))
    path.write_bytes(lying)
    tracemalloc.start()
    try:
        with pytest.raises(IndexFileError) as refusal:
            Index.open(str(path), engine=engine)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert says in str(refusal.value)
    assert refusal.value.file == str(path)
    assert refusal.value.exit_code == 3
    assert peak < (32 << 20) + 8 * len(lying), "a lie must not cost memory"


HARMLESS: dict[str, tuple[str, str, Lie]] = {
    "meta says more": ("ids", "raw", meta(colour="blue")),
    "another order of sections": (
        "ids",
        "raw",
        lambda data: put_together(dict(reversed(take_apart(data).items()))),
    ),
    "raw and compressed side by side": (
        "ids",
        "zstd",
        lambda data: put_together(
            {
                name: Part(name, 0, 0, part.raw(), part.raw_size) if name in ("louds", "meta") else part
                for name, part in take_apart(data).items()
            }
        ),
    ),
    "other planes": (
        "values",
        "zstd",
        lambda data: put_together(
            {
                name: replace(part, element_size=3).with_raw(part.raw())
                for name, part in take_apart(data).items()
            }
        ),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_the_format_allows_is_read(name: str, tmp_path: Path) -> None:
    sample, codec, rewrite = HARMLESS[name]
    path = tmp_path / "index.ft"
    data = build_sample(sample, codec, path)
    truth = answers_or_none(path)
    assert rewrite(data) != data
    path.write_bytes(rewrite(data))
    assert answers_or_none(path) == truth
    assert verify(Index.open(str(path)))


VERIFIED = {
    "another digest": meta(keys_digest="0" * 32),
    "another depth": meta(depth=4),
    "another number of tokens": meta(num_tokens=3),
    "another label": words("label_low", lambda v: v.__setitem__(9, 2), 2),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_finds_what_opening_may_not(name: str, tmp_path: Path) -> None:
    path = tmp_path / "index.ft"
    path.write_bytes(VERIFIED[name](build_sample("ids", "raw", path)))
    index = Index.open(str(path))
    with pytest.raises(IndexFileError):
        verify(index)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", SAMPLES)
def test_honest_files_verify(name: str, codec: str, tmp_path: Path) -> None:
    build_sample(name, codec, tmp_path / "index.ft")
    index = Index.open(str(tmp_path / "index.ft"))
    assert verify(index)
    assert json.dumps(describe(index, levels=True), allow_nan=False)


BOMBS: dict[str, tuple[str, bytes]] = {
    "meta": ("meta", b" " * (1 << 28)),
    "word_text": ("word_text", bytes(1 << 28)),
    "word_ends": ("word_ends", bytes(1 << 28)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, tmp_path: Path) -> None:
    """A few kilobytes that would unpack to a quarter of a gigabyte."""
    target, raw = BOMBS[name]
    path = tmp_path / "index.ft"
    parts = take_apart(build_sample("words", "zstd", path))
    frame = zstandard.ZstdCompressor(level=1).compress(raw[:FRAME_SIZE])
    count = len(raw) // FRAME_SIZE
    parts[target] = Part(target, 1, 0, frame * count, len(raw), [len(frame)] * count)
    path.write_bytes(put_together(parts))
    tracemalloc.start()
    try:
        with pytest.raises(IndexFileError):
            Index.open(str(path))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


SEED = 977
MUTATIONS = 3_000
MUTATION_SECONDS = 40


def test_random_lies(tmp_path: Path) -> None:
    """Contents of sections mutated at random, checksums right: refused, or a trie on which all engines agree.

    Such a file may be a sound index of other keys. Then `--verify` must see it.
    """
    source = random.Random(SEED)
    path = tmp_path / "index.ft"
    originals = [
        (f"{name}-{codec}", build_sample(name, codec, path), answers_or_none(path))
        for name in SAMPLES
        if name != "wide"
        for codec in CODECS
    ]
    deadline = time.process_time() + MUTATION_SECONDS
    done = accepted = 0
    while done < MUTATIONS and time.process_time() < deadline:
        name, data, truth = source.choice(originals)
        parts = take_apart(data)
        target = source.choice(list(parts))
        path.write_bytes(change(data, target, lambda raw: _mutated(raw, source)))
        native = answers_or_none(path, "cpu")
        where = f"seed {SEED}, lie {done}: {target} of {name}"
        if native is not None:
            accepted += 1
            assert native == answers_or_none(path, "reference"), where
            if native != truth:
                with pytest.raises(IndexFileError):
                    verify(Index.open(str(path)))
        done += 1
    assert done == MUTATIONS, f"only {done} of {MUTATIONS} lies in {MUTATION_SECONDS} s"
    assert 0 < accepted < done


def _mutated(raw: bytes, source: random.Random) -> bytes:
    damaged = bytearray(raw)
    if not damaged:
        return b"\0" * source.choice((1, 8, 16))
    at = source.randrange(len(damaged))
    action = source.randrange(5)
    if action == 0:
        damaged[at] ^= 1 << source.randrange(8)
    elif action == 1:
        damaged[at] = source.randrange(256)
    elif action == 2:
        del damaged[at : at + source.choice((1, 2, 8))]
    elif action == 3:
        damaged[at:at] = damaged[at : at + source.choice((1, 2, 8))]
    else:
        damaged[at : at + 8] = bytes(len(damaged[at : at + 8]))
    return bytes(damaged)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("place", [5, 6, 7])
def test_a_link_past_the_last_label(tmp_path: Path, engine: str, place: int) -> None:
    """Five labels need three bits a place, which can say more than there are."""
    path = tmp_path / "i.ft"
    build_index(
        [(1, 10, 11, 12, 13, 14), (2, 13, 14)], str(path), options=BuildOptions(tail="on", codec="raw")
    )
    honest = path.read_bytes()
    assert json.loads(take_apart(honest)["meta"].raw())["num_tail_labels"] == 5
    assert Index.open(str(path), engine=engine).lookup([2, 13, 14])[0] >= 0

    def lie(links: list[int]) -> None:
        assert links == [3 << 3]
        links[0] = place << 3

    path.write_bytes(change_words(honest, "tail_links", lie))
    with pytest.raises(IndexFileError):
        Index.open(str(path), engine=engine)
