"""Which engine answers, and why the others can't."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrie_cli.engine import cpu_extension
from flashtrie_cli.errors import EngineUnavailable, UsageError

if TYPE_CHECKING:
    from flashtrie_cli.engine.protocol import TrieEngine
    from flashtrie_cli.trie.stored import StoredTrie

ENGINES = ("auto", "cpu", "cuda", "reference")


def make_engine(name: str, stored: StoredTrie, *, threads: int = 1, device: int = 0) -> TrieEngine:
    """The engine of this name; ``auto`` takes cpu where it was built, else reference.

    Raises EngineUnavailable for an engine named that cannot run here, UsageError for an unknown name.
    """
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is not one of {', '.join(ENGINES)}")
    if name == "auto":
        name = "cpu" if cpu_extension.is_available() else "reference"
    if name == "cpu":
        from flashtrie_cli.engine.cpu import CpuEngine

        return CpuEngine(stored, threads=threads)
    if name == "cuda":
        from flashtrie_cli.engine.cuda import CudaEngine

        return CudaEngine(stored, threads=threads, device=device)
    from flashtrie_cli.engine.reference import ReferenceEngine

    return ReferenceEngine(stored)


def search_engine(name: str, device: int = 0) -> str:
    """What ``auto`` means for a search: cuda where a GPU can be used, else cpu, else reference."""
    if name != "auto":
        return name
    if not cpu_extension.is_available():
        return "reference"
    return "cpu" if why_not_cuda(device) else "cuda"


def why_not_cuda(device: int = 0) -> str | None:
    """The reason, with its remedy, for which the cuda engine cannot run here; None where it can."""
    from flashtrie_cli.engine.cuda_loader import load_kernels, open_device

    try:
        load_kernels("search", open_device(device))
    except (EngineUnavailable, UsageError) as error:
        return str(error)
    return None


def engine_states() -> dict[str, str | None]:
    """For each engine None where it works here, else the reason and the remedy."""
    states: dict[str, str | None] = {"reference": None}
    try:
        cpu_extension.native()
        states["cpu"] = None
    except EngineUnavailable as error:
        states["cpu"] = str(error)
    states["cuda"] = why_not_cuda() if states["cpu"] is None else states["cpu"]
    return states
