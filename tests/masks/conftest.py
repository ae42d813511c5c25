"""What tests of token masks and token-trie steps share."""

from __future__ import annotations

import ctypes
import shutil

import pytest
from emulated_tokens import compile_library


@pytest.fixture(scope="session")
def token_kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for the emulated machine, once for all tests."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return compile_library(tmp_path_factory.mktemp("emulated_tokens"))
