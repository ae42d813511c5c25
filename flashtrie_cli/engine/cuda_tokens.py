"""Allowed tokens on a GPU: logits masked in place, rows of mask words, states advanced, on the caller's stream.

What masks of strings (`CudaMasks`) and steps of a token trie (`CudaTrieSteps`) have in common. Device arrays are torch
tensors or anything with ``__cuda_array_interface__``. Nothing is allocated, copied or waited for by a call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.engine.cuda_buffers import DeviceArray, device_array, stream_handle
from flashtrie_cli.errors import EngineUnavailable, InputError

THREADS = 256
WARPS = THREADS // 32
MASK_TILE_WORDS = 128
"""Mask words that a warp writes (MaskTile)."""
_VECTOR_BYTES = 32 * 16
"""Of a warp."""
_LINE_BYTES = 128
"""That a tile begins with (kLineBytes)."""
_RESIDENT_WARPS = 32
"""Warps of a multiprocessor that all write at once, if a batch is small."""
LONG_BLOCKS_PER_MULTIPROCESSOR = ((160 << 20, 4), (1 << 62, 6))
"""Blocks that begin with the rows of long lists, in batches of up to so many bytes."""
_NO_ROW = 0xFFFF_FFFF
_LOGIT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_MAX_TILES = (1 << 31) - 1
_MAX_WIDTH = 1 << 30
_OVERLAPPING_ARCH = 90

pointer = ctypes.c_void_p


class EndTokens(ctypes.Structure):
    """Twin of EndTokens."""

    _fields_ = (("tokens", pointer), ("count", ctypes.c_uint32), ("after_end", ctypes.c_uint32))


class DenseRows(ctypes.Structure):
    """Twin of DenseRows."""

    _fields_ = (
        ("nodes", pointer),
        ("words", pointer),
        ("num_nodes", ctypes.c_uint32),
        ("words_per_row", ctypes.c_uint32),
        ("root_row", ctypes.c_uint32),
    )


def dense_rows(nodes_at: int, words_at: int, nodes: npt.NDArray[np.uint32], words_per_row: int) -> DenseRows:
    """``nodes`` ascending; the two addresses are on the device."""
    root_row = 0 if len(nodes) and nodes[0] == 0 else _NO_ROW
    return DenseRows(nodes_at, words_at, len(nodes), words_per_row, root_row)


class LogitBatch(ctypes.Structure):
    """Twin of LogitBatch."""

    _fields_ = (
        ("logits", pointer),
        ("rows", pointer),
        ("row_stride", ctypes.c_int64),
        ("width", ctypes.c_uint32),
        ("num_rows", ctypes.c_uint32),
        ("num_tiles", ctypes.c_uint32),
        ("inverse", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    )


class TokenRows(ctypes.Structure):
    """Twin of TokenRows."""

    _fields_ = (
        ("tokens", pointer),
        ("row_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_uint32),
        ("length", ctypes.c_uint32),
        ("token_bytes", ctypes.c_int32),
    )


def params_of(source: type[ctypes.Structure], **fields: Any) -> type[ctypes.Structure]:
    """A kernel's parameter: the source, and then these fields."""
    return type(
        "_Params", (ctypes.Structure,), {"_fields_": (("source", source), *fields.items())}
    )  # fmt: skip


class CudaTokens:
    """``part``: the kernels' file and ``prefix`` their names; ``source``: what the kernels are told of the states.

    ``num_words`` int32 words are a mask row.
    """

    prefix: str
    num_words: int

    def __init__(self, part: str, source: ctypes.Structure, device: int):
        from flashtrie_cli.engine import cuda_loader, cuda_sources

        opened = cuda_loader.open_device(device)
        image = cuda_sources.packaged_kernel(part) or cuda_sources.cached_kernel(part, opened.arch)
        self._set_up(
            source, cuda_launch.KernelModule(image.read_bytes()), opened.num_multiprocessors, opened.arch
        )

    def _set_up(self, source: ctypes.Structure, module: Any, num_multiprocessors: int, arch: int) -> None:
        self._source, self._module = source, module
        self._num_multiprocessors = num_multiprocessors
        self._overlaps = arch >= _OVERLAPPING_ARCH
        kind = type(source)
        self._apply_params = params_of(
            kind,
            batch=LogitBatch,
            states=pointer,
            num_long_blocks=ctypes.c_uint32,
        )
        self._fill_params = params_of(
            kind, states=pointer, words=pointer, row_stride=ctypes.c_int64, words_per_row=ctypes.c_uint32,
            num_rows=ctypes.c_uint32, num_tiles=ctypes.c_uint32,
        )  # fmt: skip
        self._advance_params = params_of(kind, rows=TokenRows, states=pointer, allowed=pointer)
        self._walk_params = params_of(kind, rows=TokenRows, states=pointer)

    def apply(
        self, logits: Any, states: Any, stream: Any = None, *, rows: Any = None, eos_when_ended: bool = False
    ) -> None:
        """Minus infinity, in place, over every logit that its row's state does not allow.

        ``logits``: float32, float16 or bfloat16 [rows, width], rows contiguous in themselves, ``width`` any; what lies
        beyond the vocabulary becomes minus infinity too. ``states``: uint32 or int32 [rows]; a state past its end,
        or outside the trie, allows nothing, or its end-of-sequence ids with ``eos_when_ended``. ``rows``: uint32 or
        int32 [number of states]: the states are of these rows of the logits, all different and in range, and the
        others stay as they are. Raises InputError.
        """
        self.prepare(logits, states, rows=rows, eos_when_ended=eos_when_ended)(stream)

    def prepare(
        self, logits: Any, states: Any, *, rows: Any = None, eos_when_ended: bool = False
    ) -> Callable[[Any], None]:
        """`apply` on these buffers, checked once: each call with a stream queues it again, on what they hold then.

        The buffers must stay where they are, and alive.
        """
        found = device_array("logits", logits)
        stride = _row_stride(logits, found)
        chosen = None if rows is None else _index_array("rows", rows)
        num_rows, width = found.shape if chosen is None else (chosen.shape[0], found.shape[1])
        held = state_array(states, num_rows)
        if num_rows == 0 or width == 0:
            return lambda stream: None
        logit_bytes = _LOGIT_SIZES[found.dtype]
        form, vectors, num_long_blocks = self._form(num_rows * width * logit_bytes, logit_bytes)
        batch = _batch(found, num_rows, stride, vectors)
        batch.rows = None if chosen is None else chosen.pointer
        params = self._apply_params(self._told(eos_when_ended), batch, held.pointer, num_long_blocks)
        grid = -(-num_rows * batch.num_tiles // WARPS) + num_long_blocks
        return self._prepared(f"apply_{found.dtype}_{form}", grid, params)

    pair_bytes: ClassVar[dict[int, int]]
    """Up to so many bytes of logits a lane writes two vectors, in larger batches four; by the bytes of a logit."""
    long_first_bytes: ClassVar[int | None]
    """Batches of more begin with the rows of long lists, so that reads do not mix with the writes; None: none does."""

    def _form(self, num_bytes: int, logit_bytes: int) -> tuple[str, int, int]:
        """The kernel for so many bytes of logits of so many each, vectors that a lane writes, and blocks for long
        lists."""
        if num_bytes <= _RESIDENT_WARPS * self._num_multiprocessors * _VECTOR_BYTES:
            return "v1", 1, 0
        if num_bytes <= self.pair_bytes[logit_bytes]:
            return "v2", 2, 0
        if self.long_first_bytes is None or num_bytes <= self.long_first_bytes:
            return "v4", 4, 0
        blocks = next(blocks for most, blocks in LONG_BLOCKS_PER_MULTIPROCESSOR if num_bytes <= most)
        return "long4", 4, blocks * self._num_multiprocessors

    def fill(self, states: Any, bitmask: Any, stream: Any = None) -> None:
        """The mask of each state as int32 words: token t is bit ``t % 32`` of word ``t // 32``.

        ``states``: uint32 or int32 [rows]; ``bitmask``: int32 or uint32 [>= rows, >= num_words], rows contiguous in
        themselves; words behind ``num_words`` stay. Raises InputError.
        """
        found = device_array("the bitmask", bitmask)
        if found.dtype not in ("int32", "uint32") or len(found.shape) != 2 or found.shape[1] < self.num_words:
            raise InputError(
                f"the bitmask is {found.dtype} {list(found.shape)}, not int32 [rows, {self.num_words}]"
            )
        stride = _stride("the bitmask", bitmask, found)
        held = _index_array("states", states)
        rows = held.shape[0]
        if rows > found.shape[0]:
            raise InputError(f"{rows} states for {found.shape[0]} rows of the bitmask")
        self._fill(held.pointer, found.pointer, stride, rows, stream)

    def _fill(self, states: int, words: int, stride: int, rows: int, stream: Any) -> None:
        tiles = -(-self.num_words // MASK_TILE_WORDS)
        if rows * tiles > _MAX_TILES:
            raise InputError(f"{rows} rows are too many for one call", hint="split the batch")
        params = self._fill_params(self._told(False), states, words, stride, self.num_words, rows, tiles)
        if rows:
            self.launch("fill", -(-rows * tiles // WARPS), params, stream)

    def advance(self, states: Any, tokens: Any, allowed: Any = None, stream: Any = None) -> None:
        """Each state after its token, in place; one whose token is not allowed stays.

        ``states``: uint32 or int32 [rows]; ``tokens``: int32 or int64 [rows]; ``allowed``: uint8 or bool [rows],
        written where given. Raises InputError.
        """
        found = device_array("tokens", tokens)
        if found.dtype not in ("int32", "int64") or len(found.shape) != 1 or not found.is_contiguous:
            raise InputError("tokens are not a contiguous int32 or int64 [rows]")
        rows = found.shape[0]
        given = TokenRows(found.pointer, 1, rows, 1, int(found.dtype[3:]) // 8)
        params = self._advance_params(
            source=self._told(False), rows=given, states=state_array(states, rows).pointer
        )
        if allowed is not None:
            params.allowed = _flags(allowed, rows).pointer
        if rows:
            self.launch("advance", -(-rows // self.rows_per_block), params, stream)

    def walk(self, token_rows: Any, states: Any, stream: Any = None) -> None:
        """``states``: the state after each row of ``token_rows`` (int32 or int64 [rows, length]) from the root.

        0xFFFFFFFF (-1 in int32) where a token was not allowed; tokens behind an end-of-sequence token are not looked
        at. Raises InputError.
        """
        found = device_array("token rows", token_rows)
        if found.dtype not in ("int32", "int64") or len(found.shape) != 2:
            raise InputError("token rows are not int32 or int64 [rows, length]")
        rows, length = found.shape
        stride = _stride("token rows", token_rows, found) if length else 0
        given = TokenRows(found.pointer, stride, rows, length, int(found.dtype[3:]) // 8)
        params = self._walk_params(
            source=self._told(False), rows=given, states=state_array(states, rows).pointer
        )
        if rows:
            self.launch("walk", -(-rows // self.rows_per_block), params, stream)

    rows_per_block = WARPS
    """Rows that a block advances or walks."""

    def _told(self, after_end: bool) -> ctypes.Structure:
        self._source.ends.after_end = after_end  # copied into the parameters of the launch
        return self._source

    def launch(self, kernel: str, grid: int, params: ctypes.Structure, stream: Any) -> None:
        self._prepared(kernel, grid, params)(stream)

    def _prepared(self, kernel: str, grid: int, params: ctypes.Structure) -> Callable[[Any], None]:
        function = self._module.kernel(f"{self.prefix}_{kernel}", 0)
        queue: Callable[[int], None]
        if self._overlaps:
            queue = cuda_launch.OverlappingLaunch(function, grid, THREADS, params)
        else:
            queue = cuda_launch.PreparedLaunch(function, (grid, 1, 1), THREADS, 0, params)
        return lambda stream: queue(stream_handle(stream))


def _batch(logits: DeviceArray, rows: int, stride: int, vectors: int) -> LogitBatch:
    """How rows are cut into tiles of 32 times ``vectors`` vectors."""
    width = logits.shape[1]
    size = _LOGIT_SIZES[logits.dtype]
    # Of a row that does not begin with a line of memory, the first tile begins before it.
    is_aligned = logits.pointer % _LINE_BYTES == 0 and stride * size % _LINE_BYTES == 0
    before = 0 if is_aligned else _LINE_BYTES - size
    tiles = -(-(before + width * size) // (_VECTOR_BYTES * vectors))
    if rows * tiles > _MAX_TILES or width > _MAX_WIDTH:
        raise InputError(f"{rows} rows of {width} are too many for one call", hint="split the batch")
    shift = (tiles - 1).bit_length()
    inverse = -(-(1 << (31 + shift)) // tiles)
    return LogitBatch(logits.pointer, None, stride, width, rows, tiles, inverse, shift)


def upload(arrays: dict[str, Any]) -> dict[str, Any]:
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


def state_array(states: Any, rows: int) -> DeviceArray:
    """Looked at, or InputError: uint32 or int32 [rows]."""
    found = device_array("states", states)
    if found.dtype not in ("uint32", "int32") or found.shape != (rows,) or not found.is_contiguous:
        raise InputError(f"states are not a contiguous uint32 or int32 [{rows}]")
    return found


def _index_array(name: str, array: Any) -> DeviceArray:
    found = device_array(name, array)
    if found.dtype not in ("uint32", "int32") or len(found.shape) != 1 or not found.is_contiguous:
        raise InputError(f"{name} are not a contiguous uint32 or int32 [rows]")
    return found


def _flags(allowed: Any, rows: int) -> DeviceArray:
    found = device_array("the allowed flags", allowed)
    if found.dtype not in ("uint8", "bool", "other8") or found.shape != (rows,) or not found.is_contiguous:
        raise InputError(f"the allowed flags are not a contiguous uint8 [{rows}]")
    return found


def _row_stride(logits: Any, found: DeviceArray) -> int:
    """Logits from one row to the next; InputError for what is no batch of logits."""
    if found.dtype not in _LOGIT_SIZES or len(found.shape) != 2:
        raise InputError(
            f"logits are {found.dtype} {list(found.shape)}, not float32, float16 or bfloat16 [rows, width]"
        )
    return _stride("logits", logits, found)


def _stride(name: str, array: Any, found: DeviceArray) -> int:
    """Elements from one row to the next."""
    if found.is_contiguous:
        return found.shape[1]
    if hasattr(array, "stride"):
        row, column = array.stride()
    else:
        interface = array.__cuda_array_interface__
        size = int(interface["typestr"][2:])
        row, column = (step // size for step in interface["strides"])
    if column != 1 and found.shape[1] > 1:
        raise InputError(f"{name} of a row do not lie side by side")
    return int(row)
