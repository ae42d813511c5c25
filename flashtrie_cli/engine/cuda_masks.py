"""Token masks on a GPU: a 32-byte record a node, made there from the lists. See `CudaTokens` for what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.engine.cpu_masks import MaskArrays, read_rows
from flashtrie_cli.engine.cuda_draft_layout import ByteTokens, Masks
from flashtrie_cli.engine.cuda_tokens import (
    THREADS,
    CudaTokens,
    DenseRows,
    EndTokens,
    dense_rows,
    pointer,
    upload,
)
from flashtrie_cli.errors import EngineUnavailable

RECORD_BYTES = 32
DENSE_LENGTH = 32
"""Lists of more tokens than this have a dense row, the longest first."""
MAX_DENSE_BYTES = 64 << 20


class MaskLists(ctypes.Structure):
    """Twin of MaskLists."""

    _fields_ = (
        ("records", pointer),
        ("entries", pointer),
        ("far_entries", pointer),
        ("far_targets", pointer),
        ("ends", EndTokens),
        ("dense", DenseRows),
        ("num_nodes", ctypes.c_uint32),
        ("num_far", ctypes.c_uint32),
        ("vocab_size", ctypes.c_uint32),
        ("hop_bits", ctypes.c_int32),
    )


class RecordParams(ctypes.Structure):
    """Twin of MaskRecordParams."""

    _fields_ = (
        ("records", pointer),
        ("rows", pointer),
        ("entries", pointer),
        ("dense_nodes", pointer),
        ("num_nodes", ctypes.c_uint32),
        ("num_dense", ctypes.c_uint32),
    )


class CudaMasks(CudaTokens):
    """The masks of a `TokenMasks` on one device: 36 bytes a node, 4 an entry, and dense rows of up to 64 MiB."""

    prefix = "mask"
    pair_bytes: ClassVar = {4: 10 << 20, 2: 10 << 20}
    long_first_bytes = 20 << 20
    rows_per_block = THREADS

    def __init__(
        self, arrays: MaskArrays, mask_set: Any, eos: Sequence[int], vocab_size: int, device: int = 0
    ):
        """``mask_set``: the native object of the same masks."""
        source = MaskLists(
            num_nodes=arrays.num_nodes, num_far=len(arrays.far_entries), vocab_size=vocab_size,
            hop_bits=mask_set.hop_bits,
        )  # fmt: skip
        self.ordinal = device
        super().__init__("masks", source, device)
        self._place(mask_set, eos)

    def _place(self, mask_set: Any, eos: Sequence[int]) -> None:
        """Everything onto the device, with an entry for every token; dense rows and records made there."""
        source, ids = self._source, np.array(eos, np.uint32)
        self.num_words = int(mask_set.num_words)
        parts = plain_arrays(mask_set)
        nodes = long_lists(parts["rows"], MAX_DENSE_BYTES // (4 * self.num_words))
        parts |= {"eos": ids, "dense_nodes": nodes}
        parts["dense_words"] = np.empty(len(nodes) * self.num_words, np.uint32)
        parts["records"] = np.empty((source.num_nodes + 1) * RECORD_BYTES, np.uint8)
        self._memory = upload(parts)
        at = {name: int(memory) for name, memory in self._memory.items()}
        for name in ("records", "entries", "far_entries", "far_targets"):
            setattr(source, name, at[name])
        source.ends = EndTokens(at["eos"], len(ids), 0)
        source.dense = dense_rows(at["dense_nodes"], at["dense_words"], nodes[:0], self.num_words)
        self._make_records(at, 0)
        cuda_launch.wait(0)  # kernels read records before they wait for the kernel before
        self._fill(at["dense_nodes"], at["dense_words"], self.num_words, len(nodes), None)  # from the lists
        source.dense = dense_rows(at["dense_nodes"], at["dense_words"], nodes, self.num_words)
        self._make_records(at, len(nodes))
        cuda_launch.wait(0)

    @property
    def view(self) -> Masks:
        """The lists' device pointers and sizes, for other kernels."""
        source, ends = self._source, self._source.ends
        return Masks(
            int(self._memory["rows"]), source.entries, source.far_entries, source.far_targets, ends.tokens,
            ByteTokens(),  # no node is single
            source.num_nodes, source.num_far, ends.count, source.vocab_size, source.hop_bits,
        )  # fmt: skip

    def _make_records(self, at: dict[str, int], num_dense: int) -> None:
        num_nodes = self._source.num_nodes
        params = RecordParams(
            at["records"], at["rows"], at["entries"], at["dense_nodes"], num_nodes, num_dense
        )
        kernel = self._module.kernel("mask_records", 0)
        grid = -(-(num_nodes + 1) // THREADS)
        cuda_launch.PreparedLaunch(kernel, (grid, 1, 1), THREADS, 0, params)(0)


def plain_arrays(mask_set: Any) -> dict[str, npt.NDArray[Any]]:
    """The lists of a native `MaskSet` with an entry for every token: what the kernels read."""
    try:
        return dict(zip(("rows", "entries", "far_entries", "far_targets"), mask_set.plain(), strict=True))
    except OverflowError as error:
        raise EngineUnavailable(f"the masks are too large for a GPU: {error}", hint="split the set") from None


def long_lists(rows: npt.NDArray[np.uint16], most: int) -> npt.NDArray[np.uint32]:
    """Up to ``most`` nodes with lists of more than DENSE_LENGTH tokens, the longest chosen; ascending."""
    counts = np.diff(read_rows(rows)[0])
    nodes = np.flatnonzero(counts > DENSE_LENGTH)
    order = np.argsort(counts[nodes], kind="stable")[::-1][:most]
    return np.sort(nodes[order]).astype(np.uint32)
