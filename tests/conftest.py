"""What tests of the whole program share: running it, and small indexes to run it on."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from program import Run, run_flashtrie

settings.register_profile(
    "flashtrie",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "long", parent=settings.get_profile("flashtrie"), derandomize=False, max_examples=2000
)
settings.load_profile(os.environ.get("FLASHTRIE_HYPOTHESIS", "flashtrie"))


@pytest.fixture(scope="session")
def flashtrie() -> Run:
    return run_flashtrie


@pytest.fixture(scope="session")
def words_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three keys of words."""
    path = tmp_path_factory.mktemp("words") / "words.ft"
    done = run_flashtrie("build", "-", "-o", path, stdin=b"new york\nnew york city\nold york\n")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def ids_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many keys of ids, so that a dump is longer than a pipe holds."""
    path = tmp_path_factory.mktemp("ids") / "ids.ft"
    lines = "".join(f"{i} {j}\n" for i in range(400) for j in range(i, i + 200))
    done = run_flashtrie("build", "-", "-o", path, "--input", "ids", stdin=lines.encode())
    assert done.returncode == 0, done.stderr
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-required", action="store_true", help="a test marked gpu may not skip")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """On a machine that promises a GPU, a skipped GPU test is a failed one."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and item.get_closest_marker("gpu") and item.config.getoption("--gpu-required"):
        report.outcome = "failed"
        report.longrepr = f"skipped where a GPU is required: {report.longrepr[2]}"


@pytest.fixture
def install_pycuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Puts something in the place of ``pycuda.driver``, with a driver library that is there and nothing opened yet."""
    from flashtrie_cli.engine import cuda_loader

    def install(driver: Any) -> None:
        package = types.ModuleType("pycuda")
        package.driver = driver  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pycuda", package)
        monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
        monkeypatch.setattr(cuda_loader.ctypes, "CDLL", lambda name: object())
        monkeypatch.setattr(cuda_loader, "_devices", {})
        monkeypatch.setattr(cuda_loader, "_modules", {})
        monkeypatch.setattr(cuda_loader.atexit, "register", lambda *arguments: None)

    return install
