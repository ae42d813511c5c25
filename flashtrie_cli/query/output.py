"""Search results in the formats that leave the program: tsv, jsonl, npz and the paper's wire layout."""

from __future__ import annotations

import itertools
import os
import tempfile
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu_text import hit_lines
from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.lookup import value_text
from flashtrie_cli.streams import TsvWatch

if TYPE_CHECKING:
    from flashtrie_cli.index import Index
    from flashtrie_cli.query.results import SearchResults

FORMATS = ("tsv", "jsonl", "npz", "wire")


class ResultWriter(Protocol):
    """Takes the results of successive batches, in query order."""

    def write(self, results: SearchResults, ids: list[Any] | None, first: int) -> None:
        """``ids`` of the batch's queries, if given; ``first``: number of its first query."""

    def finish(self) -> None:
        """After the last batch."""


def result_writer(name: str, index: Index, out: BinaryIO) -> ResultWriter:
    """The writer of a format; UsageError for an unknown one."""
    if name == "tsv":
        return TsvWriter(index, out)
    if name == "jsonl":
        return JsonlWriter(index, out)
    if name == "npz":
        return NpzWriter(out)
    if name == "wire":
        return WireWriter(out)
    raise UsageError(f"format {name!r} is not one of {', '.join(FORMATS)}")


def shortest(scores: npt.NDArray[np.float32]) -> list[str]:
    """Each float32 as the shortest decimal that reads back as itself; with an exponent below 1e-4 and from 1e16."""
    return [_shortest(score) for score in scores]


def _shortest(score: np.float32) -> str:
    size = abs(float(score))
    if size == 0 or 1e-4 <= size < 1e16:
        return np.format_float_positional(score, unique=True, trim="0")
    return np.format_float_scientific(score, unique=True, trim="-", exp_digits=2)


def hit_texts(index: Index, results: SearchResults) -> list[str]:
    """Each hit's key as text where the index speaks any, else its token ids between blanks."""
    if index.vocabulary is not None:
        return index.decode(results.tokens, results.token_offsets)
    words = list(map(str, results.tokens.tolist()))
    ends = results.token_offsets.tolist()
    return [" ".join(words[begin:end]) for begin, end in itertools.pairwise(ends)]


def query_names(ids: list[Any] | None, first: int) -> list[str] | None:
    """What TSV calls the queries: the id of each, or its number where it has none; None where none has one."""
    if ids is None:
        return None
    return [str(first + at if one is None else one) for at, one in enumerate(ids)]


class TsvWriter:
    """A line a hit: query (its id, else its number), rank from 1, key, key id, score, normalised score, value."""

    def __init__(self, index: Index, out: BinaryIO):
        self._index = index
        self._out = out
        self._watch = TsvWatch()

    def write(self, results: SearchResults, ids: list[Any] | None, first: int) -> None:
        index = self._index
        names = query_names(ids, first)
        texts = None if index.vocabulary is None else hit_texts(index, results)
        for column in (names, texts):
            self._watch.check(column or [])
        lines = hit_lines(
            results,
            first,
            names=names,
            texts=texts,
            values=None
            if index.values is None
            else [value_text(index.value_of(key)) for key in results.key_ids.tolist()],
            threads=index.threads,
        )
        self._out.write(self.plain_lines(results, names, first) if lines is None else lines)

    def plain_lines(self, results: SearchResults, names: list[str] | None, first: int) -> bytes:
        """The same in plain Python."""
        texts = hit_texts(self._index, results)
        key_ids = results.key_ids.tolist()
        scores, normalised = shortest(results.scores), shortest(results.normalised_scores)
        offsets = results.hit_offsets.tolist()
        has_values = self._index.values is not None
        lines = []
        for query in range(results.num_queries):
            name = first + query if names is None else names[query]
            for rank, h in enumerate(range(offsets[query], offsets[query + 1]), 1):
                row = f"{name}\t{rank}\t{texts[h]}\t{key_ids[h]}\t{scores[h]}\t{normalised[h]}"
                lines.append(f"{row}\t{value_text(self._index.value_of(key_ids[h]))}" if has_values else row)
        return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape") if lines else b""

    def finish(self) -> None:
        pass


class JsonlWriter:
    """A line a query; schema flashtrie.search/1."""

    def __init__(self, index: Index, out: BinaryIO):
        self._index = index
        self._out = out

    def write(self, results: SearchResults, ids: list[Any] | None, first: int) -> None:
        from flashtrie_cli.streams import json_line

        texts = hit_texts(self._index, results) if self._index.vocabulary is not None else None
        scores = [float(text) for text in shortest(results.scores)]
        normalised = [float(text) for text in shortest(results.normalised_scores)]
        key_ids, tokens = results.key_ids.tolist(), results.tokens.tolist()
        ends, offsets = results.token_offsets.tolist(), results.hit_offsets.tolist()
        for query in range(results.num_queries):
            row: dict[str, Any] = {"schema": "flashtrie.search/1", "query": first + query}
            if ids is not None and ids[query] is not None:
                row["id"] = ids[query]
            hits = []
            for h in range(offsets[query], offsets[query + 1]):
                hit: dict[str, Any] = {"tokens": tokens[ends[h] : ends[h + 1]]}
                if texts is not None:
                    hit["text"] = texts[h]
                hit["key_id"] = key_ids[h]
                if self._index.values is not None:
                    hit["value"] = self._index.value_of(key_ids[h])
                hit["score"] = scores[h]
                hit["normalised_score"] = normalised[h]
                hits.append(hit)
            row["hits"] = hits
            self._out.write(json_line(row))

    def finish(self) -> None:
        pass


class WireWriter:
    """The paper's output layout (appendix D.3), a record a query, little-endian, worst hit first.

    uint64 number of hits n; float64 [n] normalised scores; uint64 [n] ends of the sequences in tokens; uint32 tokens.
    """

    def __init__(self, out: BinaryIO):
        self._out = out

    def write(self, results: SearchResults, ids: list[Any] | None, first: int) -> None:
        lengths = np.diff(results.token_offsets)
        pieces: list[bytes] = []
        offsets = results.hit_offsets.tolist()
        for begin, end in itertools.pairwise(offsets):
            order = np.arange(end - 1, begin - 1, -1)
            ends = np.cumsum(lengths[order])
            total = int(ends[-1]) if len(ends) else 0
            starts = np.repeat(results.token_offsets[order] - (ends - lengths[order]), lengths[order])
            pieces += (
                np.uint64(len(order)).astype("<u8").tobytes(),
                results.normalised_scores[order].astype("<f8").tobytes(),
                ends.astype("<u8").tobytes(),
                results.tokens[starts + np.arange(total)].astype("<u4").tobytes(),
            )
        self._out.write(b"".join(pieces))

    def finish(self) -> None:
        pass


class NpzWriter:
    """The arrays of `SearchResults` in an .npz, written as they come: memory does not grow with the queries."""

    ARRAYS = ("key_ids", "scores", "normalised_scores", "tokens")
    OFFSETS = ("hit_offsets", "token_offsets")

    def __init__(self, out: BinaryIO):
        self._out = out
        self._scratch = tempfile.TemporaryDirectory(prefix="flashtrie-results-")
        names = (*self.ARRAYS, *self.OFFSETS)
        self._files = {name: open(os.path.join(self._scratch.name, name), "w+b") for name in names}
        self._counts = dict.fromkeys(names, 0)
        self._bases = dict.fromkeys(self.OFFSETS, 0)
        self._ids: list[str] = []
        for name in self.OFFSETS:
            self._put(name, np.zeros(1, np.int64))

    def _put(self, name: str, array: npt.NDArray[Any]) -> None:
        self._files[name].write(np.ascontiguousarray(array).data)
        self._counts[name] += len(array)

    def write(self, results: SearchResults, ids: list[Any] | None, first: int) -> None:
        for name in self.ARRAYS:
            self._put(name, getattr(results, name))
        for name in self.OFFSETS:
            offsets = getattr(results, name)
            self._put(name, offsets[1:] + self._bases[name])
            self._bases[name] += int(offsets[-1])
        # One for each query, so that a query finds its own; those before the first named one are made up for then.
        if ids is not None:
            self._ids += [""] * (first - len(self._ids))
            self._ids += ["" if one is None else str(one) for one in ids]

    def finish(self) -> None:
        dtypes = {"key_ids": "<u4", "scores": "<f4", "normalised_scores": "<f4", "tokens": "<u4"}
        with zipfile.ZipFile(self._out, "w", zipfile.ZIP_STORED) as archive:
            for name, file in self._files.items():
                file.seek(0)
                header = {
                    "descr": dtypes.get(name, "<i8"),
                    "fortran_order": False,
                    "shape": (self._counts[name],),
                }
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_1_0(member, header)
                    while piece := file.read(1 << 22):
                        member.write(piece)
                file.close()
            if self._ids:
                self._ids += [""] * (self._counts["hit_offsets"] - 1 - len(self._ids))
                with archive.open("ids.npy", "w") as member:
                    np.save(member, np.array(self._ids), allow_pickle=False)
        self._scratch.cleanup()
