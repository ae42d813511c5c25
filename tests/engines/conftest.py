"""PyCUDA and the kernels on the emulated machine, for every test that searches without a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashtrie_cli.engine import cuda_loader, cuda_native

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "emulation"))
import emulator
from emulated_pycuda import EmulatedClock, EmulatedDriver, NativeCalls
from emulated_streams import EmulatedStreams, Handle


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return emulator.build(tmp_path_factory.mktemp("emulation"))


@pytest.fixture
def driver(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, install_pycuda: Callable[[Any], None]
) -> Iterator[EmulatedDriver]:
    """PyCUDA and streams on the emulated machine; the kernel of a single query is launched by PyCUDA."""
    emulated = EmulatedDriver(library)
    install_pycuda(emulated)
    monkeypatch.setattr(cuda_loader, "kernel_images", lambda part, device: iter([(b"", "emulated")]))
    emulated.streams = EmulatedStreams(emulated)
    monkeypatch.setattr(cuda_native, "batch_calls", emulated.streams.addresses)
    monkeypatch.setattr(cuda_native, "function_handle", emulated.function_handle)
    for name in ("NativeStream", "NativeEvent"):
        monkeypatch.setattr(cuda_native, name, Handle)
    monkeypatch.setattr(cuda_native, "KernelClock", EmulatedClock)
    yield emulated
    assert emulated.streams.error is None


@pytest.fixture
def calls(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> NativeCalls:
    """The same, with a driver whose functions the extension may call."""
    calls = NativeCalls(driver)
    monkeypatch.setattr(cuda_native, "driver_calls", calls.addresses)
    return calls
