"""Proposal grids in memory: batches of them, and what both file formats do to their slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashtrie_cli.query.plan import PADDING

MAX_TOKEN = (1 << 31) - 1

Grid = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]
"""Tokens and log-probs, both [..., T, K]."""


class Vocabulary(Protocol):
    """What turns token strings into ids; a string that it lacks becomes an id that can match nothing."""

    def ids(self, words: list[str], /) -> npt.NDArray[np.uint32]: ...


@dataclass
class GridBatch:
    """Grids of n queries in input order, the first of them query number ``first``.

    ``tokens`` uint32 and ``logprobs`` float32, both [n, T, K] with T and K at least 1; an empty slot holds
    PADDING, or the log-prob -inf. ``ids``: what the input calls the queries (strings or numbers; None for one
    without), or None where none has a name. ``num_steps`` int32 [n]: steps of each query where they differ
    (the rest is empty slots), else None.
    """

    tokens: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    ids: list[Any] | None
    first: int
    num_steps: npt.NDArray[np.int32] | None = None

    @property
    def num_queries(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Limits:
    """How much of the input is wanted; see `read_proposals`."""

    batch_size: int
    top_k: int | None = None
    steps: int | None = None


class BadSlot(Exception):
    """A sentence about one slot, to be placed in its file."""


def checked_logprobs(raw: npt.NDArray[Any], first: int) -> npt.NDArray[np.float32]:
    """Log-probs [n, T, K] of any float dtype as float32; NaN and +inf are BadSlot.

    float64 is rounded: beyond float32's range downward it becomes -inf, an empty slot, upward the error.
    """
    with np.errstate(over="ignore"):
        grid = raw.astype(np.float32, copy=False)
    # One pass for the usual case: the maximum of what holds a NaN is NaN.
    if grid.size and not grid.max() < np.inf:
        query, step, slot = np.argwhere(~(grid < np.inf))[0].tolist()
        what = "NaN" if np.isnan(grid[query, step, slot]) else "+inf, or too large for float32"
        raise BadSlot(f"log-prob of query {first + query}, step {step}, slot {slot} is {what}")
    return grid


def checked_tokens(raw: npt.NDArray[Any], first: int) -> npt.NDArray[np.uint32]:
    """Tokens [n, T, K] of any integer dtype as uint32; -1 and what no index can hold become PADDING, in place."""
    tokens = raw.astype(np.uint32, copy=False)
    can_exceed = bool(raw.size) and raw.dtype.itemsize > 2
    can_be_negative = bool(raw.size) and raw.dtype.kind == "i"
    if can_be_negative and (lowest := int(raw.min())) < 0:
        if lowest < -1:
            query, step, slot = np.argwhere(raw < -1)[0].tolist()
            value = raw[query, step, slot]
            place = f"query {first + query}, step {step}, slot {slot}"
            raise BadSlot(f"token of {place} is {value} (only -1, for an empty slot, may be negative)")
        tokens[raw < 0] = PADDING
    if can_exceed and int(raw.max()) > MAX_TOKEN:
        tokens[raw > MAX_TOKEN] = PADDING
    return tokens


def at_least_one_slot(grid: Grid) -> Grid:
    """No steps or no slots become one empty slot, so that engines need not think of either."""
    num_queries, num_steps, num_slots = grid[0].shape
    if num_steps and num_slots:
        return grid
    shape = (num_queries, max(1, num_steps), max(1, num_slots))
    return np.full(shape, PADDING, dtype=np.uint32), np.full(shape, -np.inf, dtype=np.float32)


def keep_best(grid: Grid, top_k: int | None) -> Grid:
    """The ``top_k`` best slots of each row by log-prob, ties to the earlier slot; they keep their order."""
    tokens, logprobs = grid
    if top_k is None or top_k >= tokens.shape[2]:
        return grid
    rank = np.where(tokens == PADDING, np.float32(-np.inf), logprobs)
    if (rank[:, :, :-1] >= rank[:, :, 1:]).all():
        return np.ascontiguousarray(tokens[:, :, :top_k]), np.ascontiguousarray(logprobs[:, :, :top_k])
    best = np.argsort(-rank, axis=2, kind="stable")[:, :, :top_k]
    best.sort(axis=2)
    return np.take_along_axis(tokens, best, axis=2), np.take_along_axis(logprobs, best, axis=2)
