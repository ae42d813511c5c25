"""The lines that `lookup` and `mask` are asked: any length, any compression, one sentence a fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard
from program import Run, assert_one_line

from flashtrie_cli import Index
from flashtrie_cli.errors import InputError
from flashtrie_cli.query import lookup

BEYOND = "9" * 5000
"""More digits than Python reads."""


def test_nothing_asked_is_nothing_answered(flashtrie: Run, words_index: Path) -> None:
    """A filter before us may let nothing through."""
    for command in (["lookup"], ["search"]):
        done = flashtrie(*command, words_index, "-", "--quiet", stdin=b"")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("squeeze", [gzip.compress, lambda data: zstandard.ZstdCompressor().compress(data)])
def test_compressed_questions(flashtrie: Run, words_index: Path, tmp_path: Path, squeeze) -> None:
    path = tmp_path / "questions"
    path.write_bytes(squeeze(b"\xef\xbb\xbfnew york\r\n\nyork\n"))
    done = flashtrie("lookup", words_index, path, "--quiet")
    assert (done.returncode, done.stdout) == (0, b"new york\t0\n\t-\nyork\t-\n")
    assert flashtrie("lookup", words_index, "--quiet", stdin=path.read_bytes()).stdout == done.stdout
    path.write_bytes(path.read_bytes()[:-9])
    done = flashtrie("lookup", words_index, path, "--quiet")
    assert done.returncode == 2
    assert_one_line(done.stderr, str(path), "truncated")


@pytest.mark.parametrize("ending", ["", "\n"])
def test_batches(words_index: Path, tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "LINES_PER_BATCH", 7)
    monkeypatch.setattr(lookup, "RAW_BLOCK_SIZE", 64)
    asked = [f"new york {'city' * (i % 3)}".strip() for i in range(100)]
    (tmp_path / "asked").write_text("\n".join(asked) + ending)
    index = Index.open(str(words_index))
    batches = list(lookup.read_questions(index, str(tmp_path / "asked")))
    assert [line.decode() for batch in batches for line in batch.lines] == asked
    assert [batch.first for batch in batches] == [
        1 + sum(len(before.lines) for before in batches[:at]) for at in range(len(batches))
    ]
    assert max(len(batch.lines) for batch in batches) == 7
    assert [answer.number for batch in batches for answer in lookup.exact(index, batch)] == list(
        range(1, 101)
    )


def test_a_line_without_an_end(words_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtrie_cli.inputs import lines

    monkeypatch.setattr(lines, "MAX_LINE_SIZE", 1 << 10)
    index = Index.open(str(words_index))
    for lead in (b"", b"new york\n", b"new york\n" * 300_000):
        (tmp_path / "asked").write_bytes(lead + b"x" * (3 << 20))
        with pytest.raises(InputError, match=rf"asked:{lead.count(10) + 1}: a line of more than"):
            list(lookup.read_questions(index, str(tmp_path / "asked")))


def test_what_is_no_text(flashtrie: Run, words_index: Path) -> None:
    """Said as a build says it."""
    done = flashtrie("lookup", words_index, stdin=b"new york\nnew \xffyork\n")
    assert done.returncode == 2
    assert_one_line(done.stderr, "-:2", "not valid UTF-8 (byte 0xff)", "hint")


@pytest.mark.parametrize("number", [BEYOND, "0" * 5000 + "7", "4294967296", "2147483648"])
def test_ids_of_any_length(flashtrie: Run, ids_index: Path, number: str) -> None:
    known = int(number[-20:]) == 7
    done = flashtrie("lookup", ids_index, "--quiet", stdin=f"{number} 8\n".encode())
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"\t-\n") != known


@pytest.mark.parametrize("word", ["-1", "+1", "1_0", "x", "1.0", "²"])
def test_what_is_no_id(flashtrie: Run, ids_index: Path, word: str) -> None:
    done = flashtrie("lookup", ids_index, stdin=f"1\n1 {word}\n".encode())
    assert done.returncode == 2
    assert_one_line(done.stderr, "-:2", "is not a token id")


@pytest.mark.parametrize("word", ["²", "-1", BEYOND])
def test_an_end_of_sequence_that_is_none(flashtrie: Run, words_index: Path, word: str) -> None:
    done = flashtrie("search", words_index, "-", "--eos", word)
    assert done.returncode == 2
    assert_one_line(done.stderr, "--eos", "neither a token id")


@pytest.mark.parametrize("batch", [2, 3, 100])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 6])
def test_limits(
    words_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, limit: int
) -> None:
    """As many answers a line as asked for, wherever the batches of keys are cut."""
    from flashtrie_cli import build_index

    monkeypatch.setattr(lookup, "LINES_PER_BATCH", batch)
    monkeypatch.setattr(lookup, "PREFIXES_PER_BATCH", batch)
    keys = [[1] * length for length in range(1, 6)]
    build_index(keys, str(tmp_path / "i.ft"))
    index = Index.open(str(tmp_path / "i.ft"))
    (tmp_path / "asked").write_text("1 1\n9\n1 1 1 1 1 1\n")
    below, before = [], []
    for questions in lookup.read_questions(index, str(tmp_path / "asked")):
        below += list(lookup.extensions(index, questions, limit))
        before += list(lookup.prefixes(index, questions, limit))
    most = limit or 100

    def keys_of(answers: list[lookup.Answer], number: int) -> list[str | None]:
        return [answer.key for answer in answers if answer.number == number]

    texts = [" ".join(map(str, key)) for key in keys]
    assert keys_of(below, 1) == texts[1:][:most]
    assert keys_of(before, 1) == texts[:2][:most]
    assert keys_of(before, 3) == texts[:most]
    assert keys_of(below, 2) == keys_of(before, 2) == keys_of(below, 3) == [None]
    assert [answer.number for answer in below if answer.is_new] == [1, 2, 3]
    assert [answer.number for answer in before if answer.is_new] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["exact", "prefix", "common-prefix"])
def test_json_counts_lines_from_0(flashtrie: Run, ids_index: Path, mode: str) -> None:
    done = flashtrie("lookup", ids_index, "--mode", mode, "--json", "--quiet", stdin=b"123456\n7 8\n7 8\n")
    numbers = [json.loads(line)["query"] for line in done.stdout.splitlines()]
    assert sorted(set(numbers)) == ([0, 1, 2] if mode == "exact" else [1, 2])
