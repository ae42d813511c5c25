"""Proposal grids out of JSON lines: ``{"id": …, "tokens": [[…], …], "logprobs": [[…], …]}``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.lines import line_blocks, shown
from flashtrie_cli.inputs.native import native
from flashtrie_cli.inputs.source import RAW_BLOCK_SIZE, RawReader, ReadStats, read_chunks
from flashtrie_cli.query.grids import (
    MAX_TOKEN,
    BadSlot,
    Grid,
    GridBatch,
    Limits,
    Vocabulary,
    checked_logprobs,
    keep_best,
)
from flashtrie_cli.query.plan import PADDING

_ALL = 1 << 62  # steps
_LONG_NUMBER = "a number of thousands of digits"


class _BadLine(Exception):
    """What is wrong with the line at hand."""


@dataclass
class _Query:
    name: Any
    tokens: npt.NDArray[np.uint32]  # [T, K]
    logprobs: npt.NDArray[np.float32]


def read_line_grids(
    raw: RawReader, limits: Limits, vocabulary: Vocabulary | None, stats: ReadStats
) -> Iterator[GridBatch]:
    """Batches from lines; see `read_proposals`. Blank lines are passed over."""
    pending: list[_Query] = []
    first = 0
    for line in _lines(raw, stats):
        stats.num_lines += 1
        if not line.strip():
            stats.num_empty_lines_skipped += 1
            continue
        try:
            pending.append(_parse(line, first + len(pending), limits, vocabulary))
        except (_BadLine, BadSlot) as problem:
            raise InputError(str(problem), file=raw.path, line=stats.num_lines) from None
        stats.num_keys_read += 1
        if len(pending) == limits.batch_size:
            yield _batch(pending, first)
            first += len(pending)
            pending = []
    if pending:
        yield _batch(pending, first)


def _lines(raw: RawReader, stats: ReadStats) -> Iterator[bytes]:
    chunks = read_chunks(raw, RAW_BLOCK_SIZE)
    blocks = line_blocks(
        chunks,
        raw.path,
        RAW_BLOCK_SIZE,
        num_lines=lambda: stats.num_lines,
        arrays_hint="give the .npz itself",
    )
    for block in blocks:
        stats.num_text_bytes += len(block)
        yield from block.removesuffix(b"\n").split(b"\n")


# -Infinity marks empty slots, as Python's own JSON writes it; NaN and Infinity are refused where they stand.
_DECODER = json.JSONDecoder(parse_constant=float)


def _parse(line: bytes, number: int, limits: Limits, vocabulary: Vocabulary | None) -> _Query:
    module = native()
    usual = module.parse_grid_line(np.frombuffer(line, np.uint8), limits.steps or _ALL) if module else None
    if usual is not None:
        tokens, logprobs, id_begin, id_end = usual
        name = _id(line[id_begin:id_end]) if id_end else None
    else:
        name, tokens, logprobs = _parse_any(line, number, limits, vocabulary)
    best = keep_best((tokens[None], logprobs[None]), limits.top_k)
    return _Query(name, best[0][0], best[1][0])


def _id(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise _BadLine(_LONG_NUMBER) from None


def _parse_any(
    line: bytes, number: int, limits: Limits, vocabulary: Vocabulary | None
) -> tuple[Any, npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Any line, or what is wrong with it; the native parser knows the usual form only."""
    try:
        parsed = _DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine(f"not valid UTF-8 (byte 0x{line[error.start]:02x})") from None
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise _BadLine("nested too deeply") from None
    except ValueError:  # Python reads at most 4,300 digits of a number
        raise _BadLine(_LONG_NUMBER) from None
    if not isinstance(parsed, dict):
        raise _BadLine("not an object with `tokens` and `logprobs`")
    name = parsed.get("id")
    if not (name is None or type(name) in (str, int)):
        raise _BadLine("`id` is neither a string nor an integer")
    tokens, logprobs = _rows(parsed, "tokens", limits.steps), _rows(parsed, "logprobs", limits.steps)
    if len(tokens) != len(logprobs):
        raise _BadLine(f"`tokens` has {len(tokens)} steps, but `logprobs` {len(logprobs)}")
    for step, (row, other) in enumerate(zip(tokens, logprobs, strict=True)):
        if len(row) != len(other):
            raise _BadLine(f"step {step} has {len(row)} tokens, but {len(other)} log-probs")
    return name, *_grid(tokens, logprobs, number, vocabulary)


def _rows(line: dict[str, Any], name: str, steps: int | None) -> list[list[Any]]:
    rows = line.get(name)
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise _BadLine(f"`{name}` is missing" if rows is None else f"`{name}` is not an array of arrays")
    return rows[:steps]


def _grid(
    tokens: list[list[Any]], logprobs: list[list[Any]], number: int, vocabulary: Vocabulary | None
) -> Grid:
    counts = np.array([len(row) for row in tokens], dtype=np.intp)
    shape = (len(tokens), int(counts.max(initial=0)))
    is_slot = np.arange(shape[1]) < counts[:, None]
    grid_tokens = np.full(shape, PADDING, dtype=np.uint32)
    grid_tokens[is_slot] = _flat_tokens(list(chain.from_iterable(tokens)), vocabulary, is_slot)
    grid = np.full(shape, -np.inf, dtype=np.float64)
    grid[is_slot] = _flat_logprobs(list(chain.from_iterable(logprobs)), is_slot)
    return grid_tokens, checked_logprobs(grid[None], number)[0]


def _place(is_slot: npt.NDArray[np.bool_], at: int) -> str:
    step, slot = np.argwhere(is_slot)[at].tolist()
    return f"step {step}, slot {slot}"


def _flat_tokens(
    tokens: list[Any], vocabulary: Vocabulary | None, is_slot: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint32]:
    kinds = set(map(type, tokens))
    if kinds == {str}:
        if vocabulary is None:
            raise _BadLine("token strings, but there is no vocabulary to look them up in")
        return vocabulary.ids(tokens)
    if not kinds <= {int}:
        for at, token in enumerate(tokens):
            if type(token) not in (int, str):
                raise _BadLine(f"token of {_place(is_slot, at)} is neither an integer nor a string")
        raise _BadLine("tokens are integers here and strings there")
    if tokens and min(tokens) < -1:
        at = next(at for at, token in enumerate(tokens) if token < -1)
        what = f"token of {_place(is_slot, at)} is {shown(str(tokens[at]))[1:-1]}"
        raise _BadLine(f"{what} (only -1, for an empty slot, may be negative)")
    if tokens and (max(tokens) > MAX_TOKEN or min(tokens) < 0):
        tokens = [token if 0 <= token <= MAX_TOKEN else PADDING for token in tokens]
    return np.array(tokens, dtype=np.uint32)


def _flat_logprobs(logprobs: list[Any], is_slot: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    if not set(map(type, logprobs)) <= {float, int}:
        at = next(at for at, value in enumerate(logprobs) if type(value) not in (float, int))
        raise _BadLine(f"log-prob of {_place(is_slot, at)} is not a number")
    try:
        return np.array(logprobs, dtype=np.float64)
    except OverflowError:  # an integer of hundreds of digits
        raise _BadLine("a log-prob is too large for float32") from None


def _batch(queries: list[_Query], first: int) -> GridBatch:
    num_steps = np.array([len(query.tokens) for query in queries], dtype=np.int32)
    width = max(1, *(query.tokens.shape[1] for query in queries))
    shape = (len(queries), max(1, int(num_steps.max())), width)
    tokens = np.full(shape, PADDING, dtype=np.uint32)
    logprobs = np.full(shape, -np.inf, dtype=np.float32)
    for row, query in enumerate(queries):
        num, wide = query.tokens.shape
        tokens[row, :num, :wide] = query.tokens
        logprobs[row, :num, :wide] = query.logprobs
    names = [query.name for query in queries]
    is_ragged = bool((num_steps != shape[1]).any())
    has_names = any(name is not None for name in names)
    return GridBatch(tokens, logprobs, names if has_names else None, first, num_steps if is_ragged else None)
