"""Draft trees on a GPU: one launch on the caller's stream, no synchronisation, nothing allocated when
buffers are given.

Device arrays are torch tensors or anything with ``__cuda_array_interface__``.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_draft_layout as layout
from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.engine.cuda_buffers import checked, device_array, stream_handle
from flashtrie_cli.engine.draft_plan import (
    OUTPUTS,
    DraftConstraint,
    DraftInputs,
    DraftPlan,
    DraftTrees,
    draft_ids,
)
from flashtrie_cli.errors import EngineUnavailable, InputError, UsageError


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
            "logits": checked("logits", inputs.logits, logit_types, shape),
            "roots": checked("roots", inputs.roots, ("int32",), batch),
            "base_lengths": checked("base lengths", inputs.base_lengths, ("int32",), batch),
        }
        if inputs.vocab_map is not None:
            mapping = checked(
                "the vocabulary map's entries", inputs.vocab_map, ("int32",), (plan.vocab_size,)
            )
            pointers["vocab_map"] = mapping
        if constraint is not None and constraint.start_states is not None:
            starts = checked("start states", constraint.start_states, ("uint32", "int32"), batch)
            pointers["start_states"] = starts
        self.trees = _allocate(plan, inputs.logits, constraint is not None) if out is None else out
        for name, array in self.trees.arrays().items():
            pointers[name] = checked(f"output {name}", array, _output_types(name), plan.shape(name))
        optional = {"node_states"} if constraint is None else set()
        missing = [name for name in OUTPUTS if name not in pointers and name not in optional]
        if missing:
            raise InputError(f"output {missing[0]} is missing")
        self._must_zero = workspace is None
        needed = layout.workspace_size(plan, constraint is not None)
        self._workspace = _empty(inputs.logits, needed, "uint8") if workspace is None else workspace
        space = device_array("workspace", self._workspace)
        if space.dtype != "uint8" or len(space.shape) != 1 or space.shape[0] < needed:
            raise InputError(f"the workspace is not a uint8 array of {needed} bytes")
        if space.pointer % layout.ALIGNMENT:
            raise InputError(f"the workspace does not start on {layout.ALIGNMENT} bytes")
        self._zeros = (space.pointer, layout.num_zeros(plan))
        host_map = None
        if constraint is not None and inputs.vocab_map is not None:
            host_map = _to_host(pointers["vocab_map"], plan.vocab_size)
        self._launches, held = _prepare(plan, pointers, constraint, host_map, space.pointer)
        self._held = (inputs, held)  # keeps the buffers alive

    def __call__(self, stream: Any = None) -> DraftTrees:
        """Queue the build on ``stream`` and return its outputs, which are ready when the stream gets
        there."""
        handle = stream_handle(stream)
        if self._must_zero:
            cuda_launch.zero(*self._zeros, handle)
            self._must_zero = False
        for launch in self._launches:
            launch(handle)
        return self.trees


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


def _to_host(pointer: int, count: int) -> np.ndarray[Any, Any]:
    """The vocabulary map as it is on the device now; waits for what the device has been given to do."""
    from flashtrie_cli.engine import cuda_loader

    cuda_loader.open_device(cuda_launch.device_of(pointer))
    import pycuda.driver as cuda

    cuda.Context.synchronize()
    array = np.empty(count, np.int32)
    cuda.memcpy_dtoh(array, pointer)
    return array


def _prepare(
    plan: DraftPlan,
    pointers: dict[str, int],
    constraint: DraftConstraint | None,
    vocab_map: np.ndarray[Any, Any] | None,
    workspace: int,
) -> tuple[list[cuda_launch.PreparedLaunch], Any]:
    """The launches of one build: one, or the rows' sums first where constrained scores need them; and what they need
    kept. ``vocab_map``: the map on the host, for a constrained build."""
    if plan.batch_size == 0:
        return [], None
    ordinal = cuda_launch.device_of(pointers["logits"])
    launches, num_chunks = [], 0
    if constraint is None or (constraint.scoring == "global" and plan.num_depths):
        module, num_multiprocessors = _module("draft", ordinal)
        params, grid = layout.fill_params(plan, pointers, workspace, num_multiprocessors)
        params.sums_only = int(constraint is not None)
        num_chunks = params.num_chunks
        needed = layout.shared_bytes(plan)
        kernel = module.kernel(layout.kernel_name(plan), needed)
        launches.append(cuda_launch.PreparedLaunch(kernel, grid, layout.THREADS, needed, params))
    if constraint is None:
        return launches, None
    rules = _device_rules(constraint, ordinal)
    ids = None if vocab_map is None else _upload(draft_ids(vocab_map, rules.num_tokens))
    params = layout.fill_legal_params(
        plan, pointers | ({} if ids is None else {"draft_ids": int(ids)}), rules.params, workspace,
        renormalise=constraint.scoring == "renorm", num_chunks=num_chunks, num_mapped=rules.num_tokens,
    )  # fmt: skip
    needed = layout.legal_shared_bytes(plan)
    kernel = _module("draft_legal", ordinal)[0].kernel(f"{rules.kernel}_{plan.logit_type}", needed)
    launch = cuda_launch.PreparedLaunch(kernel, (plan.batch_size, 1, 1), layout.THREADS, needed, params)
    return [*launches, launch], (ids, rules)


@dataclass(frozen=True)
class DeviceRules:
    """What holds the tree, on the device: its kernel and parameters, a bound of its token ids, and the memory."""

    kernel: str
    params: Any
    num_tokens: int
    memory: Any


def _device_rules(constraint: DraftConstraint, ordinal: int) -> DeviceRules:
    from flashtrie_cli.engine.cuda_masks import CudaMasks

    held = constraint.trie
    if isinstance(held, CudaMasks) or hasattr(held, "on_device"):
        masks = held if isinstance(held, CudaMasks) else _uploaded_once(held, ordinal, held.on_device)
        if masks.ordinal != ordinal:
            raise InputError(f"the masks are on device {masks.ordinal}, the logits on device {ordinal}")
        return DeviceRules("draft_masked", layout.mask_rules(masks.view), int(masks.view.vocab_size), masks)
    trie = _device_trie(held, ordinal)
    num_tokens = 1 << (16 + int(trie.view["high_width"]))
    return DeviceRules("draft_legal", layout.trie_rules(trie.view, constraint.end_token), num_tokens, trie)


def _upload(array: np.ndarray[Any, Any]) -> Any:
    import pycuda.driver as cuda

    return cuda.to_device(array)


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
    return _uploaded_once(native, ordinal, lambda device: DeviceTrie(native, cuda_loader.open_device(device)))


def _uploaded_once(held: Any, ordinal: int, upload: Callable[[int], Any]) -> Any:
    """What ``upload`` puts on the device; kept until another comes, as what is used often is opened there."""
    key = (id(held), ordinal)
    if key not in _uploaded:
        if not _uploaded:
            atexit.register(_uploaded.clear)  # before the context goes
        _uploaded.clear()
        _uploaded[key] = (held, upload(ordinal))
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
        workspace = cuda.mem_alloc(layout.workspace_size(plan, constraint is not None))
    except cuda.MemoryError as error:
        raise EngineUnavailable(
            f"the device's memory is too small: {error}", hint="split the batch"
        ) from None
    cuda.memset_d32(workspace, 0, layout.num_zeros(plan))
    pointers = {name: int(array) for name, array in held.items()}
    launches, kept = _prepare(plan, pointers, constraint, inputs.vocab_map, int(workspace))
    for launch in launches:
        launch(0)
    for name, array in out.arrays().items():
        cuda.memcpy_dtoh(array, held[name])
    del kept
