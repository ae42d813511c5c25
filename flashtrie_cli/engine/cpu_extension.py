"""Whether the C++ extension is here; apart from the engine, so that to ask takes no numpy."""

from __future__ import annotations

from typing import Any

from flashtrie_cli.errors import EngineUnavailable


def native() -> Any:
    """The extension module; EngineUnavailable where it was not built."""
    try:
        from flashtrie_cli import _native
    except ImportError as error:
        raise EngineUnavailable(
            "the native engine is not installed" + ("" if was_never_built(error) else f" ({error})"),
            hint="reinstall where a C++20 compiler is found, or use --engine reference",
        ) from error
    return _native


def was_never_built(error: ImportError) -> bool:
    """Whether the extension is missing, rather than there and broken."""
    return error.path is None or not error.path.endswith((".so", ".pyd"))


def is_available() -> bool:
    try:
        native()
    except EngineUnavailable:
        return False
    return True
