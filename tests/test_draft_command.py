"""`flashtrie draft` as a program: files in, files out, and what it says."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_cases import random_logits, vectors
from program import assert_one_line
from test_readme import commands

Run = Callable[..., Any]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The kernel documentation's example."""
    case = next(case for case in vectors() if case.name == "doc_shape_N6")
    np.save(tmp_path / "logits.npy", case.logits[0])
    np.save(tmp_path / "roots.npy", np.array([77]))
    np.save(tmp_path / "base.npy", np.array([10]))
    return tmp_path


def options(folder: Path) -> list[Any]:
    return [
        "--roots",
        folder / "roots.npy",
        "--base-lengths",
        folder / "base.npy",
        "--nodes",
        6,
        "--top-k",
        2,
    ]


DOCUMENT = (Path(__file__).parent.parent / "docs" / "draft_trees.md").read_text("utf-8")


def test_the_document_shows_what_happens(flashtrie: Run, example: Path) -> None:
    """Its commands, on the files of the kernel documentation's example and a trie of two of its tokens."""
    (block,) = re.findall(r"^```console\n(.*?)^```", DOCUMENT, re.M | re.S)
    built = flashtrie("build", "-", "--input", "ids", "-o", example / "titles.ft", stdin=b"1 3\n2\n")
    assert built.returncode == 0, built.stderr
    steps = commands(block)
    assert len(steps) == 4
    for command, shown in steps:
        program, *arguments = shlex.split(command)
        assert program == "flashtrie"
        done = flashtrie(*arguments, cwd=example)
        assert (done.returncode, done.stdout.decode()) == (0, shown), done.stderr


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_build_and_show(flashtrie: Run, example: Path, engine: str) -> None:
    out = example / "tree.npz"
    done = flashtrie("draft", example / "logits.npy", "-o", out, *options(example), "--engine", engine)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert b"6 nodes" in done.stderr
    with np.load(out) as made:
        assert made["node_token_ids"].tolist() == [[77, 1, 2, 3, 3, 5]]
        assert made["packed_ancestor_mask"].shape == (1, 6, 1)
        assert len(made.files) == 12
    shown = flashtrie("draft", "--show", out)
    assert shown.stdout.decode().splitlines() == [
        "row 0: 6 of 6 nodes, base length 10, expected accepted 1.740",
        "77  p 1  [0]",
        "├─ 1  p 0.5  [1]",
        "│  └─ 3  p 0.35  [3]",
        "│     └─ 5  p 0.21  [5]",
        "└─ 2  p 0.4  [2]",
        "   └─ 3  p 0.28  [4]",
    ]
    described = json.loads(flashtrie("draft", "--show", out, "--json").stdout)
    assert described["trees"][0]["nodes"][5] == {
        "node": 5,
        "token": 5,
        "parent": 3,
        "depth": 3,
        "score": pytest.approx(-1.5606477),
        "probability": pytest.approx(0.21),
    }


def test_same_bytes_twice_and_stdout(flashtrie: Run, example: Path) -> None:
    first, second = (
        flashtrie("draft", example / "logits.npy", "-o", "-", *options(example), "-q").stdout
        for _ in range(2)
    )
    assert first == second
    assert first[:2] == b"PK"


def test_json_report(flashtrie: Run, example: Path) -> None:
    done = flashtrie("draft", example / "logits.npy", "-o", example / "t.npz", *options(example), "--json")
    made = json.loads(done.stdout)
    assert made["schema"] == "flashtrie.draft/1"
    assert (made["num_trees"], made["num_nodes"], made["num_truncated"]) == (1, 6, 1)
    assert made["expected_accepted"] == pytest.approx(1.74)


@pytest.mark.parametrize(
    ("name", "array"),
    [("sglang", "retrieve_next_token"), ("tensorrt-llm", "tree_valid"), ("flashinfer", "packed_custom_mask")],
)
def test_formats(flashtrie: Run, example: Path, name: str, array: str) -> None:
    out = example / "made.npz"
    done = flashtrie("draft", example / "logits.npy", "-o", out, *options(example), "--format", name)
    assert done.returncode == 0, done.stderr
    with np.load(out) as made:
        assert array in made.files
    refused = flashtrie("draft", "--show", out)
    assert refused.returncode == 2
    assert b"only --format arrays" in refused.stderr


def test_bfloat16_bits(flashtrie: Run, example: Path) -> None:
    logits = random_logits(np.random.default_rng(0), 2, 4, 30)
    np.save(example / "bits.npy", (logits.view(np.uint32) >> 16).astype(np.uint16))
    out = example / "bits.npz"
    assert flashtrie("draft", example / "bits.npy", "-o", out).returncode == 2
    done = flashtrie("draft", example / "bits.npy", "-o", out, "--logit-type", "bfloat16")
    assert done.returncode == 0, done.stderr


def test_held_to_an_index(flashtrie: Run, words_index: Path, tmp_path: Path) -> None:
    """Words of the index, text in the drawing: city, new, old, york are 0 to 3."""
    logits = np.zeros((1, 5, 4), np.float32)
    logits[0, 1] = (9, 1, 0, 0)  # "city" begins no key
    np.save(tmp_path / "logits.npy", logits)
    out = tmp_path / "tree.npz"
    arguments = ["--index", words_index, "--constraint", "renorm", "--top-k", 4, "--nodes", 9]
    done = flashtrie("draft", tmp_path / "logits.npy", "-o", out, *arguments)
    assert done.returncode == 0, done.stderr
    shown = flashtrie("draft", "--show", out, "--index", words_index).stdout.decode().splitlines()
    assert shown[2:] == [
        "├─ 1 'new'  p 0.7311  [1]",
        "│  └─ 3 'york'  p 0.7311  [2]",
        "│     └─ 0 'city'  p 0.7311  [3]",
        "└─ 2 'old'  p 0.2689  [4]",
        "   └─ 3 'york'  p 0.2689  [5]",
    ]
    with np.load(out) as made:
        assert made["node_states"].dtype == np.uint32


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_held_to_token_masks(flashtrie: Run, tmp_path: Path, engine: str) -> None:
    """Either kind of index; with a vocabulary map, the drafter's ids 0 to 3 are other tokens than 0 to 3."""
    pytest.importorskip("flashtrie_cli._native")
    from flashtrie_cli.query.token_masks import TokenMasks
    from flashtrie_cli.trie.token_bytes import NORMAL, SPECIAL, TokenBytes

    texts = ["o", "n", "off", "on", "of", "f"]
    vocabulary = TokenBytes.from_tokens([(SPECIAL, b"</s>"), *((NORMAL, text.encode()) for text in texts)])
    TokenMasks.from_strings(["on", "off"], vocabulary, eos=[0]).save(str(tmp_path / "masks.ft"))
    logits = np.log([[1, 1, 1, 1, 1], [6, 2, 1, 1, 5], [1, 1, 1, 1, 1]]).astype(np.float32)
    np.save(tmp_path / "logits.npy", logits)
    np.save(tmp_path / "map.npy", np.array([6, 4, 3, 0, 5]))  # f, on, off, </s>, of
    out = tmp_path / "tree.npz"
    arguments = [
        "--index",
        tmp_path / "masks.ft",
        "--vocab-map",
        tmp_path / "map.npy",
        "-k",
        3,
        "--engine",
        engine,
    ]
    done = flashtrie("draft", tmp_path / "logits.npy", "-o", out, "--nodes", 7, *arguments)
    assert done.returncode == 0, done.stderr
    shown = flashtrie("draft", "--show", out, "--index", tmp_path / "masks.ft").stdout.decode().splitlines()
    assert shown[2:] == [
        "├─ 5 'of'  p 0.625  [1]",
        "│  └─ 6 'f'  p 0.625  [2]",
        "├─ 4 'on'  p 0.25  [3]",
        "│  └─ 0 '</s>'  p 0.25  [4]",
        "└─ 3 'off'  p 0.125  [5]",
        "   └─ 0 '</s>'  p 0.125  [6]",
    ]
    refused = flashtrie("draft", tmp_path / "logits.npy", "-o", out, "--force", *arguments, "--eos", 0)
    assert refused.returncode == 2
    assert b"their own end-of-sequence ids" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "either LOGITS or --show"),
        (["{dir}/logits.npy"], 2, "the trees need a name"),
        (["{dir}/none.npy", "-o", "-"], 2, "none.npy"),
        (["{dir}/text.npy", "-o", "-"], 2, "is not a .npy array"),
        (["{dir}/logits.npy", "-o", "-", "--roots", "{dir}/logits.npy"], 2, "not 1 integers"),
        (["{dir}/logits.npy", "-o", "-", "--top-k", "9"], 2, "top-k 9"),
        (["{dir}/logits.npy", "-o", "-", "--format", "x"], 2, "format 'x'"),
        (["{dir}/logits.npy", "-o", "-", "--eos", "3"], 2, "need --index"),
        (["{dir}/logits.npy", "-o", "-", "--index", "{dir}/none.ft"], 3, "none.ft"),
        (["{dir}/logits.npy", "-o", "-", "--json"], 2, "both write to stdout"),
        (["{dir}/logits.npy", "-o", "-", "--constraint", "global"], 2, "need --index"),
        (["{dir}/logits.npy", "-o", "-", "--index", "x", "--constraint", "y"], 2, "constraint 'y'"),
        (["{dir}/cut.npy", "-o", "-"], 2, "cut short or damaged"),
        (["{dir}/squeezed.npy", "-o", "-"], 2, "is compressed"),
        (
            ["{dir}/logits.npy", "-o", "-", "--roots", "{dir}/cut.npy"],
            2,
            "cut.npy: is a .npy array that is cut short",
        ),
        (["--show", "{dir}/none.npz", "-o", "x"], 2, "not into --output"),
        (["--show", "{dir}/none.npz"], 2, "cannot be read: No such file"),
        (["--show", "{dir}/text.npy"], 2, "not an .npz"),
        (["{dir}/logits.npy", "-o", "{dir}/roots.npy", "-k", "2"], 2, "--force"),
    ],
)
def test_errors_are_one_line(
    flashtrie: Run, example: Path, arguments: list[str], code: int, message: str
) -> None:
    (example / "text.npy").write_text("no array\n")
    whole = (example / "logits.npy").read_bytes()
    (example / "cut.npy").write_bytes(whole[:-1])
    (example / "squeezed.npy").write_bytes(gzip.compress(whole))
    done = flashtrie("draft", *(argument.format(dir=example) for argument in arguments))
    assert done.returncode == code, done.stderr
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_bad_rows_are_warned_of(flashtrie: Run, example: Path) -> None:
    logits = np.zeros((1, 3, 4), np.float32)
    logits[0, 1, 2] = np.nan
    np.save(example / "nan.npy", logits)
    done = flashtrie("draft", example / "nan.npy", "-o", example / "nan.npz", "-q", "-k", 2)
    assert done.returncode == 0
    assert b"warning: 1 of 1 rows hold NaN" in done.stderr


@pytest.mark.parametrize(
    ("option", "array", "says"),
    [
        ("--roots", np.array([1 << 31]), "int32"),
        ("--base-lengths", np.array([-1]), "lengths that are not between"),
        ("--vocab-map", np.arange(3), "shape [3]"),
        ("--vocab-map", -np.arange(8), "negative"),
        ("--vocab-map", np.zeros(8, np.float32), "float32"),
        ("--vocab-map", np.zeros(8, np.int32), "two of the drafter"),
        ("--start-states", np.array([99]), "not nodes of the trie"),
    ],
)
def test_errors_name_the_file_at_fault(
    flashtrie: Run, words_index: Path, tmp_path: Path, option: str, array: np.ndarray, says: str
) -> None:
    """Not the logits, whatever is wrong beside them."""
    np.save(tmp_path / "logits.npy", random_logits(np.random.default_rng(0), 1, 4, 8))
    np.save(tmp_path / "other.npy", array)
    done = flashtrie(
        "draft", tmp_path / "logits.npy", "-o", tmp_path / "tree.npz", "--index", words_index, "--top-k", 2,
        option, tmp_path / "other.npy",
    )  # fmt: skip
    assert done.returncode == 2
    assert_one_line(done.stderr, "other.npy: ", says)
    assert not (tmp_path / "tree.npz").exists()


def test_logits_in_another_byte_order(flashtrie: Run, tmp_path: Path) -> None:
    logits = random_logits(np.random.default_rng(0), 2, 4, 8)
    made = []
    for dtype in ("<f4", ">f4"):
        np.save(tmp_path / "logits.npy", logits.astype(dtype))
        done = flashtrie("draft", tmp_path / "logits.npy", "-o", "-", "--top-k", 2, "--quiet")
        assert done.returncode == 0, done.stderr
        made.append(done.stdout)
    assert made[0] == made[1]


def test_trees_through_a_pipe(flashtrie: Run, example: Path) -> None:
    made = flashtrie("draft", example / "logits.npy", "-o", "-", "--quiet", *options(example))
    assert made.returncode == 0, made.stderr
    (example / "tree.npz").write_bytes(made.stdout)
    shown = flashtrie("draft", "--show", "-", stdin=made.stdout)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == flashtrie("draft", "--show", example / "tree.npz").stdout


def test_what_is_shown_must_be_trees(flashtrie: Run, example: Path) -> None:
    done = flashtrie("draft", "--show", example / "logits.npy")
    assert done.returncode == 2
    assert_one_line(done.stderr, "logits.npy", "is not an .npz of draft trees")


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("node_scores", np.full((1, 6), 1000.0), "make no trees"),
        ("node_scores", np.full((1, 6), np.nan), "make no trees"),
        ("node_scores", np.zeros((1, 6), int), "lacks node_scores"),
        ("node_token_ids", np.full((1, 6), "x"), "lacks node_token_ids"),
        ("parent_ids", np.full((1, 6), 5), "make no trees"),
        ("parent_ids", np.zeros((1, 5), int), "lacks"),
        ("valid_counts", np.array([7]), "make no trees"),
    ],
)
def test_arrays_that_are_no_trees(
    flashtrie: Run, example: Path, name: str, array: np.ndarray, says: str
) -> None:
    made = flashtrie("draft", example / "logits.npy", "-o", example / "tree.npz", "-q", *options(example))
    assert made.returncode == 0, made.stderr
    with np.load(example / "tree.npz") as trees:
        np.savez(example / "lie.npz", **{**trees, name: array})
    done = flashtrie("draft", "--show", example / "lie.npz")
    assert done.returncode == 2
    assert_one_line(done.stderr, "lie.npz", says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tree-mask", "full"], "goes with --format sglang"),
        (["--tree-mask", "full", "--format", "flashinfer"], "not flashinfer"),
        (["--logit-type", "float8"], "float8"),
        (["--logit-type", "float32"], "float32"),
    ],
)
def test_options_that_would_be_passed_over(
    flashtrie: Run, example: Path, flags: list[str], says: str
) -> None:
    done = flashtrie("draft", example / "logits.npy", "-o", example / "tree.npz", *options(example), *flags)
    assert done.returncode == 2
    assert_one_line(done.stderr, says)
