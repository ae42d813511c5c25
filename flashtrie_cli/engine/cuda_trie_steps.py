"""Steps of a token trie on a GPU. See `CudaTokens` for what it does, and `CudaTrieSteps.children`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_buffers import DeviceArray, device_array
from flashtrie_cli.engine.cuda_draft_layout import Trie as TrieStruct
from flashtrie_cli.engine.cuda_tokens import (
    WARPS,
    CudaTokens,
    DenseRows,
    EndTokens,
    dense_rows,
    params_of,
    pointer,
    state_array,
    upload,
)
from flashtrie_cli.errors import InputError

DENSE_FAN_OUT = 512
"""Nodes with more children than this have a dense row (kDenseFanOut), the widest first."""
MAX_DENSE_BYTES = 1 << 20
_WIDE_STRIDE = 65
_LINE_WORDS, _WIDE_WORD = 8, 6
_NOT_WIDE = 0xFFFF_FFFF


class TrieChildren(ctypes.Structure):
    """Twin of TrieChildren."""

    _fields_ = (
        ("trie", TrieStruct),
        ("ends", EndTokens),
        ("dense", DenseRows),
        ("vocab_size", ctypes.c_uint32),
    )


class CudaTrieSteps(CudaTokens):
    """The steps of a `TrieSteps` on one device; states are node ids, ``num_nodes`` the state past an end."""

    prefix = "trie_steps"
    pair_bytes: ClassVar = {4: 0, 2: 8 << 20}
    long_first_bytes = None

    def __init__(self, trie: Any, resident: Any, steps: Any, eos: Sequence[int], vocab_size: int):
        """``trie``: the native trie, ``resident`` the same on the device; ``steps``: the native steps over it, for the
        dense rows."""
        self._resident = resident  # the view's arrays are its
        source = TrieChildren(
            trie=TrieStruct.from_buffer_copy(resident.view.tobytes()), vocab_size=vocab_size
        )
        super().__init__("trie_steps", source, resident.device.ordinal)
        self._place(trie, steps, eos)

    def _place(self, trie: Any, steps: Any, eos: Sequence[int]) -> None:
        self.num_words = int(steps.num_words)
        nodes = widest_nodes(trie, MAX_DENSE_BYTES // (4 * self.num_words))
        words = np.zeros((len(nodes), self.num_words), np.int32)
        steps.fill(nodes, words)
        ids = np.array(eos, np.uint32)
        self._memory = upload({"eos": ids, "nodes": nodes, "words": words})
        at = {name: int(memory) for name, memory in self._memory.items()}
        self._source.ends = EndTokens(at["eos"], len(ids), 0)
        self._source.dense = dense_rows(at["nodes"], at["words"], nodes, self.num_words)
        kind = type(self._source)
        self._children_params = params_of(
            kind, states=pointer, tokens=pointer, nodes=pointer, counts=pointer, num_rows=ctypes.c_uint32,
            capacity=ctypes.c_uint32,
        )  # fmt: skip

    def children(self, states: Any, tokens: Any, nodes: Any, counts: Any, stream: Any = None) -> None:
        """The children of each node as lists: ``tokens`` and ``nodes`` uint32 or int32 [rows, capacity], ascending.

        ``counts`` [rows]: the whole fan-out, also where it is more than the capacity; what lies behind the children
        of a row stays as it is. Raises InputError.
        """
        found = device_array("tokens", tokens)
        if len(found.shape) != 2:
            raise InputError("tokens are not [rows, capacity]")
        rows, capacity = found.shape
        lists = [_words(name, array, found.shape) for name, array in (("tokens", tokens), ("nodes", nodes))]
        params = self._children_params(
            self._told(False), state_array(states, rows).pointer, *(part.pointer for part in lists),
            state_array(counts, rows).pointer, rows, capacity,
        )  # fmt: skip
        if rows:
            self.launch("children", -(-rows // WARPS), params, stream)


def open_trie_steps(
    trie: Any, resident: Any, steps: Any, eos: Sequence[int], vocab_size: int, device: int
) -> CudaTrieSteps:
    """``resident``: the trie of an index opened with the cuda engine, if it is on this device; else it is uploaded."""
    from flashtrie_cli.engine import cuda_loader
    from flashtrie_cli.engine.cuda_trie import DeviceTrie

    if resident is None or resident.device.ordinal != device:
        resident = DeviceTrie(trie, cuda_loader.open_device(device), for_search=False)
    return CudaTrieSteps(trie, resident, steps, eos, vocab_size)


def widest_nodes(trie: Any, most: int) -> npt.NDArray[np.uint32]:
    """Up to ``most`` nodes with more than DENSE_FAN_OUT children, those with the most first chosen; ascending.

    All of them are in the trie's wide table, because so many children make their 64 nodes' part of louds long.
    """
    lines = np.asarray(trie.lines).reshape(-1).view(np.uint32).reshape(-1, _LINE_WORDS)
    blocks = np.flatnonzero(lines[:, _WIDE_WORD] != _NOT_WIDE)
    if not len(blocks):
        return np.zeros(0, np.uint32)
    table = (
        np.asarray(trie.wide)
        .reshape(-1)
        .view(np.uint32)
        .reshape(-1, _WIDE_STRIDE)[lines[blocks, _WIDE_WORD]]
        .astype(np.int64)
    )
    fan_outs = np.diff(table, axis=1)
    row, place = np.nonzero(fan_outs > DENSE_FAN_OUT)
    nodes = blocks[row] * 64 + place
    order = np.argsort(-fan_outs[row, place], kind="stable")[:most]
    return np.sort(nodes[order]).astype(np.uint32)


def _words(name: str, array: Any, shape: tuple[int, ...]) -> DeviceArray:
    found = device_array(name, array)
    if found.dtype not in ("uint32", "int32") or found.shape != shape or not found.is_contiguous:
        raise InputError(f"{name} are not a contiguous uint32 or int32 {list(shape)}")
    return found
