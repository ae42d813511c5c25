"""The paper's CPU systems answer with the reference's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtrie_cli.engine.cpu_baselines import MarisaInt, MarisaOpt
from flashtrie_cli.engine.reference import ReferenceEngine
from flashtrie_cli.errors import InputError
from flashtrie_cli.query.plan import SearchPlan

from .conftest import make_index, random_grids, random_keys

PLANS = (
    SearchPlan(beam_width=1),
    SearchPlan(beam_width=7, num_results=3),
    SearchPlan(beam_width=50, num_results=200, alpha=5.0),
    SearchPlan(beam_width=20, eos=3),
    SearchPlan(beam_width=20, token_threshold=-1.0, sequence_threshold=-2.5),
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("vocabulary", [30, 200, 100_000])
def test_same_bytes_as_the_reference(tmp_path, plan, vocabulary):
    index = make_index(tmp_path / "x.ft", random_keys(2, 2000, vocabulary), threads=3)
    tokens, logprobs = random_grids(3, 6, 7, 40, vocabulary)
    expected = ReferenceEngine(index.stored).search(tokens, logprobs, plan)
    assert expected.num_hits > 0
    for system in (MarisaInt(index.engine), MarisaOpt(index.engine)):
        assert system.search(tokens, logprobs, plan).identical(expected), system.name


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keys=st.lists(
        st.lists(st.integers(0, 5) | st.sampled_from([65_535, 65_536, 2**31 - 1]), max_size=4), max_size=30
    ),
    seed=st.integers(0, 1000),
    width=st.integers(1, 6),
)
def test_nasty_sets(tmp_path, keys, seed, width):
    index = make_index(tmp_path / "x.ft", keys, threads=2)
    tokens, logprobs = random_grids(seed, 2, 5, 8, 7)
    tokens[:, :, 0] = np.array([65_535, 65_536, 2**31 - 1, 131_072, 5])
    plan = SearchPlan(beam_width=width)
    expected = ReferenceEngine(index.stored).search(tokens, logprobs, plan)
    for system in (MarisaInt(index.engine), MarisaOpt(index.engine)):
        assert system.search(tokens, logprobs, plan).identical(expected), system.name


def test_a_pool_answers_again_and_again(small_index):
    """Many short searches on one pool: no step may see the step before."""
    opt = MarisaOpt(small_index.engine)
    tokens, logprobs = random_grids(5, 40, 6, 50, 200)
    plan = SearchPlan(beam_width=64)
    whole = small_index.search(tokens, logprobs, plan)
    for query in range(40):
        one = opt.search(tokens[query : query + 1], logprobs[query : query + 1], plan)
        begin, end = whole.hit_offsets[query], whole.hit_offsets[query + 1]
        np.testing.assert_array_equal(one.key_ids, whole.key_ids[begin:end])


@pytest.mark.parametrize("system", [MarisaInt, MarisaOpt])
def test_bad_logprob_is_named(small_index, system):
    tokens, logprobs = random_grids(5, 2, 3, 4, 200)
    logprobs[1, 2, 3] = np.nan
    with pytest.raises(InputError, match="query 1, step 2, slot 3"):
        system(small_index.engine).search(tokens, logprobs, SearchPlan())
