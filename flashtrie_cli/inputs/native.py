"""The extension module for readers of input, which all have a plain-Python twin."""

from __future__ import annotations

from typing import Any


def native() -> Any | None:
    """The extension module, or None where it was not built; every user has a plain-Python twin."""
    try:
        from flashtrie_cli import _native  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return _native
