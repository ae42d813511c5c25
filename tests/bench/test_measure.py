"""Interleaving, effort, statistics and quality."""

from __future__ import annotations

import time

import numpy as np
import pytest

from flashtrie_cli.bench.grids import Grids
from flashtrie_cli.bench.measure import BLOCK, Effort, measure, search_work
from flashtrie_cli.bench.quality import WrongAnswer, agreement, check_exact, quality
from flashtrie_cli.bench.request import Request, parse_counts
from flashtrie_cli.bench.run import first_queries
from flashtrie_cli.bench.statistics import ratio, summary
from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.plan import SearchPlan

from .conftest import random_grids


def test_blocks_are_interleaved_and_turn():
    order = []
    works = {name: lambda call, name=name: order.append(name) for name in "ab"}
    samples = measure(works, 2 * BLOCK, Effort(passes=3, seconds=1))
    assert np.isfinite(samples["a"].call_ns).all()
    timed = order[len(samples["a"].warm_up_ns) + len(samples["b"].warm_up_ns) :]
    size = BLOCK + 1  # the first call of a block does not count
    blocks = ["".join(timed[i : i + size]) for i in range(0, len(timed), size)]
    assert blocks == [c * size for c in "abbabaababba"]


def test_a_slow_system_gets_fewer_calls():
    works = {"fast": lambda call: None, "slow": lambda call: time.sleep(0.02)}
    samples = measure(works, 32, Effort(passes=5, seconds=0.2))
    assert samples["fast"].num_calls == 32
    assert samples["fast"].num_passes == 5
    assert samples["slow"].num_passes == 1
    assert 2 <= samples["slow"].num_calls <= 12
    assert int(np.isfinite(samples["slow"].call_ns).sum()) == samples["slow"].num_calls


def test_waiting_is_not_processor_time():
    samples = measure({"x": lambda call: time.sleep(0.01)}, 2, Effort(passes=2, seconds=1))["x"]
    assert samples.call_ns.min() > 9e6
    assert samples.cpu_ns.max() < 5e6


def test_kernel_times_are_kept():
    samples = measure({"gpu": lambda call: 1000 + call}, 4, Effort(passes=2, seconds=1))
    assert samples["gpu"].kernel_ns[0].tolist() == [1000, 1001, 1002, 1003]


def test_summary_and_ratio():
    made = summary(np.array([1.0, 2.0, 3.0, 4.0, np.nan]))
    assert (made["mean"], made["p50"], made["min"], made["num_samples"]) == (2.5, 2.5, 1.0, 4)
    fast = np.random.default_rng(0).uniform(1, 2, (5, 50))
    slow = 3 * fast
    slow[0, :7] = 1e9  # lost time slices
    slow[:, 40:] = np.nan  # not reached
    made = ratio(slow, fast)
    assert made["low"] <= made["ratio"] <= made["high"]
    assert made["ratio"] == pytest.approx(3, rel=0.05)
    assert made["num_calls"] == 40


def test_quality_counts_targets(small_index):
    tokens, logprobs = random_grids(7, 4, 6, 50, 200)
    found = small_index.search(tokens, logprobs, SearchPlan(beam_width=30))
    targets = np.array([found.hits(0)[0].key_id, found.hits(1)[4].key_id, -1, small_index.num_keys + 5])
    made = quality(found, targets)
    assert made["num_targets"] == 3
    assert made["recall"] == pytest.approx(2 / 3)
    assert made["recall_of_all"] == pytest.approx(0.5)
    assert made["recall_at_1"] == pytest.approx(1 / 3)
    assert made["mean_reciprocal_rank"] == pytest.approx((1 + 1 / 5) / 3)


def test_a_wrong_answer_stops_the_benchmark(small_index):
    tokens, logprobs = random_grids(7, 4, 6, 50, 200)
    right = small_index.search(tokens, logprobs, SearchPlan(beam_width=30))
    wrong = small_index.search(tokens, logprobs, SearchPlan(beam_width=29))
    check_exact("x", right, right)
    with pytest.raises(WrongAnswer, match="query 0"):
        check_exact("x", wrong, right)
    assert agreement(right, right) == 1
    assert agreement(wrong, right) < 1
    alone = small_index.search(tokens[:2], logprobs[:2], SearchPlan(beam_width=30))
    assert first_queries(right, 2).identical(alone)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("100", (100,)), ("1,8", (1, 8)), ("100:300:100", (100, 200, 300)), ("10k,1M", (10_000, 10**6))],
)
def test_counts(text, counts):
    assert parse_counts(text, "--x") == counts


@pytest.mark.parametrize(
    "text", ["", "a", "1,,2", "1:2:x", "infk", "200:100:10", "1:9:0", "1:99999999999999:1"]
)
def test_bad_counts(text):
    with pytest.raises(UsageError, match="--x"):
        parse_counts(text, "--x")


def test_requests_travel_through_json():
    request = Request(workload="nar", systems=("cpu",), beam_widths=(100,), token_threshold=-20.0)
    assert Request.from_json(request.as_json()) == request
    assert Request(beam_widths=(100,)).conflicts(request) == []
    assert Request(beam_widths=(50,), seed=3).conflicts(request) == ["beam_widths", "seed"]
    assert Request().steady().systems == ("cpu", "marisa-opt")


def test_a_batch_of_more_queries_than_there_are_repeats_them():
    grids = Grids(*random_grids(1, 5, 2, 3, 50)[:2], np.arange(5))
    assert grids.at_least(5) is grids
    more = grids.at_least(13)
    assert len(more.tokens) == len(more.logprobs) == 13
    assert np.array_equal(more.tokens[10:], grids.tokens[:3])
    assert more.targets is not None
    assert more.targets.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    calls = []

    class Searcher:
        def search(self, tokens, logprobs, plan):
            calls.append(len(tokens))

    search_work(Searcher(), more, SearchPlan(beam_width=1), 13)(0)
    assert calls == [13]
