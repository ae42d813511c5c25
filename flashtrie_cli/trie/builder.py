"""The plain-Python builder: the oracle of the native one, and what builds where there is no compiler.

Keeps every key in memory. Both builders give the same sections to the byte.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from flashtrie_cli.format import layout
from flashtrie_cli.trie.tails import MIN_TAIL, label_size, link_width, shared_suffixes

MAX_NODES = 0xFFFF_FFFF

DUPLICATE_RULES = ("first", "last", "min", "max", "sum", "all", "error")

VALUE_NONE, VALUE_UNSIGNED, VALUE_FLOAT = 0, 1, 2


class KeyConflict(ValueError):
    """Two keys that should not stand as they do: message, then (file, line) of both, then the key."""


class PlainBuilder:
    """Same methods as the native IndexBuilder; see there."""

    def __init__(
        self, *, duplicates: str, value_kind: int, is_sorted: bool, is_compact: bool, tails: str = "off"
    ):
        self._rule = duplicates
        self._value_kind = value_kind
        self._is_sorted = is_sorted
        self._is_compact = is_compact
        self._tails = tails
        self._keys: list[tuple[tuple[int, ...], int | float, tuple[int, int]]] = []
        self._sections: dict[str, bytes] = {}

    def add(
        self,
        tokens: npt.NDArray[np.uint32],
        offsets: npt.NDArray[np.int64],
        values: npt.NDArray[np.generic] | None,
        lines: npt.NDArray[np.int64] | None,
        file: int,
    ) -> None:
        flat, ends = tokens.tolist(), offsets.tolist()
        own = (
            values.view(np.float64).tolist()
            if values is not None and self._value_kind == VALUE_FLOAT
            else values
        )
        for i in range(len(ends) - 1):
            key = tuple(flat[ends[i] : ends[i + 1]])
            place = (file, int(lines[i]) if lines is not None else 0)
            if self._is_sorted and self._keys and self._keys[-1][0] > key:
                raise KeyConflict("keys are not in ascending order", *self._keys[-1][2], *place, list(key))
            value = own[i] if own is not None else 0
            self._keys.append((key, value if isinstance(value, float) else int(value), place))

    def finish(self) -> None:
        unique = self._unique()
        keys = [key for key, _ in unique]
        nodes = _Levels([(key, False) for key in keys])
        total = len(nodes.labels)
        if total > MAX_NODES:
            raise KeyConflict("more than 4,294,967,295 nodes; build several indexes", 0, 0, 0, 0, [])
        highs = [label >> 16 for label in nodes.labels if label >> 16]
        self._counts: dict[str, float] = {
            "num_keys_read": len(self._keys),
            "num_keys": len(keys),
            "num_duplicates": len(self._keys) - len(keys),
            "num_nodes": total,
            "num_tokens": sum(map(len, keys)),
            "depth": max(map(len, keys), default=0),
            "num_runs": 0,
            "spilled_bytes": 0,
            "num_highs": len(highs),
            "high_width": max(highs, default=0).bit_length(),
            "label_entropy": entropy(nodes.labels[1:]),
            **dict.fromkeys(("num_links", "num_tail_nodes", "num_tail_labels"), 0),
            "tail_label_size": 1,
        }
        self._keys = []
        self._whole = {**self._trie_sections(nodes), **self._value_sections(unique)}
        self._cut: dict[str, bytes] = {}
        if self._tails != "off":
            heads, tails = cut_tails(keys)
            self._cut = {
                **self._trie_sections(_Levels(heads)),
                **self._value_sections(unique),
                **self._tail_sections(_in_node_order(heads, tails)),
            }
        self._sections = self._cut if self._tails == "on" else self._whole

    def use_tails(self, cut: bool) -> None:
        self._sections = self._cut if cut else self._whole

    def _trie_sections(self, nodes: _Levels) -> dict[str, bytes]:
        sections: dict[str, bytes] = {}
        labels = np.array(nodes.labels, np.uint32)
        low = labels & 0xFFFF
        if self._is_compact:
            previous = np.concatenate(([0], low[:-1])).astype(np.uint32)
            delta = (low - np.where(nodes.is_first, 0, previous)).astype(np.uint16)
            sections[layout.LABEL_DELTA] = delta.astype("<u2").tobytes()
            inner = [
                terminal
                for node, (terminal, fan_out) in enumerate(zip(nodes.terminal, nodes.fan_outs, strict=True))
                if fan_out or node == 0
            ]
            sections[layout.INNER_TERMINAL] = pack_bits(inner)
        else:
            sections[layout.LABEL_LOW] = low.astype("<u2").tobytes()
            sections[layout.TERMINAL] = pack_bits(nodes.terminal)
        louds = [bit for fan_out in nodes.fan_outs for bit in (1,) * fan_out + (0,)]
        sections[layout.LOUDS] = pack_bits(louds)
        width = int(self._counts["high_width"])
        if width:
            highs = [label >> 16 for label in nodes.labels if label >> 16]
            sections[layout.HIGH_FLAGS] = pack_bits([label >> 16 > 0 for label in nodes.labels])
            sections[layout.LABEL_HIGH] = pack_bits(
                [high >> bit & 1 for high in highs for bit in range(width)]
            )
        if any(nodes.links):
            sections[layout.LINK_FLAGS] = pack_bits(nodes.links)
        return sections

    def _value_sections(self, unique: list[tuple[tuple[int, ...], list[int | float]]]) -> dict[str, bytes]:
        sections: dict[str, bytes] = {}
        if self._value_kind == VALUE_NONE:
            return sections
        by_key_id = sorted(unique, key=lambda item: (len(item[0]), item[0]))
        values = [value for _, key_values in by_key_id for value in key_values]
        dtype = "<f8" if self._value_kind == VALUE_FLOAT else "<u8"
        sections[layout.VALUES] = np.array(values, dtype).tobytes()
        if self._rule == "all":
            counts = [len(key_values) for _, key_values in by_key_id]
            sections[layout.VALUE_COUNTS] = np.array(counts, "<u4").tobytes()
        return sections

    def _tail_sections(self, tails: list[tuple[int, ...]]) -> dict[str, bytes]:
        if not tails:
            return {}
        labels, ends, begins = shared_suffixes(tails)
        size, width = label_size(max(labels)), link_width(len(labels))
        self._counts.update(
            num_links=len(tails),
            num_tail_nodes=sum(map(len, tails)),
            num_tail_labels=len(labels),
            tail_label_size=size,
        )
        return {
            layout.TAIL_LINKS: pack_bits(begin >> bit & 1 for begin in begins for bit in range(width)),
            layout.TAIL_ENDS: pack_bits(ends),
            layout.TAIL_LABELS: np.array(labels, f"<u{size}").tobytes(),
        }

    def counts(self) -> dict[str, float]:
        return dict(self._counts)

    def has(self, section: str) -> bool:
        return section in self._sections

    def read(self, section: str, chunk_bytes: int, sink: Callable[[bytes], None]) -> None:
        data = self._sections[section]
        for at in range(0, len(data), chunk_bytes):
            sink(data[at : at + chunk_bytes])

    def _unique(self) -> list[tuple[tuple[int, ...], list[int | float]]]:
        unique: list[tuple[tuple[int, ...], list[int | float]]] = []
        previous = (0, 0)
        for key, value, place in sorted(self._keys, key=lambda item: item[0]):
            if not unique or unique[-1][0] != key:
                unique.append((key, [value]))
            elif self._rule == "error":
                raise KeyConflict("the same key stands twice", *previous, *place, list(key))
            else:
                self._combine(unique[-1][1], value, place, key)
            previous = place
        return unique

    def _combine(
        self, kept: list[int | float], value: int | float, place: tuple[int, int], key: tuple[int, ...]
    ) -> None:
        if self._rule == "last":
            kept[0] = value
        elif self._rule == "min":
            kept[0] = value if value < kept[0] else kept[0]
        elif self._rule == "max":
            kept[0] = value if value > kept[0] else kept[0]
        elif self._rule == "sum":
            kept[0] = kept[0] + value
            if self._value_kind == VALUE_UNSIGNED and kept[0] >= 1 << 64:
                raise KeyConflict(
                    "the values of a key add up to more than 64 bits hold", *place, *place, list(key)
                )
            if not math.isfinite(kept[0]):
                raise KeyConflict(
                    "the values of a key add up to more than a float holds", *place, *place, list(key)
                )
        elif self._rule == "all":
            kept.append(value)


class _Levels:
    """Nodes in level order from sorted unique keys, each with whether it ends in a link.

    Per node label, fan-out, terminal, first of its siblings; per leaf but the root whether it is a link.
    """

    def __init__(self, keys: list[tuple[tuple[int, ...], bool]]):
        self.labels = [0]
        self.fan_outs: list[int] = []
        self.terminal: list[bool] = []
        self.is_first = [True]
        self.links: list[bool] = []
        level = [(0, len(keys))]  # ranges of keys that share the node's path
        depth = 0
        while level:
            below: list[tuple[int, int]] = []
            for begin, end in level:
                ends_here = begin < end and len(keys[begin][0]) == depth
                self.terminal.append(ends_here)
                is_link = ends_here and keys[begin][1]
                begin += ends_here
                fan_out = 0
                while begin < end:
                    token = keys[begin][0][depth]
                    stop = begin
                    while stop < end and keys[stop][0][depth] == token:
                        stop += 1
                    self.labels.append(token)
                    self.is_first.append(fan_out == 0)
                    below.append((begin, stop))
                    fan_out += 1
                    begin = stop
                self.fan_outs.append(fan_out)
                if fan_out == 0 and depth > 0:
                    self.links.append(is_link)
            level = below
            depth += 1


def cut_tails(
    keys: list[tuple[int, ...]],
) -> tuple[list[tuple[tuple[int, ...], bool]], list[tuple[int, ...]]]:
    """Sorted unique keys, each cut below the first node that leads to it alone, where enough follows; the tails."""
    shared = [0, *(_common(a, b) for a, b in itertools.pairwise(keys)), 0]
    heads, tails = [], []
    for key, before, after in zip(keys, shared, shared[1:], strict=False):
        end = max(before, after) + 1
        is_link = len(key) >= end + MIN_TAIL
        heads.append((key[:end] if is_link else key, is_link))
        if is_link:
            tails.append(key[end:])
    return heads, tails


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens at the front of both."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _in_node_order(
    heads: list[tuple[tuple[int, ...], bool]], tails: list[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Tails in the order of their links' nodes: level by level."""
    links = [head for head, is_link in heads if is_link]
    paired = sorted(zip(links, tails, strict=True), key=lambda pair: (len(pair[0]), pair[0]))
    return [tail for _, tail in paired]


def pack_bits(bits: Iterable[int | bool]) -> bytes:
    """Bits, lowest first, in little-endian 64-bit words."""
    array = np.fromiter(bits, np.uint8)
    packed = np.packbits(array, bitorder="little").tobytes()
    return packed + b"\0" * (-len(packed) % 8)


def entropy(labels: list[int]) -> float:
    """Order-0 entropy in bits an item."""
    counts = Counter(labels)
    total = len(labels)
    return sum(count * math.log2(total / count) for count in counts.values()) / total if total else 0.0
