"""Which engine answers, and why the others can't."""

from __future__ import annotations

from flashtrie_cli.engine import cpu
from flashtrie_cli.engine.protocol import TrieEngine
from flashtrie_cli.errors import UsageError
from flashtrie_cli.trie.stored import StoredTrie

ENGINES = ("auto", "cpu", "reference")


def make_engine(name: str, stored: StoredTrie, *, threads: int = 1, device: int = 0) -> TrieEngine:
    """The engine of this name; ``auto`` takes cpu where it was built, else reference.

    Raises EngineUnavailable for an engine named that cannot run here, UsageError for an unknown name.
    """
    from flashtrie_cli.engine.reference import ReferenceEngine

    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    if name == "auto":
        name = "cpu" if cpu.is_available() else "reference"
    if name == "cpu":
        return cpu.CpuEngine(stored, threads=threads)
    return ReferenceEngine(stored)
