"""Getting to kernels, without a GPU: every way to fail, against a fake driver library, PyCUDA and nvcc."""

from __future__ import annotations

import os
import stat
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashtrie_cli.engine import cuda_loader, cuda_sources
from flashtrie_cli.errors import EngineUnavailable, UsageError

NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0;;
  --list-gpu-arch) echo compute_75; echo compute_90; exit 0;;
esac
[ -n "$FAKE_NVCC_FAILS" ] && { echo "search.cu(7): error: no luck today" >&2; exit 2; }
echo "$@" >>"$(dirname "$0")/calls"
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo compiled >"$2"; shift; done
"""


class FakeError(Exception):
    """Of PyCUDA: no RuntimeError, as in life."""


class FakeCuda(types.ModuleType):
    """What the loader asks of pycuda.driver."""

    Error = FakeError

    def __init__(self) -> None:
        super().__init__("pycuda.driver")
        self.count, self.fails_init, self.refuses, self.loaded = 1, False, [], []
        outer = self

        class Device:
            def __init__(self, ordinal: int) -> None:
                self.ordinal = ordinal

            @staticmethod
            def count() -> int:
                return outer.count

            def retain_primary_context(self) -> Any:
                return types.SimpleNamespace(push=lambda: None, pop=lambda: None)

            def name(self) -> str:
                return "Fake 90"

            def compute_capability(self) -> tuple[int, int]:
                return 9, 0

            def get_attribute(self, which: str) -> int:
                return {"sms": 132, "shared": 232448}[which]

            def total_memory(self) -> int:
                return 1 << 37

        self.Device = Device
        self.device_attribute = types.SimpleNamespace(
            MULTIPROCESSOR_COUNT="sms", MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared"
        )

    def init(self) -> None:
        if self.fails_init:
            raise FakeError("no CUDA-capable device is detected")

    def module_from_buffer(self, image: bytes) -> str:
        if image in self.refuses:
            raise FakeError("no kernel image is available for execution on the device")
        self.loaded.append(image)
        return "module"


@pytest.fixture
def cuda(install_pycuda: Callable[[Any], None]) -> FakeCuda:
    """A driver library and a PyCUDA that are there."""
    fake = FakeCuda()
    install_pycuda(fake)
    return fake


@pytest.fixture
def nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A compiler of our own in FLASHTRIE_NVCC, and a cache folder."""
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(NVCC)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("FLASHTRIE_NVCC", str(path))
    monkeypatch.setenv("FLASHTRIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_sources, "packaged_kernel", lambda part: None)
    return path


def calls(nvcc: Path) -> list[str]:
    path = nvcc.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(cuda_loader.ctypes, "CDLL", missing)
    with pytest.raises(EngineUnavailable, match=r"no NVIDIA driver here.*--engine cpu"):
        cuda_loader.driver()


def test_no_pycuda(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.delitem(sys.modules, "pycuda.driver")
    with pytest.raises(EngineUnavailable, match="PyCUDA"):
        cuda_loader.driver()


def test_no_device(cuda: FakeCuda) -> None:
    cuda.fails_init = True
    with pytest.raises(EngineUnavailable, match="no usable device"):
        cuda_loader.open_device()
    cuda.fails_init, cuda.count = False, 0
    with pytest.raises(EngineUnavailable, match="no device"):
        cuda_loader.open_device()


def test_no_such_device(cuda: FakeCuda) -> None:
    with pytest.raises(UsageError, match=r"no device 3 \(hint: devices here: 0 to 0\)"):
        cuda_loader.open_device(3)


def test_a_device_is_opened_once(cuda: FakeCuda) -> None:
    device = cuda_loader.open_device()
    assert (device.arch, device.num_multiprocessors) == (90, 132)
    assert cuda_loader.open_device() is device


def test_kernels_are_compiled_once_and_kept(cuda: FakeCuda, nvcc: Path) -> None:
    device = cuda_loader.open_device()
    assert cuda_loader.load_kernels("search", device) == "module"
    cuda_loader._modules.clear()
    cuda_loader.load_kernels("search", device)
    assert cuda.loaded == [b"compiled\n"] * 2
    assert len(calls(nvcc)) == 1
    assert "-arch=sm_90" in calls(nvcc)[0]
    assert "--fmad=false" in calls(nvcc)[0]


def test_a_cached_kernel_serves_without_nvcc(
    cuda: FakeCuda, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = cuda_sources.cached_kernel("search", 90)
    monkeypatch.setattr(cuda_sources, "find_nvcc", lambda: None)
    assert cuda_sources.cached_kernel("search", 90) == cached
    with pytest.raises(EngineUnavailable, match=r"compute capability 7\.5, and no nvcc"):
        cuda_sources.cached_kernel("search", 75)


def test_other_sources_are_compiled_again(
    cuda: FakeCuda, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda_sources.cached_kernel("search", 90)
    monkeypatch.setattr(cuda_sources, "source_digest", lambda part: "another")
    cuda_sources.cached_kernel("search", 90)
    assert len(calls(nvcc)) == 2


def test_a_gpu_newer_than_nvcc_gets_ptx_and_an_older_one_an_error(cuda: FakeCuda, nvcc: Path) -> None:
    cuda_sources.cached_kernel("search", 103)
    assert "-ptx -arch=compute_90" in calls(nvcc)[0]
    with pytest.raises(
        EngineUnavailable, match=r"compiles for compute capability 7\.5 and newer, the GPU has 7\.0"
    ):
        cuda_sources.cached_kernel("search", 70)


def test_a_failed_compilation_leaves_nothing_behind(
    cuda: FakeCuda, nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVCC_FAILS", "1")
    with pytest.raises(EngineUnavailable, match="no luck today"):
        cuda_sources.cached_kernel("search", 90)
    assert os.listdir(cuda_sources.cache_folder()) == []


def test_a_cache_that_cannot_be_written(cuda: FakeCuda, nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHTRIE_CACHE", str(nvcc / "inside-a-file"))
    with pytest.raises(EngineUnavailable, match="FLASHTRIE_CACHE names another folder"):
        cuda_sources.cached_kernel("search", 90)


def test_a_packaged_fatbin_that_lacks_the_architecture(
    cuda: FakeCuda, nvcc: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaged = tmp_path / "search.fatbin"
    packaged.write_bytes(b"other architectures")
    monkeypatch.setattr(cuda_sources, "packaged_kernel", lambda part: packaged)
    cuda.refuses.append(b"other architectures")
    assert cuda_loader.load_kernels("search", cuda_loader.open_device()) == "module"
    assert cuda.loaded == [b"compiled\n"]


def test_a_packaged_fatbin_of_other_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "_kernels"
    folder.mkdir()
    digest = cuda_sources.source_digest("search")
    monkeypatch.setattr(cuda_sources, "_PACKAGE", tmp_path)
    monkeypatch.setattr(cuda_sources, "source_digest", lambda part: digest)
    (folder / "search.fatbin").write_bytes(b"x")
    (folder / "search.digest").write_text("0123456789abcdef\n")
    assert cuda_sources.packaged_kernel("search") is None
    (folder / "search.digest").write_text(digest + "\n")
    assert cuda_sources.packaged_kernel("search") == folder / "search.fatbin"


def test_the_package_is_built_with_a_digest(nvcc: Path, tmp_path: Path) -> None:
    cuda_sources.build_fatbin("search", tmp_path / "kernels")
    assert (tmp_path / "kernels" / "search.digest").read_text().strip() == cuda_sources.source_digest(
        "search"
    )
    assert "code=sm_75" in calls(nvcc)[0]
    assert "code=compute_90" in calls(nvcc)[0]


def test_a_package_without_a_working_nvcc_still_installs(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVCC_FAILS", "1")
    with pytest.warns(UserWarning, match="compiled at first use: .*no luck today"):
        cuda_sources.build_fatbin("search", tmp_path / "kernels")
    assert (tmp_path / "kernels" / "search.digest").read_text() == ""
