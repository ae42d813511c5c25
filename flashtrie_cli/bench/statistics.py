"""Numbers out of samples: quantiles, spread, and intervals by bootstrap over queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

BOOTSTRAPS = 2000
INTERVAL = (0.025, 0.975)


def summary(samples: F64) -> dict[str, float]:
    """Mean, quantiles, the middle half's width and the least of samples, in their unit; NaN samples don't
    count."""
    kept = samples[~np.isnan(samples)]
    p25, p50, p75, p90, p95, p99 = np.quantile(kept, (0.25, 0.5, 0.75, 0.9, 0.95, 0.99)).tolist()
    return {
        "num_samples": float(len(kept)),
        "mean": float(kept.mean()),
        "p50": p50,
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "min": float(kept.min()),
        "spread": p75 - p25,
    }


def ratio(slow: F64, fast: F64, *, seed: int = 0) -> dict[str, float]:
    """How many times as long ``slow`` takes as ``fast``, with a 95 % interval.

    Both are [passes, calls]. A call counts with the median of its passes, which a neighbour's time slice does not
    move; the ratio is that of the sums over the calls that both measured. For the interval, calls are drawn again
    with replacement, since calls differ far more than the passes of one call do.
    """
    both = ~np.isnan(slow).all(axis=0) & ~np.isnan(fast).all(axis=0)
    above, below = np.nanmedian(slow[:, both], axis=0), np.nanmedian(fast[:, both], axis=0)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(above), (BOOTSTRAPS, len(above)))
    low, high = np.quantile(above[picks].sum(axis=1) / below[picks].sum(axis=1), INTERVAL).tolist()
    point = float(above.sum() / below.sum())
    return {"ratio": point, "low": low, "high": high, "num_calls": float(both.sum())}


def finite(value: Any) -> Any:
    """The same with NaN as None, for JSON."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
