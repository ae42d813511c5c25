"""One query at a time, launched by the extension on the emulated machine: the same bytes as cpu, and what can fail."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_search_cuda_emulated import both
from test_search_kernels import many_keys, random_grids

from flashtrie_cli import SearchPlan
from flashtrie_cli.engine import cuda_native
from flashtrie_cli.errors import EngineUnavailable, InputError

from emulated_pycuda import EmulatedDriver, NativeCalls  # isort: skip

PLAN = SearchPlan(beam_width=20)


def one(seed: int, *, vocabulary: int = 40) -> tuple[np.ndarray, np.ndarray]:
    return random_grids((1, 3, 30), vocabulary, seed, 1000)


def test_the_same_bytes_again_and_again(calls: NativeCalls) -> None:
    """Answers take turns in memory that is cleared between; fewer hits follow many and the other way round."""
    cpu, cuda = both(many_keys(800, 40, 1))
    for seed, vocabulary in enumerate((40, 40, 400, 40, 4000, 9, 40)):
        grid = one(seed, vocabulary=vocabulary)
        assert cuda.search(*grid, PLAN).identical(cpu.search(*grid, PLAN))
    assert calls.launches == 7


def test_narrow_types(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(300, 40, 1))
    tokens, logprobs = one(5)
    grid = tokens.astype(np.uint16), logprobs.astype(np.float16)
    expected = cpu.search(tokens, grid[1].astype(np.float32), PLAN)
    assert cuda.engine.search(*grid, PLAN).identical(expected)
    assert calls.launches == 1


def test_pinned_grids_are_read_where_they_are(calls: NativeCalls) -> None:
    """But for those that begin where the kernel cannot."""
    cpu, cuda = both(many_keys(800, 40, 1))
    pinned = cuda.engine.pinned_grids(4, 3, 29)  # type: ignore[attr-defined]
    pinned[0][:], pinned[1][:] = random_grids((4, 3, 29), 40, 5, 1000)
    for query in (0, 1, 2, 3, 0):
        grid = tuple(array[query : query + 1] for array in pinned)
        assert cuda.search(*grid, PLAN).identical(cpu.search(*grid, PLAN))
        single: Any = cuda.engine._last[1]  # type: ignore[attr-defined]
        staged = single._tokens.reshape(grid[0].shape)
        assert (staged == grid[0]).all() == (query in (1, 2, 3))
        single._tokens[:] = 0
        ordinary = tuple(array.copy() for array in grid)
        assert cuda.search(*ordinary, PLAN).identical(cpu.search(*ordinary, PLAN))
        single._tokens[:] = 0


def test_answers_outlive_the_next_calls(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    found = [cuda.search(*one(seed), PLAN) for seed in range(4)]
    assert all(answer.identical(cpu.search(*one(seed), PLAN)) for seed, answer in enumerate(found))


def test_an_answer_that_comes_late_is_waited_for(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    calls.delay_s = 0.2
    for seed in range(3):
        assert cuda.search(*one(seed), PLAN).identical(cpu.search(*one(seed), PLAN))


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
@pytest.mark.parametrize("slots", [800, 803])
def test_large_answers_are_taken_when_the_stream_has_ended(
    calls: NativeCalls, delay_s: float, slots: int
) -> None:
    """And large grids go past the caches. Fewer hits follow many, which are not cleared."""
    cpu, cuda = both(many_keys(4000, 900, 1))
    plan = SearchPlan(beam_width=700)
    calls.is_told, calls.delay_s = True, delay_s
    for seed, vocabulary in enumerate((900, 9000, 900)):
        grid = random_grids((1, 3, slots), vocabulary, seed, 1000)
        assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))


def test_a_large_answer_that_does_not_come(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(4000, 900, 1))
    plan, grid = SearchPlan(beam_width=700), random_grids((1, 3, 800), 900, 1, 1000)
    calls.is_told = True
    assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))
    calls.stall = True
    for status in (0, 700):
        calls.set_status(status)
        with pytest.raises(EngineUnavailable, match=f"failed.* {status}"):
            cuda.search(*grid, plan)
    calls.stall = False
    assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))


def test_the_time_of_the_kernel(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(300, 40, 1))
    cuda.search(*one(1), PLAN)
    before = calls.num_recorded
    cuda.engine.times_kernels = True  # type: ignore[attr-defined]
    for seed in (2, 3):
        assert cuda.search(*one(seed), PLAN).identical(cpu.search(*one(seed), PLAN))
    assert calls.launches == 3
    assert calls.num_recorded == before + 4
    assert cuda.engine.last_kernel_ns == 125_000  # type: ignore[attr-defined]


def test_a_bad_logprob_is_named_and_harms_nobody_else(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    tokens, logprobs = one(1)
    bad = logprobs.copy()
    bad[0, 2, 7] = np.nan
    for _ in range(2):
        with pytest.raises(InputError, match="query 0, step 2, slot 7"):
            cuda.search(tokens, bad, PLAN)
        assert cuda.search(tokens, logprobs, PLAN).identical(cpu.search(tokens, logprobs, PLAN))


def test_a_launch_that_fails(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    calls.launch_code = 719
    with pytest.raises(EngineUnavailable, match="719"):
        cuda.search(*one(1), PLAN)
    calls.launch_code = 0
    assert cuda.search(*one(1), PLAN).identical(cpu.search(*one(1), PLAN))


@pytest.mark.parametrize(("status", "said"), [(700, "700"), (0, "0")])
def test_a_kernel_that_fails_or_leaves_no_answer(calls: NativeCalls, status: int, said: str) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    calls.stall = True
    calls.set_status(status)
    with pytest.raises(EngineUnavailable, match=f"failed.* {said}"):
        cuda.search(*one(1), PLAN)
    calls.stall = False
    assert cuda.search(*one(1), PLAN).identical(cpu.search(*one(1), PLAN))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A background job begins with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_the_kernel_is_at_work(calls: NativeCalls) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    cuda.search(*one(0), PLAN)
    calls.stall = True
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        cuda.search(*one(1), PLAN)
    calls.stall = False
    assert cuda.search(*one(1), PLAN).identical(cpu.search(*one(1), PLAN))


@pytest.mark.parametrize("failure", [AttributeError, EngineUnavailable])
def test_without_the_native_way_pycuda_launches(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    def fail(*_: Any) -> int:
        raise failure("cuGraphDestroy")

    monkeypatch.setattr(cuda_native, "driver_calls", list)
    monkeypatch.setattr(cuda_native, "function_handle", fail)
    cpu, cuda = both(many_keys(800, 40, 1))
    assert cuda.search(*one(1), PLAN).identical(cpu.search(*one(1), PLAN))
    assert driver.launched == ["search_alone"]
