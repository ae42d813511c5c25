"""Damaged files: flips, cuts, swaps, random mutations give the right answer or exit 3, and nothing else."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from forge import put_together, take_apart
from samples import CODECS, SAMPLES, SMALL, answers_or_none, build_sample

from flashtrie_cli import Index
from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.format.reader import IndexFile
from flashtrie_cli.inspect import verify

SEED = 20261130
MUTATIONS = 10_000
MUTATION_SECONDS = 60


@pytest.fixture(scope="module", params=[(name, codec) for name in SMALL for codec in CODECS], ids="-".join)
def sample(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, bytes, object]:
    """(a place to write to, the whole file, its answers)."""
    path = tmp_path_factory.mktemp("damage") / "index.ft"
    data = build_sample(*request.param, path)
    truth = answers_or_none(path)
    assert truth is not None
    return path, data, truth


def covered(data: bytes) -> set[int]:
    """Positions that some checksum or check covers: all but the padding between sections."""
    parts = take_apart(data)
    table_offset = int.from_bytes(data[-56:-48], "little")
    positions = set(range(64)) | set(range(table_offset, len(data)))
    at = 64
    for part in parts.values():
        at += -at % 64
        positions |= set(range(at, at + len(part.stored)))
        at += len(part.stored)
    return positions


def test_every_byte_flipped(sample: tuple[Path, bytes, object]) -> None:
    path, data, truth = sample
    checked = covered(data)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8) if at % 3 else 0xFF
        path.write_bytes(damaged)
        answers = answers_or_none(path)
        assert answers is None or answers == truth, at
        assert (answers is None) == (at in checked), at


def test_every_cut(sample: tuple[Path, bytes, object]) -> None:
    path, data, _ = sample
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(IndexFileError):
            Index.open(str(path))
    for more in (b"\0", b"\0" * 64, data):
        path.write_bytes(data + more)
        with pytest.raises(IndexFileError):
            Index.open(str(path))


def test_contents_swapped(sample: tuple[Path, bytes, object]) -> None:
    """Two sections have each other's bytes, and the table still says what stood there before."""
    path, data, truth = sample
    parts = take_apart(data)
    assert put_together(parts) == data, "the forge must be able to write the file itself"
    names = list(parts)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            forged = take_apart(data)
            forged[one].stored, forged[other].stored = forged[other].stored, forged[one].stored
            path.write_bytes(put_together(forged))
            answers = answers_or_none(path)
            same = parts[one].stored == parts[other].stored
            assert answers is None or same or is_seen_by_verify(path, other), (one, other)
            forged = take_apart(data)
            forged[one].name, forged[other].name = other, one
            path.write_bytes(put_together(forged))
            answers = answers_or_none(path)
            same = parts[one].raw() == parts[other].raw()
            same = same or one.startswith("label") or is_seen_by_verify(path, other)
            assert answers is None or answers == truth or same, (one, other)


def is_seen_by_verify(path: Path, section: str) -> bool:
    """Tails with other bits may be a sound trie of other keys; then its digest is another."""
    if not section.startswith("tail"):
        return False
    with pytest.raises(IndexFileError):
        verify(Index.open(str(path)))
    return True


def test_random_mutations(tmp_path: Path) -> None:
    """Bytes set, pieces moved, doubled, dropped or zeroed, in any of the samples."""
    source = random.Random(SEED)
    path = tmp_path / "index.ft"
    originals = []
    for name in SAMPLES:
        for codec in CODECS:
            data = build_sample(name, codec, path)
            originals.append((f"{name}-{codec}", data, answers_or_none(path)))
    deadline = time.process_time() + MUTATION_SECONDS
    done = 0
    while done < MUTATIONS and time.process_time() < deadline:
        name, data, truth = source.choice(originals)
        path.write_bytes(mutated(data, source))
        answers = answers_or_none(path)
        assert answers is None or answers == truth, f"seed {SEED}, mutation {done} of {name}"
        done += 1
    print(f"seed {SEED}, {done} mutations")
    assert done == MUTATIONS, f"only {done} of {MUTATIONS} mutations in {MUTATION_SECONDS} s"


def mutated(data: bytes, source: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 5))):
        if not damaged:
            break
        at = source.randrange(len(damaged))
        size = min(source.choice((1, 4, 8, 64, 200)), len(damaged) - at)
        action = source.randrange(6)
        if action == 0:
            damaged[at] = source.randrange(256)
        elif action == 1:
            damaged[at : at + size] = source.randbytes(size)
        elif action == 2:
            del damaged[at : at + size]
        elif action == 3:
            damaged[at:at] = damaged[at : at + size]
        elif action == 4:
            damaged[at : at + size] = bytes(size)
        else:
            to = source.randrange(len(damaged))
            piece = damaged[at : at + size]
            damaged[to : to + size] = piece
    return bytes(damaged)


def test_the_command_line_says_so(flashtrie, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "index.ft"
    data = bytearray(build_sample("ids", "zstd", path))
    data[70] ^= 1
    path.write_bytes(data)
    for arguments in (["dump", path], ["inspect", path, "--verify"], ["lookup", path], ["search", path, "-"]):
        done = flashtrie(*arguments)
        assert done.returncode == 3, done.stderr
        assert done.stdout == b""
        assert done.stderr.startswith(b"flashtrie: " + bytes(path) + b": ")
        assert done.stderr.count(b"\n") == 1


def test_an_index_is_a_file(tmp_path: Path) -> None:
    """A pipe cannot be mapped, and is not empty either."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        for path in (str(pipe), os.devnull):
            with pytest.raises(IndexFileError, match="is a pipe or a device"):
                IndexFile.open(path)
    finally:
        os.close(writer)
