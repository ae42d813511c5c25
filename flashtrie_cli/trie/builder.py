"""The plain-Python builder: the oracle of the native one, and what builds where there is no compiler.

Keeps every key in memory. Both builders give the same sections to the byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from flashtrie_cli.format import layout

MAX_NODES = 0xFFFF_FFFF

DUPLICATE_RULES = ("first", "last", "min", "max", "sum", "all", "error")

VALUE_NONE, VALUE_UNSIGNED, VALUE_FLOAT = 0, 1, 2


class KeyConflict(ValueError):
    """Two keys that should not stand as they do: message, then (file, line) of both, then the key."""


class PlainBuilder:
    """Same methods as the native IndexBuilder; see there."""

    def __init__(self, *, duplicates: str, value_kind: int, is_sorted: bool, is_compact: bool):
        self._rule = duplicates
        self._value_kind = value_kind
        self._is_sorted = is_sorted
        self._is_compact = is_compact
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
        nodes = _Levels(unique)
        total = len(nodes.labels)
        if total > MAX_NODES:
            raise KeyConflict("more than 4,294,967,295 nodes; build several indexes", 0, 0, 0, 0, [])
        labels = np.array(nodes.labels, np.uint32)
        low = labels & 0xFFFF
        if self._is_compact:
            previous = np.concatenate(([0], low[:-1])).astype(np.uint32)
            delta = (low - np.where(nodes.is_first, 0, previous)).astype(np.uint16)
            self._sections[layout.LABEL_DELTA] = delta.astype("<u2").tobytes()
            inner = [
                t
                for t, fan_out, at in zip(nodes.terminal, nodes.fan_outs, range(total), strict=True)
                if fan_out or at == 0
            ]
            self._sections[layout.INNER_TERMINAL] = pack_bits(inner)
        else:
            self._sections[layout.LABEL_LOW] = low.astype("<u2").tobytes()
            self._sections[layout.TERMINAL] = pack_bits(nodes.terminal)
        louds = [bit for fan_out in nodes.fan_outs for bit in (1,) * fan_out + (0,)]
        self._sections[layout.LOUDS] = pack_bits(louds)
        highs = [label >> 16 for label in nodes.labels if label >> 16]
        width = max(highs, default=0).bit_length()
        if width:
            self._sections[layout.HIGH_FLAGS] = pack_bits([label >> 16 > 0 for label in nodes.labels])
            self._sections[layout.LABEL_HIGH] = pack_bits(
                [high >> bit & 1 for high in highs for bit in range(width)]
            )
        if self._value_kind != VALUE_NONE:
            values = [value for _, node_values in nodes.values for value in node_values]
            dtype = "<f8" if self._value_kind == VALUE_FLOAT else "<u8"
            self._sections[layout.VALUES] = np.array(values, dtype).tobytes()
            if self._rule == "all":
                counts = [len(node_values) for _, node_values in nodes.values]
                self._sections[layout.VALUE_COUNTS] = np.array(counts, "<u4").tobytes()
        self._counts = {
            "num_keys_read": len(self._keys),
            "num_keys": len(unique),
            "num_duplicates": len(self._keys) - len(unique),
            "num_nodes": total,
            "num_tokens": sum(len(key) for key, _ in unique),
            "depth": max((len(key) for key, _ in unique), default=0),
            "num_runs": 0,
            "spilled_bytes": 0,
            "num_highs": len(highs),
            "high_width": width,
            "label_entropy": entropy(nodes.labels[1:]),
        }
        self._keys = []

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
        elif self._rule == "all":
            kept.append(value)


class _Levels:
    """Nodes in level order from sorted unique keys: per node label, fan-out, terminal, first of its siblings."""

    def __init__(self, unique: list[tuple[tuple[int, ...], list[int | float]]]):
        self.labels = [0]
        self.fan_outs: list[int] = []
        self.terminal: list[bool] = []
        self.is_first = [True]
        self.values: list[tuple[tuple[int, ...], list[int | float]]] = []
        level = [(0, len(unique))]  # ranges of keys that share the node's path
        depth = 0
        while level:
            below: list[tuple[int, int]] = []
            for begin, end in level:
                ends_here = begin < end and len(unique[begin][0]) == depth
                self.terminal.append(ends_here)
                if ends_here:
                    self.values.append(unique[begin])
                    begin += 1
                fan_out = 0
                while begin < end:
                    token = unique[begin][0][depth]
                    stop = begin
                    while stop < end and unique[stop][0][depth] == token:
                        stop += 1
                    self.labels.append(token)
                    self.is_first.append(fan_out == 0)
                    below.append((begin, stop))
                    fan_out += 1
                    begin = stop
                self.fan_outs.append(fan_out)
            level = below
            depth += 1


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
