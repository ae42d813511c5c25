"""The gate for CI: is an engine slower than in an earlier run, by more than the noise?

Times on a shared machine move by half from minute to minute. So a CPU engine is judged by its ratio to
`marisa-opt` on the same calls, block by block: a fixed algorithm over the same trie, which feels
neighbours, caches and clock rates much as the engine does. On one thread the time is the processor's, so
that time slices lost to other processes don't count, plus what the fastest pass spent waiting. A run is
several sessions, each with an index opened anew, since where pages happen to lie in the caches moves an
engine by some per cent, too. In a session a call counts with its fastest pass; noise only adds, and adds
more to the engine than to the reference, so a run is judged by its lowest session. While that looks too
slow, more sessions are measured: a neighbour goes away, a regression stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.bench.request import Request
from flashtrie_cli.bench.run import YARDSTICK
from flashtrie_cli.bench.systems import OURS, SYSTEMS
from flashtrie_cli.errors import InputError, UsageError

F64 = npt.NDArray[np.float64]

MAX_NOISE = 0.015
"""More than this is not granted to noise: it would hide what the gate is there for."""
REFERENCES = {"cpu": ("marisa-opt", YARDSTICK), "gpu": ("flashtrie-paper",)}
SHARED_LIMIT = 1.25
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


CASE_FIELDS = ("workload", "num_slots", "beam_width", "batch_size", "digest")
SYSTEM_FIELDS = ("samples_ns", "cpu_samples_ns", "session_passes")


def base_request(base: dict[str, Any], path: str) -> Request:
    """What a base measured. Raises InputError for a record that nothing can be judged by."""
    if "request" not in base or not base.get("cases"):
        raise InputError("holds no searches to compare with", file=path)
    try:
        request = Request.from_json(base["request"]).checked()
        systems = [case["systems"] for case in base["cases"]]
        whole = isinstance(base["environment"], dict) and isinstance(base["options"], dict)
        whole = whole and all(name in case for case in base["cases"] for name in CASE_FIELDS)
        whole = whole and all(name in s for one in systems for s in one.values() for name in SYSTEM_FIELDS)
        is_ours = all(any(name in one for name in OURS) for one in systems)
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = is_ours = False
    if not whole:
        raise InputError("is no whole export", file=path, hint="make the base again")
    if not is_ours:
        raise InputError(
            f"measured no engine that could be judged ({' or '.join(OURS)})",
            file=path,
            hint="make the base again",
        )
    return request


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


def judge(base_case: dict[str, Any], case: dict[str, Any], *, threads: int = 1) -> list[Verdict]:
    """The verdict on each of our engines that both runs measured."""
    verdicts = []
    for name in OURS:
        if name not in base_case["systems"] or name not in case["systems"]:
            continue
        known = [
            other
            for other in REFERENCES[SYSTEMS[name].device]
            if other in base_case["systems"] and other in case["systems"]
        ]
        reference = known[0] if known else None
        was, now = (sessions(one, name, reference, threads) for one in (base_case, case))
        noise = min(max(_gap(was), _gap(now)), MAX_NOISE)
        moved = None
        if reference not in (None, YARDSTICK) and YARDSTICK in known:
            moved = float(
                sessions(case, reference, YARDSTICK, threads).min()
                / sessions(base_case, reference, YARDSTICK, threads).min()
            )
        verdicts.append(Verdict(case_key(case), name, float(now.min() / was.min()), noise, reference, moved))
    return verdicts


def sessions(case: dict[str, Any], name: str, reference: str | None, threads: int) -> F64:
    """The ratio in each session, of the sums over calls of the fastest pass; nanoseconds without a
    reference."""
    own = _fastest(case["systems"][name], name, threads)
    if reference is None:
        return own.sum(axis=1)
    beside = _fastest(case["systems"][reference], reference, threads)
    calls = min(own.shape[1], beside.shape[1])
    return own[:, :calls].sum(axis=1) / beside[:, :calls].sum(axis=1)


def _fastest(system: dict[str, Any], name: str, threads: int) -> F64:
    """[sessions, calls] of the fastest pass."""
    clock = np.asarray(system["samples_ns"], float)
    by_processor = threads == 1 and (name == YARDSTICK or SYSTEMS[name].device == "cpu")
    cpu = np.asarray(system["cpu_samples_ns"], float) if by_processor else clock
    ends = np.cumsum(system["session_passes"])
    parts = list(zip((0, *ends[:-1]), ends, strict=True))
    return np.array(
        [cpu[a:b].min(axis=0) + np.maximum(clock[a:b] - cpu[a:b], 0).min(axis=0) for a, b in parts]
    )


def _gap(values: F64) -> float:
    """Between the lowest and the second-lowest session, as a share; the whole allowance where there is
    one."""
    ordered = np.sort(values)
    return float(ordered[1] / ordered[0] - 1) if len(ordered) > 1 else MAX_NOISE


def merged(case: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A case with the samples of further sessions behind its own, as far as both measured the same calls."""
    systems = dict(case["systems"])
    for name, own in systems.items():
        extra = more["systems"][name]
        calls = min(own["num_calls"], extra["num_calls"])
        both = {
            key: [row[:calls] for row in own[key] + extra[key]]
            for key in ("samples_ns", "cpu_samples_ns", "kernel_samples_ns")
            if own.get(key) is not None
        }
        passes = own["session_passes"] + extra["session_passes"]
        systems[name] = {
            **own,
            **both,
            "num_passes": sum(passes),
            "session_passes": passes,
            "num_calls": calls,
        }
    return {**case, "systems": systems}
