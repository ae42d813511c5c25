"""Token masks on a GPU: logits masked in place from the lists, states advanced, on the caller's stream.

Device arrays are torch tensors or anything with ``__cuda_array_interface__``. Nothing is allocated, copied or
waited for after `CudaMasks` has been made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.engine.cpu_masks import MaskArrays
from flashtrie_cli.engine.cuda_buffers import DeviceArray, device_array, stream_handle
from flashtrie_cli.errors import EngineUnavailable, InputError

THREADS = 256
CHUNK_BYTES = 16 << 10
"""Logits that a block writes at a time (kChunkVectors)."""
BLOCKS_PER_MULTIPROCESSOR = 5
"""FT_MASK_BLOCKS: the grid is no larger than what runs at once."""
_LOGIT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

_MAX_ITEMS = 1 << 30
_pointer = ctypes.c_void_p


class _MaskView(ctypes.Structure):
    """Twin of MaskView."""

    _fields_ = (
        ("rows", _pointer),
        ("entries", _pointer),
        ("far_entries", _pointer),
        ("far_targets", _pointer),
        ("eos", _pointer),
        ("num_nodes", ctypes.c_uint32),
        ("num_far", ctypes.c_uint32),
        ("num_eos", ctypes.c_uint32),
        ("vocab_size", ctypes.c_uint32),
        ("hop_bits", ctypes.c_int32),
    )


class _ApplyParams(ctypes.Structure):
    """Twin of MaskApplyParams."""

    _fields_ = (
        ("masks", _MaskView),
        ("dense_nodes", _pointer),
        ("dense_words", _pointer),
        ("logits", _pointer),
        ("states", _pointer),
        ("row_stride", ctypes.c_int64),
        ("width", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("num_chunks", ctypes.c_uint32),
        ("num_dense", ctypes.c_uint32),
        ("words_per_row", ctypes.c_uint32),
    )


class _AdvanceParams(ctypes.Structure):
    """Twin of MaskAdvanceParams."""

    _fields_ = (
        ("masks", _MaskView),
        ("states", _pointer),
        ("tokens", _pointer),
        ("allowed", _pointer),
        ("num_rows", ctypes.c_uint32),
        ("token_bytes", ctypes.c_int32),
    )


class CudaMasks:
    """The lists of a `TokenMasks` on one device."""

    def __init__(
        self, arrays: MaskArrays, mask_set: Any, eos: Sequence[int], vocab_size: int, device: int = 0
    ):
        """``mask_set``: the native object of the same masks, for the dense rows of its long lists."""
        from flashtrie_cli.engine import cuda_loader, cuda_sources

        self.ordinal = device
        opened = cuda_loader.open_device(device)
        image = cuda_sources.packaged_kernel("masks") or cuda_sources.cached_kernel("masks", opened.arch)
        self._module = cuda_launch.KernelModule(image.read_bytes())
        self._num_multiprocessors = opened.num_multiprocessors
        ids, dense_nodes = np.array(eos, np.uint32), mask_set.dense_nodes
        parts = {name: getattr(arrays, name) for name in ("rows", "entries", "far_entries", "far_targets")}
        self._memory = _upload(
            {**parts, "eos": ids, "dense_nodes": dense_nodes, "dense_words": mask_set.dense_words}
        )
        at = {name: int(memory) for name, memory in self._memory.items()}
        self._dense = {"dense_nodes": at.pop("dense_nodes"), "dense_words": at.pop("dense_words")}
        self._dense |= {"num_dense": len(dense_nodes), "words_per_row": mask_set.num_words}
        self._view = _MaskView(
            **at, num_nodes=len(arrays.labels), num_far=len(arrays.far_entries), num_eos=len(ids),
            vocab_size=vocab_size, hop_bits=mask_set.hop_bits,
        )  # fmt: skip

    @property
    def view(self) -> ctypes.Structure:
        """The lists' device pointers and sizes, for other kernels."""
        return self._view

    def apply(self, logits: Any, states: Any, stream: Any = None) -> None:
        """Minus infinity, in place, over every logit that its row's state does not allow.

        ``logits``: float32, float16 or bfloat16 [rows, width], rows contiguous in themselves, ``width`` any; what lies
        beyond the vocabulary becomes minus infinity too. ``states``: uint32 or int32 [rows]; a state past its end,
        or outside the trie, allows nothing. Raises InputError.
        """
        found = device_array("logits", logits)
        stride = _row_stride(logits, found)
        params = _ApplyParams(masks=self._view, logits=found.pointer, row_stride=stride, **self._dense)
        params.num_rows, params.width = found.shape
        params.states = _states(states, params.num_rows).pointer
        if params.num_rows == 0 or params.width == 0:
            return
        # One logit less than a vector may lie before the first that starts on 16 bytes.
        size = _LOGIT_SIZES[found.dtype]
        params.num_chunks = -(-((params.width - 1) * size + 16) // CHUNK_BYTES)
        num_items = params.num_rows * params.num_chunks
        if num_items > _MAX_ITEMS:
            raise InputError(f"{params.num_rows} rows are too many for one call", hint="split the batch")
        grid = min(num_items, BLOCKS_PER_MULTIPROCESSOR * self._num_multiprocessors)
        self._launch(f"mask_apply_{found.dtype}", grid, params, stream)

    def advance(self, states: Any, tokens: Any, allowed: Any = None, stream: Any = None) -> None:
        """Each state after its token, in place; one whose token is not allowed stays.

        ``states``: uint32 or int32 [rows]; ``tokens``: int32 or int64 [rows]; ``allowed``: uint8 or bool [rows],
        written where given. Raises InputError.
        """
        found = device_array("tokens", tokens)
        if found.dtype not in ("int32", "int64") or len(found.shape) != 1 or not found.is_contiguous:
            raise InputError("tokens are not a contiguous int32 or int64 [rows]")
        rows = found.shape[0]
        params = _AdvanceParams(masks=self._view, tokens=found.pointer, num_rows=rows)
        params.states = _states(states, rows).pointer
        params.token_bytes = int(found.dtype[3:]) // 8
        if allowed is not None:
            flags = device_array("the allowed flags", allowed)
            if (
                flags.dtype not in ("uint8", "bool", "other8")
                or flags.shape != (rows,)
                or not flags.is_contiguous
            ):
                raise InputError(f"the allowed flags are not a contiguous uint8 [{rows}]")
            params.allowed = flags.pointer
        if rows:
            self._launch("mask_advance", -(-rows // THREADS), params, stream)

    def _launch(self, kernel: str, grid: int, params: ctypes.Structure, stream: Any) -> None:
        function = self._module.kernel(kernel, 0)
        cuda_launch.PreparedLaunch(function, (grid, 1, 1), THREADS, 0, params)(stream_handle(stream))


def _upload(arrays: dict[str, Any]) -> dict[str, Any]:
    """Device memory by name; an empty array gets some too, so that its pointer is one."""
    import pycuda.driver as cuda

    held = {}
    try:
        for name, array in arrays.items():
            held[name] = cuda.mem_alloc(max(array.nbytes, 4))
            if array.nbytes:
                cuda.memcpy_htod(held[name], np.ascontiguousarray(array))
    except cuda.MemoryError as error:
        raise EngineUnavailable(f"the device's memory is too small for the masks: {error}") from None
    return held


def _states(states: Any, rows: int) -> DeviceArray:
    found = device_array("states", states)
    if found.dtype not in ("uint32", "int32") or found.shape != (rows,) or not found.is_contiguous:
        raise InputError(f"states are not a contiguous uint32 or int32 [{rows}]")
    return found


def _row_stride(logits: Any, found: DeviceArray) -> int:
    """Logits from one row to the next; InputError for what is no batch of logits."""
    if found.dtype not in _LOGIT_SIZES or len(found.shape) != 2:
        raise InputError(
            f"logits are {found.dtype} {list(found.shape)}, not float32, float16 or bfloat16 [rows, width]"
        )
    if found.is_contiguous:
        return found.shape[1]
    if hasattr(logits, "stride"):
        row, column = logits.stride()
    else:
        size = _LOGIT_SIZES[found.dtype]
        row, column = (step // size for step in logits.__cuda_array_interface__["strides"])
    if column != 1:
        raise InputError("logits of a row do not lie side by side")
    return int(row)
