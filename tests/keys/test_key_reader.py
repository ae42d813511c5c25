"""Files in, batches out: compression, block edges, counts, and one clear line for every bad input."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import os
import random
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs import lines as lines_module
from flashtrie_cli.inputs import source as source_module
from flashtrie_cli.inputs.lines import line_blocks
from flashtrie_cli.keys import reader as reader_module
from flashtrie_cli.keys.reader import KeyReader, lowered
from flashtrie_cli.keys.vocabulary import WordVocabulary


def read(paths: list, kind: str = "ids", **options) -> tuple[list[list[int]], list | None, list[int]]:
    """Keys, values and lines of all batches together."""
    keys, values, numbers = [], [], []
    for batch in KeyReader([str(path) for path in paths], kind=kind, **options):
        assert batch.tokens.dtype == np.uint32
        assert batch.offsets.dtype == np.int64
        assert batch.offsets[0] == 0
        assert batch.offsets[-1] == len(batch.tokens)
        assert len(batch.lines) == batch.num_keys
        keys += [batch.tokens[a:b].tolist() for a, b in pairwise(batch.offsets)]
        values += batch.values.tolist() if batch.values is not None else []
        numbers += batch.lines.tolist()
    return keys, values or None, numbers


def words_of(path, **options) -> list[list[bytes]]:
    vocabulary = WordVocabulary()
    keys, _, _ = read([path], "text", tokenizer=vocabulary, **options)
    new_ids, text, offsets = vocabulary.sorted()
    return [[text[offsets[new_ids[t]] : offsets[new_ids[t] + 1]].tobytes() for t in key] for key in keys]


def error_of(*arguments, **options) -> str:
    with pytest.raises((InputError, UsageError)) as caught:
        read(*arguments, **options)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def outcome_of(path) -> list | str:
    try:
        return read([path])[0]
    except InputError as error:
        return str(error)


TEXT = b"".join(b"%d %d\n" % (n, n * 7919 % 1_000_003) for n in range(50_000))


def squeeze(text: bytes, form: str) -> bytes:
    frames = [text[: len(text) // 3], text[len(text) // 3 :]]
    if form == "gz":
        return gzip.compress(text)
    if form == "gz parts":
        return b"".join(map(gzip.compress, frames)) + b"\0" * 512
    if form == "zst":
        return zstandard.ZstdCompressor().compress(text)
    if form == "zst without size":
        squeezer = zstandard.ZstdCompressor(write_content_size=False, write_checksum=True).compressobj()
        return squeezer.compress(text) + squeezer.flush()
    if form == "zst parts":
        skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00junk"
        return skippable + b"".join(
            zstandard.ZstdCompressor().compress(frame) + skippable for frame in frames
        )
    return text


FORMS = ["plain", "gz", "gz parts", "zst", "zst without size", "zst parts"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_compression_by_content(tmp_path: Path, form: str, threads: int) -> None:
    path = tmp_path / "keys"
    path.write_bytes(squeeze(TEXT, form))
    reader = KeyReader([str(path)], kind="ids", threads=threads, block_size=10_000)
    batches = list(reader)
    assert len(batches) > 3
    tokens = np.concatenate([batch.tokens for batch in batches])
    assert tokens.tolist() == [int(word) for word in TEXT.split()]
    assert np.concatenate([batch.lines for batch in batches]).tolist() == list(range(1, 50_001))
    assert reader.stats.num_text_bytes == len(TEXT)
    assert reader.stats.num_bytes_read == path.stat().st_size == reader.total_size
    assert (reader.stats.num_keys_read, reader.stats.num_lines) == (50_000, 50_000)
    assert reader.source_digest == hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest()


@pytest.mark.parametrize("form", FORMS)
def test_one_byte_reads(tmp_path: Path, form: str, monkeypatch) -> None:
    """Input that comes in single bytes, as from a slow pipe, gives the same keys."""
    path = tmp_path / "keys"
    text = TEXT[:2000]
    path.write_bytes(squeeze(text, form))
    monkeypatch.setattr(source_module, "RAW_BLOCK_SIZE", 1)
    monkeypatch.setattr(source_module, "ZSTD_PIECE_SIZE", 1)
    expected = [[int(word) for word in line.split()] for line in text.splitlines()]
    assert read([path], block_size=1)[0] == expected


@pytest.mark.parametrize("form", FORMS[1:])
def test_truncated(tmp_path: Path, form: str) -> None:
    """Every cut is found, unless it leaves whole frames or members."""
    text = TEXT[:3000]
    whole = squeeze(text, form)
    path = tmp_path / "cut"
    whole_parts = {0, len(text[: len(text) // 3].splitlines()), len(text.splitlines())}
    for size in sorted({*range(7, 40), *range(40, len(whole) - 1, 37), len(whole) - 1}):
        path.write_bytes(whole[:size])
        outcome = outcome_of(path)
        if isinstance(outcome, str):
            assert outcome.startswith(f"{path}: "), outcome
            assert "truncated" in outcome or "parts" in form, outcome
        else:
            assert "parts" in form
            assert len(outcome) in whole_parts


@pytest.mark.parametrize("form", ["gz", "zst without size"])
def test_corrupt(tmp_path: Path, form: str) -> None:
    whole = bytearray(squeeze(TEXT, form))
    whole[len(whole) // 2] ^= 0x55
    path = tmp_path / "bad"
    path.write_bytes(whole)
    assert f"{path}: corrupt {form[:2]}" in error_of([path]).replace("corrupt zstd", "corrupt zs").replace(
        "gzip", "gz"
    )


def test_garbage_behind_a_member(tmp_path: Path) -> None:
    path = tmp_path / "bad.gz"
    path.write_bytes(gzip.compress(b"1\n") + b"garbage")
    assert "corrupt gzip data" in error_of([path])
    path.write_bytes(zstandard.ZstdCompressor().compress(b"1\n") + b"garbage")
    assert "corrupt zstd data" in error_of([path])


@given(
    st.lists(
        st.sampled_from([b"1", b"22 3", b"", b" ", b"\r", b"\xef\xbb\xbf", b"123456789 5"]), max_size=12
    ),
    st.sampled_from([b"\n", b"\r\n"]),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
    st.integers(1, 20),
)
@settings(max_examples=300, deadline=None)
def test_blocks_are_the_lines(pieces: list[bytes], end: bytes, cuts: list[int], block_size: int) -> None:
    text = end.join(pieces)
    chunks, at = [], 0
    while at < len(text):
        size = cuts[len(chunks) % len(cuts)]
        chunks.append(text[at : at + size])
        at += size
    blocks = list(line_blocks(chunks, "x", block_size, num_lines=int))
    assert b"".join(blocks) == text.removeprefix(b"\xef\xbb\xbf")
    assert all(block.endswith(b"\n") for block in blocks[:-1])
    assert all(blocks)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 13, 100])
def test_block_size_changes_nothing(tmp_path: Path, block_size: int) -> None:
    path = tmp_path / "keys"
    path.write_bytes("\ufeffa b\tx\r\n\r\nç\u3000d\t0\n\nlast e\t3\n".encode())
    assert words_of(path, block_size=block_size) == words_of(path)
    text = b"1 2\t5\n\n3\t7\n4\t1.5\n5\t2\n"
    path.write_bytes(text)
    keys, values, numbers = read([path], values_column=2, block_size=block_size)
    assert (keys, values, numbers) == ([[1, 2], [3], [4], [5]], [5, 7, 1.5, 2], [1, 3, 4, 5])
    path.write_bytes(text + b"oops\t1\n")
    assert f"{path}:6: 'oops'" in error_of([path], values_column=2, block_size=block_size)


def test_values_turn_float_once_and_stay(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1\t5\n2\t6\n3\t0.5\n")
    second.write_text("4\t7\n")
    kinds = [
        batch.values.dtype.kind
        for batch in KeyReader([str(first), str(second)], kind="ids", values_column=2, block_size=1)
    ]
    assert kinds == ["u", "u", "f", "f"]


class TestText:
    def test_line_ends_bom_and_blank_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.txt"
        path.write_bytes("\ufeffnew york\r\n\r\n \t \n\u3000\nnul\0 here\nno newline".encode())
        vocabulary = WordVocabulary()
        reader = KeyReader([str(path)], kind="text", tokenizer=vocabulary)
        (batch,) = reader
        assert batch.lines.tolist() == [1, 5, 6]
        assert reader.stats.num_empty_lines_skipped == 3
        assert words_of(path) == [[b"new", b"york"], [b"nul\0", b"here"], [b"no", b"newline"]]

    def test_bom_of_every_file(self, tmp_path: Path) -> None:
        paths = [tmp_path / "a", tmp_path / "b"]
        for path in paths:
            path.write_bytes(b"\xef\xbb\xbf1\n")
        assert read(paths)[0] == [[1], [1]]

    def test_no_keys(self, tmp_path: Path) -> None:
        path = tmp_path / "empty"
        for content in (b"", b"\n", b"\n\n  \n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"):
            path.write_bytes(content)
            assert read([path])[0] == []
            assert words_of(path) == []
        path.write_bytes(gzip.compress(b""))
        assert read([path])[0] == []

    def test_a_line_of_a_megabyte(self, tmp_path: Path) -> None:
        path = tmp_path / "long"
        path.write_bytes(b"a\n" + b"x" * (3 << 20) + b" y\n" + b"z\n")
        assert [len(key) for key in words_of(path, block_size=1 << 16)] == [1, 2, 1]
        path.write_bytes(b"7\n" + b"1 " * (1 << 19) + b"\n")
        assert f"{path}:2: a key of more than 65535 tokens" in error_of([path])

    def test_a_line_without_end(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(lines_module, "MAX_LINE_SIZE", 1 << 20)
        path = tmp_path / "endless"
        path.write_bytes(b"1\n" + b"1" * (5 << 20))
        for threads in (1, 2):
            for lead in (b"", b"1\n", b"1\n" * 300_000):
                path.write_bytes(lead + b"1" * (5 << 20))
                place = f"{path}:{lead.count(10) + 1}: a line of more than 1 MiB"
                assert place in error_of([path], block_size=1 << 16, threads=threads)

    @pytest.mark.parametrize("lowercase", [False, True])
    @pytest.mark.parametrize("threads", [1, 2])
    def test_invalid_utf8(self, tmp_path: Path, lowercase: bool, threads: int) -> None:
        path = tmp_path / "latin1.txt"
        path.write_bytes(b"ok\n\ncaf\xe9 noir\n")
        options = {"kind": "text", "tokenizer": WordVocabulary(), "lowercase": lowercase, "threads": threads}
        message = error_of([path], **options)
        assert f"{path}:3: not valid UTF-8 (byte 0xe9)" in message
        assert "iconv" in message

    def test_utf16_and_arrays_and_foreign_compression(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes("a b\n".encode("utf-16"))
        assert f"{path}:1: not valid UTF-8" in error_of([path], kind="text", tokenizer=WordVocabulary())
        np.savez(tmp_path / "x.npz", tokens=np.arange(3))
        assert "--input npz" in error_of([tmp_path / "x.npz"])
        path.write_bytes(b"\xfd7zXZ\x00....")
        assert "compressed with xz" in error_of([path])
        path.write_bytes(bz2.compress(b"1\n"))
        assert "compressed with bzip2" in error_of([path])
        path.write_bytes(b"BZhang wei\n")
        assert words_of(path) == [[b"BZhang", b"wei"]]

    @given(st.text(alphabet=st.characters(codec="utf-8"), max_size=30))
    @settings(max_examples=300, deadline=None)
    def test_lowercase_is_str_lower(self, text: str) -> None:
        assert lowered(text.encode()) == text.lower().encode()

    def test_lowercase_leaves_invalid_bytes(self) -> None:
        assert lowered(b"A\xff\xed\xa0\x80\xc3B\xc3\x89") == b"a\xff\xed\xa0\x80\xc3b\xc3\xa9"

    def test_lowercase_of_a_line_is_that_of_its_words(self, tmp_path: Path) -> None:
        """A sigma at a word's end has its own lower case, whatever stands on the next line."""
        path = tmp_path / "x"
        path.write_text("ΟΔΟΣ ΑΣ\nΣΑ İx\n", encoding="utf-8")
        expected = [
            [w.lower().encode() for w in line.split()] for line in path.read_text("utf-8").splitlines()
        ]
        assert words_of(path, lowercase=True) == expected


class TestErrors:
    def test_missing_directory_and_no_permission(self, tmp_path: Path) -> None:
        assert "No such file" in error_of([tmp_path / "none"])
        assert "Is a directory" in error_of([tmp_path])
        assert "No such file" in error_of([tmp_path / "none"], kind="npz")
        assert "Is a directory" in error_of([tmp_path], kind="npz")
        path = tmp_path / "secret"
        path.write_text("1\n")
        path.chmod(0)
        if not os.access(path, os.R_OK):
            assert "Permission denied" in error_of([path])
        path.chmod(stat.S_IRUSR | stat.S_IWUSR)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_names_file_and_line(self, tmp_path: Path, threads: int) -> None:
        good, bad = tmp_path / "good", tmp_path / "bad"
        good.write_text("1\n")
        bad.write_text("1 2\n\n3 four 5\n")
        message = error_of([good, bad], threads=threads, block_size=2)
        assert message.startswith(f"{bad}:3: 'four' is not a token id")

    def test_offending_text_is_cut_and_escaped(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"\x1b[31m\xff" + b"y" * 10_000)
        message = error_of([path])
        assert len(message) < 300
        assert "\x1b" not in message
        assert "…" in message

    def test_options(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        assert "needs a tokenizer" in error_of([path], kind="text")
        assert "columns are counted from 1" in error_of([path], values_column=0)
        assert "says its values itself" in error_of([path], kind="jsonl", values_column=1)
        for kind in ("ids", "npz"):
            assert "has ids already" in error_of([path], kind=kind, tokenizer=WordVocabulary())
        assert "--lowercase" in error_of([path], lowercase=True)
        assert "once only" in error_of(["-", "-"])
        assert "'csv'" in error_of([path], kind="csv")

    def test_bad_values(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_text("1\t5\n2\tlots\n")
        assert f"{path}:2: value 'lots' in column 2 is neither" in error_of([path], values_column=2)
        path.write_text("1\t5\n2\n")
        assert f"{path}:2: 1 TAB separated column(s), but --values 2" in error_of([path], values_column=2)
        path.write_text(f"1\t{1 << 64}\n")
        assert f"{path}:1: value '{1 << 64}' in column 2 is above" in error_of([path], values_column=2)


def test_reads_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with subprocess.Popen([sys.executable, "-c", f"open({str(path)!r}, 'w').write('1 2\\n' * 100000)"]):
        reader = KeyReader([str(path)], kind="ids", threads=2)
        assert reader.total_size is None
        assert sum(batch.num_keys for batch in reader) == 100_000


def test_stdin() -> None:
    code = (
        "from flashtrie_cli.keys.reader import KeyReader\n"
        "for batch in KeyReader(['-'], kind='ids', threads=2): print(batch.source, batch.tokens.tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], input=b"5 6\n7", capture_output=True, check=True)
    assert run.stdout == b"- [5, 6, 7]\n"


def test_stopping_early_ends_the_reading_thread(tmp_path: Path) -> None:
    import threading

    path = tmp_path / "keys"
    path.write_bytes(TEXT * 20)
    before = set(threading.enumerate())

    def still_reading() -> list[threading.Thread]:
        threads = [thread for thread in threading.enumerate() if thread not in before]
        for thread in threads:
            thread.join(5)
        return [thread for thread in threads if thread.is_alive()]

    batches = iter(KeyReader([str(path)], kind="ids", threads=2, block_size=1000))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert still_reading() == []


def test_same_batches_without_the_extension(tmp_path: Path, monkeypatch) -> None:
    pieces = ["1", "22", " ", "\t", "\n", "\r\n", "4294967", "2147483647"]
    path = tmp_path / "keys"
    path.write_text("".join(random.Random(1).choices(pieces, k=4000)).replace("22147483647", "2"))
    text = path.read_text()
    path.write_text("\n".join(" ".join(w[:9] for w in line.split()) for line in text.split("\n")))
    expected, words = read([path]), words_of(path)
    monkeypatch.setattr(reader_module, "native", lambda: None)
    monkeypatch.setattr("flashtrie_cli.keys.vocabulary.native", lambda: None)
    assert read([path]) == expected
    assert words_of(path) == words
