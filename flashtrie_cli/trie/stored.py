"""A token trie as it lies in an index file: arrays and counts, not yet walked by any engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.format import layout
from flashtrie_cli.format.reader import IndexFile
from flashtrie_cli.trie.tails import StoredTails

SPARE_WORDS = 4
"""64-bit words readable behind the louds bits and packed labels, so that a reader may look past the end."""

MAX_HIGH_WIDTH = 15


@dataclass(frozen=True)
class StoredTrie:
    """Sections of a token trie. Arrays are little-endian, one-dimensional, maybe views of the mapped file.

    ``louds`` uint64 with SPARE_WORDS behind it; either ``label_low`` uint16 [num_nodes] and ``terminal`` uint64,
    or their compact forms ``label_delta`` and ``inner_terminal``; ``high_flags`` and ``label_high`` uint64, empty
    where ``high_width`` is 0. With ``tails`` the arrays are those of the ``num_stored`` nodes that are not in a tail.
    """

    path: str
    num_nodes: int
    num_keys: int
    high_width: int
    louds: npt.NDArray[np.uint64]
    label_low: npt.NDArray[np.uint16] | None
    label_delta: npt.NDArray[np.uint16] | None
    terminal: npt.NDArray[np.uint64] | None
    inner_terminal: npt.NDArray[np.uint64] | None
    high_flags: npt.NDArray[np.uint64]
    label_high: npt.NDArray[np.uint64]
    tails: StoredTails | None = None

    @property
    def num_stored(self) -> int:
        """Nodes that have bits and labels of their own: all but those in tails."""
        return self.num_nodes - (self.tails.num_nodes if self.tails is not None else 0)

    @classmethod
    def load(cls, file: IndexFile, meta: dict[str, Any], *, threads: int = 1) -> StoredTrie:
        """Read the trie's sections and compare their sizes with the counts; raises IndexFileError."""

        def refuse(why: str) -> IndexFileError:
            return IndexFileError(why, file=file.path, hint="rebuild the index")

        num_nodes, num_keys, high_width = counts = tuple(
            meta.get(name, -1) for name in ("num_nodes", "num_keys", "high_width")
        )
        if not all(type(count) is int and count >= 0 for count in counts):
            raise refuse("says nothing of its counts")
        if not 1 <= num_nodes <= 0xFFFF_FFFF or num_keys > num_nodes or high_width > MAX_HIGH_WIDTH:
            raise refuse("has counts out of range")
        tails = StoredTails.load(file, meta, refuse, threads=threads)
        num_stored = num_nodes - (tails.num_nodes if tails is not None else 0)

        def check(name: str, least: int, most: int) -> None:
            """Before anything is read: a section is as large as its nodes need, so no lie fills the memory."""
            size = file.raw_size(name)
            if not least <= size <= most:
                raise refuse(
                    f"section {name} holds {size:,} bytes, which its {num_stored:,} nodes do not need"
                )

        def words(name: str, least: int, most: int, spare: int) -> npt.NDArray[np.uint64]:
            check(name, least, most)
            return file.array(name, np.uint64, threads=threads, spare=spare)

        def bits(name: str, count: int, spare: int = 0) -> npt.NDArray[np.uint64]:
            """``count`` bits, none set behind the last."""
            size = -(-count // 64)
            array = words(name, 8 * size, 8 * size, spare)
            if int(array[size - 1]) >> (count - 64 * (size - 1)):
                raise refuse(f"section {name} has bits behind the last")
            return array

        def labels(name: str) -> npt.NDArray[np.uint16]:
            check(name, 2 * num_stored, 2 * num_stored)
            return file.array(name, np.uint16, threads=threads)

        if file.has(layout.LABEL_DELTA) == file.has(layout.LABEL_LOW):
            raise refuse(f"holds not one of {layout.LABEL_LOW} and {layout.LABEL_DELTA}")
        if file.has(layout.INNER_TERMINAL) == file.has(layout.TERMINAL):
            raise refuse(f"holds not one of {layout.TERMINAL} and {layout.INNER_TERMINAL}")
        if not file.has(layout.HIGH_FLAGS) == file.has(layout.LABEL_HIGH) == (high_width > 0):
            raise refuse("contradicts itself in the high parts of its labels")
        louds = bits(layout.LOUDS, 2 * num_stored - 1, SPARE_WORDS)
        label_low = label_delta = terminal = inner_terminal = None
        if file.has(layout.LABEL_DELTA):
            label_delta = labels(layout.LABEL_DELTA)
        else:
            label_low = labels(layout.LABEL_LOW)
        if file.has(layout.INNER_TERMINAL):
            inner_terminal = words(layout.INNER_TERMINAL, 8, -(-num_stored // 64) * 8, 0)
        else:
            terminal = bits(layout.TERMINAL, num_stored)
        high_flags = label_high = np.zeros(0, np.uint64)
        if high_width:
            high_flags = bits(layout.HIGH_FLAGS, num_stored)
            high_bytes = -(-num_stored * high_width // 64) * 8
            label_high = words(layout.LABEL_HIGH, 8 if tails is None else 0, high_bytes, SPARE_WORDS)
        return cls(
            file.path,
            num_nodes,
            num_keys,
            high_width,
            louds,
            label_low,
            label_delta,
            terminal,
            inner_terminal,
            high_flags,
            label_high,
            tails,
        )
