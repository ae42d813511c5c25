"""What queries and keys are called in results: ids that some queries lack, texts that TSV cannot hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from program import Run, assert_one_line

from flashtrie_cli import Index
from flashtrie_cli.query.output import result_writer
from flashtrie_cli.query.plan import SearchPlan

SLOTS = {"tokens": [["old"], ["york"]], "logprobs": [[-1], [-0.5]]}


def lines(*ids: object) -> bytes:
    """A query a line that finds one key; None has no id."""
    rows = [SLOTS if one is None else {"id": one, **SLOTS} for one in ids]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


class TestIds:
    IDS = (None, "b", None, 7)

    def search(self, flashtrie: Run, index: Path, *flags: object) -> bytes:
        done = flashtrie("search", index, "-", "--quiet", *flags, stdin=lines(*self.IDS))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_tsv_counts_where_there_is_none(self, flashtrie: Run, words_index: Path) -> None:
        rows = self.search(flashtrie, words_index).splitlines()
        assert [row.split(b"\t")[0] for row in rows] == [b"0", b"b", b"2", b"7"]

    def test_jsonl_leaves_it_out(self, flashtrie: Run, words_index: Path) -> None:
        rows = [json.loads(row) for row in self.search(flashtrie, words_index, "--json").splitlines()]
        assert [row.get("id", "none") for row in rows] == ["none", "b", "none", 7]

    def test_npz_has_one_for_each_query(self, flashtrie: Run, words_index: Path) -> None:
        found = np.load(io.BytesIO(self.search(flashtrie, words_index, "--format", "npz")))
        assert found["ids"].tolist() == ["", "b", "", "7"]
        assert len(found["hit_offsets"]) == 5

    @pytest.mark.parametrize(
        ("batches", "expected"),
        [
            ([None, ["b", None]], ["", "", "b", ""]),
            ([["b", 7], None], ["b", "7", "", ""]),
            ([None, None], None),
        ],
    )
    def test_npz_where_whole_batches_have_none(
        self, words_index: Path, batches: list[list[object] | None], expected: list[str] | None
    ) -> None:
        index = Index.open(str(words_index), engine="reference")
        tokens, logprobs = np.zeros((2, 1, 1), np.uint32), np.zeros((2, 1, 1), np.float32)
        out = io.BytesIO()
        writer = result_writer("npz", index, out)
        for number, ids in enumerate(batches):
            writer.write(index.engine.search(tokens, logprobs, SearchPlan()), ids, 2 * number)
        writer.finish()
        arrays = np.load(io.BytesIO(out.getvalue()))
        assert (arrays["ids"].tolist() if "ids" in arrays else None) == expected

    def test_an_id_of_thousands_of_digits(self, flashtrie: Run, words_index: Path) -> None:
        line = b'{"id": %s, "tokens": [[1]], "logprobs": [[-1]]}\n' % (b"9" * 5000)
        done = flashtrie("search", words_index, "-", stdin=line)
        assert done.returncode == 2
        assert_one_line(done.stderr, "-:1", "digits")


class TestTextsInTsv:
    @pytest.mark.parametrize("name", ["a\tb", "a\nb", "a\rb"])
    def test_an_id(self, flashtrie: Run, words_index: Path, name: str) -> None:
        done = flashtrie("search", words_index, "-", "--quiet", stdin=lines("plain", name, name))
        assert done.returncode == 0
        assert_one_line(done.stderr, "warning", "TAB or a line break", "--json")
        assert done.stdout.count(name.encode()) == 2

    @pytest.mark.parametrize("mode", ["exact", "prefix"])
    def test_a_line_that_is_looked_up(self, flashtrie: Run, words_index: Path, mode: str) -> None:
        done = flashtrie("lookup", words_index, "-q", "--mode", mode, stdin=b"new\tyork\n")
        assert (done.returncode, done.stdout[:9]) == (0, b"new\tyork\t")
        assert_one_line(done.stderr, "warning", "TAB or a line break")

    def test_nothing_to_warn_of(self, flashtrie: Run, words_index: Path) -> None:
        for ids in ((None,), ("plain", "näme")):
            done = flashtrie("search", words_index, "-", "--quiet", stdin=lines(*ids))
            assert (done.returncode, done.stderr) == (0, b"")

    def test_a_key(self, flashtrie: Run, tmp_path: Path) -> None:
        pytest.importorskip("tokenizers")
        from tokenizers import Tokenizer, models

        vocabulary = {"a": 0, "\n": 1, "\t": 2, "b": 3}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        index = tmp_path / "i.ft"
        built = flashtrie(
            "build", "-", "--input", "jsonl", "--tokenizer", tmp_path / "tokenizer.json", "-o", index,
            stdin=b"[0, 1, 3]\n[3]\n",
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        grid = b'{"tokens": [[0], [1], [3]], "logprobs": [[-1], [-1], [-1]]}\n'
        for command, stdin in ((["dump"], b""), (["lookup", "--mode", "prefix"], b"a\n"), (["search"], grid)):
            name, *flags = command
            done = flashtrie(name, index, *(["-"] if name != "dump" else []), *flags, "--quiet", stdin=stdin)
            assert done.returncode == 0, done.stderr
            assert_one_line(done.stderr, "warning", "TAB or a line break")
            plain = flashtrie(
                name, index, *(["-"] if name != "dump" else []), *flags, "--json", "-q", stdin=stdin
            )
            assert plain.stderr == b""
        assert flashtrie("dump", index, "--ids").stderr == b""
