"""Proposal grids in: both formats against plain Python, and one clear line for every bad grid."""

from __future__ import annotations

import gzip
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs.native import native
from flashtrie_cli.inputs.source import ReadStats
from flashtrie_cli.query import proposal_lines
from flashtrie_cli.query.grids import Limits
from flashtrie_cli.query.plan import PADDING
from flashtrie_cli.query.proposals import GridBatch, read_proposals

INF = math.inf


class Words:
    """A vocabulary as the index has one."""

    def ids(self, words: list[str]) -> np.ndarray:
        known = {"a": 0, "b": 1, "c": 2}
        return np.array([known.get(word, 0xFFFFFFFF) for word in words], dtype=np.uint32)


def read(path: Path, **options) -> list[GridBatch]:
    batches = list(read_proposals(str(path), **{"batch_size": 100, **options}))
    first = 0
    for batch in batches:
        assert (batch.tokens.dtype, batch.logprobs.dtype) == (np.uint32, np.float32)
        assert batch.tokens.shape == batch.logprobs.shape
        assert batch.tokens.ndim == 3
        assert min(batch.tokens.shape) >= 1
        assert batch.tokens.flags.c_contiguous
        assert batch.logprobs.flags.c_contiguous
        assert batch.first == first
        assert batch.ids is None or len(batch.ids) == batch.num_queries
        assert not np.isnan(batch.logprobs).any()
        first += batch.num_queries
    return batches


def slots(batches: list[GridBatch]) -> list[list[list[tuple[int, float]]]]:
    """The slots of every query and step that are not empty."""
    return [
        [
            [(t, p) for t, p in zip(row, probs, strict=True) if t != PADDING and p != -INF]
            for row, probs in zip(query, grid, strict=True)
        ]
        for batch in batches
        for query, grid in zip(batch.tokens.tolist(), batch.logprobs.tolist(), strict=True)
    ]


def error_of(path: Path, **options) -> str:
    with pytest.raises(InputError) as caught:
        read(path, **options)
    text = str(caught.value)
    assert text.startswith(f"{path}:")
    assert "\n" not in text
    assert len(text) < 300
    return text.removeprefix(f"{path}:").strip()


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    return path


def random_grid(shape: tuple[int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 50_000, shape), -random.random(shape).astype(np.float32) * 10


class TestArrays:
    @pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
    @pytest.mark.parametrize("float_dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("batch_size", [1, 3, 7, 1000])
    def test_round_trip(self, tmp_path: Path, dtype, float_dtype, batch_size: int) -> None:
        tokens, logprobs = random_grid((7, 3, 5))
        for write in (np.savez, np.savez_compressed):
            write(tmp_path / "x.npz", tokens=tokens.astype(dtype), logprobs=logprobs.astype(float_dtype))
            batches = read(tmp_path / "x.npz", batch_size=batch_size)
            assert all(batch.num_queries <= batch_size for batch in batches)
            assert all(batch.ids is None and batch.num_steps is None for batch in batches)
            assert np.array_equal(np.concatenate([batch.tokens for batch in batches]), tokens.astype(dtype))
            expected = logprobs.astype(float_dtype).astype(np.float32)
            assert np.array_equal(np.concatenate([batch.logprobs for batch in batches]), expected)

    def test_fortran_order(self, tmp_path: Path) -> None:
        tokens, logprobs = random_grid((5, 3, 4))
        path = save(tmp_path / "x.npz", tokens=np.asfortranarray(tokens), logprobs=logprobs)
        assert np.array_equal(np.concatenate([b.tokens for b in read(path, batch_size=2)]), tokens)

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [(["x", "yé"], ["x", "yé"]), ([b"x", b"\xff"], ["x", "\udcff"]), ([7, 1 << 40], [7, 1 << 40])],
    )
    def test_ids(self, tmp_path: Path, ids: list, expected: list) -> None:
        path = save(tmp_path / "x.npz", tokens=[[[1]], [[2]]], logprobs=[[[-1.0]], [[-2.0]]], ids=ids)
        assert [name for batch in read(path, batch_size=1) for name in batch.ids] == expected

    @pytest.mark.parametrize("dtype", [np.int32, np.int64])
    def test_empty_slots(self, tmp_path: Path, dtype) -> None:
        path = save(
            tmp_path / "x.npz", tokens=np.array([[[5, -1, 6]]], dtype), logprobs=[[[-1.0, -1.0, -INF]]]
        )
        assert slots(read(path)) == [[[(5, -1.0)]]]
        assert read(path)[0].tokens[0, 0, 1] == PADDING

    @pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
    def test_tokens_that_no_index_holds_match_nothing(self, tmp_path: Path, dtype) -> None:
        tokens = np.array([[[3, 2**31 - 1, 2**31, 2**32 - 1]]], dtype)
        if dtype != np.uint32:
            tokens[0, 0, 2] = 2**32 + 3  # must not come out as 3
        path = save(tmp_path / "x.npz", tokens=tokens, logprobs=np.full((1, 1, 4), -1.0))
        assert slots(read(path)) == [[[(3, -1.0), (2**31 - 1, -1.0)]]]

    def test_float64_is_rounded(self, tmp_path: Path) -> None:
        path = save(tmp_path / "x.npz", tokens=[[[1, 2]]], logprobs=[[[-0.1, -1e300]]])
        assert slots(read(path)) == [[[(1, float(np.float32(-0.1)))]]]

    @pytest.mark.parametrize("shape", [(3, 0, 4), (3, 2, 0), (3, 0, 0)])
    def test_no_steps_or_slots(self, tmp_path: Path, shape: tuple) -> None:
        path = save(tmp_path / "x.npz", tokens=np.zeros(shape, int), logprobs=np.zeros(shape))
        assert all(slot == [] for query in slots(read(path)) for slot in query)
        assert sum(batch.num_queries for batch in read(path)) == 3

    def test_no_queries(self, tmp_path: Path) -> None:
        path = save(tmp_path / "x.npz", tokens=np.zeros((0, 2, 3), int), logprobs=np.zeros((0, 2, 3)))
        assert read(path) == []

    @pytest.mark.parametrize(
        ("arrays", "message"),
        [
            ({}, "has no array `tokens` (it has none)"),
            ({"tokens": [[[1]]]}, "has no array `logprobs` (it has `tokens`)"),
            ({"tokens": [[[1.0]]], "logprobs": [[[1.0]]]}, "`tokens` is float64, not integers"),
            ({"tokens": [[[True]]], "logprobs": [[[1.0]]]}, "`tokens` is bool, not integers"),
            ({"tokens": [[["a"]]], "logprobs": [[[1.0]]]}, "`tokens` is <U1, not integers"),
            (
                {"tokens": [[[1]]], "logprobs": [[[1]]]},
                "`logprobs` is int64, not float16, float32 or float64",
            ),
            ({"tokens": [[[1]]], "logprobs": [[[1j]]]}, "`logprobs` is complex128"),
            (
                {"tokens": [[1]], "logprobs": [[1.0]]},
                "`tokens` has shape [1, 1], not [queries, steps, slots]",
            ),
            ({"tokens": 1, "logprobs": 1.0}, "`tokens` has shape [], not"),
            (
                {"tokens": [[[1, 2]]], "logprobs": [[[1.0]]]},
                "`logprobs` has shape [1, 1, 1], but `tokens` [1, 1, 2]",
            ),
            (
                {"tokens": [[[1]]], "logprobs": [[[1.0]]], "ids": [1, 2]},
                "`ids` is int64 of shape [2], not 1 strings",
            ),
            ({"tokens": [[[1]]], "logprobs": [[[1.0]]], "ids": [0.5]}, "`ids` is float64 of shape [1]"),
        ],
        ids=range(12),
    )
    def test_bad_arrays(self, tmp_path: Path, arrays: dict, message: str) -> None:
        assert message in error_of(save(tmp_path / "x.npz", **arrays))

    @pytest.mark.parametrize("batch_size", [1, 2, 100])
    @pytest.mark.parametrize(
        ("value", "word"), [(np.nan, "NaN"), (np.inf, "+inf"), (1e300, "+inf, or too large")]
    )
    def test_bad_logprobs(self, tmp_path: Path, value: float, word: str, batch_size: int) -> None:
        tokens, logprobs = random_grid((5, 3, 4))
        grid = logprobs.astype(np.float64)
        grid[3, 2, 1] = value
        path = save(tmp_path / "x.npz", tokens=tokens, logprobs=grid)
        assert f"log-prob of query 3, step 2, slot 1 is {word}" in error_of(path, batch_size=batch_size)
        assert read(path, steps=2, batch_size=batch_size)  # what is not wanted is not judged

    def test_negative_token(self, tmp_path: Path) -> None:
        tokens, logprobs = random_grid((5, 3, 4))
        tokens[4, 1, 2] = -2
        path = save(tmp_path / "x.npz", tokens=tokens, logprobs=logprobs)
        assert "token of query 4, step 1, slot 2 is -2 (only -1" in error_of(path, batch_size=2)

    def test_objects(self, tmp_path: Path) -> None:
        path = save(tmp_path / "x.npz", tokens=np.array([[[object()]]]), logprobs=[[[1.0]]])
        assert "holds Python objects" in error_of(path)

    @pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
    def test_every_cut_is_found(self, tmp_path: Path, write) -> None:
        buffer = io.BytesIO()
        tokens, logprobs = random_grid((4, 2, 3))
        write(buffer, tokens=tokens, logprobs=logprobs)
        path = tmp_path / "cut"
        for size in range(0, len(buffer.getvalue()), 11):
            path.write_bytes(buffer.getvalue()[:size])
            error_of(path)

    def test_is_read_in_slices(self, tmp_path: Path) -> None:
        import tracemalloc

        shape = (1 << 12, 8, 64)
        for write in (np.savez, np.savez_compressed):
            write(tmp_path / "x.npz", tokens=np.zeros(shape, np.int32), logprobs=np.zeros(shape, np.float32))
            tracemalloc.start()
            total = sum(b.num_queries for b in read_proposals(str(tmp_path / "x.npz"), batch_size=64))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert total == shape[0]
            assert peak < 6 << 20  # of 16 MiB


def plain_best(tokens: list[int], logprobs: list[float], top_k: int) -> list[tuple[int, float]]:
    alive = [(t, p) for t, p in zip(tokens, logprobs, strict=True) if t >= 0 and p != -INF]
    order = sorted(range(len(alive)), key=lambda at: -alive[at][1])[:top_k]  # stable: earlier slots win ties
    return [alive[at] for at in sorted(order)]


ROWS = st.lists(
    st.tuples(st.integers(-1, 5), st.sampled_from([-INF, -3.0, -2.0, -1.0, 0.0, 1.0])), max_size=6
)
QUERIES = st.lists(st.lists(ROWS, max_size=4), max_size=6)


@given(QUERIES, st.none() | st.integers(1, 4), st.none() | st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_both_formats_against_plain_python(tmp_path_factory, queries, top_k, steps, batch_size) -> None:
    expected = [
        [plain_best([t for t, _ in row], [p for _, p in row], top_k or 99) for row in query[:steps]]
        for query in queries
    ]
    directory = tmp_path_factory.mktemp("grids")
    options = {"top_k": top_k, "steps": steps, "batch_size": batch_size}

    lines = directory / "grids.jsonl"
    text = [
        {"tokens": [[t for t, _ in r] for r in q], "logprobs": [[p for _, p in r] for r in q]}
        for q in queries
    ]
    lines.write_text("\n".join(map(json.dumps, text)) + "\n")
    found = read(lines, **options)
    lengths = [batch.num_steps for batch in found]
    for batch, length in zip(found, lengths, strict=True):
        wanted = [len(query) for query in expected[batch.first : batch.first + batch.num_queries]]
        assert wanted == ([batch.tokens.shape[1]] * len(wanted) if length is None else length.tolist())
    padded = [
        query + [[]] * (len(got) - len(query)) for query, got in zip(expected, slots(found), strict=True)
    ]
    assert slots(found) == padded

    num_steps = max(map(len, queries), default=1)
    num_slots = max((len(row) for query in queries for row in query), default=1)
    tokens = np.full((len(queries), num_steps, num_slots), -1)
    logprobs = np.zeros(tokens.shape)
    for q, query in enumerate(queries):
        for t, row in enumerate(query):
            for k, (token, logprob) in enumerate(row):
                tokens[q, t, k], logprobs[q, t, k] = token, logprob
    found = read(save(directory / "grids.npz", tokens=tokens, logprobs=logprobs), **options)
    padded = [
        query + [[]] * (len(got) - len(query)) for query, got in zip(expected, slots(found), strict=True)
    ]
    assert slots(found) == padded


class TestLines:
    GOOD = '{"tokens": [[1]], "logprobs": [[-1]]}'

    def write(self, tmp_path: Path, *lines: str | bytes) -> Path:
        path = tmp_path / "grids.jsonl"
        path.write_bytes(
            b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        )
        return path

    def test_names_blank_lines_and_stats(self, tmp_path: Path) -> None:
        named = '{"id": "q", "tokens": [[1, 2], []], "logprobs": [[-1, -2.5], []], "more": 1}\r'
        path = self.write(
            tmp_path, "\ufeff" + self.GOOD, "", named, '{"id": 7, "tokens": [], "logprobs": []}'
        )
        stats = ReadStats()
        (batch,) = read(path, stats=stats)
        assert batch.ids == [None, "q", 7]
        assert batch.num_steps.tolist() == [1, 2, 0]
        assert slots([batch]) == [[[(1, -1.0)], []], [[(1, -1.0), (2, -2.5)], []], [[], []]]
        assert (stats.num_keys_read, stats.num_lines, stats.num_empty_lines_skipped) == (3, 4, 1)
        assert stats.num_bytes_read == path.stat().st_size
        assert read(self.write(tmp_path, self.GOOD))[0].ids is None

    @pytest.mark.parametrize("squeeze", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
    def test_compressed(self, tmp_path: Path, squeeze) -> None:
        path = tmp_path / "x"
        path.write_bytes(squeeze((self.GOOD + "\n").encode() * 1000))
        assert [batch.num_queries for batch in read(path, batch_size=300)] == [300, 300, 300, 100]
        if squeeze is not bytes:
            path.write_bytes(path.read_bytes()[:-5])
            assert "truncated" in error_of(path)

    def test_words(self, tmp_path: Path) -> None:
        path = self.write(
            tmp_path, '{"tokens": [["a", "zebra", "c"], ["b"]], "logprobs": [[-1, -2, -3], [0]]}'
        )
        assert slots(read(path, vocabulary=Words())) == [[[(0, -1.0), (2, -3.0)], [(1, 0.0)]]]
        assert slots(read(path, vocabulary=Words(), top_k=1)) == [[[(0, -1.0)], [(1, 0.0)]]]
        assert "1: token strings, but there is no vocabulary" in error_of(path)

    def test_minus_infinity_and_huge_tokens(self, tmp_path: Path) -> None:
        tokens = [1, 2, 10**30, -1]
        line = f'{{"tokens": [{tokens}], "logprobs": [[-Infinity, -1, -1, -1]]}}'
        path = self.write(tmp_path, line)
        assert slots(read(path)) == [[[(2, -1.0)]]]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not JSON: "),
            (b"\xff", "not valid UTF-8 (byte 0xff)"),
            ("[" * 100_000, "nested too deeply"),
            ("[" + "9" * 5000 + "]", "digits"),
            ("[[1]]", "not an object"),
            ("{}", "`tokens` is missing"),
            ('{"tokens": [[1]]}', "`logprobs` is missing"),
            ('{"tokens": [1], "logprobs": [[1]]}', "`tokens` is not an array of arrays"),
            ('{"tokens": [[1]], "logprobs": 3}', "`logprobs` is not an array of arrays"),
            ('{"tokens": [[1], [2]], "logprobs": [[1]]}', "`tokens` has 2 steps, but `logprobs` 1"),
            ('{"tokens": [[1], [2, 3]], "logprobs": [[1], [2]]}', "step 1 has 2 tokens, but 1 log-probs"),
            ('{"tokens": [[1], [2, "a"]], "logprobs": [[1], [2, 3]]}', "integers here and strings there"),
            ('{"tokens": [[1], [2, 2.0]], "logprobs": [[1], [2, 3]]}', "token of step 1, slot 1 is neither"),
            ('{"tokens": [["a", null]], "logprobs": [[1, 2]]}', "token of step 0, slot 1 is neither"),
            ('{"tokens": [[true]], "logprobs": [[1]]}', "token of step 0, slot 0 is neither"),
            (
                '{"tokens": [[1], [2, -2]], "logprobs": [[1], [2, 3]]}',
                "token of step 1, slot 1 is -2 (only -1",
            ),
            ('{"tokens": [[-1%s]], "logprobs": [[1]]}' % ("0" * 999), "token of step 0, slot 0 is -1000"),
            (
                '{"tokens": [[1], [2, 3]], "logprobs": [[1], [2, null]]}',
                "log-prob of step 1, slot 1 is not a number",
            ),
            ('{"tokens": [[1]], "logprobs": [["-1"]]}', "log-prob of step 0, slot 0 is not a number"),
            ('{"tokens": [[1]], "logprobs": [[false]]}', "log-prob of step 0, slot 0 is not a number"),
            ('{"tokens": [[1]], "logprobs": [[NaN]]}', "log-prob of query 1, step 0, slot 0 is NaN"),
            ('{"tokens": [[1]], "logprobs": [[Infinity]]}', "log-prob of query 1, step 0, slot 0 is +inf"),
            (
                '{"tokens": [[1], [2, 3]], "logprobs": [[1], [2, 1e999]]}',
                "log-prob of query 1, step 1, slot 1 is +inf",
            ),
            (f'{{"tokens": [[1]], "logprobs": [[{10**999}]]}}', "too large for float32"),
            ('{"id": [1], "tokens": [[1]], "logprobs": [[1]]}', "`id` is neither a string nor an integer"),
            ('{"id": true, "tokens": [[1]], "logprobs": [[1]]}', "`id` is neither"),
        ],
        ids=range(26),
    )
    @pytest.mark.parametrize("batch_size", [1, 100])
    def test_bad_lines(self, tmp_path: Path, line: str | bytes, message: str, batch_size: int) -> None:
        found = error_of(self.write(tmp_path, self.GOOD, "", line, self.GOOD), batch_size=batch_size)
        assert found.startswith("3: ")
        assert message in found

    def test_stdin(self) -> None:
        code = (
            "from flashtrie_cli.query.proposals import read_proposals\n"
            "for batch in read_proposals('-', batch_size=2): print(batch.tokens.tolist())"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], input=self.GOOD.encode(), capture_output=True, check=True
        )
        assert run.stdout == b"[[[1]]]\n"


PIECES = [
    "{",
    "}",
    "[",
    "]",
    "[[",
    "]]",
    ",",
    ":",
    '"id"',
    '"tokens"',
    '"logprobs"',
    '"x"',
    "1",
    "-1",
    "0",
    "01",
    "-0",
]
PIECES += [
    "-2",
    "2147483648",
    "9" * 18,
    "9" * 19,
    "-0.5",
    "1.5e2",
    "1e-400",
    "-1e39",
    "1e39",
    "1.",
    ".5",
    "1e",
    "-",
    " ",
]
PIECES += ["null", "true", "NaN", "-Infinity", '"\\u0041"', '"é"', '"\\', "\t"]
NUMBERS = st.sampled_from([-1, 0, 5, 2**31 - 1, 2**31, 2**40]) | st.integers(0, 70_000)
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-40, 0, width=32) | st.integers(-9, 0)


@st.composite
def grid_lines(draw) -> str:
    """Lines of the usual form, most of them then spoilt somewhere."""
    counts = draw(st.lists(st.integers(0, 3), max_size=3))
    members = {
        "tokens": [draw(st.lists(NUMBERS, min_size=n, max_size=n)) for n in counts],
        "logprobs": [draw(st.lists(FLOATS, min_size=n, max_size=n)) for n in counts],
    }
    if draw(st.booleans()):
        members["id"] = draw(st.sampled_from(["q 1", 7, -3, 10**30, "é", "", None, 0.5]))
    names = draw(st.permutations(sorted(members)))
    line = json.dumps({name: members[name] for name in names}, ensure_ascii=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.sampled_from(PIECES)) + line[at + draw(st.integers(0, 3)) :]
    return line


@pytest.mark.skipif(native() is None, reason="the extension is not built")
@given(grid_lines(), st.none() | st.integers(1, 2))
@settings(max_examples=600, deadline=None)
def test_native_lines_equal_python(line: str, steps: int | None) -> None:
    """The native parser gives what Python gives, or leaves the line to it."""
    usual = native().parse_grid_line(np.frombuffer(line.encode() or b" ", np.uint8), steps or 99)
    if usual is None:
        return
    tokens, logprobs, begin, end = usual
    limits = Limits(1, None, steps)
    name, *grid = proposal_lines._parse_any(line.encode(), 0, limits, None)
    assert name == (json.loads(line.encode()[begin:end]) if end else None)
    assert tokens.tolist() == grid[0].tolist()
    assert logprobs.tobytes() == grid[1].tobytes()
    assert (tokens.shape, tokens.dtype, logprobs.dtype) == (grid[0].shape, np.uint32, np.float32)


@pytest.mark.skipif(native() is None, reason="the extension is not built")
@pytest.mark.parametrize(
    "line",
    [
        '{"tokens": [[1, 2], []], "logprobs": [[-1, -2.5e0], []]}',
        ' { "logprobs" : [ [ -0.25 ] ] , "tokens" : [ [ 70000 ] ] , "id" : "a b" } \r',
        '{"id":12,"tokens":[],"logprobs":[]}',
    ],
)
def test_the_usual_lines_are_native(line: str) -> None:
    assert native().parse_grid_line(np.frombuffer(line.encode(), np.uint8), 99) is not None


class TestFiles:
    def test_no_grids(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        path.write_bytes(b"")
        assert error_of(path) == "is empty"
        path.write_bytes(b"1 2 3\n")
        assert "1: not JSON" in error_of(path)
        with open(path, "wb") as file:
            np.save(file, np.arange(3))
        assert "is one array, but a grid needs two" in error_of(path)
        assert "No such file" in error_of(tmp_path / "none")
        assert "Is a directory" in error_of(tmp_path)

    def test_arrays_in_a_pipe(self, tmp_path: Path) -> None:
        path = save(tmp_path / "x.npz", tokens=[[[1]]], logprobs=[[[0.0]]])
        code = (
            "from flashtrie_cli.query.proposals import read_proposals\n"
            "list(read_proposals('-', batch_size=2))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], input=path.read_bytes(), capture_output=True, check=False
        )
        assert b"arrays cannot be read from a pipe" in run.stderr.splitlines()[-1]

    @pytest.mark.parametrize("options", [{"batch_size": 0}, {"top_k": 0}, {"steps": 0}])
    def test_options(self, tmp_path: Path, options: dict) -> None:
        with pytest.raises(UsageError, match="is not at least 1"):
            read_proposals(str(tmp_path / "x"), **{"batch_size": 1, **options})
