"""Synthetic keys and grids: the same on any thread count, and shaped like the real sets."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrie_cli.bench.grids import NO_TOKEN, Grids, KeySample, draw_tail, head_noise, nar_grids, widened
from flashtrie_cli.bench.nar_keys import NarKeys, profiles
from flashtrie_cli.bench.workloads import draws_for, level_rows, synthetic
from flashtrie_cli.errors import UsageError


def flat(batches):
    batches = list(batches)
    tokens = np.concatenate([batch.tokens for batch in batches])
    return tokens, np.concatenate([np.diff(batch.offsets) for batch in batches])


def test_threads_and_batches_change_nothing():
    keys = NarKeys(300_000, seed=4)
    one, three = flat(keys.batches(threads=1)), flat(keys.batches(threads=3))
    np.testing.assert_array_equal(one[0], three[0])
    np.testing.assert_array_equal(one[1], three[1])
    middle = keys.draw(200_000, 5)
    begin = int(one[1][:200_000].sum())
    np.testing.assert_array_equal(middle.tokens, one[0][begin : begin + len(middle.tokens)])


def test_seeds_differ_and_vocabulary_is_kept():
    assert (
        NarKeys(1000, seed=1).draw(0, 1000).tokens.tobytes()
        != NarKeys(1000, seed=2).draw(0, 1000).tokens.tobytes()
    )
    wide = NarKeys(20_000, vocabulary=2_200_000).draw(0, 20_000).tokens
    assert 1_000_000 < wide.max() < 2_200_000
    assert NarKeys(20_000).draw(0, 20_000).tokens.max() < 50_257


@pytest.mark.parametrize("bad", [{"profile": "x"}, {"num_draws": 0}, {"vocabulary": 5}])
def test_refuses(bad):
    with pytest.raises(UsageError):
        NarKeys(**{"num_draws": 10, **bad})


def test_levels_are_like_those_of_the_titles(tmp_path):
    """100,000 synthetic keys beside 100,000 real titles: nodes and mean fan-out of each level within a tenth."""
    made = synthetic(str(tmp_path), num_keys=100_000, num_queries=1, num_slots=10)
    assert made.index.num_keys == pytest.approx(100_000, rel=0.03)
    real = next(m for m in profiles()["titles"]["measured"] if m["num_keys"] == 100_000)["levels"]
    for level, title in zip(level_rows(made.index)[1:8], real[1:8], strict=True):
        assert level["num_nodes"] == pytest.approx(title["num_nodes"], rel=0.1), level["depth"]
        assert level["mean_fan_out"] == pytest.approx(title["mean_fan_out"], rel=0.1), level["depth"]
        assert level["single_child_share"] == pytest.approx(title["single_child_share"], abs=0.05), level[
            "depth"
        ]


def test_draws_for_is_monotone():
    counts = [draws_for(n) for n in (1, 10_000, 1_000_000, 10_000_000, 1_000_000_000)]
    assert counts == sorted(counts)
    assert counts[-1] < 1 << 31


@pytest.fixture
def sample(small_index):
    return KeySample.of(small_index, 6, seed=0)


def test_tail_is_distinct_and_drawn_from_the_marginal(sample):
    marginal = sample.marginal(0)
    head = np.unique(marginal)[:5]
    tail = draw_tail(np.random.default_rng(0), head, marginal, 20, 200)
    assert len(np.unique(tail)) == 20
    assert not np.isin(tail, head).any()
    assert np.isin(tail, marginal).all()


def test_marginal_runs_dry(sample):
    tail = draw_tail(np.random.default_rng(0), np.zeros(0, np.uint32), np.array([7], np.uint32), 50, 60)
    assert len(np.unique(tail)) == 50
    assert tail.max() < 60


def test_an_index_with_fewer_tokens_than_slots():
    head = np.arange(5, dtype=np.uint32)
    tail = draw_tail(np.random.default_rng(0), head, head, 95, 7)
    assert len(np.unique(np.concatenate((head, tail)))) == 100


def test_grids_hold_their_targets(small_index, sample):
    grids = nar_grids(sample, num_queries=20, num_slots=60, num_tokens=200, seed=1)
    assert (np.diff(grids.logprobs, axis=2) <= 0).all()
    for query, target in enumerate(grids.targets.tolist()):
        for step, token in enumerate(small_index.key_tokens([target]).tokens.tolist()):
            assert token in grids.tokens[query, step]
        for row in grids.tokens[query]:
            assert len(np.unique(row)) == len(row)
    again = nar_grids(sample, num_queries=5, num_slots=60, num_tokens=200, seed=1)
    np.testing.assert_array_equal(again.tokens, grids.tokens[:5])


@pytest.mark.parametrize("head", [0, 4, 60])
def test_head_noise_keeps_the_head_and_all_logprobs(sample, head):
    grids = nar_grids(sample, num_queries=3, num_slots=60, num_tokens=200)
    noisy = head_noise(grids, head, sample, 200)
    np.testing.assert_array_equal(noisy.tokens[:, :, :head], grids.tokens[:, :, :head])
    np.testing.assert_array_equal(noisy.logprobs, grids.logprobs)
    changed = (noisy.tokens != grids.tokens).mean()
    assert changed == 0 if head == 60 else changed > 0.3


def test_widened_rows_go_on_falling(sample):
    grids = nar_grids(sample, num_queries=3, num_slots=40, num_tokens=500)
    wide = widened(grids, 100, sample, 500)
    np.testing.assert_array_equal(wide.tokens[:, :, :40], grids.tokens)
    assert (np.diff(wide.logprobs, axis=2) <= 0).all()
    assert all(len(np.unique(row)) == 100 for row in wide.tokens.reshape(-1, 100))
    assert widened(grids, 10, sample, 500).tokens.shape[2] == 10


def test_grids_slots_and_queries():
    grids = Grids(np.full((4, 2, 8), NO_TOKEN), np.zeros((4, 2, 8), np.float32), np.arange(4))
    assert grids.slots(3).tokens.shape == (4, 2, 3)
    assert grids.queries(2).targets.tolist() == [0, 1]
