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


class TrieSteps:
    """Steps over an opened trie; `Index.steps` makes one.

    ``eos``: ids that end an answer where a key ends. ``vocab_size``: the width of the model's logits. States are
    node ids, 0 the root; ``ended`` is the state behind an end-of-sequence token.
    """

    def __init__(self, trie: Any, num_nodes: int, *, eos: Iterable[int], vocab_size: int):
        self.eos = tuple(sorted(set(eos)))
        self.vocab_size = vocab_size
        self.ended = num_nodes
        try:
            self._steps = native().TrieSteps(trie, np.array(self.eos, np.uint32), vocab_size)
        except (ValueError, OverflowError) as error:
            raise UsageError(str(error), hint="take the width of the model's logits") from None

    @property
    def num_words(self) -> int:
        """int32 words of a mask row."""
        return int(self._steps.num_words)

    def children(
        self, nodes: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens and nodes of the children of each node, ascending, and offsets int64 [len(nodes) + 1]."""
        return self._steps.children(_states(nodes))

    def allowed(self, state: int) -> npt.NDArray[np.uint32]:
        """Tokens that may come next: the children's, and the end-of-sequence ids where a key ends; ascending."""
        return self.allowed_lists([state])[0]

    def allowed_lists(self, states: npt.ArrayLike) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Those of each state, one list after the other: ids uint32, offsets int64 [len(states) + 1]."""
        return self._steps.allowed_lists(_states(states))

    def fill(self, states: npt.ArrayLike, bitmask: Any) -> None:
        """Those of each state as rows of an int32 array [>= len(states), >= num_words]."""
        self._steps.fill(_states(states), bitmask)

    def advance(
        self, states: npt.ArrayLike, tokens: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Each state after its token, and whether it was allowed; where it was not the state stays."""
        after = np.array(states, np.uint32)
        allowed = self._steps.advance(after, np.ascontiguousarray(tokens, np.int64))
        return after, allowed.view(np.bool_)

    def walk(self, token_rows: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        """The state after each row of tokens [rows, length] from the root; 0xFFFFFFFF where one was not allowed."""
        rows = np.ascontiguousarray(token_rows, np.int64)
        if rows.ndim != 2:
            raise ValueError(f"token rows have two dimensions, not {rows.ndim}")
        return self._steps.walk(rows)

    def bitmask(self, num_rows: int = 1) -> npt.NDArray[np.int32]:
        """Zeros of the right shape for `fill`."""
        return np.zeros((num_rows, self.num_words), np.int32)


def _states(states: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(states, np.uint32)
