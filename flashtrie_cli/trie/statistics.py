"""What a stored trie looks like, level by level; one pass over its bits in bounded pieces, no engine needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flashtrie_cli.trie.stored import StoredTrie

WORDS_PER_PIECE = 1 << 16

FAN_OUT_BOUNDS = (0, 1, 2, 8, 64, 1024)
"""Upper bounds of the fan-out classes; the last class is open."""


@dataclass
class LevelStatistics:
    """One level: nodes, keys that end there, leaves, children in all, largest fan-out, nodes by fan-out class."""

    depth: int
    num_nodes: int = 0
    num_keys: int = 0
    num_leaves: int = 0
    num_children: int = 0
    max_fan_out: int = 0
    fan_out_classes: list[int] = field(default_factory=lambda: [0] * (len(FAN_OUT_BOUNDS) + 1))

    @property
    def mean_fan_out(self) -> float:
        """Children a node that has any."""
        inner = self.num_nodes - self.num_leaves
        return self.num_children / inner if inner else 0.0

    def count(self, fan_outs: npt.NDArray[np.int64], terminal: npt.NDArray[np.bool_]) -> None:
        self.num_nodes += len(fan_outs)
        self.num_keys += int(terminal.sum())
        self.num_leaves += int((fan_outs == 0).sum())
        self.num_children += int(fan_outs.sum())
        self.max_fan_out = max(self.max_fan_out, int(fan_outs.max(initial=0)))
        classes = np.searchsorted(np.array(FAN_OUT_BOUNDS), fan_outs, side="left")
        for number, count in enumerate(np.bincount(classes, minlength=len(self.fan_out_classes))):
            self.fan_out_classes[number] += int(count)


def level_statistics(stored: StoredTrie) -> list[LevelStatistics]:
    """Statistics of each level, the root's first. The trie must have passed an engine's checks."""
    levels = [LevelStatistics(0)]
    left = 1  # nodes of the level at hand still to come
    below = 0  # their children so far
    for fan_outs, terminal in _pieces(stored):
        at = 0
        while at < len(fan_outs):
            take = min(left, len(fan_outs) - at)
            part = fan_outs[at : at + take]
            levels[-1].count(part, terminal[at : at + take])
            below += int(part.sum())
            left -= take
            at += take
            if left == 0 and below:
                levels.append(LevelStatistics(len(levels)))
                left, below = below, 0
    return levels


def _pieces(stored: StoredTrie) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Fan-outs and terminal bits of successive nodes."""
    num_bits = 2 * stored.num_nodes - 1
    carried = 0  # ones of a node whose zero has not come yet
    node = inner = 0
    for begin in range(0, -(-num_bits // 64), WORDS_PER_PIECE):
        words = stored.louds[begin : begin + WORDS_PER_PIECE]
        count = min(num_bits - 64 * begin, 64 * len(words))
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=min(count, 64 * WORDS_PER_PIECE))
        zeros = np.flatnonzero(bits == 0)
        if not len(zeros):
            carried += len(bits)
            continue
        fan_outs = np.diff(zeros, prepend=-1) - 1
        fan_outs[0] += carried
        carried = len(bits) - 1 - int(zeros[-1])
        if stored.terminal is not None:
            terminal = _bits(stored.terminal, node, len(fan_outs))
        else:
            assert stored.inner_terminal is not None
            has_bit = fan_outs > 0
            if node == 0:
                has_bit[0] = True
            terminal = np.ones(len(fan_outs), np.bool_)
            num_inner = int(has_bit.sum())
            terminal[has_bit] = _bits(stored.inner_terminal, inner, num_inner)
            inner += num_inner
        node += len(fan_outs)
        yield fan_outs, terminal


def _bits(words: npt.NDArray[np.uint64], begin: int, count: int) -> npt.NDArray[np.bool_]:
    first = begin // 64
    piece = words[first : (begin + count + 63) // 64].view(np.uint8)
    return np.unpackbits(piece, bitorder="little")[begin - 64 * first :][:count].astype(np.bool_)
