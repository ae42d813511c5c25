"""Batches on the emulated machine: chunks on lanes, rounds, and who owns the answers' memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from program import ENVIRONMENT, HERE
from test_search_cuda_emulated import both
from test_search_kernels import many_keys, random_grids

from flashtrie_cli import SearchPlan
from flashtrie_cli.engine import cuda_native, cuda_pipeline
from flashtrie_cli.engine.cpu import native
from flashtrie_cli.engine.cuda_lane import answer_parts
from flashtrie_cli.engine.cuda_pipeline import chunks
from flashtrie_cli.engine.cuda_slabs import SlabPool
from flashtrie_cli.errors import EngineUnavailable, InputError

from emulated_pycuda import EmulatedDriver  # isort: skip

PLAN = SearchPlan(beam_width=6)
QUERY_BYTES = 192
"""Of a grid of three steps of eight slots, and of its answer."""


@pytest.fixture
def small_chunks(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    """Chunks of three queries at most, answers of any size lent, copies by several threads."""
    monkeypatch.setattr(cuda_pipeline, "_CHUNK_BYTES", 3 * QUERY_BYTES)
    monkeypatch.setattr(cuda_pipeline, "_MIN_LENT_BYTES", 0)
    monkeypatch.setattr(cuda_pipeline, "_DIRECT_WAVES", 0)  # but for the last chunk
    monkeypatch.setattr(
        cuda_native, "copy_pool", lambda _: native().CopyPool(3, 48)
    )  # threads, and pieces, for all
    return driver


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 1500))
def test_chunks_make_the_batch(num_queries: int, first: int, most: int) -> None:
    sizes = list(chunks(num_queries, first, most))
    assert sum(sizes) == num_queries
    assert all(0 < size <= most for size in sizes)


def test_chunks_begin_and_end_short() -> None:
    assert list(chunks(4096, 256, 1056)) == [256, 512, 853, 853, 854, 512, 256]
    assert list(chunks(1100, 256, 1056)) == [256, 588, 256]
    assert list(chunks(1024, 260, 1056)) == [260, 504, 260]
    assert list(chunks(600, 256, 1056)) == [300, 300]
    assert list(chunks(500, 256, 1056)) == [500]
    assert list(chunks(5, 256, 3)) == [2, 3]


@pytest.mark.parametrize("queries", [2, 3, 6, 7, 20])
def test_chunks_on_lanes_one_after_another(small_chunks: EmulatedDriver, queries: int) -> None:
    """Batches of all sizes in turn: what a chunk counts from must not be that of the batch before."""
    cpu, cuda = both(many_keys(300, 20, 3))
    for turn in range(3):
        grid = random_grids((queries, 3, 8), 20 if turn != 1 else 400, turn, 50)
        assert cuda.search(*grid, PLAN).identical(cpu.search(*grid, PLAN))


def test_rounds(small_chunks: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    grid = random_grids((23, 3, 8), 20, 4, 50)
    expected = cpu.search(*grid, PLAN)
    for queries in (1, 2, 7):
        monkeypatch.setattr(cuda_pipeline, "_ROUND_BYTES", queries * 6 * (20 + 4 * 3))
        found = cuda.search(*grid, PLAN)
        assert found.identical(expected)
        assert cuda.engine._slabs.num_lent == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("bad", [0, 4, 10])
def test_a_bad_logprob_in_any_chunk(small_chunks: EmulatedDriver, bad: int) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    tokens, logprobs = random_grids((11, 3, 8), 20, 4, 50)
    wrong = logprobs.copy()
    wrong[bad, 2, 5] = np.inf
    for _ in range(2):
        with pytest.raises(InputError, match=f"query {bad}, step 2, slot 5"):
            cuda.search(tokens, wrong, PLAN)
        assert cuda.search(tokens, logprobs, PLAN).identical(cpu.search(tokens, logprobs, PLAN))


@pytest.mark.parametrize("seed", range(12))
def test_work_in_any_order(small_chunks: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Nothing is read, or written over, before an event or a stream says that it may be."""
    small_chunks.streams.draw_by(seed)
    monkeypatch.setattr(cuda_pipeline, "_NUM_LANES", 1 + seed % 4)
    monkeypatch.setattr(cuda_pipeline, "_FIRST_SHARE", 18 if seed % 2 else 4)
    monkeypatch.setattr(cuda_pipeline, "_ORDERED_BYTES", 0 if seed % 4 > 1 else 1 << 20)
    monkeypatch.setattr(cuda_pipeline, "_DIRECT_WAVES", seed % 3 / 4)  # of 18 queries: 4 and 9
    cpu, cuda = both(many_keys(300, 20, 3))
    pinned = cuda.engine.pinned_grids(17, 3, 8)  # type: ignore[attr-defined]
    kept = []
    for turn in range(3):
        grid = random_grids((17, 3, 8), 20, 9 * seed + turn, 50)
        expected = cpu.search(*grid, PLAN)
        kept.append((cuda.search(*grid, PLAN), expected))
        assert small_chunks.streams.is_idle
        pinned[0][:], pinned[1][:] = grid
        kept.append((cuda.search(*pinned, PLAN), expected))
        assert small_chunks.streams.is_idle
        grid[0][:], grid[1][:] = 0, 0  # nobody reads it any more
        assert all(found.identical(expected) for found, expected in kept)


def test_pinned_grids_are_not_copied_on_the_host(small_chunks: EmulatedDriver) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    pinned = cuda.engine.pinned_grids(7, 3, 8)  # type: ignore[attr-defined]
    pinned[0][:], pinned[1][:] = random_grids((7, 3, 8), 20, 4, 50)
    assert cuda.search(*pinned, PLAN).identical(cpu.search(*pinned, PLAN))
    assert not any(lane._staging for pipeline in cuda.engine._pipelines.values() for lane in pipeline._lanes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("call", ["launch", "record", "query", "wait", "upload", "download"])
def test_a_call_of_the_driver_that_fails(small_chunks: EmulatedDriver, call: str, is_kept: bool) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    grid = random_grids((17, 3, 8), 20, 4, 50)
    streams = small_chunks.streams
    held = [cuda.search(*grid, PLAN) for _ in range(2 * is_kept)]
    for after in (0, 3):
        streams.fail(call, 719, after)
        with pytest.raises(EngineUnavailable, match="the GPU failed during the search: the driver said 719"):
            cuda.search(*grid, PLAN)
        assert streams.is_idle
        assert cuda.search(*grid, PLAN).identical(cpu.search(*grid, PLAN))
    assert lent(cuda) == len(held)


def test_ctrl_c_while_kernels_are_at_work(
    small_chunks: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = small_chunks.streams
    _, cuda = both(many_keys(300, 20, 3))
    grid = random_grids((17, 3, 8), 20, 4, 50)
    monkeypatch.setattr(cuda_native, "batch_calls", streams.stalled_addresses)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            cuda.search(*grid, PLAN)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert streams.is_idle


def test_bad_logprobs_in_several_chunks_harm_no_later_batch(small_chunks: EmulatedDriver) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    tokens, logprobs = random_grids((17, 3, 8), 20, 4, 50)
    wrong = logprobs.copy()
    wrong[[1, 5, 16], 2, 5] = np.nan
    for _ in range(2):
        with pytest.raises(InputError, match="query 1, step 2, slot 5"):
            cuda.search(tokens, wrong, PLAN)
        assert cuda.search(tokens, logprobs, PLAN).identical(cpu.search(tokens, logprobs, PLAN))


def test_no_memory_for_the_answer_once_the_search_has_begun(
    small_chunks: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    grid = random_grids((17, 3, 8), 20, 4, 50)
    with monkeypatch.context() as patch:
        patch.setattr(SlabPool, "take", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            cuda.search(*grid, PLAN)
        assert small_chunks.streams.is_idle
    assert cuda.search(*grid, PLAN).identical(cpu.search(*grid, PLAN))


def lent(cuda: Any) -> int:
    return int(cuda.engine._slabs.num_lent)


def test_answers_are_lent_until_their_last_array_goes(small_chunks: EmulatedDriver) -> None:
    _, cuda = both(many_keys(300, 20, 3))
    grid = random_grids((7, 3, 8), 20, 4, 50)
    found: Any = cuda.search(*grid, PLAN)
    assert lent(cuda) == 1
    tokens = found.tokens[3:9]
    del found
    assert lent(cuda) == 1
    second = cuda.search(*grid, PLAN)
    assert lent(cuda) == 2
    del tokens, second
    assert lent(cuda) == 0
    assert len(cuda.engine._slabs.free) == 2  # type: ignore[attr-defined]
    assert cuda.search(*grid, PLAN).num_hits > 0
    assert len(cuda.engine._slabs.free) == 2  # type: ignore[attr-defined]


def test_past_a_limit_answers_are_copied(
    small_chunks: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    grids = [random_grids((7, 3, 8), 20, seed, 50) for seed in range(4)]
    found = [cuda.search(*grid, PLAN) for grid in grids]
    assert lent(cuda) == 2
    assert all(answer.identical(cpu.search(*grid, PLAN)) for answer, grid in zip(found, grids, strict=True))


def test_much_room_for_few_hits_is_not_lent(small_chunks: EmulatedDriver) -> None:
    cpu, cuda = both([(1,), (1, 2)])
    grid = random_grids((7, 3, 8), 20, 4, 50)
    found = cuda.search(*grid, PLAN)
    assert found.identical(cpu.search(*grid, PLAN))
    assert lent(cuda) == 0


def test_answers_outlive_their_engine(small_chunks: EmulatedDriver) -> None:
    cpu, cuda = both(many_keys(300, 20, 3))
    grid = random_grids((7, 3, 8), 20, 4, 50)
    found = cuda.search(*grid, PLAN)
    del cuda
    gc.collect()
    assert found.identical(cpu.search(*grid, PLAN))


def test_slabs_are_used_again_when_they_suit(driver: EmulatedDriver) -> None:
    pool = SlabPool()
    small, large = pool.take(1000), pool.take(1 << 20)
    places = [slab.__array_interface__["data"][0] for slab in (small, large)]
    del small, large
    assert pool.num_lent == 0
    again = pool.take(1 << 19)
    assert again.__array_interface__["data"][0] == places[1]
    assert pool.take(500).__array_interface__["data"][0] == places[0]
    assert len(pool.free) == 1
    pool.take(1 << 24)  # suits neither
    assert [memory.nbytes for memory in pool.free] == [1 << 24]


def test_no_memory_to_pin(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise driver.MemoryError("out of memory")

    monkeypatch.setattr(driver, "pagelocked_empty", fail)
    with pytest.raises(EngineUnavailable, match=r"no memory to pin.*a smaller batch"):
        SlabPool().take(1000)


def test_parts_do_not_overlap(driver: EmulatedDriver) -> None:
    parts = answer_parts(5, 17, 3)
    arrays = parts.arrays(SlabPool().take(parts.num_bytes))
    for value, array in enumerate(arrays.values()):
        array[:] = value
    assert [set(array.tolist()) for array in arrays.values()] == [{value} for value in range(6)]
    assert [len(array) for array in arrays.values()] == [6, 17, 17, 17, 18, 51]


@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_are_copied_whole(threads: int) -> None:
    rng = np.random.default_rng(1)
    pool = native().CopyPool(threads)
    sources = [rng.integers(0, 255, size, np.uint8) for size in (0, 1, 1 << 20, (5 << 20) + 3)]
    sources.append(rng.random(300_000))
    for _ in range(3):
        targets = [np.zeros_like(source) for source in sources]
        pool.copy_arrays(targets, sources)
        for target, source in zip(targets, sources, strict=True):
            np.testing.assert_array_equal(target, source)
    with pytest.raises(ValueError, match="another size"):
        pool.copy_arrays([np.zeros(3)], [np.zeros(4)])


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="nothing tells of threads")


def in_threads(pool: Any, size: int = 1 << 20) -> None:
    """A copy that is worth its threads."""
    source = np.arange(size, dtype=np.uint8)
    target = np.zeros_like(source)
    pool.copy_arrays([target], [source])
    np.testing.assert_array_equal(target, source)


@needs_proc
def test_copying_threads_begin_when_needed_and_end_with_their_engine(small_chunks: EmulatedDriver) -> None:
    gc.collect()
    before = num_threads()
    _, cuda = both(many_keys(300, 20, 3))
    pinned = cuda.engine.pinned_grids(7, 3, 8)  # type: ignore[attr-defined]
    pinned[0][:], pinned[1][:] = random_grids((7, 3, 8), 20, 4, 50)
    cuda.search(*pinned, PLAN)
    assert num_threads() == before
    for seed in range(2):
        cuda.search(*random_grids((7, 3, 8), 20, seed, 50), PLAN)
        cuda.search(*random_grids((7, 3, 16), 20, seed, 50), PLAN)  # another pipeline
        assert num_threads() == before + 2
    del cuda
    gc.collect()
    assert num_threads() == before


def test_copying_threads_sleep_when_there_is_nothing_to_copy() -> None:
    pool = native().CopyPool(4)
    in_threads(pool)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_copying_threads_are_not_in_a_forked_child() -> None:
    pool = native().CopyPool(4)
    in_threads(pool)
    for copies in (False, True):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(10)
                if copies:
                    in_threads(pool)
                del pool
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
    in_threads(pool)


def test_copies_of_several_callers_at_once() -> None:
    pool = native().CopyPool(3, piece_bytes=512)
    callers = [threading.Thread(target=lambda: [in_threads(pool) for _ in range(5)]) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()


@needs_proc
def test_a_process_may_end_with_copying_threads_asleep() -> None:
    script = (
        "import numpy as np; from flashtrie_cli import _native; pool = _native.CopyPool(4);"
        "a = np.ones(1 << 22, np.uint8); pool.copy_arrays([a.copy()], [a]);"
        "import os; assert len(os.listdir('/proc/self/task')) >= 4"
    )
    subprocess.run([sys.executable, "-c", script], cwd=HERE, env=ENVIRONMENT, check=True, timeout=60)
