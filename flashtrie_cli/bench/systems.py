"""The systems that can be measured side by side, each over one opened index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.choose import make_engine, why_not_cuda
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


_cuda_engines: WeakKeyDictionary[Index, Any] = WeakKeyDictionary()


def _cuda(index: Index, threads: int) -> Any:
    """One cuda engine an index, whose trie all GPU systems share."""
    if index not in _cuda_engines:
        _cuda_engines[index] = make_engine("cuda", index.stored, threads=threads)
        _cuda_engines[index].times_kernels = True
    return _cuda_engines[index]


def _paper(name: str) -> Callable[[Index, int], Searcher]:
    def make(index: Index, threads: int) -> Searcher:
        from flashtrie_cli.engine.cuda_paper import PaperSystem

        return PaperSystem(_cuda(index, threads), name)

    return make


_TABLE = (
    ("cpu", "cpu", True, "ours, C++", _cpu),
    ("cuda", "gpu", True, "ours, CUDA", _cuda),
    ("marisa-int", "cpu", True, "FlashTrie paper B.1: one thread, lookups from the root", _marisa_int),
    ("marisa-opt", "cpu", True, "FlashTrie paper B.2: worker pool, merge, bounded heap", _marisa_opt),
    (
        "flashtrie-paper",
        "gpu",
        True,
        "the paper's own search (2.2, algorithms 1 to 5)",
        _paper("flashtrie-paper"),
    ),
    ("ppt", "gpu", False, "position token lists, no prefix constraint (4.6, I)", _paper("ppt")),
    ("linear-probe", "gpu", True, "a thread a proposal, children scanned (J)", _paper("linear-probe")),
    ("two-pointer", "gpu", True, "a thread a beam, merge (J)", _paper("two-pointer")),
    ("per-child", "gpu", True, "a thread a child, proposals scanned (J)", _paper("per-child")),
    ("hash-transitions", "gpu", True, "hash set of (node, token)", _paper("hash-transitions")),
)
SYSTEMS = {row[0]: System(*row) for row in _TABLE}
SLOW = ("linear-probe", "two-pointer", "per-child")
"""Ablations that are measured only when asked for by name."""


def choose_systems(names: Sequence[str] | None) -> list[System]:
    """The systems of these names; without names, every CPU system, and the GPU's where there is one.

    Raises UsageError for an unknown name, EngineUnavailable for one that cannot run here.
    """
    if names is None:
        kept = [s for s in SYSTEMS.values() if s.name not in SLOW]
        return [s for s in kept if s.device == "cpu"] if not gpu_available() else kept
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
    return why_not_cuda() is None


def resident_size(searcher: Any, index: Index) -> int:
    """Bytes that a system keeps for the trie."""
    return int(getattr(searcher, "resident_size", index.engine.resident_size))
