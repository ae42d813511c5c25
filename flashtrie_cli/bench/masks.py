"""Token masks measured: compiling, filling, advancing and batches, beside whatever peer is installed.

Every system compiles the same members and follows random walks through them, one after the other within a size.
Compiling is timed from Python strings to the object that answers, the vocabulary made ready before.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashtrie_cli.bench.environment import environment
from flashtrie_cli.bench.mask_systems import MaskSystem, open_systems
from flashtrie_cli.bench.request import Request
from flashtrie_cli.bench.run import SCHEMA
from flashtrie_cli.bench.workloads import GPT2_END, find_sample_data
from flashtrie_cli.errors import UsageError
from flashtrie_cli.keys.string_sets import read_string_sets
from flashtrie_cli.keys.token_vocabulary import open_vocabulary
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import TokenBytes

DEFAULT_SIZES = (100, 1_000, 10_000, 100_000)
NUM_STEPS = 3_000
"""Fills and advances timed a size and system."""
SLOW_STEPS = 300
"""The same for systems whose compile already took longer than a second."""
BATCH_SIZE = 256
BATCH_STEPS = 400


@dataclass
class MaskBench:
    """What to measure: sets by name, a vocabulary, sizes (the smaller ones are samples of a set)."""

    sets: dict[str, Sequence[str]]
    tokens: TokenBytes
    eos: Sequence[int]
    sizes: Sequence[int] = DEFAULT_SIZES
    systems: Sequence[str] | None = None
    seconds: float = 1.0
    seed: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def run(self, watch: Callable[[str, float], None] = lambda what, share: None) -> list[dict[str, Any]]:
        """Rows, one a set, size and system: times in microseconds, bytes of memory, or what went wrong."""
        opened = open_systems(self.systems, self.tokens, self.eos)
        cases = [(name, size) for name, members in self.sets.items() for size in self._sizes(len(members))]
        for at, (name, size) in enumerate(cases):
            members = self.sets[name]
            rng = random.Random(f"{self.seed} {name} {size}")
            chosen = list(members) if size == len(members) else rng.sample(list(members), size)
            base: dict[str, Any] | None = None
            for system in opened:
                watch(f"{name} {size:,} {system.name}", at / len(cases))
                row = {"set": name, "num_members": size, "system": system.name}
                if size > system.most_members:
                    row["left_out"] = "too slow, or more than it takes"
                else:
                    row |= self._measure(system, chosen)
                    base = base or row
                    row["times_ours"] = row.get("compile_cpu_us", 0) / base["compile_cpu_us"] or None
                self.rows.append(row)
        return self.rows

    def _sizes(self, largest: int) -> list[int]:
        return [size for size in self.sizes if size <= largest]

    def _measure(self, system: MaskSystem, members: list[str]) -> dict[str, Any]:
        try:
            compiled, compile_us, cpu_us = self._compile(system, members)
            is_slow = statistics.median(compile_us) > 1e6
            steps = SLOW_STEPS if is_slow else NUM_STEPS
            fill, advance = follow(system, compiled, self.eos, random.Random(self.seed), steps)
        except Exception as error:  # whatever a peer raises is its answer
            return {"failed": " ".join(str(error).split())[:200] or type(error).__name__}
        row = {
            "compile_us": statistics.median(compile_us),
            "compile_cpu_us": statistics.median(cpu_us),
            "compile_samples_us": compile_us,
            "fill_us": summary_us(fill),
            "advance_us": summary_us(advance),
            "memory": system.memory(compiled),
        }
        if isinstance(compiled, TokenMasks):
            row["batch_us"] = batch_times(compiled, self.seed)
        return row

    def _compile(self, system: MaskSystem, members: list[str]) -> tuple[Any, list[float], list[float]]:
        """The last of as many compiles as fit into the time; of each, but for the first, which warms up, what passed
        on the clock and what the processors spent on it (on a busy machine the better measure)."""
        spent: list[float] = []
        worked: list[float] = []
        began = time.perf_counter()
        gc.disable()
        try:
            while True:
                start, cpu_start = time.perf_counter_ns(), time.process_time_ns()
                compiled = system.compile(members)
                worked.append((time.process_time_ns() - cpu_start) / 1e3)
                spent.append((time.perf_counter_ns() - start) / 1e3)
                elapsed = time.perf_counter() - began
                if (elapsed >= self.seconds and len(spent) >= 3) or elapsed > 5 * self.seconds:
                    return compiled, spent[1:] or spent, worked[1:] or worked
        finally:
            gc.enable()


def follow(
    system: MaskSystem, compiled: Any, eos: Sequence[int], rng: random.Random, num_steps: int
) -> tuple[list[int], list[int]]:
    """Nanoseconds of each fill and each advance along random walks, the call from Python included.

    The next token is drawn from the system's own mask: some allow one spelling only where others allow all.
    """
    clock = time.perf_counter_ns
    ends = set(eos)
    fills: list[int] = []
    advances: list[int] = []
    while len(fills) < num_steps:
        system.start(compiled)
        while True:
            begin = clock()
            system.fill()
            fills.append(clock() - begin)
            allowed = np.flatnonzero(np.unpackbits(system.row().view(np.uint8), bitorder="little"))
            token = int(allowed[rng.randrange(len(allowed))])
            if token in ends:
                break
            begin = clock()
            is_allowed = system.advance(token)
            advances.append(clock() - begin)
            if not is_allowed:
                raise RuntimeError("it refuses a token of its own mask")
    return fills, advances


def batch_times(masks: TokenMasks, seed: int) -> dict[str, Any]:
    """One call fills the rows of a batch of generations, one advances their states.

    ``in_step``: all begin together and none again, so that the first fill writes a long row for each;
    ``staggered``: one that ends begins anew at once, so that some rows of every fill are the root's long one;
    ``shared``: the same where states with long lists share a row. Each walks alone, since rows of another that lie
    between its own in the caches would count.
    """
    rows = masks.rows(BATCH_SIZE)
    first: list[int] = []
    in_step: list[int] = []
    advances: list[int] = []
    states = np.zeros(BATCH_SIZE, np.uint32)
    rng = random.Random(seed)
    for _ in range(BATCH_STEPS // 2):
        (in_step if states.any() else first).append(_timed(rows.fill, states))
        states = _stepped(masks, states, rng, advances)
        if (states == masks.ended).all():
            states[:] = 0
    fills = {"first": first, "in_step": in_step}
    fills["staggered"] = _staggered(masks, rows.fill, random.Random(seed), advances)
    fills["shared"] = _staggered(masks, masks.rows(BATCH_SIZE).share, random.Random(seed), advances)
    return {
        "num_states": BATCH_SIZE,
        **{f"{name}_fill_us": summary_us(samples) for name, samples in fills.items()},
        "advance_us": summary_us(advances),
    }


def _staggered(
    masks: TokenMasks, show: Callable[[Any], Any], rng: random.Random, advances: list[int]
) -> list[int]:
    """Nanoseconds of each ``show(states)``, those of the second half of the steps, when lengths have spread."""
    shown: list[int] = []
    states = np.zeros(BATCH_SIZE, np.uint32)
    for _ in range(BATCH_STEPS):
        shown.append(_timed(show, states))
        states = _stepped(masks, states, rng, advances)
        states[states == masks.ended] = 0
    return shown[BATCH_STEPS // 2 :]


def _stepped(masks: TokenMasks, states: Any, rng: random.Random, advances: list[int]) -> Any:
    tokens = _random_tokens(masks, states, rng)
    begin = time.perf_counter_ns()
    states, _ = masks.advance(states, tokens)
    advances.append(time.perf_counter_ns() - begin)
    return states


def _timed(call: Callable[[Any], Any], states: Any) -> int:
    begin = time.perf_counter_ns()
    call(states)
    return time.perf_counter_ns() - begin


def _random_tokens(masks: TokenMasks, states: Any, rng: random.Random) -> Any:
    """An allowed token for each state; -1, which none allows, where there is none."""
    ids, offsets = masks.allowed_lists(states)
    ranges = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return np.array([ids[rng.randrange(a, b)] if a < b else -1 for a, b in ranges], np.int64)


def summary_us(samples_ns: list[int]) -> dict[str, float]:
    """Median, mean, 99th percentile and largest, in microseconds."""
    ordered = sorted(samples_ns)
    return {
        "median": ordered[len(ordered) // 2] / 1e3,
        "mean": statistics.fmean(ordered) / 1e3,
        "p99": ordered[len(ordered) * 99 // 100] / 1e3,
        "max": ordered[-1] / 1e3,
        "num_samples": len(ordered),
    }


def run_masks(
    request: Request, made: dict[str, Any], *, watch: Callable[[str, float], None], save: Callable[[], None]
) -> None:
    """Measure the sample data's titles in GPT-2 tokens, adding rows to ``made``; ``save`` is called at the end."""
    directory = find_sample_data(request.sample_data)
    if directory is None:
        raise UsageError("the sample data is not here", hint="--sample-data DIR")
    members = read_string_sets([str(directory / "titles.txt.zst")]).members
    vocabulary = open_vocabulary(str(directory / "tokenizer.json.zst"))
    bench = MaskBench(
        {"titles": [member.decode() if isinstance(member, bytes) else member for member in members]},
        vocabulary.tokens,
        (GPT2_END,),
        sizes=request.num_keys or DEFAULT_SIZES,
        systems=request.systems,
        seconds=request.seconds,
        seed=request.seed,
    )
    made.update(schema=SCHEMA, environment=environment(), request=request.as_json(), masks=bench.rows)
    made["is_complete"] = False
    bench.run(watch)
    made["is_complete"] = True
    save()
