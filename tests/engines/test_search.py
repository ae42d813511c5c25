"""Beam search: cpu = reference = brute force over the keys, byte for byte, ties included."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Key, Oracle, Slot, engines, scratch
from strategies import grids, key_lists, plans

from flashtrie_cli import Index, SearchPlan
from flashtrie_cli.errors import InputError, UsageError

Grid = Sequence[Sequence[Slot]]


def arrays(queries: Sequence[Grid]) -> tuple[np.ndarray, np.ndarray]:
    """Grids of one shape as tokens and log-probs [queries, steps, slots]."""
    steps = len(queries[0]) if queries else 0
    slots = len(queries[0][0]) if steps else 0
    shape = (len(queries), steps, slots)
    tokens = np.array([[[slot[0] for slot in row] for row in grid] for grid in queries], np.uint32).reshape(
        shape
    )
    logprobs = np.array([[[slot[1] for slot in row] for row in grid] for grid in queries], np.float32)
    return tokens, logprobs.reshape(shape)


def check(
    keys: Sequence[Key], queries: Sequence[Grid], plan: SearchPlan, indexes: tuple[Index, Index]
) -> int:
    """All three agree; the number of hits."""
    cpu, reference = indexes
    grid = arrays(queries)
    found = cpu.search(*grid, plan)
    assert found.identical(reference.search(*grid, plan))
    oracle = Oracle(keys)
    expected = [oracle.search(query, plan) for query in queries]
    assert [[(h.key_id, h.tokens, h.score, h.normalised_score) for h in hits] for hits in found] == expected
    return found.num_hits


@given(key_lists(), st.data())
@settings(max_examples=300)
def test_the_three_agree(keys: list[Key], data: st.DataObject) -> None:
    check(keys, [data.draw(grids(keys))], data.draw(plans(keys)), engines(keys))


@given(key_lists(min_size=20, max_size=200), st.data(), st.integers(1, 5), st.sampled_from((2, 3)))
@settings(max_examples=60)
def test_batches_and_threads_do_not_show(
    keys: list[Key], data: st.DataObject, size: int, threads: int
) -> None:
    grid = data.draw(grids(keys))
    queries = [[row[::-1] for row in grid] if number % 2 else grid for number in range(size)]
    plan = data.draw(plans(keys))
    check(keys, queries, plan, engines(keys))
    many = Index.open(scratch("oracle.ft"), threads=threads).search(*arrays(queries), plan)
    assert many.identical(Index.open(scratch("oracle.ft"), threads=1).search(*arrays(queries), plan))


def random_grid(source: random.Random, tokens: Sequence[int], steps: int, slots: int) -> Grid:
    return [
        [(source.choice(tokens), round(-source.expovariate(1), 1)) for _ in range(slots)]
        for _ in range(steps)
    ]


@pytest.mark.parametrize(
    ("fan_out", "step"),
    [*product((1, 2, 8, 9, 31, 32, 33, 255, 256, 257, 2000), (1, 3, 65_536)), (65_535, 1), (65_536, 1)],
)
def test_fan_outs(fan_out: int, step: int) -> None:
    """Scanned in any width of registers, or searched per proposal: the same hits."""
    source = random.Random(fan_out)
    keys = [(i * step % 2**31,) for i in range(fan_out)]
    keys += [(i * step % 2**31, 1) for i in range(0, min(fan_out, 300), 3)]
    tokens = [source.randrange(fan_out + 1) * step % 2**31 for _ in range(40)] + [1, 65_537]
    indexes = engines(keys)
    hits = 0
    for slots, beam in ((1, 1), (2, 4), (30, 5), (200, 50)):
        plan = SearchPlan(beam_width=beam)
        hits += check(keys, [random_grid(source, tokens, 2, slots)], plan, indexes)
    assert hits


def test_ties_go_to_the_smaller_node() -> None:
    keys = [(a, b) for a in range(30) for b in range(30)]
    row = [(token, -1.0) for token in range(30)]
    for beam in (1, 7, 40):
        assert check(keys, [[row, row]], SearchPlan(beam_width=beam), engines(keys)) == beam


def test_deep_beams() -> None:
    source = random.Random(5)
    keys = [tuple(source.choices(range(4), k=source.randrange(1, 40))) for _ in range(500)]
    for beam in (1, 10, 300):
        plan = SearchPlan(beam_width=beam, alpha=0.7)
        check(keys, [random_grid(source, range(4), 45, 6) for _ in range(3)], plan, engines(keys))


@pytest.mark.parametrize("eos", [None, 9])
def test_the_end_of_sequence(eos: int | None) -> None:
    keys = [(1,), (1, 2), (9,), (9, 9), (1, 9)]
    grid = [[(1, -0.1), (9, -0.2)], [(2, -0.3), (9, -0.5)], [(9, -0.7), (9, -0.6)]]
    for plan in (
        SearchPlan(eos=eos),
        SearchPlan(eos=eos, token_threshold=-0.4),
        SearchPlan(eos=eos, padding=9),
    ):
        check(keys, [grid], plan, engines(keys))


@pytest.mark.parametrize("logprobs", [(-1.0, -3.0), (-3.0, -1.0)])
def test_the_end_of_sequence_twice_in_a_row_counts_best(logprobs: tuple[float, float]) -> None:
    keys = [(1,), (1, 2)]
    first, second = logprobs
    ends = [(9, first), (9, second), (2, -0.5)]
    grid = [[(1, -0.25), (8, -1.0), (8, -1.0)], ends, ends]
    (hits,) = engines(keys)[0].search(*arrays([grid]), SearchPlan(eos=9, alpha=0))
    assert [(hit.tokens, hit.score) for hit in hits] == [((1,), -1.25), ((1, 2), -1.75)]
    assert check(keys, [grid], SearchPlan(eos=9, alpha=0), engines(keys)) == 2


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        ({"token_threshold": -2.0}, 1),
        ({"token_threshold": -2.0 - 2**-20}, 2),
        ({"token_threshold": -1.0}, 0),
        ({"sequence_threshold": -3.0}, 1),
        ({"sequence_threshold": -3.0 - 2**-20}, 2),
        ({"sequence_threshold": -1.0}, 0),
    ],
)
def test_thresholds_are_for_what_lies_above_them(limits: dict[str, float], found: int) -> None:
    keys = [(1,), (1, 2)]
    grid = [[(1, -1.0)], [(2, -2.0)]]
    assert check(keys, [grid], SearchPlan(**limits), engines(keys)) == found


def test_empty_shapes() -> None:
    keys = [(1,), ()]
    index, reference = engines(keys)
    for shape in ((0, 0, 0), (0, 3, 2), (2, 0, 3), (2, 3, 0)):
        tokens, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        found = index.search(tokens, logprobs)
        assert found.identical(reference.search(tokens, logprobs))
        assert (found.num_queries, found.num_hits) == (shape[0], 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_bad_logprob_is_named(bad: float, threads: int) -> None:
    engines([(1,)])
    tokens, logprobs = np.ones((4, 3, 5), np.int64), np.full((4, 3, 5), -1, np.float32)
    logprobs[2, 1, 3] = logprobs[3, 0, 0] = bad
    for engine in ("cpu", "reference"):
        index = Index.open(scratch("oracle.ft"), engine=engine, threads=threads)
        with pytest.raises(InputError, match=r"query 2, step 1, slot 3: log-prob (nan|inf)"):
            index.search(tokens, logprobs)


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [
        (np.zeros((1, 2, 3), np.int64), np.zeros((1, 2, 4), np.float32)),
        (np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.float32)),
        (np.zeros((1, 2, 3), np.int64), np.zeros((1, 2, 3), np.int64)),
        (np.zeros(3, np.int64), np.zeros(3, np.float32)),
        (np.full((1, 1, 1), -2), np.zeros((1, 1, 1), np.float32)),
    ],
)
def test_bad_grids(tokens: np.ndarray, logprobs: np.ndarray) -> None:
    index, _ = engines([(0,)])
    with pytest.raises(InputError):
        index.search(tokens, logprobs)


@pytest.mark.parametrize(
    "kind", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
)
@pytest.mark.parametrize("floats", [np.float16, np.float32, np.float64])
def test_number_types(kind: type, floats: type) -> None:
    index, _ = engines([(1,), (1, 2)])
    tokens, logprobs = np.array([[1, 3], [2, 3]], kind), np.array([[-0.5, -1], [-0.25, -2]], floats)
    assert [hit.tokens for hit in index.search(tokens, logprobs).hits(0)] == [(1,), (1, 2)]
    expected = index.search(tokens.astype(np.int64), logprobs.astype(np.float32))
    assert index.search(tokens, logprobs).identical(expected)
    assert index.search(tokens[::-1][::-1], np.asfortranarray(logprobs)).identical(expected)


@pytest.mark.parametrize(
    "change",
    [
        {"beam_width": 0},
        {"beam_width": 2**21},
        {"num_results": 0},
        {"alpha": -1.0},
        {"alpha": float("nan")},
        {"token_threshold": float("nan")},
        {"sequence_threshold": float("nan")},
        {"eos": -1},
        {"eos": 2**31},
    ],
)
def test_bad_plans(change: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        replace(SearchPlan(), **change)


def test_scores_that_would_vanish() -> None:
    index, _ = engines([(1,)])
    with pytest.raises(UsageError, match="alpha"):
        index.search(np.ones((50, 1), np.int64), np.zeros((50, 1), np.float32), alpha=900)
