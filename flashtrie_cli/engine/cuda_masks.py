"""Token masks on a GPU: a 32-byte record a node, made there from the lists. See `CudaTokens` for what it does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.engine.cpu_masks import MaskArrays
from flashtrie_cli.engine.cuda_tokens import (
    THREADS,
    CudaTokens,
    DenseRows,
    EndTokens,
    dense_rows,
    pointer,
    upload,
)

RECORD_BYTES = 32


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
    """The masks of a `TokenMasks` on one device: 32 bytes a node and 4 an entry."""

    prefix = "mask"
    rows_per_block = THREADS

    def __init__(
        self, arrays: MaskArrays, mask_set: Any, eos: Sequence[int], vocab_size: int, device: int = 0
    ):
        """``mask_set``: the native object of the same masks, for the dense rows of its long lists."""
        source = MaskLists(
            num_nodes=len(arrays.labels), num_far=len(arrays.far_entries), vocab_size=vocab_size,
            hop_bits=mask_set.hop_bits,
        )  # fmt: skip
        super().__init__("masks", source, device)
        self._place(arrays, mask_set, eos)

    def _place(self, arrays: MaskArrays, mask_set: Any, eos: Sequence[int]) -> None:
        """Everything onto the device; the rows only until the records are made of them."""
        source, ids = self._source, np.array(eos, np.uint32)
        self.num_words = int(mask_set.num_words)
        parts = {name: getattr(arrays, name) for name in ("entries", "far_entries", "far_targets")}
        parts |= {"eos": ids, "dense_nodes": mask_set.dense_nodes, "dense_words": mask_set.dense_words}
        parts["records"] = np.empty((source.num_nodes + 1) * RECORD_BYTES, np.uint8)
        self._memory = upload(parts)
        at = {name: int(memory) for name, memory in self._memory.items()}
        for name in ("records", "entries", "far_entries", "far_targets"):
            setattr(source, name, at[name])
        source.ends = EndTokens(at["eos"], len(ids), 0)
        source.dense = dense_rows(at["dense_nodes"], at["dense_words"], mask_set.dense_nodes, self.num_words)
        passing = upload({"rows": arrays.rows})
        params = RecordParams(
            at["records"], int(passing["rows"]), at["entries"], at["dense_nodes"], source.num_nodes,
            source.dense.num_nodes,
        )  # fmt: skip
        kernel = self._module.kernel("mask_records", 0)
        grid = -(-(source.num_nodes + 1) // THREADS)
        cuda_launch.PreparedLaunch(kernel, (grid, 1, 1), THREADS, 0, params)(0)
        cuda_launch.wait(0)
