"""The gate for CI: is an engine slower than in an earlier run, by more than the noise?

Absolute times on a shared machine move by half; the ratio of two systems timed block by block in one
process moves far less. So a CPU engine is judged by its ratio to `marisa-opt` on the same calls: a fixed
algorithm over the same trie, which feels busy neighbours, caches and clock rates as the engine does. Passes
are grouped in rounds of ten. In a round, each call counts with the lower quartile of its times, and the
round's ratio is that of the sums. Noise only ever adds, so a run is judged by its lowest round. While that
looks too slow, more rounds are measured: a neighbour goes away, a regression stays. What is left of the
noise is the gap between a run's lowest and third-lowest round.

Measured on two shared cores under load 3 to 9, 21 runs of one commit: over a hundred passes the lowest
rounds differed by 1.6 % at most, means by 20 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.bench.run import YARDSTICK
from flashtrie_cli.bench.systems import OURS, SYSTEMS
from flashtrie_cli.errors import UsageError

F64 = npt.NDArray[np.float64]

ROUND = 10
"""Passes of a round."""
QUANTILE = 0.25
MAX_NOISE = 0.03
"""More than this is not granted to noise: it would hide what the gate is there for."""
REFERENCES = {"cpu": ("marisa-opt", YARDSTICK), "gpu": ("flashtrie-paper",)}
SHARED_LIMIT = 1.15
"""The reference itself may move this much against the yardstick before a warning."""


@dataclass(frozen=True)
class Verdict:
    """One system in one case: ``slowdown`` against the base (1.0 is the same), ``noise`` a share,
    ``reference`` what it was measured against (None: the clock), ``reference_slowdown`` of that against the
    yardstick."""

    case: str
    system: str
    slowdown: float
    noise: float
    reference: str | None
    reference_slowdown: float | None

    def is_slower(self, max_slowdown: float) -> bool:
        return self.slowdown > max_slowdown * (1 + self.noise)

    @property
    def reference_moved(self) -> bool:
        return self.reference_slowdown is not None and self.reference_slowdown > SHARED_LIMIT

    def looks_slower(self, max_slowdown: float) -> bool:
        """Too slow unless the noise is to blame: worth more rounds."""
        return self.slowdown > max_slowdown


def check_comparable(base: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to compare runs of other machines, options or indexes. Raises UsageError."""
    for name, hint in (("cpu", "make the base on this processor"), ("gpu", "make the base on this GPU")):
        was, now = base["environment"].get(name), current["environment"].get(name)
        was, now = (item["name"] if isinstance(item, dict) else item for item in (was, now))
        if was != now:
            raise UsageError(f"the base was measured on {name} {was!r}, this run on {now!r}", hint=hint)
    if base["options"] != current["options"]:
        names = sorted(
            name
            for name in {*base["options"], *current["options"]}
            if base["options"].get(name) != current["options"].get(name)
        )
        raise UsageError(f"the base was measured with other options ({', '.join(names)})")


def case_key(case: dict[str, Any]) -> str:
    """What names a case in both runs."""
    return (
        f"{case['workload']}, K = {case['num_slots']}, B = {case['beam_width']}, batch {case['batch_size']}"
    )


def matching_case(base: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The base's case for one of this run; UsageError where there is none or it used another index."""
    for other in base["cases"]:
        if case_key(other) == case_key(case):
            if other["digest"] != case["digest"]:
                raise UsageError(
                    f"the base measured another index for {case_key(case)}", hint="make the base again"
                )
            return other
    raise UsageError(f"the base has no case {case_key(case)}")


def judge(base_case: dict[str, Any], case: dict[str, Any]) -> list[Verdict]:
    """The verdict on each of our engines that both runs measured."""
    verdicts = []
    for name in OURS:
        if name not in base_case["systems"] or name not in case["systems"]:
            continue
        reference = next(
            (
                other
                for other in REFERENCES[SYSTEMS[name].device]
                if other in base_case["systems"] and other in case["systems"]
            ),
            None,
        )
        was, now = (rounds(one, name, reference) for one in (base_case, case))
        noise = min(_gap(was) + _gap(now), MAX_NOISE)
        slowdown = float(now.min() / was.min())
        verdicts.append(
            Verdict(case_key(case), name, slowdown, noise, reference, _shared(base_case, case, reference))
        )
    return verdicts


def _shared(base_case: dict[str, Any], case: dict[str, Any], reference: str | None) -> float | None:
    """Slow-down of the reference against the yardstick, which shares no code with it."""
    if reference in (None, YARDSTICK) or any(YARDSTICK not in one["systems"] for one in (base_case, case)):
        return None
    assert reference is not None
    return float(rounds(case, reference, YARDSTICK).min() / rounds(base_case, reference, YARDSTICK).min())


def rounds(case: dict[str, Any], name: str, reference: str | None) -> F64:
    """The ratio of each round of ten passes (what is left over joins the last); nanoseconds without a
    reference."""
    own = np.asarray(case["systems"][name]["samples_ns"], float)
    beside = None if reference is None else np.asarray(case["systems"][reference]["samples_ns"], float)
    if beside is not None:
        passes, calls = min(len(own), len(beside)), min(own.shape[1], beside.shape[1])
        own, beside = own[:passes, :calls], beside[:passes, :calls]
    starts = range(0, max(len(own) - ROUND + 1, 1), ROUND)
    ends = [*list(starts)[1:], len(own)]
    ratios = []
    for begin, end in zip(starts, ends, strict=True):
        ratio = np.quantile(own[begin:end], QUANTILE, axis=0).sum()
        if beside is not None:
            ratio /= np.quantile(beside[begin:end], QUANTILE, axis=0).sum()
        ratios.append(float(ratio))
    return np.array(ratios)


def _gap(values: F64) -> float:
    """Between the lowest and the third-lowest round, as a share; the whole allowance where there are
    fewer."""
    ordered = np.sort(values)
    return float(ordered[2] / ordered[0] - 1) if len(ordered) > 2 else MAX_NOISE


def merged(case: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A case with the samples of further rounds of the same behind its own, as far as both measured the
    same calls."""
    systems = dict(case["systems"])
    for name, own in systems.items():
        calls = min(own["num_calls"], more["systems"][name]["num_calls"])
        samples = [row[:calls] for row in own["samples_ns"] + more["systems"][name]["samples_ns"]]
        systems[name] = {**own, "samples_ns": samples, "num_passes": len(samples), "num_calls": calls}
    return {**case, "systems": systems}
