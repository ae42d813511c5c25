"""The benchmark itself: workloads x widths x batches, answers checked first, every finished case kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashtrie_cli.bench.environment import environment
from flashtrie_cli.bench.grids import Grids
from flashtrie_cli.bench.measure import Effort, Samples, Work, measure, search_work
from flashtrie_cli.bench.quality import agreement, check_exact, quality
from flashtrie_cli.bench.statistics import ratio, summary
from flashtrie_cli.bench.systems import OURS, SYSTEMS, Searcher, System, resident_size
from flashtrie_cli.bench.workloads import Workload
from flashtrie_cli.engine.cpu import is_available as native_available
from flashtrie_cli.engine.cpu import native
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

SCHEMA = "flashtrie.bench/1"
YARDSTICK = "yardstick"
ORACLE_NODES = 1_000_000
"""Up to this size the plain-Python reference checks too; beyond, it would take minutes."""
ORACLE_QUERIES, ORACLE_WIDTH = 2, 32
MAX_TABLE = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What to measure. ``widths``: (slots, beam width) pairs; ``plan``: the other fields of the search
    plan."""

    widths: tuple[tuple[int, int], ...]
    batch_sizes: tuple[int, ...] = (1,)
    threads: int = 1
    effort: Effort = field(default_factory=Effort)
    plan: dict[str, Any] = field(default_factory=dict)
    use_eos: bool = False

    def search_plan(self, workload: Workload, beam_width: int) -> SearchPlan:
        return SearchPlan(beam_width=beam_width, eos=workload.eos if self.use_eos else None, **self.plan)

    def describe(self) -> dict[str, Any]:
        """The options that must agree for two runs to be compared."""
        plan = {name: value if np.isfinite(value) else str(value) for name, value in self.plan.items()}
        return {"threads": self.threads, "use_eos": self.use_eos, **plan}


Watch = Callable[[str, float], None]
"""Told what is being done and the share of the whole that is done."""


def new_record(settings: Settings) -> dict[str, Any]:
    """An empty record of schema ``flashtrie.bench/1``; docs/bench.md describes it."""
    return {
        "schema": SCHEMA,
        "environment": environment(),
        "options": settings.describe(),
        "workloads": [],
        "cases": [],
        "quality": [],
        "is_complete": False,
    }


def run(
    workloads: Iterable[Workload],
    systems: list[System],
    settings: Settings,
    record: dict[str, Any],
    *,
    total_cases: int,
    watch: Watch = lambda what, share: None,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Measure, adding to ``record`` case by case; ``save`` is called after each. Raises WrongAnswer."""
    done = 0
    for workload in workloads:
        record["workloads"].append(workload.describe())
        searchers = {system.name: system.make(workload.index, settings.threads) for system in systems}
        record["workloads"][-1]["resident_bytes"] = {
            name: resident_size(searcher, workload.index) for name, searcher in searchers.items()
        }
        for num_slots, beam_width in settings.widths:
            grids = workload.slots(num_slots)
            plan = settings.search_plan(workload, beam_width)
            watch(f"{workload.name}, B = {beam_width}: checking answers", done / total_cases)
            record["quality"].append(_check(workload, systems, searchers, grids, plan))
            for batch_size in settings.batch_sizes:
                at = f"{workload.name}, K = {num_slots}, B = {beam_width}, batch {batch_size}"

                def tick(share: float, at: str = at, done: int = done) -> None:
                    watch(at, (done + share) / total_cases)

                samples = _measure_case(workload, searchers, grids, plan, batch_size, settings, tick)
                sizes = (num_slots, beam_width, batch_size)
                record["cases"].append(_case(workload, sizes, samples, settings.threads))
                done += 1
                save()
    record["is_complete"] = True
    save()


def _check(
    workload: Workload, systems: list[System], searchers: dict[str, Searcher], grids: Grids, plan: SearchPlan
) -> dict[str, Any]:
    """Compare every system with the oracle before anything is timed, and say how good the answers are."""
    expected = workload.index.search(grids.tokens, grids.logprobs, plan)
    if workload.index.num_nodes <= ORACLE_NODES:
        _check_oracle(workload, grids, plan)
    agreements = {}
    for system in systems:
        # The slow ones take minutes for all queries at the widest; a few show a wrong answer as well.
        few = min(2 if system.name == "marisa-int" else 32, len(grids.tokens))
        part = grids.queries(few)
        found = searchers[system.name].search(part.tokens, part.logprobs, plan)
        want = first_queries(expected, few)
        if system.exact:
            check_exact(system.name, found, want)
        agreements[system.name] = agreement(found, want)
    result: dict[str, Any] = {
        "workload": workload.name,
        "num_slots": grids.tokens.shape[2],
        "beam_width": plan.beam_width,
        "agreement": agreements,
    }
    if grids.targets is not None:
        result.update(quality(expected, grids.targets))
    return result


def _check_oracle(workload: Workload, grids: Grids, plan: SearchPlan) -> None:
    from dataclasses import replace

    from flashtrie_cli.engine.reference import ReferenceEngine

    few, narrow = grids.queries(ORACLE_QUERIES), replace(plan, beam_width=min(plan.beam_width, ORACLE_WIDTH))
    expected = ReferenceEngine(workload.index.stored).search(few.tokens, few.logprobs, narrow)
    check_exact(workload.index.engine.name, workload.index.search(few.tokens, few.logprobs, narrow), expected)


def first_queries(results: SearchResults, count: int) -> SearchResults:
    """The results of the first ``count`` queries."""
    hits = int(results.hit_offsets[count])
    tokens = int(results.token_offsets[hits])
    return SearchResults(
        results.hit_offsets[: count + 1],
        results.key_ids[:hits],
        results.scores[:hits],
        results.normalised_scores[:hits],
        results.token_offsets[: hits + 1],
        results.tokens[:tokens],
    )


def _measure_case(
    workload: Workload,
    searchers: dict[str, Searcher],
    grids: Grids,
    plan: SearchPlan,
    batch_size: int,
    settings: Settings,
    tick: Callable[[float], None],
) -> dict[str, Samples]:
    grids = grids.at_least(batch_size)
    works = {name: search_work(searcher, grids, plan, batch_size) for name, searcher in searchers.items()}
    if native_available():
        works[YARDSTICK] = yardstick_work(workload)
    return measure(works, max(1, len(grids.tokens) // batch_size), settings.effort, tick)


def yardstick_work(workload: Workload) -> Work:
    """Fixed work whose table is as large as the resident index, so that both feel caches and memory alike."""
    size = min(1 << max(workload.index.engine.resident_size - 1, 1).bit_length(), MAX_TABLE)
    yardstick = native().Yardstick(max(size, 1 << 12))

    def work(number: int) -> None:
        yardstick.run(number)

    return work


def _case(
    workload: Workload, sizes: tuple[int, int, int], samples: dict[str, Samples], threads: int
) -> dict[str, Any]:
    num_slots, beam_width, batch_size = sizes
    ratios = [
        {"of": name, "to": ours, **_ratio(name, ours, samples, threads)}
        for ours in OURS
        if ours in samples
        for name in samples
        if name not in (ours, YARDSTICK)
    ]
    return {
        "workload": workload.name,
        "digest": workload.index.file.digest,
        "head": workload.head,
        "num_slots": num_slots,
        "beam_width": beam_width,
        "batch_size": batch_size,
        "systems": {name: _system_result(own, batch_size) for name, own in samples.items()},
        "ratios": ratios,
    }


def _ratio(name: str, ours: str, samples: dict[str, Samples], threads: int) -> dict[str, Any]:
    """By processor time where both run on one CPU thread: a long call loses time slices on a busy machine, a short one
    does not, and the clock would charge the slower system for it. Else by the clock."""
    if threads == 1 and all(SYSTEMS[one].device == "cpu" for one in (name, ours)):
        return {"by": "cpu time", **ratio(samples[name].cpu_ns, samples[ours].cpu_ns)}
    return {"by": "clock", **ratio(samples[name].call_ns, samples[ours].call_ns)}


def _system_result(own: Samples, batch_size: int) -> dict[str, Any]:
    timed = own.call_ns[: own.num_passes, : own.num_calls]
    cpu = own.cpu_ns[: own.num_passes, : own.num_calls]
    kernel = own.kernel_ns[: own.num_passes, : own.num_calls]
    has_kernel = bool(np.isfinite(kernel).any())
    latency = summary(timed.ravel() / 1e3)
    return {
        "latency_us": latency,
        "cpu_us": summary(cpu.ravel() / 1e3),
        "kernel_us": summary(kernel.ravel() / 1e3) if has_kernel else None,
        "queries_per_s": batch_size * 1e6 / latency["mean"],
        "num_passes": own.num_passes,
        "session_passes": [own.num_passes],
        "num_calls": own.num_calls,
        "samples_ns": timed.astype(np.int64).tolist(),
        "cpu_samples_ns": cpu.astype(np.int64).tolist(),
        "kernel_samples_ns": kernel.astype(np.int64).tolist() if has_kernel else None,
    }
