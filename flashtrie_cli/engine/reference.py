"""The reference engine: plain Python over lists, the oracle that every other engine is compared with.

Slow and obvious on purpose. It walks the same stored sections, but shares no step with the native engine.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.protocol import I64, U32, WALK_TOKENS, KeyList, bad_logprob_message
from flashtrie_cli.errors import IndexFileError, InputError
from flashtrie_cli.trie.stored import StoredTrie
from flashtrie_cli.trie.unfold import unfolded

if TYPE_CHECKING:
    from flashtrie_cli.query.plan import SearchPlan
    from flashtrie_cli.query.results import SearchResults

NO_NODE = 0xFFFF_FFFF


def bits_of(words: npt.NDArray[np.uint64], count: int) -> list[int]:
    """The first ``count`` bits of 64-bit words, lowest first."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=count).tolist()


class ReferenceEngine:
    """See ``TrieEngine``."""

    name = "reference"

    def __init__(self, stored: StoredTrie):
        self._path = stored.path
        self._load(stored)
        self.stored = stored
        if stored.tails is not None:
            fan_outs = [last - first for first, last in itertools.pairwise(self.first_child)]
            self.stored = stored = unfolded(stored, self.labels, self.terminal, fan_outs)
            self._load(stored)
        self._parents = [0] * stored.num_nodes
        self._depths = [0] * stored.num_nodes
        for node, first in enumerate(self.first_child[:-1]):
            for child in range(first, self.first_child[node + 1]):
                self._parents[child] = node
                self._depths[child] = self._depths[node] + 1
        self._key_nodes = [node for node, ends in enumerate(self.terminal) if ends]
        if len(self._key_nodes) != stored.num_keys:
            self._refuse("has another number of keys than it says")
        self.largest_label = max(self.labels[1:], default=0)
        self.resident_size = 0  # lists of Python objects: no figure worth comparing

    def _refuse(self, why: str) -> None:
        raise IndexFileError(why, file=self._path, hint="rebuild the index")

    def _load(self, stored: StoredTrie) -> None:
        """Children of node v are ``first_child[v]`` to ``first_child[v + 1]``; ``labels`` and ``terminal`` by node."""
        count = stored.num_stored
        self.first_child = [1]
        for bit in bits_of(stored.louds, 2 * count - 1):
            if bit:
                self.first_child[-1] += 1
            else:
                node = len(self.first_child) - 1
                if self.first_child[-1] <= node:
                    self._refuse("louds does not describe a tree")
                self.first_child.append(self.first_child[-1])
        # Each entry grew from where its node's children begin to where they end: shift by one node.
        ends = self.first_child[:-1]
        self.first_child = [1, *ends]
        if len(ends) != count or ends[-1] != count:
            self._refuse("louds has another number of nodes than it says")
        leaves = [self.first_child[v] == self.first_child[v + 1] for v in range(count)]
        self.labels = self._labels(stored)
        self.terminal = self._terminal(stored, leaves)
        for node in range(1, count):
            if leaves[node] and not self.terminal[node]:
                self._refuse("a node has neither children nor a key")
        for first, last in zip(self.first_child, self.first_child[1:], strict=False):
            if any(self.labels[i] >= self.labels[i + 1] for i in range(first, last - 1)):
                self._refuse("siblings are out of order")

    def _labels(self, stored: StoredTrie) -> list[int]:
        if stored.label_low is not None:
            labels = stored.label_low.tolist()
        else:
            assert stored.label_delta is not None
            labels = stored.label_delta.tolist()
            for first, last in zip(self.first_child, self.first_child[1:], strict=False):
                for child in range(first + 1, last):
                    labels[child] = (labels[child] + labels[child - 1]) & 0xFFFF
        if stored.high_width:
            flags = bits_of(stored.high_flags, stored.num_stored)
            width, flagged = stored.high_width, sum(flags)
            if flagged * width > (len(stored.label_high) - 4) * 64:
                self._refuse("label_high is too short for its flags")
            bits = bits_of(stored.label_high, flagged * width)
            at = 0
            for node, flag in enumerate(flags):
                if flag:
                    high = sum(bit << i for i, bit in enumerate(bits[at : at + width]))
                    if high == 0 and node > 0:
                        self._refuse("a label is flagged as above 16 bits and is not")
                    labels[node] |= high << 16
                    at += width
        return labels

    def _terminal(self, stored: StoredTrie, leaves: list[bool]) -> list[int]:
        if stored.terminal is not None:
            return bits_of(stored.terminal, stored.num_stored)
        assert stored.inner_terminal is not None
        inner = [node for node, leaf in enumerate(leaves) if not leaf or node == 0]
        if len(inner) > 64 * len(stored.inner_terminal):
            self._refuse("inner_terminal is too short for its nodes")
        terminal = [1] * stored.num_stored
        for node, bit in zip(inner, bits_of(stored.inner_terminal, len(inner)), strict=True):
            terminal[node] = bit
        return terminal

    def children(self, node: int) -> range:
        return range(self.first_child[node], self.first_child[node + 1])

    def child(self, node: int, token: int) -> int | None:
        """The child with this label."""
        first, last = self.first_child[node], self.first_child[node + 1]
        at = bisect_left(self.labels, token, first, last)
        return at if at < last and self.labels[at] == token else None

    def path(self, node: int) -> tuple[int, ...]:
        """The labels from the root to a node."""
        labels = []
        while node:
            labels.append(self.labels[node])
            node = self._parents[node]
        return tuple(reversed(labels))

    def key_id(self, node: int) -> int:
        return bisect_left(self._key_nodes, node) if self.terminal[node] else -1

    def _walk(self, tokens: list[int]) -> int | None:
        node = 0
        for token in tokens:
            below = self.child(node, token)
            if below is None:
                return None
            node = below
        return node

    def find_nodes(self, tokens: U32, offsets: I64) -> U32:
        nodes = [self._walk(tokens[a:b].tolist()) for a, b in itertools.pairwise(offsets)]
        return np.array([NO_NODE if node is None else node for node in nodes], np.uint32)

    def find_key_ids(self, tokens: U32, offsets: I64) -> I64:
        nodes = self.find_nodes(tokens, offsets).tolist()
        return np.array([-1 if node == NO_NODE else self.key_id(node) for node in nodes], np.int64)

    def keys_below(self, prefix: U32, batch_size: int) -> Iterator[KeyList]:
        node = self._walk(prefix.tolist())
        batch: list[int] = []
        num_tokens = 0
        for found in self._terminals_below(node) if node is not None else ():
            batch.append(found)
            num_tokens += self._depths[found]
            if len(batch) == batch_size or num_tokens >= WALK_TOKENS:
                yield self._key_list(batch)
                batch, num_tokens = [], 0
        if batch:
            yield self._key_list(batch)

    def _terminals_below(self, node: int) -> Iterator[int]:
        stack = [node]
        while stack:
            node = stack.pop()
            if self.terminal[node]:
                yield node
            stack.extend(reversed(self.children(node)))

    def common_prefixes(self, tokens: U32) -> tuple[U32, U32]:
        lengths, key_ids, node = [], [], 0
        for depth, token in enumerate([*tokens.tolist(), None]):
            if self.terminal[node]:
                lengths.append(depth)
                key_ids.append(self.key_id(node))
            below = None if token is None else self.child(node, token)
            if below is None:
                break
            node = below
        return np.array(lengths, np.uint32), np.array(key_ids, np.uint32)

    def key_tokens(self, key_ids: U32) -> KeyList:
        if any(key >= len(self._key_nodes) for key in key_ids.tolist()):
            raise IndexError("no such key id")
        return self._key_list([self._key_nodes[key] for key in key_ids.tolist()])

    def _key_list(self, nodes: list[int]) -> KeyList:
        paths = [self.path(node) for node in nodes]
        return KeyList(
            np.array([self.key_id(node) for node in nodes], np.uint32),
            np.array([token for path in paths for token in path], np.uint32),
            np.cumsum([0, *(len(path) for path in paths)], dtype=np.int64),
        )

    def search(
        self, tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], plan: SearchPlan
    ) -> SearchResults:
        from flashtrie_cli.query.results import SearchResults

        bad = np.flatnonzero(~(logprobs.reshape(-1) < np.inf))
        if len(bad):
            first = int(bad[0])
            raise InputError(bad_logprob_message(first, logprobs.shape, float(logprobs.reshape(-1)[first])))
        factors = plan.length_factors(tokens.shape[1])
        answers = [self._search_one(tokens[q], logprobs[q], plan, factors) for q in range(len(tokens))]
        hits = [hit for answer in answers for hit in answer]
        paths = [self.path(node) for _, node, _ in hits]
        return SearchResults(
            np.cumsum([0, *(len(answer) for answer in answers)], dtype=np.int64),
            np.array([self.key_id(node) for _, node, _ in hits], np.uint32),
            np.array([score for _, _, score in hits], np.float32),
            np.array([normalised for normalised, _, _ in hits], np.float32),
            np.cumsum([0, *(len(path) for path in paths)], dtype=np.int64),
            np.array([token for path in paths for token in path], np.uint32),
        )

    def _search_one(
        self,
        tokens: npt.NDArray[np.uint32],
        logprobs: npt.NDArray[np.float32],
        plan: SearchPlan,
        factors: npt.NDArray[np.float32],
    ) -> list[tuple[np.float32, int, np.float32]]:
        """(normalised score, node, score) of the hits of one query, best first."""
        rows = [best_logprobs(tokens[t], logprobs[t], plan.padding) for t in range(len(tokens))]
        frontier = [(0, np.float32(0))]
        results: list[tuple[np.float32, int, np.float32]] = []
        with np.errstate(over="ignore", under="ignore"):
            for step, row in enumerate(rows):
                candidates = []
                for node, score in frontier:
                    for token, logprob in row.items():
                        total = score + logprob
                        if not (
                            logprob > np.float32(plan.token_threshold)
                            and total > np.float32(plan.sequence_threshold)
                        ):
                            continue
                        child = self.child(node, token)
                        if child is not None:
                            candidates.append((child, total))
                for child, score in candidates:
                    if not self.terminal[child]:
                        continue
                    if plan.eos is not None:
                        end = rows[step + 1].get(plan.eos) if step + 1 < len(rows) else None
                        if end is None:
                            continue
                        score = score + end
                    results.append((score * factors[step + 1] + np.float32(0), child, score))
                inner = [(child, score) for child, score in candidates if len(self.children(child))]
                frontier = sorted(inner, key=lambda item: (-item[1], item[0]))[: plan.beam_width]
        return sorted(results, key=lambda hit: (-hit[0], hit[1]))[: plan.result_limit]


def best_logprobs(
    tokens: npt.NDArray[np.uint32], logprobs: npt.NDArray[np.float32], padding: int
) -> dict[int, np.float32]:
    """The slots of a row that are not empty, each token once, with its best log-prob."""
    best: dict[int, np.float32] = {}
    for token, logprob in zip(tokens.tolist(), logprobs, strict=True):
        if token != padding and logprob > -np.inf and (token not in best or logprob > best[token]):
            best[token] = logprob
    return best
