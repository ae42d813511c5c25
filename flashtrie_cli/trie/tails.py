"""Tails: unbranched ends of keys, cut off the trie and kept in a store where equal ends lie once.

Where a node leads to one key alone, and at least MIN_TAIL labels lie below it, they are a *tail*; the node becomes a
leaf, flagged as a *link*, and names where in the store its tail begins. A tail that ends another one lies inside it
(the FlashTrie paper, appendix A; Yata 2011). Opening an index unfolds it: see ``trie.unfold``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.format import layout
from flashtrie_cli.format.reader import IndexFile

TAIL_RULES = ("off", "on", "auto")

MIN_TAIL = 2
"""Labels below a node from which on they are cut off; the native builder has the same number."""

MAX_UNFOLDING = 1000
"""Most nodes that an index may have for each one stored, so that a small file cannot fill the memory."""

TAIL_FIELDS = ("num_tail_nodes", "num_links", "num_tail_labels", "tail_label_size")
"""What meta says of tails, integers all: labels cut off, tails, labels stored, bytes of each."""

LABEL_TYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}

_AFTER_ALL = 1 << 31
"""Above every label; put behind a reversed tail it sorts a tail behind those that it ends."""


@dataclass(frozen=True)
class StoredTails:
    """The tail store of a stored trie.

    ``link_flags`` uint64, a bit a leaf other than the root; ``links`` uint64, packed, ``link_width`` bits for each
    flagged leaf: where its tail begins; ``ends`` uint64, a bit a label; ``labels`` uint8, uint16 or uint32.
    """

    num_nodes: int
    num_links: int
    link_flags: npt.NDArray[np.uint64]
    links: npt.NDArray[np.uint64]
    ends: npt.NDArray[np.uint64]
    labels: npt.NDArray[Any]

    @property
    def link_width(self) -> int:
        return link_width(len(self.labels))

    @classmethod
    def load(
        cls,
        file: IndexFile,
        meta: Mapping[str, Any],
        refuse: Callable[[str], IndexFileError],
        *,
        threads: int,
    ) -> StoredTails | None:
        """The tail store of a file of TAILS_VERSION, None in others; sizes checked before anything is read."""
        if file.version != layout.TAILS_VERSION:
            return None
        counts = {name: meta.get(name, 0) for name in TAIL_FIELDS}
        if not all(type(count) is int and count > 0 for count in counts.values()):
            raise refuse("says nothing of its tails")
        num_tail_nodes, num_links, num_labels, label_size = counts.values()
        num_stored = meta["num_nodes"] - num_tail_nodes
        if not (
            num_labels <= num_tail_nodes
            and num_links < num_stored
            and MIN_TAIL * num_links <= num_tail_nodes
            and unfolds_within_limits({**counts, "num_nodes": meta["num_nodes"]})
            and label_size in LABEL_TYPES
        ):
            raise refuse("has tails out of range")

        def read(name: str, least: int, most: int, kind: type[np.generic], spare: int = 0) -> Any:
            size = file.raw_size(name)
            if not least <= size <= most:
                raise refuse(f"section {name} holds {size:,} bytes, which its tails do not need")
            return file.array(name, kind, threads=threads, spare=spare)

        def words(bits: int) -> int:
            return 8 * -(-bits // 64)

        link_bytes, end_bytes = words(num_links * link_width(num_labels)), words(num_labels)
        label_bytes = label_size * num_labels
        return cls(
            num_tail_nodes,
            num_links,
            read(layout.LINK_FLAGS, words(num_links), words(num_stored), np.uint64),
            read(layout.TAIL_LINKS, link_bytes, link_bytes, np.uint64, spare=1),
            read(layout.TAIL_ENDS, end_bytes, end_bytes, np.uint64),
            read(layout.TAIL_LABELS, label_bytes, label_bytes, LABEL_TYPES[label_size]),
        )


def unfolds_within_limits(counts: Mapping[str, Any]) -> bool:
    """Whether a reader would take an index of so many nodes and tail labels."""
    num_stored = counts["num_nodes"] - counts["num_tail_nodes"]
    return bool(counts["num_tail_nodes"] <= MAX_UNFOLDING * (num_stored + counts["num_tail_labels"]))


def folding_ratio(counts: Mapping[str, Any], *, is_compressed: bool) -> float:
    """Bits of the tails cut off, by bits of the same nodes left where they are; below 1 cutting pays.

    The FlashTrie paper's criterion (appendix A, equation 1) with its costs counted. There a run of k labels of w bits,
    of which the store keeps the share alpha, takes w + alpha k w bits, so folding pays where alpha < 1 - 1 / k. That
    takes a link for as wide as a label, and a node for no more than its label. Here a link has the bits of its place
    and a flag, a stored label its own bits and one that may end a tail, a node its label and two bits of louds. w is
    the entropy of the labels where the file is compressed, else what a label takes.
    """
    if counts["num_tail_nodes"] == 0:
        return 1.0
    entropy = round(counts["label_entropy"], 6)  # both builders agree on it so far
    node_bits = (entropy if is_compressed else 16) + 2
    stored_bits = (entropy if is_compressed else 8 * counts["tail_label_size"]) + 1
    link_bits = link_width(counts["num_tail_labels"]) + 1
    folded = counts["num_links"] * link_bits + counts["num_tail_labels"] * stored_bits
    return float(folded / (counts["num_tail_nodes"] * node_bits))


def link_width(num_labels: int) -> int:
    """Bits of a place in a store of so many labels."""
    return max((num_labels - 1).bit_length(), 1)


def label_size(largest: int) -> int:
    """Bytes of a label in the store."""
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4


def shared_suffixes(tails: Sequence[tuple[int, ...]]) -> tuple[list[int], list[bool], list[int]]:
    """Labels of the store, for each whether a tail ends there, and where each tail begins.

    Tails come in the order of their reversed labels, each behind the longer ones that end like it, so that one look at
    the last one stored says whether it lies there already.
    """
    labels: list[int] = []
    ends: list[bool] = []
    begins: dict[tuple[int, ...], int] = {}
    last: tuple[int, ...] = ()
    for turned in sorted({tail[::-1] for tail in tails}, key=lambda turned: (*turned, _AFTER_ALL)):
        if last[: len(turned)] != turned:
            last = turned
            labels += turned[::-1]
            ends += [False] * (len(turned) - 1) + [True]
        begins[turned[::-1]] = len(labels) - len(turned)
    return labels, ends, [begins[tail] for tail in tails]
