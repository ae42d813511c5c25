"""What an index of token masks holds, counted: for `flashtrie inspect` and the benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu_masks import read_rows
from flashtrie_cli.query.token_masks import TokenMasks

NUM_LARGEST = 10
_BOUNDS = (0, 1, 2, 4, 8, 16, 64, 256, 1024)


def describe_masks(masks: TokenMasks) -> dict[str, Any]:
    """Counts, allowed tokens a node, distinct masks, largest nodes and memory, as plain values."""
    rows, entries, *_ = masks.set.plain()
    starts, is_terminal = read_rows(rows)
    counts = np.diff(starts)
    quantiles = np.quantile(counts, [0.5, 0.9, 0.99]).astype(int).tolist() if len(counts) else [0, 0, 0]
    return {
        **masks.meta,
        "num_nodes": masks.num_nodes,
        "num_terminals": int(is_terminal.sum()),
        "num_allowed": len(entries),
        "num_entries": len(masks.arrays.entries),
        "num_far_entries": len(masks.arrays.far_entries),
        "allowed_per_node": {
            "mean": float(counts.mean()),
            "median": quantiles[0],
            "p90": quantiles[1],
            "p99": quantiles[2],
            "max": int(counts.max()),
            "histogram": _histogram(counts),
        },
        "num_distinct_masks": count_distinct(entries >> np.uint32(masks.set.hop_bits), starts, is_terminal),
        "largest": _largest(counts),
        "num_dense_rows": len(masks.set.dense_nodes),
        "memory": {
            **{name: array.nbytes for name, array in vars(masks.arrays).items()},
            "dense_rows": int(masks.set.dense_bytes),
            "resident": masks.resident_bytes,
        },
    }


def _histogram(counts: npt.NDArray[np.int64]) -> dict[str, int]:
    at = np.searchsorted(_BOUNDS, counts)
    found = np.bincount(at, minlength=len(_BOUNDS) + 1)
    names = [*(f"<={bound}" for bound in _BOUNDS), f">{_BOUNDS[-1]}"]
    return dict(zip(names, found.tolist(), strict=True))


def _largest(counts: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    order = np.lexsort((np.arange(len(counts)), -counts))[:NUM_LARGEST]
    return [{"node": int(node), "num_allowed": int(counts[node])} for node in order]


def count_distinct(
    tokens: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], is_terminal: npt.NDArray[np.bool_]
) -> int:
    """Different masks among the nodes, by two independent 64-bit sums over each node's tokens."""
    num_nodes = len(is_terminal)
    mixed = [
        _mix(tokens.astype(np.uint64) + np.uint64(salt)) for salt in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03)
    ]
    sums = []
    for values in mixed:
        running = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values, out=running[1:])
        sums.append(running[starts[1 : num_nodes + 1]] - running[starts[:num_nodes]])
    keys = np.stack([*sums, is_terminal.astype(np.uint64)], axis=1)
    return len(np.unique(keys, axis=0))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
