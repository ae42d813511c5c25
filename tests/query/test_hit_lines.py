"""Hits as TSV lines: the extension against plain Python, byte by byte."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program import whole_app
from typer.testing import CliRunner

from flashtrie_cli import Index, build_index
from flashtrie_cli.engine import cpu
from flashtrie_cli.engine.cpu_text import hit_lines
from flashtrie_cli.query.output import TsvWriter, query_names
from flashtrie_cli.query.results import SearchResults

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="the extension is not built")


def results_of(scores: Any, hits: int = 3) -> SearchResults:
    """Hits in queries of ``hits``, with these scores, each key of one to four tokens."""
    scores = np.asarray(scores, np.float32)
    rng = np.random.default_rng(len(scores))
    lengths = rng.integers(1, 5, len(scores))
    offsets = np.unique(np.r_[np.arange(0, len(scores), hits), len(scores)]).astype(np.int64)
    return SearchResults(
        np.r_[offsets, offsets[-1]],  # the last query has none
        rng.integers(0, 1 << 32, len(scores), dtype=np.uint32), scores, scores[::-1].copy(),
        np.r_[0, np.cumsum(lengths)].astype(np.int64), rng.integers(0, 1 << 31, lengths.sum(), dtype=np.uint32),
    )  # fmt: skip


def both(index: Index, results: SearchResults, ids: list[Any] | None, first: int) -> tuple[bytes, bytes]:
    out = io.BytesIO()
    writer = TsvWriter(index, out)
    writer.write(results, ids, first)
    return out.getvalue(), writer.plain_lines(results, query_names(ids, first), first)


@pytest.fixture(scope="module")
def tokens_index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    path = str(tmp_path_factory.mktemp("lines") / "tokens.ft")
    build_index([(1, 2), (3,)], path)
    return Index.open(path, engine="cpu", threads=3)


@given(st.lists(st.integers(0, 0xFFFF_FFFF), min_size=1, max_size=40), st.integers(0, 1 << 40))
def test_any_float_as_numpy_writes_it(tokens_index: Index, patterns: list[int], first: int) -> None:
    scores = np.array(patterns, np.uint32).view(np.float32)
    results = results_of(np.where(np.isfinite(scores), scores, np.float32(1)))
    native, plain = both(tokens_index, results, None, first)
    assert native == plain


def test_floats_at_the_edges_of_their_layouts(tokens_index: Index) -> None:
    edges = [
        0.0,
        -0.0,
        1,
        -1.5,
        1e-4,
        9.9999e-5,
        1e16,
        9.999999e15,
        16777216,
        3.4028235e38,
        1e-45,
        1.17549435e-38,
        123456.79,
    ]
    around = [np.nextafter(np.float32(edge), np.float32(to)) for edge in edges for to in (-9, 9)]
    native, plain = both(tokens_index, results_of([*edges, *around]), None, 0)
    assert native == plain


def test_many_queries_on_several_threads_with_names(tokens_index: Index) -> None:
    results = results_of(-np.random.default_rng(1).gamma(3, 4, 5000))
    names = [f"q-{number}" if number % 3 else number for number in range(results.num_queries)]
    native, plain = both(tokens_index, results, names, 7)
    assert native == plain


def test_a_name_with_a_line_break_is_left_to_python(tokens_index: Index) -> None:
    results = results_of([-1, -2])
    assert hit_lines(results, 0, names=["a\nb", "c"], texts=None, values=None, threads=1) is None
    native, plain = both(tokens_index, results, ["a\nb", "c"], 0)
    assert native == plain


@pytest.mark.parametrize("with_values", [False, True])
def test_words_and_values(tmp_path: Any, with_values: bool) -> None:
    lines = ["new york\t5", "new york city\t7", "naïve\t9"]
    source = tmp_path / "words.tsv"
    source.write_text(
        "\n".join(line if with_values else line.split("\t")[0] for line in lines) + "\n", "utf-8"
    )
    path = str(tmp_path / "words.ft")
    arguments = [
        "build",
        str(source),
        "-o",
        path,
        "--tokenizer",
        "words",
        *(["--values", "2"] if with_values else []),
    ]
    outcome = CliRunner().invoke(whole_app(), arguments)
    assert outcome.exit_code == 0, outcome.output
    index = Index.open(path, engine="cpu")
    results = SearchResults(
        np.array([0, 2, 3], np.int64), np.array([2, 0, 1], np.uint32), np.float32([-1, -2.5, -3]),
        np.float32([-1, -2, -3]), np.array([0, 1, 3, 5], np.int64), np.array([0, 1, 2, 1, 0], np.uint32),
    )  # fmt: skip
    native, plain = both(index, results, None, 0)
    assert native == plain
    assert native.count(b"\t") == (6 if with_values else 5) * 3


def test_arrays_that_differ_are_refused() -> None:
    results = results_of([-1, -2, -3])
    short = SearchResults(**{**vars(results), "key_ids": results.key_ids[:2]})
    with pytest.raises(ValueError, match="differ in length"):
        hit_lines(short, 0, names=None, texts=None, values=None, threads=1)
