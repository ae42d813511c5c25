"""Every result format, read back: the hits of several batches as one search of all queries gives them."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest

from flashtrie_cli import Index, SearchPlan, build_index
from flashtrie_cli.build import BuildOptions
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.query.output import result_writer

NUM_QUERIES = 7
Hit = tuple[tuple[int, ...], int, float, float]
"""Tokens, key id, score, normalised score."""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    rng = np.random.default_rng(3)
    keys = sorted({tuple(rng.integers(0, 6, rng.integers(1, 5)).tolist()) for _ in range(200)})
    offsets = np.cumsum([0, *map(len, keys)])
    flat = np.array([token for key in keys for token in key], np.uint32)
    values = np.arange(len(keys), dtype=np.uint64) * 10
    path = str(tmp_path_factory.mktemp("output") / "i.ft")
    build_index(iter([KeyBatch(flat, offsets, values, None, "keys")]), path, options=BuildOptions())
    return Index.open(path, engine="reference")


@pytest.fixture(scope="module")
def grids() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 6, (NUM_QUERIES, 4, 5)).astype(np.uint32)
    logprobs = -rng.random((NUM_QUERIES, 4, 5), dtype=np.float32)
    logprobs[2] = -np.inf  # no hits, between others
    return tokens, logprobs


@pytest.fixture(scope="module")
def truth(index: Index, grids: tuple[np.ndarray, np.ndarray]) -> list[list[Hit]]:
    results = index.search(*grids, beam_width=6)
    found = [
        [(hit.tokens, hit.key_id, hit.score, hit.normalised_score) for hit in results.hits(query)]
        for query in range(NUM_QUERIES)
    ]
    assert [len(hits) for hits in found] == [6, 6, 0, 6, 6, 6, 6]
    assert any(len({len(hit[0]) for hit in hits}) > 1 for hits in found)
    return found


@pytest.fixture(params=[(7,), (3, 1, 3), (1, 1, 1, 4)], ids=str)
def written(request: pytest.FixtureRequest, index: Index, grids: tuple[np.ndarray, np.ndarray]):
    def write(form: str) -> bytes:
        out, first = io.BytesIO(), 0
        writer = result_writer(form, index, out)
        for size in request.param:
            part = slice(first, first + size)
            found = index.engine.search(grids[0][part], grids[1][part], SearchPlan(beam_width=6))
            writer.write(found, None, first)
            first += size
        writer.finish()
        return out.getvalue()

    return write


def test_npz(written, truth: list[list[Hit]]) -> None:
    with np.load(io.BytesIO(written("npz"))) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    assert {name: array.dtype.str for name, array in found.items()} == {
        "hit_offsets": "<i8", "token_offsets": "<i8", "key_ids": "<u4", "tokens": "<u4", "scores": "<f4",
        "normalised_scores": "<f4",
    }  # fmt: skip
    hits = [hit for hits in truth for hit in hits]
    assert np.diff(found["hit_offsets"]).tolist() == [len(hits) for hits in truth]
    assert found["hit_offsets"][0] == found["token_offsets"][0] == 0
    for at, (tokens, key_id, score, normalised) in enumerate(hits):
        begin, end = found["token_offsets"][at : at + 2]
        assert tuple(found["tokens"][begin:end].tolist()) == tokens
        assert (found["key_ids"][at], found["scores"][at]) == (key_id, np.float32(score))
        assert found["normalised_scores"][at] == np.float32(normalised)
    assert len(found["token_offsets"]) == len(hits) + 1
    assert found["token_offsets"][-1] == len(found["tokens"])


def test_wire(written, truth: list[list[Hit]]) -> None:
    """A record a query: number of hits, normalised scores, ends, tokens; worst hit first."""
    data, at = written("wire"), 0

    def take(form: str, count: int) -> list:
        nonlocal at
        values = struct.unpack_from(f"<{count}{form}", data, at)
        at += struct.calcsize(f"<{count}{form}")
        return list(values)

    for hits in truth:
        (num_hits,) = take("Q", 1)
        scores, ends = take("d", num_hits), take("Q", num_hits)
        tokens = take("I", ends[-1] if ends else 0)
        begins = [0, *ends][:-1]
        read = [
            (tuple(tokens[begin:end]), score) for begin, end, score in zip(begins, ends, scores, strict=True)
        ]
        assert read == [(hit[0], hit[3]) for hit in reversed(hits)]
    assert at == len(data)


def test_jsonl(written, index: Index, truth: list[list[Hit]]) -> None:
    rows = [json.loads(line) for line in written("jsonl").splitlines()]
    assert [row["query"] for row in rows] == list(range(NUM_QUERIES))
    for row, hits in zip(rows, truth, strict=True):
        assert set(row) == {"schema", "query", "hits"}
        assert [(tuple(h["tokens"]), h["key_id"]) for h in row["hits"]] == [hit[:2] for hit in hits]
        assert [np.float32(h["score"]) for h in row["hits"]] == [np.float32(hit[2]) for hit in hits]
        assert [np.float32(h["normalised_score"]) for h in row["hits"]] == [
            np.float32(hit[3]) for hit in hits
        ]
        assert [h["value"] for h in row["hits"]] == [index.value_of(hit[1]) for hit in hits]


def test_tsv(written, index: Index, truth: list[list[Hit]]) -> None:
    rows = [line.split("\t") for line in written("tsv").decode().splitlines()]
    expected = [
        [
            str(query),
            str(rank),
            " ".join(map(str, hit[0])),
            str(hit[1]),
            hit[2],
            hit[3],
            str(index.value_of(hit[1])),
        ]
        for query, hits in enumerate(truth)
        for rank, hit in enumerate(hits, 1)
    ]
    assert [
        [*row[:4], float(np.float32(row[4])), float(np.float32(row[5])), row[6]] for row in rows
    ] == expected
