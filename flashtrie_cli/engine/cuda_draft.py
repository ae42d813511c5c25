"""Draft trees on a GPU: one launch on the caller's stream, no synchronisation, nothing allocated when
buffers are given.

Device arrays are torch tensors or anything with ``__cuda_array_interface__``.
"""

from __future__ import annotations

import atexit
import ctypes
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.engine.draft_plan import (
    LOGIT_TYPES,
    OUTPUTS,
    DraftConstraint,
    DraftInputs,
    DraftPlan,
    DraftTrees,
)
from flashtrie_cli.errors import EngineUnavailable, InputError, UsageError

THREADS = 256
TILE_LOGITS = 8192
"""Most logits that one block reads at a time (kTileLogits)."""
MERGE_BYTES = 8 * 288
"""Shared memory of a warp's merge list (kMergeStride)."""
SCAN_BYTES = 20 * 256 + 8 * 1024 + 176
"""Shared memory of a block's scan (ScanShared)."""
RUNS_AT_ONCE = 8
"""What the candidates of a row are rounded up to in shared memory (kRunsAtOnce)."""
BLOCKS_PER_MULTIPROCESSOR = 4
"""Blocks that run at once (kBlocksAtOnce)."""
MAX_CHUNK_TILES = 4
TILE_OVERHEAD = 1500
"""Logits that could be read in the time that a tile takes beside its reading."""
LEGAL_BYTES = 36_032
"""Shared memory of a block of the constrained kernel before its sort (LegalShared)."""
_LEVEL_NODE_BYTES, _CANDIDATE_BYTES, _TREE_SHARED_BYTES = 24, 12, 16
_ALIGNMENT = 256
_MAX_GRID_Z = 65_535

_pointer = ctypes.c_void_p


class _Sizes(ctypes.Structure):
    """Twin of DraftSizes."""

    _fields_ = (
        ("batch_size", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("vocab_size", ctypes.c_int32),
        ("num_nodes", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("first_row", ctypes.c_int32),
        ("self_padding", ctypes.c_int32),
        ("logit_type", ctypes.c_int32),
    )


class _Outputs(ctypes.Structure):
    """Twin of DraftOutputs: the outputs in the order of OUTPUTS."""

    _fields_ = tuple((name, _pointer) for name in OUTPUTS)


class DraftParams(ctypes.Structure):
    """Twin of the kernel's DraftParams."""

    _fields_ = (
        ("sizes", _Sizes),
        ("out", _Outputs),
        ("logits", _pointer),
        ("roots", _pointer),
        ("base_lengths", _pointer),
        ("vocab_map", _pointer),
        ("chunk_keys", _pointer),
        ("chunk_sums", _pointer),
        ("tickets", _pointer),
        ("num_chunks", ctypes.c_int32),
        ("num_tiles", ctypes.c_int32),
        ("tile_packs", ctypes.c_int32),
        ("chunk_tiles", ctypes.c_int32),
        ("sums_only", ctypes.c_int32),
    )


class _Trie(ctypes.Structure):
    """Twin of TrieView."""

    _fields_ = (
        *((name, _pointer) for name in ("louds", "lines", "wide", "label_low", "high_flags", "high_bits")),
        ("num_nodes", ctypes.c_uint32),
        ("num_keys", ctypes.c_uint32),
        ("high_width", ctypes.c_int32),
    )


class _Constraint(ctypes.Structure):
    """Twin of the header's DraftConstraint."""

    _fields_ = (
        ("trie", _Trie),
        ("start_states", _pointer),
        ("end_token", ctypes.c_int64),
        ("renormalise", ctypes.c_int32),
    )


class LegalParams(ctypes.Structure):
    """Twin of the kernel's LegalParams."""

    _fields_ = (
        ("sizes", _Sizes),
        ("out", _Outputs),
        ("constraint", _Constraint),
        ("logits", _pointer),
        ("roots", _pointer),
        ("base_lengths", _pointer),
        ("chunk_sums", _pointer),
        ("levels", _pointer),
        ("candidates", _pointer),
        ("num_chunks", ctypes.c_int32),
    )


@dataclass(frozen=True)
class DeviceArray:
    """What an array on a device says of itself."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    is_contiguous: bool


def device_array(name: str, array: Any) -> DeviceArray:
    """Look at a device array; InputError when it is none."""
    if hasattr(array, "data_ptr") and hasattr(array, "is_cuda"):
        if not array.is_cuda:
            raise InputError(f"{name} are not on the device")
        dtype = str(array.dtype).removeprefix("torch.")
        return DeviceArray(array.data_ptr(), tuple(array.shape), dtype, array.is_contiguous())
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise InputError(f"{name} are not on the device")
    kind = {"i": "int", "u": "uint", "f": "float", "V": "bfloat"}.get(interface["typestr"][1], "other")
    itemsize = int(interface["typestr"][2:])
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    dense, step = [], itemsize
    for size in reversed(shape):
        dense.append(step)
        step *= size
    is_contiguous = strides is None or tuple(strides) == tuple(reversed(dense))
    return DeviceArray(interface["data"][0] or 0, shape, f"{kind}{8 * itemsize}", is_contiguous)


def _checked(name: str, array: Any, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """The pointer of a contiguous device array of this type and shape, or InputError."""
    found = device_array(name, array)
    if found.dtype not in dtypes or found.shape != shape:
        raise InputError(f"{name}: {found.dtype} {list(found.shape)} instead of {dtypes[0]} {list(shape)}")
    if not found.is_contiguous:
        raise InputError(f"{name} are not contiguous")
    return found.pointer


def _row_packs(plan: DraftPlan, logits: int) -> tuple[int, int]:
    """16-byte packs that a row touches, and logits of a pack; rows that start between packs may need one more."""
    itemsize = 4 if plan.logit_type == "float32" else 2
    pack = 16 // itemsize
    aligned = logits % 16 == 0 and plan.vocab_size % pack == 0
    return -(-(plan.vocab_size + (0 if aligned else pack - 1)) // pack), pack


@dataclass(frozen=True)
class Tiling:
    """How a row of logits is cut: ``num_tiles`` of ``tile_packs`` packs, ``chunk_tiles`` of them to a block."""

    num_tiles: int
    tile_packs: int
    chunk_tiles: int

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tiles // self.chunk_tiles)


def tiling(plan: DraftPlan, logits: int, num_multiprocessors: int) -> Tiling:
    """Cut the rows so that the multiprocessors get even shares while one or two rounds of blocks read everything; where
    there are more rounds, into chunks of several tiles, so that less is merged. Measured on an H200:
    docs/benchmarks/draft.md."""
    packs, pack = _row_packs(plan, logits)
    rows, blocks = plan.batch_size * plan.num_depths, BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors
    least = -(-packs * pack // TILE_LOGITS)
    if rows * least > 2 * blocks:
        chunk_tiles = max(1, min(rows * least // (2 * blocks), MAX_CHUNK_TILES, least))
        return Tiling(least, -(-packs // least), chunk_tiles)

    def cut(chunks: int) -> Tiling:
        chunk_tiles = -(-packs * pack // (chunks * TILE_LOGITS))
        tile_packs = -(-packs // (chunks * chunk_tiles))
        return Tiling(-(-packs // tile_packs), tile_packs, chunk_tiles)

    def cost(cut: Tiling) -> int:
        share = -(-rows * cut.num_chunks // num_multiprocessors)
        return share * cut.chunk_tiles * (cut.tile_packs * pack + TILE_OVERHEAD)

    cuts = [cut(chunks) for chunks in range(-(-least // MAX_CHUNK_TILES), max_chunks(plan.vocab_size) + 1)]
    return min(cuts, key=cost)


def max_chunks(vocab_size: int) -> int:
    """Most chunks of a row: what one warp merges at once, or as many as must be."""
    return max(-(-(vocab_size + 14) // TILE_LOGITS), min(32, -(-(vocab_size + 14) // 1024)))


def _workspace_parts(plan: DraftPlan, constrained: bool) -> dict[str, int]:
    """Offset of each part of the workspace, and of its end; tickets come first."""
    rows = plan.batch_size * plan.num_depths
    chunks = rows * max_chunks(plan.vocab_size)
    sizes = {
        "tickets": 4 * plan.batch_size,
        "chunk_sums": 8 * chunks,
        "chunk_keys": 8 * chunks * plan.top_k,
        "levels": _LEVEL_NODE_BYTES * plan.batch_size * (plan.num_depths + 1) * plan.num_nodes
        if constrained
        else 0,
        "candidates": _CANDIDATE_BYTES * plan.batch_size * plan.num_nodes * plan.top_k if constrained else 0,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return {**offsets, "end": end}


def num_tickets(plan: DraftPlan) -> int:
    """32-bit words at the start of the workspace that must be zero at first."""
    return plan.batch_size


def workspace_size(plan: DraftPlan, constrained: bool = False) -> int:
    """Bytes of workspace, the same for every logit type."""
    return max(_workspace_parts(plan, constrained)["end"], 1)


def shared_bytes(plan: DraftPlan) -> int:
    """Dynamic shared memory of a block: a chunk's lists, or the tree, its candidates, and then the warps' merge lists or
    the masks."""
    places = 1 << (plan.num_nodes - 1).bit_length()
    candidates = 8 * plan.num_depths * -(-plan.top_k // RUNS_AT_ONCE) * RUNS_AT_ONCE
    behind = max(THREADS // 32 * MERGE_BYTES, 4 * plan.num_nodes * plan.mask_words)
    return _TREE_SHARED_BYTES + max(SCAN_BYTES, 44 * places + 16 + candidates + behind)


def legal_shared_bytes(plan: DraftPlan) -> int:
    """Dynamic shared memory of a block of the constrained kernel: its fixed part, then the keys of a level to sort."""
    places = 1 << (plan.num_nodes * plan.top_k - 1).bit_length()
    return LEGAL_BYTES + 8 * max(places, 2)


def fill_legal_params(
    plan: DraftPlan,
    pointers: dict[str, int],
    constraint: DraftConstraint,
    view: Any,
    workspace: int,
    num_chunks: int,
) -> LegalParams:
    """Parameters of the constrained kernel; ``view``: the trie's device pointers (cuda_layout.TRIE)."""
    params = LegalParams()
    _fill_common(params, plan, pointers)
    params.constraint.trie = _Trie.from_buffer_copy(view.tobytes())
    params.constraint.start_states = pointers.get("start_states", 0)
    params.constraint.end_token = -1 if constraint.end_token is None else constraint.end_token
    params.constraint.renormalise = int(constraint.scoring == "renorm")
    parts = _workspace_parts(plan, True)
    params.levels, params.candidates = workspace + parts["levels"], workspace + parts["candidates"]
    if constraint.scoring == "global":
        params.chunk_sums = workspace + parts["chunk_sums"]
        params.num_chunks = num_chunks
    return params


def _fill_common(params: DraftParams | LegalParams, plan: DraftPlan, pointers: dict[str, int]) -> None:
    for name in ("batch_size", "block_size", "vocab_size", "num_nodes", "top_k", "first_row"):
        setattr(params.sizes, name, getattr(plan, name))
    params.sizes.self_padding = int(plan.self_padding)
    params.sizes.logit_type = LOGIT_TYPES[plan.logit_type]
    for name in OUTPUTS:
        setattr(params.out, name, pointers.get(name, 0))
    for name in ("logits", "roots", "base_lengths"):
        setattr(params, name, pointers.get(name, 0))


def fill_params(
    plan: DraftPlan, pointers: dict[str, int], workspace: int, num_multiprocessors: int
) -> tuple[DraftParams, tuple[int, int, int]]:
    """The kernel's parameters and its grid, from pointers by name (inputs and outputs)."""
    params = DraftParams()
    _fill_common(params, plan, pointers)
    params.vocab_map = pointers.get("vocab_map", 0)
    parts = _workspace_parts(plan, False)
    for name in ("tickets", "chunk_sums", "chunk_keys"):
        setattr(params, name, workspace + parts[name])
    cut = tiling(plan, pointers["logits"], num_multiprocessors)
    for name in ("num_tiles", "tile_packs", "chunk_tiles", "num_chunks"):
        setattr(params, name, getattr(cut, name))
    if plan.batch_size > _MAX_GRID_Z:
        raise UsageError(f"{plan.batch_size} batch rows do not fit into one launch", hint="split the batch")
    chunks = cut.num_chunks if plan.num_depths else 1
    return params, (chunks, max(plan.num_depths, 1), plan.batch_size)


class PreparedDraft:
    """A build whose buffers are checked once; each call queues it again, on the buffers' contents of that
    time."""

    def __init__(self, plan: DraftPlan, inputs: DraftInputs, out: DraftTrees | None, workspace: Any):
        constraint = inputs.constraint
        logit_types: tuple[str, ...] = (plan.logit_type,)
        if plan.logit_type == "bfloat16":
            logit_types += ("uint16", "int16")
        batch, shape = (plan.batch_size,), (plan.batch_size, plan.block_size, plan.vocab_size)
        pointers = {
            "logits": _checked("logits", inputs.logits, logit_types, shape),
            "roots": _checked("roots", inputs.roots, ("int32",), batch),
            "base_lengths": _checked("base lengths", inputs.base_lengths, ("int32",), batch),
        }
        if inputs.vocab_map is not None:
            mapping = _checked(
                "the vocabulary map's entries", inputs.vocab_map, ("int32",), (plan.vocab_size,)
            )
            pointers["vocab_map"] = mapping
        if constraint is not None and constraint.start_states is not None:
            starts = _checked("start states", constraint.start_states, ("uint32", "int32"), batch)
            pointers["start_states"] = starts
        self.trees = _allocate(plan, inputs.logits, constraint is not None) if out is None else out
        for name, array in self.trees.arrays().items():
            pointers[name] = _checked(f"output {name}", array, _output_types(name), plan.shape(name))
        optional = {"node_states"} if constraint is None else set()
        missing = [name for name in OUTPUTS if name not in pointers and name not in optional]
        if missing:
            raise InputError(f"output {missing[0]} is missing")
        self._must_zero = workspace is None
        needed = workspace_size(plan, constraint is not None)
        self._workspace = _empty(inputs.logits, needed, "uint8") if workspace is None else workspace
        space = device_array("workspace", self._workspace)
        if space.dtype != "uint8" or len(space.shape) != 1 or space.shape[0] < needed:
            raise InputError(f"the workspace is not a uint8 array of {needed} bytes")
        if space.pointer % _ALIGNMENT:
            raise InputError(f"the workspace does not start on {_ALIGNMENT} bytes")
        self._tickets = (space.pointer, num_tickets(plan))
        self._launches = _prepare(plan, pointers, constraint, space.pointer)
        self._inputs = inputs  # keeps the buffers alive

    def __call__(self, stream: Any = None) -> DraftTrees:
        """Queue the build on ``stream`` and return its outputs, which are ready when the stream gets
        there."""
        handle = stream_handle(stream)
        if self._must_zero:
            cuda_launch.zero(*self._tickets, handle)
            self._must_zero = False
        for launch in self._launches:
            launch(handle)
        return self.trees


def stream_handle(stream: Any) -> int:
    """The driver's handle of a stream: an integer, or torch's, cupy's or PyCUDA's object."""
    if stream is None:
        return 0
    for attribute in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    if isinstance(stream, int):
        return stream
    raise InputError(f"{type(stream).__name__} is no stream", hint="pass its handle as an integer")


def _output_types(name: str) -> tuple[str, ...]:
    dtype = OUTPUTS[name][0]
    return (dtype, "int32") if dtype == "uint32" else (dtype,)  # torch computes little with uint32


def _empty(like: Any, shape: Any, dtype: str) -> Any:
    """An array beside ``like``, made by the library that made it."""
    library = type(like).__module__.partition(".")[0]
    if library == "torch":
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if library == "cupy":
        import cupy

        with like.device:
            return cupy.empty(shape, dtype)
    raise InputError(f"outputs cannot be allocated beside {library}'s arrays", hint="pass out and workspace")


def _allocate(plan: DraftPlan, like: Any, constrained: bool) -> DraftTrees:
    names = [name for name in OUTPUTS if constrained or name != "node_states"]
    return DraftTrees(**{name: _empty(like, plan.shape(name), _output_types(name)[-1]) for name in names})


_modules: dict[tuple[int, str], cuda_launch.KernelModule] = {}


def _module(part: str, ordinal: int) -> tuple[cuda_launch.KernelModule, int]:
    """The kernels of one file on this device, whose primary context is made current, and its multiprocessors."""
    from flashtrie_cli.engine import cuda_loader, cuda_sources

    device = cuda_loader.open_device(ordinal)
    module = _modules.get((ordinal, part))
    if module is None:
        image = cuda_sources.packaged_kernel(part) or cuda_sources.cached_kernel(part, device.arch)
        module = _modules[ordinal, part] = cuda_launch.KernelModule(image.read_bytes())
    return module, device.num_multiprocessors


def _prepare(
    plan: DraftPlan, pointers: dict[str, int], constraint: DraftConstraint | None, workspace: int
) -> list[cuda_launch.PreparedLaunch]:
    """The launches of one build: one, or the rows' sums first where constrained scores need them."""
    if plan.batch_size == 0:
        return []
    ordinal = cuda_launch.device_of(pointers["logits"])
    launches, num_chunks = [], 0
    if constraint is None or (constraint.scoring == "global" and plan.num_depths):
        module, num_multiprocessors = _module("draft", ordinal)
        params, grid = fill_params(plan, pointers, workspace, num_multiprocessors)
        params.sums_only = int(constraint is not None)
        num_chunks = params.num_chunks
        needed = shared_bytes(plan)
        kernel = module.kernel(f"draft_{plan.logit_type}", needed)
        launches.append(cuda_launch.PreparedLaunch(kernel, grid, THREADS, needed, params))
    if constraint is not None:
        module, _ = _module("draft_legal", ordinal)
        view = _device_trie(constraint.trie, ordinal).view
        legal = fill_legal_params(plan, pointers, constraint, view, workspace, num_chunks)
        needed = legal_shared_bytes(plan)
        kernel = module.kernel(f"draft_legal_{plan.logit_type}", needed)
        launches.append(cuda_launch.PreparedLaunch(kernel, (plan.batch_size, 1, 1), THREADS, needed, legal))
    return launches


def _device_trie(trie: Any, ordinal: int) -> Any:
    """The trie on the device: that of an index opened with the cuda engine, else uploaded now (and kept)."""
    from flashtrie_cli.engine import cpu_draft, cuda_loader
    from flashtrie_cli.engine.cuda_trie import DeviceTrie

    resident = getattr(getattr(trie, "engine", None), "device_trie", trie)
    if isinstance(resident, DeviceTrie):
        if resident.device.ordinal != ordinal:
            raise InputError(
                f"the index is on device {resident.device.ordinal}, the logits on device {ordinal}"
            )
        return resident
    native = cpu_draft.native_trie(trie) if cpu_draft.is_available() else None
    if native is None:
        raise UsageError("the cuda engine needs the trie of an opened index")
    key = (id(native), ordinal)
    if key not in _uploaded:
        if not _uploaded:
            atexit.register(_uploaded.clear)  # before the context goes
        _uploaded.clear()  # one at a time: an index that is used often is opened with the cuda engine
        _uploaded[key] = (native, DeviceTrie(native, cuda_loader.open_device(ordinal)))
    return _uploaded[key][1]


_uploaded: dict[tuple[int, int], tuple[Any, Any]] = {}


def build(
    plan: DraftPlan, inputs: DraftInputs, out: DraftTrees | None, workspace: Any, stream: Any
) -> DraftTrees:
    """Queue one build of device arrays; see `PreparedDraft`."""
    return PreparedDraft(plan, inputs, out, workspace)(stream)


def build_from_host(plan: DraftPlan, inputs: DraftInputs, out: DraftTrees) -> None:
    """Copy numpy inputs to the device, build, copy the outputs back."""
    if plan.batch_size == 0:
        return
    from flashtrie_cli.engine import cuda_loader

    cuda_loader.open_device(0)
    import pycuda.driver as cuda

    constraint = inputs.constraint
    given = {"logits": inputs.logits, "roots": inputs.roots, "base_lengths": inputs.base_lengths}
    if inputs.vocab_map is not None:
        given["vocab_map"] = inputs.vocab_map
    if constraint is not None:
        given["start_states"] = constraint.start_states
    try:
        held = {name: cuda.to_device(array) for name, array in given.items()}
        held |= {name: cuda.mem_alloc(max(array.nbytes, 1)) for name, array in out.arrays().items()}
        workspace = cuda.mem_alloc(workspace_size(plan, constraint is not None))
    except cuda.MemoryError as error:
        raise EngineUnavailable(
            f"the device's memory is too small: {error}", hint="split the batch"
        ) from None
    cuda.memset_d32(workspace, 0, num_tickets(plan))
    for launch in _prepare(
        plan, {name: int(array) for name, array in held.items()}, constraint, int(workspace)
    ):
        launch(0)
    for name, array in out.arrays().items():
        cuda.memcpy_dtoh(array, held[name])
