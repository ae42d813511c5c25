"""PyCUDA and the kernels on the emulated machine, for every test that searches without a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashtrie_cli.engine import cuda_loader, cuda_native, cuda_pinned

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "emulation"))
import emulator
from emulated_pycuda import EmulatedClock, EmulatedDriver, NativeCalls


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulator.build(tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def driver(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, install_pycuda: Callable[[Any], None]
) -> Iterator[EmulatedDriver]:
    """PyCUDA on the emulated machine; kernels are launched through it."""
    emulated = EmulatedDriver(library)
    install_pycuda(emulated)
    monkeypatch.setattr(cuda_loader, "kernel_images", lambda part, device: iter([(b"", "emulated")]))
    yield emulated
    cuda_pinned._ranges.clear()


@pytest.fixture
def calls(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> NativeCalls:
    """The same, with a driver whose functions the extension may call."""
    calls = NativeCalls(driver)
    monkeypatch.setattr(cuda_native, "driver_calls", calls.addresses)
    monkeypatch.setattr(cuda_native, "function_handle", calls.function_handle)
    monkeypatch.setattr(cuda_native, "KernelClock", EmulatedClock)
    return calls
