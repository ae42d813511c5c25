"""The kernels of masks and steps, compiled once for the emulated machine."""

from __future__ import annotations

import ctypes
import shutil

import pytest
from emulated_tokens import compile_library


@pytest.fixture(scope="session")
def token_kernels(tmp_path_factory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return compile_library(tmp_path_factory.mktemp("emulated_tokens"))
