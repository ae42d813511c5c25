"""The driver's start on a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flashtrie_cli.engine import cuda_start


class Driver:
    """A driver library that notes what it is asked."""

    def __init__(self, code: int = 0):
        self.code, self.asked = code, []

    def cuInit(self, flags: int) -> int:
        self.asked.append("cuInit")
        return self.code

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        self.asked.append(f"cuDeviceGet {ordinal}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.asked.append("cuDevicePrimaryCtxRetain")
        return 0


def start(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    def load(name: str) -> Any:
        assert name == "libcuda.so.1"
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(cuda_start.ctypes, "CDLL", load)
    cuda_start.begin_start(2)
    for thread in threading.enumerate():
        if thread.name == "cuda-start":
            thread.join(10)


def test_driver_and_context_are_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    start(monkeypatch, driver)
    assert driver.asked == ["cuInit", "cuDeviceGet 2", "cuDevicePrimaryCtxRetain"]


def test_what_fails_is_left_to_whoever_opens_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(code=100)
    start(monkeypatch, driver)
    assert driver.asked == ["cuInit"]
    start(monkeypatch, None)
