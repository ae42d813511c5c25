"""What the native launch asks of the driver, against a driver that notes it."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from flashtrie_cli.engine import cuda_launch, cuda_native
from flashtrie_cli.errors import EngineUnavailable


def pointer_to(argument: Any) -> Any:
    return argument._obj


class Driver:
    """As much of libcuda as is asked; ``fails`` names the call that returns an error."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails, self.function = "", 0x1234
        self.created: list[tuple[int, int]] = []  # flags and priorities of streams

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.asked.append(name)
            if name == "cuGraphKernelNodeGetParams":
                pointer_to(arguments[1]).function = self.function
            if name == "cuEventCreate":
                pointer_to(arguments[0]).value = 0x50 + self.asked.count(name)
            if name == "cuCtxGetStreamPriorityRange":
                pointer_to(arguments[0]).value, pointer_to(arguments[1]).value = 0, -5
            if name == "cuStreamCreateWithPriority":
                pointer_to(arguments[0]).value = 0x60 + self.asked.count(name)
                self.created.append((arguments[1], arguments[2].value))
            if name == "cuEventElapsedTime":
                pointer_to(arguments[0]).value = 0.125
            if name == "cuGetErrorName":
                pointer_to(arguments[1]).value = b"CUDA_ERROR_SOME"
            return 801 if name == self.fails else 0

        return call


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_launch, "_driver", driver)
    return driver


CAPTURE = [
    "cuStreamBeginCapture_v2",
    "launch",
    "cuStreamEndCapture",
    "cuGraphGetNodes",
    "cuGraphKernelNodeGetParams",
    "cuGraphDestroy",
]


def test_a_captured_launch_says_what_it_launches(driver: Driver) -> None:
    assert cuda_native.function_handle(lambda: driver.asked.append("launch"), 7) == 0x1234
    assert driver.asked == CAPTURE


@pytest.mark.parametrize("fails", [name for name in CAPTURE[:-1] if name != "launch"])
def test_where_capturing_fails_nothing_stays_open(driver: Driver, fails: str) -> None:
    driver.fails = fails
    with pytest.raises(EngineUnavailable, match=r"CUDA_ERROR_SOME \(801\)"):
        cuda_native.function_handle(lambda: driver.asked.append("launch"), 7)
    assert ("cuGraphDestroy" in driver.asked) == (CAPTURE.index(fails) > CAPTURE.index("cuStreamEndCapture"))
    assert ("launch" in driver.asked) == (fails != "cuStreamBeginCapture_v2")


def test_a_launch_that_fails_ends_the_capture(driver: Driver) -> None:
    def launch() -> None:
        raise KeyError("launch")

    with pytest.raises(KeyError):
        cuda_native.function_handle(launch, 7)
    assert driver.asked == ["cuStreamBeginCapture_v2", "cuStreamEndCapture"]


def test_a_node_without_a_function(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.function = 0
    monkeypatch.setattr(cuda_native, "driver_calls", list)
    with pytest.raises(EngineUnavailable, match="does not say"):
        cuda_native.function_handle(lambda: None, 7)
    assert cuda_native.gpu_query(lambda: None, 7) is None  # and PyCUDA launches


def test_the_clock(driver: Driver) -> None:
    clock = cuda_native.KernelClock()
    assert clock.handles == [0x51, 0x52]
    assert clock.elapsed_ns() == 125_000
    del clock
    assert driver.asked.count("cuEventDestroy_v2") == 2


def test_streams_and_events_go_with_their_owners(driver: Driver) -> None:
    calm, urgent = cuda_native.NativeStream(), cuda_native.NativeStream(is_urgent=True)
    event = cuda_native.NativeEvent()
    assert (calm.handle, urgent.handle, event.handle) == (0x61, 0x62, 0x51)
    assert driver.created == [(1, 0), (1, -5)]  # the greatest priority is the least number
    del calm, urgent, event
    assert [driver.asked.count(name) for name in ("cuStreamDestroy_v2", "cuEventDestroy_v2")] == [2, 1]


@pytest.mark.parametrize(
    "fails", ["cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority", "cuEventCreate"]
)
def test_streams_and_events_that_are_not_to_be_had(driver: Driver, fails: str) -> None:
    driver.fails = fails
    with pytest.raises(EngineUnavailable, match=rf"{fails}.*\(801\)"):
        (cuda_native.NativeEvent if fails == "cuEventCreate" else cuda_native.NativeStream)()
    assert not [name for name in driver.asked if "Destroy" in name]


def test_a_driver_too_old_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_native, "driver", lambda: type("Library", (), {}))
    with pytest.raises(EngineUnavailable, match=r"too old.*cuLaunchKernel.*--engine cpu"):
        cuda_native.batch_calls()


def test_addresses_of_the_drivers_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(None)
    names = ("cuLaunchKernel", "cuStreamQuery", "cuStreamSynchronize", "cuEventRecord")
    functions = dict(zip(names, (library.abs, library.labs, library.atoi, library.atol), strict=True))
    monkeypatch.setattr(cuda_native, "driver", lambda: type("Library", (), functions))
    addresses = cuda_native.driver_calls()
    assert len(set(addresses)) == 4
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(addresses[0])(-3) == 3


@pytest.mark.parametrize(
    ("processors", "threads", "expected"),
    [(1, 1, 1), (2, 1, 1), (2, 64, 2), (8, 1, 4), (16, 1, 8), (16, 12, 12), (64, 1, 8), (64, 100, 64)],
)
def test_threads_that_copy(
    monkeypatch: pytest.MonkeyPatch, processors: int, threads: int, expected: int
) -> None:
    monkeypatch.setattr(cuda_native, "native", lambda: SimpleNamespace(CopyPool=lambda count: count))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(processors), raising=False)
    assert cuda_native.copy_pool(threads) == expected
