"""Timing systems side by side: interleaved, so that what disturbs the machine disturbs them alike.

A call is a batch of queries, host arrays to host results. The calls are cut into blocks of a few; every
system runs a block, in an order that turns, before the next block begins. Every sample is kept.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flashtrie_cli.bench.grids import Grids
from flashtrie_cli.bench.systems import Searcher
from flashtrie_cli.query.plan import SearchPlan

BLOCK = 8
"""Calls of one system in a row: long enough for caches to be its own, short enough to share what disturbs."""

SHORT_NS = 20e6
"""A call shorter than this suffers when another system ran before it (caches, a GPU's clocks): by 40 to 90
% on an H200, by 30 % on a CPU. A block of such calls therefore begins with one that does not count."""

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Effort:
    """How long to measure: ``passes`` over the calls, within ``seconds`` a system and case (the slow ones
    get fewer calls, then fewer passes)."""

    passes: int = 10
    seconds: float = 1.0


@dataclass
class Samples:
    """Times of one system, float64 [passes, calls], NaN where it did not get to: of the clock, of the
    processors that this process had (a time slice lost to another process is not in it), of the kernel."""

    call_ns: F64
    cpu_ns: F64
    kernel_ns: F64
    num_calls: int = 0
    num_passes: int = 0
    is_short: bool = True
    warm_up_ns: list[int] = field(default_factory=list)


Work = Callable[[int], int | None]
"""Do call number i; the kernel's nanoseconds, or None where there is no kernel."""


def search_work(searcher: Searcher, grids: Grids, plan: SearchPlan, batch_size: int) -> Work:
    """The searches of ``grids`` in batches; a last, smaller batch is left out."""

    def call(number: int) -> int | None:
        part = slice(number * batch_size, (number + 1) * batch_size)
        searcher.search(grids.tokens[part], grids.logprobs[part], plan)
        return getattr(searcher, "last_kernel_ns", None)

    return call


def measure(
    works: dict[str, Work], num_calls: int, effort: Effort, tick: Callable[[float], None] = lambda share: None
) -> dict[str, Samples]:
    """Time every work on calls 0 to ``num_calls``, interleaved. ``tick(share)`` is called between blocks."""
    samples = {name: _warm_up(work, num_calls, effort) for name, work in works.items()}
    names = list(works)
    passes = max(s.num_passes for s in samples.values())
    blocks = range(0, num_calls, BLOCK)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(passes):
            for at, begin in enumerate(blocks):
                for turn in range(len(names)):
                    name = names[(turn + at + number) % len(names)]
                    own = samples[name]
                    if number < own.num_passes and begin < own.num_calls:
                        _time_block(works[name], own, number, range(begin, min(begin + BLOCK, own.num_calls)))
                tick((number + (at + 1) / len(blocks)) / passes)
    finally:
        if was_enabled:
            gc.enable()
    return samples


def _time_block(work: Work, samples: Samples, number: int, calls: Sequence[int]) -> None:
    clock, cpu_clock = time.perf_counter_ns, time.process_time_ns
    if samples.is_short:
        work(calls[0])
    for call in calls:
        cpu_begin = cpu_clock()
        begin = clock()
        kernel = work(call)
        samples.call_ns[number, call] = clock() - begin
        samples.cpu_ns[number, call] = cpu_clock() - cpu_begin
        if kernel is not None:
            samples.kernel_ns[number, call] = kernel


def _warm_up(work: Work, num_calls: int, effort: Effort) -> Samples:
    """Run some calls that don't count, and see from the later half how many can be timed."""
    spent: list[int] = []
    allowed = effort.seconds * 1e9 / (effort.passes + 1)
    while len(spent) < num_calls and (len(spent) < 2 or sum(spent) < allowed):
        if len(spent) == 1 and spent[0] > effort.seconds * 1e9:
            break  # one call is more than all we have
        begin = time.perf_counter_ns()
        work(len(spent))
        spent.append(time.perf_counter_ns() - begin)
    one = float(np.median(spent[len(spent) // 2 :]))
    affordable = max(1.0, effort.seconds * 1e9 / one)
    passes = int(np.clip(affordable / num_calls, 1, effort.passes))
    calls = int(np.clip(affordable / passes, min(2, num_calls), num_calls))
    call, cpu, kernel = (np.full((effort.passes, num_calls), np.nan) for _ in range(3))
    return Samples(call, cpu, kernel, calls, passes, one < SHORT_NS, spent)
