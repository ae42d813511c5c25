"""A stored trie with tails as the whole trie it stands for, in plain Python; the native engine has a twin.

Every engine walks the whole trie: its nodes are numbered as if nothing had been cut off, so key ids, the order of ties
and all answers are the same with tails and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.trie.builder import pack_bits
from flashtrie_cli.trie.stored import SPARE_WORDS, StoredTrie
from flashtrie_cli.trie.tails import StoredTails

MAX_DEPTH = 65_535


@dataclass(frozen=True)
class _Node:
    """A node of the whole trie as it comes: where it is stored, or its place in the tail store."""

    fan_out: int
    label: int
    terminal: bool


def unfolded(stored: StoredTrie, labels: list[int], terminal: list[int], fan_outs: list[int]) -> StoredTrie:
    """The whole trie. ``labels``, ``terminal`` and ``fan_outs`` are those of the stored nodes, which are a tree.

    Raises IndexFileError where the tails and the trie do not fit together.
    """
    assert stored.tails is not None
    nodes = list(_in_level_order(stored, stored.tails, labels, terminal, fan_outs))
    if len(nodes) != stored.num_nodes:
        raise _refused(stored, "has another number of nodes than it says")
    whole = np.array([node.label for node in nodes], np.uint32)
    highs = [int(high) for high in whole >> 16 if high]
    width = stored.high_width
    if any(high >> width for high in highs):
        raise _refused(stored, "has tails with larger labels than it says")
    has_highs = width > 0
    return StoredTrie(
        path=stored.path,
        num_nodes=stored.num_nodes,
        num_keys=stored.num_keys,
        high_width=width,
        louds=_words(bit for node in nodes for bit in (*(1,) * node.fan_out, 0)),
        label_low=(whole & 0xFFFF).astype(np.uint16),
        label_delta=None,
        terminal=_words((node.terminal for node in nodes), 0),
        inner_terminal=None,
        high_flags=_words(whole >> 16 > 0, 0) if has_highs else np.zeros(0, np.uint64),
        label_high=_words(high >> bit & 1 for high in highs for bit in range(width))
        if has_highs
        else np.zeros(0, np.uint64),
    )


def _in_level_order(
    stored: StoredTrie, tails: StoredTails, labels: list[int], terminal: list[int], fan_outs: list[int]
) -> Iterator[_Node]:
    """The nodes of the whole trie: level by level, each level a list of stored nodes (None) and places in the store."""
    starts = iter(_links(stored, tails, fan_outs))
    ends = np.unpackbits(tails.ends.view(np.uint8), bitorder="little", count=len(tails.labels)).tolist()
    level: list[int | None] = [None]
    node = 0
    for _ in range(MAX_DEPTH + 1):
        below: list[int | None] = []
        for place in level:
            if place is not None:
                is_end = bool(ends[place])
                if not is_end:
                    if place + 1 == len(tails.labels):
                        raise _refused(stored, "has a tail without an end")
                    below.append(place + 1)
                yield _Node(int(not is_end), int(tails.labels[place]), is_end)
                continue
            start = next(starts) if fan_outs[node] == 0 and node > 0 else None
            if start is not None:
                below.append(start)
                yield _Node(1, labels[node], False)
            else:
                below += [None] * fan_outs[node]
                yield _Node(fan_outs[node], labels[node], bool(terminal[node]))
            node += 1
        level = below
        if not level:
            return
    raise _refused(stored, "has tails that lead too deep")


def _links(stored: StoredTrie, tails: StoredTails, fan_outs: list[int]) -> list[int | None]:
    """For each leaf but the root where its tail begins, or None."""
    num_leaves = fan_outs[1:].count(0)
    flags = np.unpackbits(tails.link_flags.view(np.uint8), bitorder="little")
    if len(flags) != -(-num_leaves // 64) * 64 or flags[num_leaves:].any():
        raise _refused(stored, "has link flags for other leaves than its own")
    if int(flags.sum()) != tails.num_links:
        raise _refused(stored, "has another number of links than it says")
    width = tails.link_width
    bits = np.unpackbits(tails.links.view(np.uint8), bitorder="little", count=width * tails.num_links)
    places = iter((bits.reshape(-1, width).astype(np.int64) << np.arange(width)).sum(axis=1).tolist())
    starts = [next(places) if flag else None for flag in flags[:num_leaves]]
    if any(start is not None and start >= len(tails.labels) for start in starts):
        raise _refused(stored, "has a link past the end of the tails")
    return starts


def _words(bits: object, spare: int = SPARE_WORDS) -> npt.NDArray[np.uint64]:
    packed = np.frombuffer(pack_bits(bits), np.uint64)  # type: ignore[arg-type]
    return np.concatenate((packed, np.zeros(spare, np.uint64)))


def _refused(stored: StoredTrie, why: str) -> IndexFileError:
    return IndexFileError(why, file=stored.path, hint="rebuild the index")
