"""The search kernels' own source, run on the emulated machine of tests/emulation: the same bytes as the cpu engine."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Key, engines
from strategies import grids, key_lists, plans
from test_search import arrays

from flashtrie_cli import Index, SearchPlan
from flashtrie_cli.engine import cuda_layout, cuda_sources
from flashtrie_cli.engine.cuda_layout import Shape, plan_launch
from flashtrie_cli.errors import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "emulation"))
from emulator import EmulatedEngine

KERNELS = {
    "search_block": 1, "search_alone": 1, "search_spill": 1, "search_cluster4": 4,
    "pairs_block": 1, "pairs_alone": 1, "pairs_cluster8": 8,
}  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the kernels with")


def emulated(library: ctypes.CDLL, index: Index, kernel: str) -> EmulatedEngine:
    return EmulatedEngine(library, index.engine.trie, kernel=kernel)  # type: ignore[attr-defined]


def test_the_parameter_is_the_kernels(library: ctypes.CDLL) -> None:
    assert library.search_batch_size() == cuda_layout.BATCH.itemsize


@given(key_lists(), st.data(), st.sampled_from(sorted(KERNELS)), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_the_same_bytes_as_cpu(
    library: ctypes.CDLL, keys: list[Key], data: st.DataObject, kernel: str, seed: int
) -> None:
    cpu, _ = engines(keys)
    tokens, logprobs = arrays([data.draw(grids(keys))])
    if 0 in tokens.shape:
        return
    plan = data.draw(plans(keys))
    engine = emulated(library, cpu, kernel)
    engine.uses_root_table = data.draw(st.booleans()) and max([0, *(t for key in keys for t in key)]) < 2048
    engine.scan_limit = data.draw(st.sampled_from((1, 1 << 14)))
    engine.pairs = data.draw(st.sampled_from((None, (1, 1, 0), (2, 1, 1), (1, 3, 99))))
    engine.shared_hits = data.draw(st.sampled_from((None, 0)))
    found = engine.search(tokens, logprobs, plan, num_blocks=KERNELS[kernel], seed=seed)
    assert found.identical(cpu.search(tokens, logprobs, plan))


def many_keys(count: int, vocabulary: int, seed: int) -> list[Key]:
    rng = np.random.default_rng(seed)
    return [tuple(int(t) for t in rng.integers(0, vocabulary, rng.integers(1, 4))) for _ in range(count)]


def random_grids(
    shape: tuple[int, int, int], vocabulary: int, seed: int, scores: int
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, shape).astype(np.uint32)
    return tokens, -rng.integers(1, scores, shape).astype(np.float32) / 4


@pytest.mark.parametrize("kernel", ["search_alone", "search_spill", "search_cluster4", "pairs_cluster8"])
@pytest.mark.parametrize("scores", [2, 1000])
def test_pools_that_fill_up_and_scores_that_are_all_alike(
    library: ctypes.CDLL, kernel: str, scores: int
) -> None:
    """More candidates and results than the pools hold, and with one score for all: nothing but node ids decides."""
    keys = many_keys(8000, 90, 1)
    cpu, _ = engines(keys)
    tokens, logprobs = random_grids((1, 3, 90), 90, 2, scores)
    plan = SearchPlan(beam_width=60, num_results=300)
    engine = emulated(library, cpu, kernel)
    engine.places = (1584, 1584)
    found = engine.search(tokens, logprobs, plan, num_blocks=KERNELS[kernel])
    assert found.num_hits == 300
    assert found.identical(cpu.search(tokens, logprobs, plan))


@pytest.mark.parametrize(
    "kernel", ["search_block", "search_alone", "search_cluster4", "pairs_block", "pairs_alone"]
)
@pytest.mark.parametrize("steps_apart", [1, 40])
def test_floors_drop_nothing_that_counts(library: ctypes.CDLL, kernel: str, steps_apart: int) -> None:
    """Far more candidates than are kept, scores a rounding step apart: floors rise in mid-step, and decide."""
    fan_out = 24
    keys = [key for n in (1, 2, 3) for key in itertools.product(range(fan_out), repeat=n)]
    cpu, _ = engines(keys)
    rng = np.random.default_rng(steps_apart)
    tokens = np.stack([rng.permutation(fan_out) for _ in range(3)])[None].astype(np.uint32)
    step = np.float32(2.0**-23 * steps_apart)
    logprobs = (np.float32(-1) - step * rng.integers(0, 12, tokens.shape)).astype(np.float32)
    for plan in (SearchPlan(beam_width=130), SearchPlan(beam_width=90, num_results=300, alpha=0.0)):
        engine = emulated(library, cpu, kernel)
        engine.pairs = (24, 1, 0) if kernel.startswith("pairs") else None
        found = engine.search(tokens, logprobs, plan, num_blocks=KERNELS[kernel])
        assert found.identical(cpu.search(tokens, logprobs, plan))


@pytest.mark.parametrize("kernel", [kernel for kernel in sorted(KERNELS) if kernel.startswith("pairs")])
@pytest.mark.parametrize("pairs", [(1, 0, 0), (64, 2, 1000), (64, 2, 1), (200, 50, 4)])
@pytest.mark.parametrize("falls", [True, False], ids=["falling", "shuffled"])
def test_a_frontier_by_pairs(
    library: ctypes.CDLL, kernel: str, pairs: tuple[int, int, int], falls: bool
) -> None:
    """Wide nodes, scanned or asked for what is above a bar, then above floors; rows in order, or not; tokens twice."""
    rng = np.random.default_rng(4)
    keys = [(int(a), int(b), *rest) for a in range(40) for b in rng.permutation(300)[: rng.integers(1, 250)]
            for rest in ((), (int(b) % 7,))]  # fmt: skip
    cpu, _ = engines(keys)
    tokens = rng.integers(0, 300, (1, 4, 120)).astype(np.uint32)
    tokens[:, ::2, :60] = np.stack([rng.permutation(40).repeat(2)[:60] for _ in range(2)])
    logprobs = (-rng.gamma(2.0, 2.0, tokens.shape)).astype(np.float32)
    if falls:
        logprobs = -np.sort(-logprobs, axis=2)
    for plan in (
        SearchPlan(beam_width=40),
        SearchPlan(beam_width=100, num_results=20, alpha=0.5, eos=5),
        SearchPlan(beam_width=33, num_results=2000),
    ):
        engine = emulated(library, cpu, kernel)
        engine.pairs = pairs
        engine.table_fan_out = 150 if pairs[1] == 2 else 2
        found = engine.search(tokens, logprobs, plan, num_blocks=KERNELS[kernel], seed=7)
        assert found.identical(cpu.search(tokens, logprobs, plan))


@pytest.mark.parametrize("fan_out", [1, 2, 40])
def test_the_table_of_wide_nodes_finds_what_a_binary_search_finds(library: ctypes.CDLL, fan_out: int) -> None:
    """So full that buckets overflow; labels on both sides of 16 bits; tokens that no child has."""
    rng = np.random.default_rng(12)
    keys = [(int(a), int(b)) for a in range(50) for b in rng.integers(0, 90_000, rng.integers(1, 120))]
    cpu, _ = engines(keys)
    engine = emulated(library, cpu, "search_block")
    tokens = np.array([*sorted({b for _, b in keys}), 1, 65_535, 65_536, 89_999], np.uint32)
    assert engine.differences_of_table(fan_out, tokens) == 0


@pytest.mark.parametrize("kernel", ["search_cluster4", "pairs_cluster8"])
@pytest.mark.parametrize("num_results", [1, 8, 61, 384, 1000, 3000])
def test_hits_that_blocks_share_in_writing(library: ctypes.CDLL, kernel: str, num_results: int) -> None:
    """More and fewer hits than wanted; shares that end within a bin; depths 1 to 4; very many scores alike."""
    keys = many_keys(4000, 40, 5) + [(n % 40, n % 7, n % 11, n % 40) for n in range(900)]
    cpu, _ = engines(keys)
    for scores in (40, 4000):
        tokens, logprobs = random_grids((2, 4, 60), 40, 6, scores)
        plan = SearchPlan(beam_width=150, num_results=num_results)
        engine = emulated(library, cpu, kernel)
        for engine.shared_hits in (0, None):
            found = engine.search(tokens, logprobs, plan, num_blocks=KERNELS[kernel], seed=scores)
            assert found.identical(cpu.search(tokens, logprobs, plan))


def test_a_line_with_more_children_than_a_tag_can_count(library: ctypes.CDLL) -> None:
    """The root has them; the children of the nodes behind it in its line stand in the wide table."""
    keys = [(token,) for token in range(70_000)] + [
        (token, child) for token in range(70) for child in (5, 7, 69_999)
    ]
    cpu, _ = engines(keys)
    tokens = np.array([[[3, 68, 69_998, 12], [7, 69_999, 5, 8]]], np.uint32)
    logprobs = np.array([[[-1, -2, -3, -4], [-1, -1.5, -2, -3]]], np.float32)
    plan = SearchPlan(beam_width=4, num_results=16)
    engine = emulated(library, cpu, "search_alone")
    engine.uses_root_table = False  # it has small labels only
    found = engine.search(tokens, logprobs, plan)
    assert found.num_hits == 4 + 3 * 3
    assert found.identical(cpu.search(tokens, logprobs, plan))


@pytest.mark.parametrize("kernel", sorted(KERNELS))
@pytest.mark.parametrize("apart", [0.0, 2.0**-20, 0.25])
def test_hits_are_in_order_whether_they_share_a_bin_or_not(
    library: ctypes.CDLL, kernel: str, apart: float
) -> None:
    cpu, _ = engines(many_keys(400, 30, 8))
    rng = np.random.default_rng(9)
    tokens = np.stack([rng.permutation(30) for _ in range(6)]).reshape(2, 3, 30).astype(np.uint32)
    logprobs = (-1 - apart * rng.integers(0, 40, tokens.shape)).astype(np.float32)
    for plan in (SearchPlan(beam_width=25, num_results=40), SearchPlan(beam_width=50, num_results=300)):
        found = emulated(library, cpu, kernel).search(tokens, logprobs, plan, num_blocks=KERNELS[kernel])
        assert found.identical(cpu.search(tokens, logprobs, plan))


def test_several_queries_a_block_with_widths_and_steps_of_their_own(library: ctypes.CDLL) -> None:
    keys = many_keys(500, 12, 3)
    cpu, _ = engines(keys)
    tokens, logprobs = random_grids((6, 4, 12), 12, 4, 1000)
    plan = SearchPlan(beam_width=7, num_results=20)
    widths, steps = np.array([1, 7, 2, 7, 3, 5], np.uint32), np.array([4, 3, 2, 1, 0, 4], np.uint32)
    found = emulated(library, cpu, "search_block").search(
        tokens, logprobs, plan, num_blocks=2, beam_widths=widths, step_counts=steps
    )
    for query in range(6):
        own = SearchPlan(beam_width=int(widths[query]), num_results=20)
        one = slice(query, query + 1)
        expected = cpu.search(tokens[one, : steps[query]], logprobs[one, : steps[query]], own)
        assert found.hits(query) == expected.hits(0)


@pytest.mark.parametrize("token_dtype", [np.uint16, np.int32, np.int64])
def test_grids_of_other_types(library: ctypes.CDLL, token_dtype: type) -> None:
    keys = many_keys(300, 20, 5)
    cpu, _ = engines(keys)
    tokens, logprobs = random_grids((2, 3, 10), 20, 6, 50)
    engine, plan = emulated(library, cpu, "search_block"), SearchPlan(beam_width=10)
    found = engine.search(tokens.astype(token_dtype), logprobs.astype(np.float16), plan)
    assert found.identical(cpu.search(tokens, logprobs, plan))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_bad_logprob_is_told_even_behind_the_last_step_searched(
    library: ctypes.CDLL, value: float
) -> None:
    cpu, _ = engines([(1,), (2, 3)])
    tokens, logprobs = random_grids((2, 6, 4), 8, 7, 50)
    logprobs[1, 5, 2] = value
    engine = emulated(library, cpu, "search_block")
    engine.search(tokens, logprobs, SearchPlan(beam_width=2))
    assert engine.bad_slots.tolist() == [cuda_layout.NO_SLOT, 5 * 4 + 2]


@given(
    st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 40), st.integers(1, 5000),
    st.sampled_from([(75, 64 << 10), (80, 163 << 10), (90, 227 << 10), (120, 99 << 10)]),
)  # fmt: skip
def test_every_launch_fits_its_multiprocessor(
    beam_width: int, num_results: int, slots: int, depth: int, queries: int, device: tuple[int, int]
) -> None:
    arch, shared = device
    shape = Shape(beam_width, num_results, slots, depth)
    launch = plan_launch(shape, queries, arch=arch, num_multiprocessors=80, shared_bytes=shared)
    assert launch.shared_bytes <= shared
    most = max(launch.beam_capacity, launch.result_capacity)
    assert launch.candidate_places >= most + 2 * (launch.num_threads - 128)
    assert launch.result_places >= launch.result_capacity + 2 * (launch.num_threads - 128)
    assert launch.candidate_places % 4 == launch.result_places % 4 == launch.beam_capacity % 4 == 0
    assert arch >= 90 or launch.blocks_per_group == 1


@pytest.mark.parametrize("shape", [Shape(4097, 1, 1, 1), Shape(1, 4097, 1, 1), Shape(1, 1, 4097, 1)])
def test_what_is_too_large_names_the_cpu_engine(shape: Shape) -> None:
    with pytest.raises(UsageError, match="--engine cpu"):
        plan_launch(shape, 1, arch=90, num_multiprocessors=132, shared_bytes=227 << 10)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("beam_width", "queries", "fan_out", "kernel"),
    [
        (100, 1, 4.0, "search_alone"), (100, 500, 4.0, "search_block"), (100, 1, 59.0, "search_cluster8"),
        (100, 31, 59.0, "pairs_alone"), (100, 133, 59.0, "pairs_block"), (100, 1, 470.0, "pairs_alone"),
        (100, 1, 30.0, "search_cluster8"), (256, 15, 59.0, "search_cluster8"), (256, 30, 59.0, "search_cluster4"),
        (1000, 15, 4.0, "search_cluster8"), (1000, 16, 4.0, "search_cluster4"), (1000, 30, 4.0, "search_cluster4"),
        (1000, 31, 4.0, "search_alone"), (1000, 1, 900.0, "pairs_cluster8"), (1000, 16, 900.0, "pairs_alone"),
        (100, 132, 900.0, "pairs_alone"), (100, 133, 900.0, "pairs_block"),
    ],
)  # fmt: skip
def test_the_kernel_of_a_batch(beam_width: int, queries: int, fan_out: float, kernel: str) -> None:
    """Clusters for few queries and wide beams or bushy tries, pairs where the second step is heavy."""
    shape = Shape(beam_width, beam_width, beam_width, 8)
    launch = plan_launch(
        shape, queries, arch=90, num_multiprocessors=132, shared_bytes=227 << 10, fan_out=fan_out
    )
    assert launch.kernel == kernel


@pytest.mark.parametrize("arch", [75, 90, 120])
def test_the_kernels_compile(arch: int, tmp_path: Path) -> None:
    root = cuda_sources.source_root()
    command = ["nvcc", "-std=c++17", "--fmad=false", f"-arch=sm_{arch}", "-cubin", "-I", str(root)]
    subprocess.run([*command, "-o", str(tmp_path / "k"), str(root / "kernels" / "search.cu")], check=True)
