"""Proposal grids out of `.npz`, in slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.arrays import ArrayFile, ArrayStream
from flashtrie_cli.inputs.source import ReadStats
from flashtrie_cli.query.grids import (
    BadSlot,
    GridBatch,
    Limits,
    at_least_one_slot,
    checked_logprobs,
    checked_tokens,
    keep_best,
)


def read_array_grids(path: str, limits: Limits, stats: ReadStats) -> Iterator[GridBatch]:
    """Batches from ``tokens`` and ``logprobs`` [Q, T, K] and maybe ``ids`` [Q]; see `read_proposals`."""
    with ArrayFile(path) as file:
        tokens, logprobs = file.stream("tokens"), file.stream("logprobs")
        _check_arrays(tokens, logprobs)
        ids = file.stream("ids") if file.has("ids") else None
        if ids is not None and (ids.shape != tokens.shape[:1] or ids.dtype.kind not in "iuUS"):
            raise ids.fault(
                f"is {ids.dtype} of shape {list(ids.shape)}, not {tokens.num_rows} strings or integers"
            )
        while tokens.num_taken < tokens.num_rows:
            first = tokens.num_taken
            raw_tokens, raw_logprobs = tokens.take(limits.batch_size), logprobs.take(limits.batch_size)
            stats.num_keys_read += len(raw_tokens)
            stats.num_text_bytes += raw_tokens.nbytes + raw_logprobs.nbytes
            if limits.steps is not None:
                raw_tokens = np.ascontiguousarray(raw_tokens[:, : limits.steps])
                raw_logprobs = np.ascontiguousarray(raw_logprobs[:, : limits.steps])
            try:
                grid = checked_tokens(raw_tokens, first), checked_logprobs(raw_logprobs, first)
            except BadSlot as problem:
                raise InputError(str(problem), file=path) from None
            names = _as_names(ids.take(limits.batch_size)) if ids is not None else None
            yield GridBatch(*keep_best(at_least_one_slot(grid), limits.top_k), names, first)


def _check_arrays(tokens: ArrayStream, logprobs: ArrayStream) -> None:
    if tokens.dtype.kind not in "iu":
        raise tokens.fault(f"is {tokens.dtype}, not integers")
    if logprobs.dtype.kind != "f" or logprobs.dtype.itemsize > 8:
        raise logprobs.fault(f"is {logprobs.dtype}, not float16, float32 or float64")
    if len(tokens.shape) != 3:
        raise tokens.fault(f"has shape {list(tokens.shape)}, not [queries, steps, slots]")
    if tokens.shape != logprobs.shape:
        raise logprobs.fault(f"has shape {list(logprobs.shape)}, but `tokens` {list(tokens.shape)}")


def _as_names(ids: npt.NDArray[Any]) -> list[Any]:
    if ids.dtype.kind == "S":
        return [name.decode("utf-8", "surrogateescape") for name in ids.tolist()]
    return np.asarray(ids).tolist()
