"""Every option of a command does what it says, seen from outside: none is taken and passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_cases import random_logits
from program import Run

from flashtrie_cli import Index
from flashtrie_cli.query.draft import build_draft_trees

GRID = b'{"tokens": [["new", "old"], ["york"], ["city"]], "logprobs": [[-1, -2], [-0.5], [-0.25]]}\n'
ALL = {"new york": -1.5, "new york city": -1.75, "old york": -2.5}


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ([], ["new york", "new york city", "old york"]),
        (["--steps", "2"], ["new york", "old york"]),
        (["--top-k", "1"], ["new york", "new york city"]),
        (["--results", "2"], ["new york", "new york city"]),
        (["--beam-width", "1"], ["new york"]),
        (["--beam-width", "1", "--results", "9"], ["new york", "new york city"]),
        (["--token-threshold", "-1.5"], ["new york", "new york city"]),
        (["--sequence-threshold", "-1.625"], ["new york"]),
    ],
)
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_search(flashtrie: Run, words_index: Path, flags: list[str], keys: list[str], engine: str) -> None:
    done = flashtrie("search", words_index, "-", "-q", "--alpha", 0, "--engine", engine, *flags, stdin=GRID)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    assert [row[2] for row in rows] == keys
    assert [float(row[4]) for row in rows] == [ALL[key] for key in keys]


def test_search_by_length_and_end(flashtrie: Run, words_index: Path) -> None:
    done = flashtrie("search", words_index, "-", "-q", "--alpha", 2, "--eos", "city", stdin=GRID)
    rows = [line.split("\t")[2:6:2] for line in done.stdout.decode().splitlines()]
    assert rows == [["new york", "-1.75"], ["old york", "-2.75"]]
    normalised = [float(line.split("\t")[5]) for line in done.stdout.decode().splitlines()]
    assert normalised == pytest.approx([-1.75 * (6 / 7) ** 2, -2.75 * (6 / 7) ** 2])


@pytest.mark.parametrize(("mode", "line"), [("prefix", b"new\n"), ("common-prefix", b"new york city\n")])
def test_lookup_limit(flashtrie: Run, words_index: Path, mode: str, line: bytes) -> None:
    whole = flashtrie("lookup", words_index, "-q", "--mode", mode, stdin=line).stdout.splitlines()
    assert len(whole) == 2
    some = flashtrie(
        "lookup", words_index, "-q", "--mode", mode, "--limit", 1, stdin=line
    ).stdout.splitlines()
    assert some == whole[:1]


def built(flashtrie: Run, folder: Path, keys: bytes, *flags: object) -> tuple[bytes, dict[str, Any]]:
    """The dump and the description of an index that the command builds."""
    path = folder / "i.ft"
    done = flashtrie("build", "-", "-q", "--force", "-o", path, *flags, stdin=keys)
    assert done.returncode == 0, done.stderr
    return flashtrie("dump", path).stdout, json.loads(flashtrie("inspect", path, "--json").stdout)


def test_build(flashtrie: Run, tmp_path: Path) -> None:
    values = b"B a\t3\nb a\t1\nB a\t2\n"
    assert built(flashtrie, tmp_path, values, "--values", 2)[0] == b"B a\t3\nb a\t1\n"
    assert built(flashtrie, tmp_path, values, "--values", 2, "--lowercase")[0] == b"b a\t3\n"
    for rule, kept in {
        "first": b"3",
        "last": b"2",
        "min": b"2",
        "max": b"3",
        "sum": b"5",
        "all": b"3 2",
    }.items():
        dumped, _ = built(flashtrie, tmp_path, values, "--values", 2, "--duplicates", rule)
        assert dumped == b"B a\t%s\nb a\t1\n" % kept
    assert (
        built(flashtrie, tmp_path, values, "--values", 2, "--value-type", "float")[0]
        == b"B a\t3.0\nb a\t1.0\n"
    )
    _, raw = built(flashtrie, tmp_path, values, "--values", 2, "--codec", "raw")
    assert {section["codec"] for section in raw["sections"]} == {"raw"}
    keys = b"".join(b"k%d x y z w v\n" % i for i in range(50))
    assert [
        built(flashtrie, tmp_path, keys, "--tail", rule)[1]["format_version"] for rule in ("off", "on")
    ] == [1, 2]
    many = b"".join(b"%d %d\n" % (i * i % 9973, i) for i in range(20_000))
    sizes = [built(flashtrie, tmp_path, many, "--level", level)[1]["file_size"] for level in (1, 22)]
    assert sizes[0] > sizes[1]
    refused = flashtrie("build", "-", "-o", tmp_path / "s.ft", "--sorted", stdin=b"b\na\nb a\n")
    assert (refused.returncode, b"ascending" in refused.stderr) == (2, True)


OPTIONS: list[tuple[list[object], dict[str, Any]]] = [
    ([], {}),
    (["--nodes", 5], {"num_nodes": 5}),
    (["--top-k", 1], {"top_k": 1}),
    (["--first-row", 0], {"first_row": 0}),
    (["--padding", "self", "--top-k", 1], {"padding": "self", "top_k": 1}),
    (["--roots", "{roots}"], {"roots": [5, 7]}),
    (["--base-lengths", "{roots}"], {"base_lengths": [5, 7]}),
    (["--vocab-map", "{map}"], {"vocab_map": np.arange(8)[::-1]}),
    (["--index", "{index}"], {"trie": "{index}"}),
    (["--index", "{index}", "--constraint", "global"], {"trie": "{index}", "scoring": "global"}),
    (["--index", "{index}", "--eos", 7], {"trie": "{index}", "end_token": 7}),
    (["--index", "{index}", "--start-states", "{states}"], {"trie": "{index}", "start_states": [0, 1]}),
]


def test_draft(flashtrie: Run, tmp_path: Path) -> None:
    """Each as the library has it, and unlike what comes without it."""
    logits = random_logits(np.random.default_rng(3), 2, 6, 8)
    files = {name: tmp_path / f"{name}.npy" for name in ("logits", "roots", "map", "states")}
    arrays = (logits, np.array([5, 7]), np.arange(8)[::-1], np.array([0, 1]))
    for path, array in zip(files.values(), arrays, strict=True):
        np.save(path, array)
    index = tmp_path / "i.ft"
    lines = b"".join(b"%d %d %d\n" % (a, b, (a + b) % 8) for a in range(0, 6, 2) for b in range(8))
    assert flashtrie("build", "-", "--input", "ids", "-o", index, stdin=lines).returncode == 0
    trie, seen = Index.open(str(index)), []
    for flags, meant in OPTIONS:
        filled = [str(flag).format(**files, index=index) for flag in flags]
        done = flashtrie("draft", files["logits"], "-o", tmp_path / "t.npz", "-f", "-k", 8, "-n", 12, *filled)
        assert done.returncode == 0, (flags, done.stderr)
        options = {"roots": [0, 0], "base_lengths": [0, 0], "num_nodes": 12, "top_k": 8, **meant}
        if "trie" in options:
            options["trie"] = trie
        wanted = build_draft_trees(logits, **options).arrays()
        with np.load(tmp_path / "t.npz") as found:
            assert sorted(found.files) == sorted(wanted)
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array, err_msg=f"{flags} {name}")
            made = b"".join(found[name].tobytes() for name in sorted(found.files))
        assert made not in seen, flags
        seen.append(made)
