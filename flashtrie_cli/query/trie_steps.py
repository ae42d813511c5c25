"""A token trie asked one step at a time, so that a model that speaks token by token is held to its keys.

`TrieSteps` answers as `TokenMasks` does, with nodes of the token trie as states, so the processors for transformers
take either. A key is one sequence of tokens: unlike masks of strings, no other segmentation of its text is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu import native
from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.token_states import TokenStates, state_array

MAX_WIDTH = 1 << 31
"""Tokens that a trie can hold."""


class TrieSteps(TokenStates):
    """Steps over an opened trie; `Index.steps` makes one.

    ``eos``: ids that end an answer where a key ends. ``vocab_size``: the width of the model's logits. States are
    node ids, 0 the root; ``ended`` is the state behind an end-of-sequence token. ``resident``: the trie on a device,
    where there is one already.
    """

    def __init__(
        self, trie: Any, num_nodes: int, *, eos: Iterable[int], vocab_size: int, resident: Any = None
    ):
        if not 1 <= vocab_size <= MAX_WIDTH:
            raise UsageError(f"a vocabulary size of {vocab_size} is not between 1 and {MAX_WIDTH}")
        self.eos = tuple(sorted(set(eos)))
        if self.eos and self.eos[0] < 0:
            raise UsageError(f"end-of-sequence id {self.eos[0]} is negative")
        self.vocab_size = vocab_size
        self._trie, self._resident = trie, resident
        try:
            super().__init__(native().TrieSteps(trie, np.array(self.eos, np.uint32), vocab_size), num_nodes)
        except (ValueError, OverflowError) as error:
            raise UsageError(str(error), hint="take the width of the model's logits") from None

    def children(
        self, nodes: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens and nodes of the children of each node, ascending, and offsets int64 [len(nodes) + 1]."""
        return self._native.children(state_array(nodes))

    def _open_device(self, device: int) -> Any:
        from flashtrie_cli.engine.cuda_trie_steps import open_trie_steps

        return open_trie_steps(self._trie, self._resident, self._native, self.eos, self.vocab_size, device)
