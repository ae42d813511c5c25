"""Keys out of `.npz` and `.npy`: flat tokens with offsets, or one key a row of a 2-D array."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.arrays import ArrayFile, ArrayStream
from flashtrie_cli.keys.batch import MAX_DEPTH, MAX_TOKEN, UNKNOWN_TOKEN, KeyBatch

BATCH_TOKENS = 1 << 20
BATCH_KEYS = 1 << 18


def array_batches(
    path: str,
    *,
    batch_tokens: int = BATCH_TOKENS,
    batch_keys: int = BATCH_KEYS,
    on_fraction: Callable[[float], None] = lambda fraction: None,
) -> Iterator[KeyBatch]:
    """Batches of bounded size from one file.

    `.npz`: ``tokens`` [S] with ``offsets`` [N + 1], or ``tokens`` [N, L] whose rows end with padding (-1, or
    0xFFFFFFFF); ``values`` [N] where there are some. `.npy`: ``tokens`` [N, L]. Any integer dtype; an array
    in Fortran order is loaded whole. Unlike lines of text, empty keys count. Raises InputError naming the
    row, from 1.
    """
    with ArrayFile(path) as file:
        tokens = file.stream("" if file.names == [""] else "tokens")
        _need_integers(tokens)
        values = file.stream("values") if file.has("values") else None
        if len(tokens.shape) == 2:
            if file.has("offsets"):
                raise InputError("has 2-D `tokens` and `offsets`; one of them is too much", file=path)
            batches = _padded_batches(tokens, batch_tokens, batch_keys)
            num_keys = tokens.num_rows
        elif len(tokens.shape) == 1 and file.has("offsets"):
            offsets = file.stream("offsets")
            num_keys = _check_offsets_shape(offsets)
            batches = _flat_batches(tokens, offsets, num_keys, batch_tokens, batch_keys)
        else:
            raise tokens.fault(f"has shape {list(tokens.shape)}: needs two dimensions, or one and `offsets`")
        if values is not None and values.shape != (num_keys,):
            raise values.fault(f"has shape {list(values.shape)}, but there are {num_keys} keys")
        is_float = False
        row = 1
        for flat, bounds in batches:
            count = len(bounds) - 1
            taken = None
            if values is not None:
                taken, is_float = _as_values(values, values.take(count), row, is_float)
            on_fraction(tokens.fraction_taken)
            yield KeyBatch(flat, bounds, taken, np.arange(row, row + count, dtype=np.int64), path)
            row += count


Flat = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]


def _need_integers(stream: ArrayStream) -> None:
    if stream.dtype.kind not in "iu":
        raise stream.fault(f"is {stream.dtype}, not integers")


def _padded_batches(tokens: ArrayStream, batch_tokens: int, batch_keys: int) -> Iterator[Flat]:
    width = tokens.shape[1]
    step = max(1, min(batch_keys, batch_tokens // max(1, width)))
    while tokens.num_taken < tokens.num_rows:
        first_row = tokens.num_taken + 1
        rows = tokens.take(step)
        is_token = _is_token_or_fail(tokens, rows, first_row)
        counts = is_token.sum(axis=1, dtype=np.int64)
        if (gaps := np.flatnonzero((is_token[:, 1:] & ~is_token[:, :-1]).any(axis=1))).size:
            raise tokens.fault(f"row {first_row + int(gaps[0])} has a token behind its padding")
        if width > MAX_DEPTH and (deep := np.flatnonzero(counts > MAX_DEPTH)).size:
            raise tokens.fault(f"row {first_row + int(deep[0])} has more than {MAX_DEPTH} tokens")
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        yield rows[is_token].astype(np.uint32), offsets


def _is_token_or_fail(tokens: ArrayStream, rows: npt.NDArray[Any], first_row: int) -> npt.NDArray[np.bool_]:
    is_token = (rows >= 0) & (rows <= MAX_TOKEN)
    if not is_token.all():
        bad = ~is_token & (rows != UNKNOWN_TOKEN)
        if rows.dtype.kind == "i":
            bad &= rows != -1
        if (at := np.argwhere(bad)).size:
            row, column = at[0].tolist()
            raise tokens.fault(
                f"row {first_row + row} has token {rows[row, column]}, outside 0 to {MAX_TOKEN}"
            )
    return is_token


def _check_offsets_shape(offsets: ArrayStream) -> int:
    _need_integers(offsets)
    if len(offsets.shape) != 1 or offsets.num_rows == 0:
        raise offsets.fault(f"has shape {list(offsets.shape)}: needs one dimension, a number more than keys")
    return offsets.num_rows - 1


def _flat_batches(
    tokens: ArrayStream, offsets: ArrayStream, num_keys: int, batch_tokens: int, batch_keys: int
) -> Iterator[Flat]:
    begin = _as_offsets(offsets, offsets.take(1), 1)
    if begin[0] != 0:
        raise offsets.fault(f"starts with {begin[0]}, not 0")
    row = 1
    while row <= num_keys:
        ends = np.concatenate([begin[-1:], _as_offsets(offsets, offsets.take(batch_keys), row)])
        counts = np.diff(ends)
        _check_counts(tokens, offsets, counts, ends, row)
        at = 0
        while at < len(counts):
            # As many keys as fit, one at least.
            to = max(at + 1, int(np.searchsorted(ends, ends[at] + batch_tokens, side="right")) - 1)
            flat = tokens.take(int(ends[to] - ends[at]))
            _check_flat(tokens, flat, ends[at : to + 1], row + at)
            yield flat.astype(np.uint32), ends[at : to + 1] - ends[at]
            at = to
        row += len(counts)
        begin = ends
    if begin[-1] != tokens.num_rows:
        raise offsets.fault(f"ends with {begin[-1]}, but there are {tokens.num_rows} tokens")


def _as_offsets(offsets: ArrayStream, taken: npt.NDArray[Any], first: int) -> npt.NDArray[np.int64]:
    if taken.dtype.kind == "u" and (large := np.flatnonzero(taken > np.iinfo(np.int64).max)).size:
        raise offsets.fault(f"at row {first + int(large[0])} is {taken[large[0]]}: too large")
    return taken.astype(np.int64)


def _check_counts(
    tokens: ArrayStream,
    offsets: ArrayStream,
    counts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    row: int,
) -> None:
    # Ends are compared, not differences, which could wrap round.
    if (back := np.flatnonzero(ends[1:] < ends[:-1])).size:
        raise offsets.fault(f"goes back at row {row + int(back[0])}")
    if (deep := np.flatnonzero(counts > MAX_DEPTH)).size:
        raise offsets.fault(f"gives row {row + int(deep[0])} more than {MAX_DEPTH} tokens")
    if ends[-1] > tokens.num_rows:
        raise offsets.fault(f"goes up to {ends[-1]}, but there are {tokens.num_rows} tokens")


def _check_flat(tokens: ArrayStream, flat: npt.NDArray[Any], ends: npt.NDArray[np.int64], row: int) -> None:
    if len(flat) and (int(flat.max()) > MAX_TOKEN or int(flat.min()) < 0):
        bad = int(np.flatnonzero((flat > MAX_TOKEN) | (flat < 0))[0])
        in_row = row + int(np.searchsorted(ends - ends[0], bad, side="right")) - 1
        raise tokens.fault(f"row {in_row} has token {flat[bad]}, outside 0 to {MAX_TOKEN}")


def _as_values(
    values: ArrayStream, taken: npt.NDArray[Any], row: int, is_float: bool
) -> tuple[npt.NDArray[np.uint64] | npt.NDArray[np.float64], bool]:
    """uint64 while all are unsigned integers, float64 from the first other number on."""
    if values.dtype.kind not in "iuf":
        raise values.fault(f"is {values.dtype}, not numbers")
    if values.dtype.kind == "f":
        is_float = True
        if (bad := np.flatnonzero(~np.isfinite(taken))).size:
            raise values.fault(f"row {row + int(bad[0])} is {taken[bad[0]]}, not a finite number")
    elif values.dtype.kind == "i":
        is_float = is_float or bool((taken < 0).any())
    return (taken.astype(np.float64) if is_float else taken.astype(np.uint64)), is_float
