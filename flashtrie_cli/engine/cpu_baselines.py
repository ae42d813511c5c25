"""The paper's CPU systems (appendix B) over the CPU engine's trie, for the benchmark: `marisa-int`,
`marisa-opt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu import CpuEngine, search_arguments

if TYPE_CHECKING:
    from flashtrie_cli.query.plan import SearchPlan
    from flashtrie_cli.query.results import SearchResults


class _CpuBaseline:
    """A search over the trie that a `CpuEngine` holds; same answers, other work."""

    name: str

    def __init__(self, engine: CpuEngine):
        self._engine = engine

    def _run(self, **arguments: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def search(
        self, tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], plan: SearchPlan
    ) -> SearchResults:
        """See ``TrieEngine.search``; the same bytes."""
        from flashtrie_cli.query.results import SearchResults

        self._engine.check_logprobs(logprobs)
        *arrays, _ = self._run(**search_arguments(tokens, logprobs, plan))
        return SearchResults(*arrays)


class MarisaInt(_CpuBaseline):
    """B.1: one thread, every (beam, proposal) pair looked up by its full prefix from the root."""

    name = "marisa-int"

    def _run(self, **arguments: Any) -> tuple[Any, ...]:
        return self._engine._native.search_marisa_int(self._engine.trie, **arguments)


class MarisaOpt(_CpuBaseline):
    """B.2: worker pool over beams, cached node state, two-pointer merge, shared bounded min-heap."""

    name = "marisa-opt"

    def __init__(self, engine: CpuEngine):
        super().__init__(engine)
        self._searcher = engine._native.MarisaOpt(engine.trie, num_threads=engine.threads)

    def _run(self, **arguments: Any) -> tuple[Any, ...]:
        return self._searcher.search(**arguments)
