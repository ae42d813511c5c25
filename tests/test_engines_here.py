"""Where the native engine is promised, it must be there: a silent fall back to plain Python fails."""

from __future__ import annotations

import os

import pytest

from flashtrie_cli.engine import cpu


@pytest.mark.skipif(
    not os.environ.get("FLASHTRIE_REQUIRE_NATIVE"), reason="FLASHTRIE_REQUIRE_NATIVE is not set"
)
def test_the_native_engine_is_installed() -> None:
    assert cpu.is_available()
    assert cpu.native().__name__ == "flashtrie_cli._native"
