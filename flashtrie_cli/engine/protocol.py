"""What every engine can do with a token trie. Results are the same bytes from each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from flashtrie_cli.trie.stored import StoredTrie

if TYPE_CHECKING:
    from flashtrie_cli.query.plan import SearchPlan
    from flashtrie_cli.query.results import SearchResults

U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


WALK_TOKENS = 1 << 20


@dataclass(frozen=True)
class KeyList:
    """Keys flat: key i is ``tokens[offsets[i]:offsets[i + 1]]`` (uint32, int64 [n + 1]) with ``key_ids[i]`` uint32."""

    key_ids: U32
    tokens: U32
    offsets: I64

    def __len__(self) -> int:
        return len(self.key_ids)


class TrieEngine(Protocol):
    """Questions about a token trie. ``tokens`` uint32 flat, ``offsets`` int64 [n + 1]."""

    name: str
    resident_size: int
    """Bytes that the trie takes in memory."""
    stored: StoredTrie
    """The trie it walks: that of the file, unfolded where it has tails."""
    largest_label: int
    """Largest token in the trie; 0 where there is none."""

    def find_nodes(self, tokens: U32, offsets: I64) -> U32:
        """Node of each sequence, 0xFFFFFFFF where no key begins so."""

    def find_key_ids(self, tokens: U32, offsets: I64) -> I64:
        """Key id of each sequence, -1 where it is no key."""

    def keys_below(self, prefix: U32, batch_size: int) -> Iterator[KeyList]:
        """Keys that extend ``prefix`` (itself included), in lexicographic order, at most ``batch_size`` at a time.

        Batches are shorter where keys are long: one ends with the key that brings it to WALK_TOKENS tokens.
        """

    def common_prefixes(self, tokens: U32) -> tuple[U32, U32]:
        """Lengths and key ids of the keys that are prefixes of a sequence, shortest first."""

    def key_tokens(self, key_ids: U32) -> KeyList:
        """The keys of these ids; IndexError for an id that is none."""

    def search(
        self, tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], plan: SearchPlan
    ) -> SearchResults:
        """Beam search over ``tokens`` and ``logprobs`` [queries, steps, slots]; contract in docs/search.md.

        Raises InputError, naming query, step and slot, for a log-prob that is NaN or +inf.
        """


def bad_logprob_message(flat: int, shape: tuple[int, ...], value: float) -> str:
    """What to say of the log-prob at a flat index of a grid."""
    query, step, slot = (int(i) for i in np.unravel_index(flat, shape))
    return f"query {query}, step {step}, slot {slot}: log-prob {value} is not a number below +inf"
