"""Proposal grids in: `.npz` or JSON lines, streamed in batches, checked at this door.

Queries, steps and slots are counted from 0 in error messages, as in arrays and in the results.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs.source import NPY_MAGIC, STDIN, ZIP_MAGIC, RawReader, ReadStats, open_raw
from flashtrie_cli.query.grids import GridBatch, Limits, Vocabulary
from flashtrie_cli.query.proposal_arrays import read_array_grids
from flashtrie_cli.query.proposal_lines import read_line_grids

__all__ = ["GridBatch", "read_proposals"]

_ZIP_STARTS = (ZIP_MAGIC, b"PK\x05\x06")  # the second: an archive without members


def read_proposals(
    path: str,
    *,
    batch_size: int,
    top_k: int | None = None,
    steps: int | None = None,
    vocabulary: Vocabulary | None = None,
    stats: ReadStats | None = None,
) -> Iterator[GridBatch]:
    """Batches of at most ``batch_size`` queries from a file; ``-`` is stdin, for JSON lines.

    `.npz`: ``tokens`` [Q, T, K] of any integer dtype, ``logprobs`` [Q, T, K] of float16, 32 or 64, and maybe
    ``ids`` [Q]. JSON lines, plain, gzip or Zstandard: ``{"id": …, "tokens": [[…]], "logprobs": [[…]]}``, of
    which rows and queries may differ in length, and tokens may be strings of the ``vocabulary``. Either is
    read in slices, never whole (but for an array in Fortran order).

    float64 log-probs are rounded to float32. Tokens -1 and 0xFFFFFFFF mark an empty slot, as does log-prob
    -inf; a token that no index can hold (above 2^31 - 1) or that the vocabulary lacks is an empty slot too.
    ``top_k`` keeps the best slots of each row (by log-prob, ties to the earlier slot, in their order),
    ``steps`` the first rows. ``stats`` counts for a progress bar. Raises InputError naming file and query,
    step and slot, or file and line.
    """
    for name, value in (("batch size", batch_size), ("top k", top_k), ("number of steps", steps)):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} is not at least 1")
    return _read(path, Limits(batch_size, top_k, steps), vocabulary, stats or ReadStats())


def _read(path: str, limits: Limits, vocabulary: Vocabulary | None, stats: ReadStats) -> Iterator[GridBatch]:
    stats.files.append(path)
    with open_raw(path) as file:
        raw = RawReader(path, file, stats, None)
        head = raw.peek(len(NPY_MAGIC))
        if not head and path == STDIN:
            return  # a filter before us let nothing through; an empty file was hardly meant
        if not head:
            raise InputError("is empty", file=path)
        if head.startswith(NPY_MAGIC):
            raise InputError(
                "is one array, but a grid needs two", file=path, hint="np.savez(…, tokens=…, logprobs=…)"
            )
        if not head.startswith(_ZIP_STARTS):
            yield from read_line_grids(raw, limits, vocabulary, stats)
            return
        if path == STDIN or not file.seekable():
            raise InputError(
                "arrays cannot be read from a pipe", file=path, hint="give a file, or JSON lines"
            )
    yield from read_array_grids(path, limits, stats)
