"""The CPU engine: the C++ extension behind the common protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu_extension import is_available as is_available
from flashtrie_cli.engine.cpu_extension import native as native
from flashtrie_cli.engine.protocol import I64, U32, KeyList, bad_logprob_message
from flashtrie_cli.errors import IndexFileError, InputError
from flashtrie_cli.trie.stored import StoredTrie
from flashtrie_cli.trie.tails import StoredTails

if TYPE_CHECKING:
    from flashtrie_cli.query.plan import SearchPlan
    from flashtrie_cli.query.results import SearchResults

NO_TOKEN = 0xFFFF_FFFF


class CpuEngine:
    """See ``TrieEngine``. ``threads`` work on the queries of a batch; the answer does not depend on them."""

    name = "cpu"

    def __init__(self, stored: StoredTrie, *, threads: int = 1):
        self._native = native()
        self.stored = stored
        self.threads = max(threads, 1)
        self.last_query_ns: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        try:
            self.trie = self._open(stored)
        except ValueError as error:
            raise IndexFileError(str(error), file=stored.path, hint="rebuild the index") from error
        if self.trie.num_keys != stored.num_keys:
            raise IndexFileError(
                "has another number of keys than it says", file=stored.path, hint="rebuild the index"
            )
        owned = (self.trie.louds, self.trie.label_low, self.trie.high_flags, self.trie.label_high)
        self.largest_label: int = self.trie.largest_label
        self.resident_size = self.trie.lines.nbytes + self.trie.wide.nbytes + sum(a.nbytes for a in owned)

    def _open(self, stored: StoredTrie) -> Any:
        module, count = self._native, stored.num_stored
        labels, terminal = stored.label_low, stored.terminal
        if labels is None:
            labels = module.restore_labels(stored.louds, count, stored.label_delta, self.threads)
        if terminal is None:
            terminal = module.restore_terminal(stored.louds, count, stored.inner_terminal, self.threads)
        parts = (stored.louds, terminal, labels, stored.high_flags, stored.label_high)
        if stored.tails is not None:
            parts = self._unfolded(stored, stored.tails, *parts)
            self.stored = replace(
                stored, louds=parts[0], terminal=parts[1], inner_terminal=None, label_low=parts[2], label_delta=None,
                high_flags=parts[3], label_high=parts[4], tails=None,
            )  # fmt: skip
        louds, terminal, labels, high_flags, label_high = parts
        return module.Trie(
            louds=louds,
            terminal=terminal,
            label_low=labels,
            high_flags=high_flags,
            label_high=label_high,
            high_width=stored.high_width,
            num_nodes=stored.num_nodes,
            num_threads=self.threads,
        )

    def _unfolded(self, stored: StoredTrie, tails: StoredTails, *parts: npt.NDArray[Any]) -> Any:
        """The same arrays of the whole trie (``trie.unfold``)."""
        louds, terminal, labels, high_flags, label_high = parts
        return self._native.unfold_tails(
            louds=louds,
            terminal=terminal,
            label_low=labels,
            high_flags=high_flags,
            label_high=label_high,
            high_width=stored.high_width,
            num_stored=stored.num_stored,
            num_nodes=stored.num_nodes,
            num_links=tails.num_links,
            link_width=tails.link_width,
            link_flags=tails.link_flags,
            links=tails.links,
            ends=tails.ends,
            labels=tails.labels.view(np.uint8),
            label_size=tails.labels.itemsize,
        )

    def find_nodes(self, tokens: U32, offsets: I64) -> U32:
        return self._native.find_nodes(self.trie, tokens, offsets, self.threads)

    def find_key_ids(self, tokens: U32, offsets: I64) -> I64:
        return self._native.find_key_ids(self.trie, tokens, offsets, self.threads)

    def keys_below(self, prefix: U32, batch_size: int) -> Iterator[KeyList]:
        node = int(self.find_nodes(prefix, np.array([0, len(prefix)], np.int64))[0])
        if node == 0xFFFF_FFFF:
            return
        walk = self._native.KeyWalk(self.trie, node, prefix.tolist())
        while True:
            keys = KeyList(*walk.next(batch_size))
            if not len(keys):
                return
            yield keys

    def common_prefixes(self, tokens: U32) -> tuple[U32, U32]:
        return self._native.common_prefixes(self.trie, tokens)

    def key_tokens(self, key_ids: U32) -> KeyList:
        return KeyList(*self._native.key_tokens(self.trie, key_ids))

    def search(
        self, tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], plan: SearchPlan
    ) -> SearchResults:
        from flashtrie_cli.query.results import SearchResults

        self.check_logprobs(logprobs)
        *arrays, self.last_query_ns = self._native.search(
            self.trie, **search_arguments(tokens, logprobs, plan), num_threads=self.threads
        )
        return SearchResults(*arrays)

    def check_logprobs(self, logprobs: npt.NDArray[np.float32]) -> None:
        """InputError, naming query, step and slot, for the first log-prob that is NaN or +inf."""
        bad = self._native.find_bad_logprob(logprobs.reshape(-1), self.threads)
        if bad >= 0:
            raise InputError(bad_logprob_message(bad, logprobs.shape, float(logprobs.reshape(-1)[bad])))


def search_arguments(
    tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], plan: SearchPlan
) -> dict[str, Any]:
    """What every native search takes beside the trie."""
    return {
        "tokens": tokens,
        "logprobs": logprobs,
        "length_factors": plan.length_factors(tokens.shape[1]),
        "beam_width": plan.beam_width,
        "num_results": plan.result_limit,
        "token_threshold": plan.token_threshold,
        "sequence_threshold": plan.sequence_threshold,
        "eos": NO_TOKEN if plan.eos is None else plan.eos,
        "padding": plan.padding,
    }
