"""The cuda engine on a GPU: the same bytes as the cpu engine, from host arrays and from device arrays."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Key, built, engines
from strategies import grids, key_lists, plans
from test_search import arrays

from flashtrie_cli import Index, SearchPlan
from flashtrie_cli.engine.choose import why_not_cuda
from flashtrie_cli.errors import InputError, UsageError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_not_cuda() is not None, reason=str(why_not_cuda()))]


def both(keys: list[Key]) -> tuple[Index, Index]:
    cpu, _ = engines(keys)
    return cpu, Index.open(cpu.path, engine="cuda")


def many_keys(count: int, vocabulary: int, seed: int) -> list[Key]:
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, vocabulary, rng.integers(1, 5))) for _ in range(count)]


def random_grids(shape: tuple[int, int, int], vocabulary: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, vocabulary, shape).astype(np.uint32), -rng.exponential(3, shape).astype(np.float32)


@given(key_lists(), st.data())
@settings(max_examples=60)
def test_nasty_sets(keys: list[Key], data: st.DataObject) -> None:
    cpu, cuda = both(keys)
    plan, query = data.draw(plans(keys)), data.draw(grids(keys))
    for grid in (arrays([query]), arrays([query, query])):
        assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))


@pytest.mark.parametrize("queries", [1, 3, 200, 3000])
@pytest.mark.parametrize("width", [1, 100, 1000, 4096])
def test_batches_and_beams(queries: int, width: int) -> None:
    cpu, cuda = both(many_keys(20000, 300, 1))
    for slots in (5, 300):
        tokens, logprobs = random_grids(
            (min(queries, 40) if slots * width > 5000 else queries, 5, slots), 320, 2
        )
        plan = SearchPlan(beam_width=width)
        for _ in range(2):
            assert cuda.search(tokens, logprobs, plan).identical(cpu.search(tokens, logprobs, plan))


def test_four_thousand_proposals() -> None:
    cpu, cuda = both(many_keys(30000, 5000, 3))
    grid = random_grids((2, 3, 4096), 5000, 4)
    plan = SearchPlan(beam_width=4096, num_results=4000)
    assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))


def test_a_root_with_a_table() -> None:
    cpu, cuda = both([(token, token % 7) for token in range(0, 3_000_000, 400)])
    tokens = np.arange(0, 3_000_000, 1500, dtype=np.uint32).reshape(1, 1, 2000).repeat(3, axis=1)
    grid = tokens, np.linspace(-9, -1, tokens.size, dtype=np.float32).reshape(tokens.shape)
    assert cuda.search(*grid, SearchPlan(beam_width=500)).identical(
        cpu.search(*grid, SearchPlan(beam_width=500))
    )


def test_narrow_types_and_pinned_grids() -> None:
    cpu, cuda = both(many_keys(5000, 200, 5))
    tokens, logprobs = random_grids((50, 4, 30), 200, 6)
    logprobs = logprobs.astype(np.float16)
    plan = SearchPlan(beam_width=20)
    expected = cpu.search(tokens, logprobs, plan)
    engine = cuda.engine
    assert engine.search(tokens.astype(np.uint16), logprobs, plan).identical(expected)
    pinned = engine.pinned_grids(*tokens.shape)  # type: ignore[attr-defined]
    pinned[0][:], pinned[1][:] = tokens, logprobs
    assert engine.search(*pinned, plan).identical(expected)
    assert engine.search(pinned[0][3:4], pinned[1][3:4], plan).hits(0) == expected.hits(3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_logprob_is_named(value: float) -> None:
    _, cuda = both(many_keys(50, 9, 7))
    tokens, logprobs = random_grids((7, 4, 5), 9, 8)
    logprobs[5, 3, 2] = value
    with pytest.raises(InputError, match="query 5, step 3, slot 2"):
        cuda.search(tokens, logprobs, SearchPlan(beam_width=3))


def test_device_arrays() -> None:
    gpuarray = pytest.importorskip("pycuda.gpuarray")
    cpu, cuda = both(many_keys(5000, 100, 9))
    tokens, logprobs = random_grids((4, 4, 50), 100, 10)
    plan = SearchPlan(beam_width=30)
    expected = cpu.search(tokens, logprobs, plan)
    on_device = gpuarray.to_gpu(tokens), gpuarray.to_gpu(logprobs)
    found = cuda.engine.search_arrays(*on_device, plan)  # type: ignore[attr-defined]
    import pycuda.driver as driver

    driver.Context.synchronize()

    def fetch(array: object) -> np.ndarray:
        interface = array.__cuda_array_interface__  # type: ignore[attr-defined]
        host = np.empty(interface["shape"], interface["typestr"])
        driver.memcpy_dtoh(host, interface["data"][0])
        return host

    num_hits, key_ids, ends, flat = map(
        fetch, (found.num_hits, found.key_ids, found.token_ends, found.tokens)
    )
    for query in range(4):
        hits = expected.hits(query)
        assert num_hits[query] == len(hits)
        assert key_ids[query, : len(hits)].tolist() == [hit.key_id for hit in hits]
        begin = 0
        for at, hit in enumerate(hits):
            assert tuple(flat[query, begin : ends[query, at]].tolist()) == hit.tokens
            begin = ends[query, at]
    with pytest.raises(InputError, match="no device array"):
        cuda.engine.search_arrays(tokens, logprobs, plan)  # type: ignore[attr-defined]


def test_too_wide_a_beam_is_refused() -> None:
    _, cuda = both([(1,)])
    with pytest.raises(UsageError, match="--engine cpu"):
        cuda.search(*random_grids((1, 1, 1), 2, 0), SearchPlan(beam_width=5000))


def test_a_process_that_used_the_gpu_ends_in_peace() -> None:
    path = built([(1, 2), (1, 3)])
    program = (
        "import sys, numpy as np; from flashtrie_cli import Index, SearchPlan\n"
        "index = Index.open(sys.argv[1], engine='cuda')\n"
        "print(index.search(np.array([[[1], [3]]]), np.array([[[-1.0], [-1.0]]]), SearchPlan()).num_hits)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
