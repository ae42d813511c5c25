"""Whether answers are right and how good they are: agreement between systems, recall of known targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import FlashtrieError
from flashtrie_cli.query.results import SearchResults


class WrongAnswer(FlashtrieError):
    """A system that must be exact is not; nothing is timed."""


def check_exact(name: str, found: SearchResults, expected: SearchResults) -> None:
    """Raise WrongAnswer at the first query in which an exact system differs by a byte."""
    if found.identical(expected):
        return
    query = next((q for q in range(expected.num_queries) if found.hits(q) != expected.hits(q)), 0)
    raise WrongAnswer(
        f"system {name} answers query {query} otherwise than the cpu engine; nothing was timed",
        hint="please report it, with the index and the grids",
    )


def agreement(found: SearchResults, expected: SearchResults) -> float:
    """Share of the expected hits that a system returns too (1.0 for an exact one)."""
    if expected.num_hits == 0:
        return 1.0
    shared = 0
    for query in range(expected.num_queries):
        own = found.key_ids[found.hit_offsets[query] : found.hit_offsets[query + 1]]
        want = expected.key_ids[expected.hit_offsets[query] : expected.hit_offsets[query + 1]]
        shared += int(np.isin(want, own).sum())
    return shared / expected.num_hits


def target_ranks(results: SearchResults, targets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rank, from 0, of each query's target among its hits; -1 where it was not returned."""
    ranks = np.full(len(targets), -1, np.int64)
    for query, target in enumerate(targets.tolist()):
        own = results.key_ids[results.hit_offsets[query] : results.hit_offsets[query + 1]]
        places = np.flatnonzero(own == target)
        if target >= 0 and len(places):
            ranks[query] = places[0]
    return ranks


def quality(results: SearchResults, targets: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Recall and precision with one known target a query (the paper's table 1 in kind).

    ``recall``: share of the targets among all hits, and among the best 1, 10 and 100. ``precision``: share
    of the returned hits that are targets, over queries with a target. ``mean_reciprocal_rank``: 1 / (rank +
    1), 0 if missed. Queries whose target is no key of the index count as missed in ``recall_of_all``.
    """
    known = targets >= 0
    ranks = target_ranks(results, targets)[known]
    found = ranks >= 0
    hits = int(np.diff(results.hit_offsets)[known].sum())
    count = max(int(known.sum()), 1)
    return {
        "num_targets": int(known.sum()),
        "recall": float(found.sum() / count),
        "recall_of_all": float(found.sum() / max(len(targets), 1)),
        **{f"recall_at_{n}": float((found & (ranks < n)).sum() / count) for n in (1, 10, 100)},
        "precision": float(found.sum() / max(hits, 1)),
        "mean_reciprocal_rank": float((1.0 / (ranks[found] + 1)).sum() / count),
        "mean_hits": float(np.diff(results.hit_offsets).mean()),
    }
