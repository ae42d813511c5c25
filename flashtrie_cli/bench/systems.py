"""The systems that can be measured side by side, each over one opened index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.choose import make_engine
from flashtrie_cli.engine.cpu import CpuEngine
from flashtrie_cli.errors import EngineUnavailable, UsageError
from flashtrie_cli.index import Index
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

if TYPE_CHECKING:
    U32 = npt.NDArray[np.uint32]
    F32 = npt.NDArray[np.float32]

OURS = ("cpu", "cuda")


class Searcher(Protocol):
    """What a system must do: `TrieEngine.search`. ``last_kernel_ns``, where it has one, is the time of the
    call's kernel or, on a CPU, None."""

    name: str

    def search(self, tokens: U32, logprobs: F32, plan: SearchPlan) -> SearchResults: ...


@dataclass(frozen=True)
class System:
    """A name of the issue's table, where it runs, whether its answers must be the engines' bytes, how to
    make it."""

    name: str
    device: str
    exact: bool
    about: str
    make: Callable[[Index, int], Searcher]


def _cpu(index: Index, threads: int) -> CpuEngine:
    if isinstance(index.engine, CpuEngine) and index.engine.threads == threads:
        return index.engine
    return CpuEngine(index.stored, threads=threads)


def _marisa_int(index: Index, threads: int) -> Searcher:
    from flashtrie_cli.engine.cpu_baselines import MarisaInt

    return MarisaInt(_cpu(index, threads))


def _marisa_opt(index: Index, threads: int) -> Searcher:
    from flashtrie_cli.engine.cpu_baselines import MarisaOpt

    return MarisaOpt(_cpu(index, threads))


SYSTEMS = {
    system.name: system
    for system in (
        System("cpu", "cpu", True, "ours, C++", _cpu),
        System("cuda", "gpu", True, "ours, CUDA", lambda index, threads: make_engine("cuda", index.stored)),
        System(
            "marisa-int", "cpu", True, "FlashTrie paper B.1: one thread, lookups from the root", _marisa_int
        ),
        System(
            "marisa-opt", "cpu", True, "FlashTrie paper B.2: worker pool, merge, bounded heap", _marisa_opt
        ),
    )
}


def choose_systems(names: Sequence[str] | None) -> list[System]:
    """The systems of these names; without names, every CPU system, and the GPU's where there is one.

    Raises UsageError for an unknown name, EngineUnavailable for one that cannot run here.
    """
    if names is None:
        return [s for s in SYSTEMS.values() if s.device == "cpu" or gpu_available()]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown:
        raise UsageError(f"system {unknown[0]!r} is not one of {', '.join(SYSTEMS)}")
    chosen = [SYSTEMS[name] for name in dict.fromkeys(names)]
    for system in chosen:
        if system.device == "gpu" and not gpu_available():
            raise EngineUnavailable(
                f"system {system.name} needs an NVIDIA GPU with a driver and PyCUDA",
                hint="see flashtrie info",
            )
    return chosen


def gpu_available() -> bool:
    """Whether the cuda engine could answer here."""
    try:
        from flashtrie_cli.engine import cuda  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return False
    return bool(cuda.is_available())


def resident_size(searcher: Any, index: Index) -> int:
    """Bytes that a system keeps for the trie."""
    return int(getattr(searcher, "resident_size", index.engine.resident_size))
