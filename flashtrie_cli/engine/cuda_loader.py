"""From nothing to kernels on a GPU: driver, PyCUDA, device, primary context, compiled code.

The context is the device's primary one, which torch, cupy and the CUDA runtime use too, so that device
arrays of theirs are valid here. Whatever can fail here is an EngineUnavailable that says what to do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.engine import cuda_sources
from flashtrie_cli.errors import EngineUnavailable, UsageError

_USE_CPU = "--engine cpu needs no GPU"


@dataclass(frozen=True)
class Device:
    """A GPU whose primary context is current on this thread."""

    ordinal: int
    name: str
    arch: int
    """Compute capability, 90 for 9.0."""
    num_multiprocessors: int
    shared_memory_bytes: int
    """Most dynamic shared memory a block may ask for."""
    memory_bytes: int
    handle: Any
    context: Any


_devices: dict[int, Device] = {}
_modules: dict[tuple[int, str], Any] = {}


def require_driver() -> Any:
    """``pycuda.driver``, which need not be initialised. EngineUnavailable without a driver or PyCUDA."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise EngineUnavailable(
            "no NVIDIA driver here (libcuda.so.1 is missing)", hint=f"install NVIDIA's driver; {_USE_CPU}"
        ) from None
    try:
        import pycuda.driver as cuda
    except ImportError as error:
        if getattr(error, "name", None) == "pycuda":
            raise EngineUnavailable("PyCUDA is not installed", hint="pip install 'flashtrie[cuda]'") from None
        raise EngineUnavailable(
            f"PyCUDA cannot be imported: {error}", hint="reinstall it against this machine's CUDA toolkit"
        ) from None
    return cuda


def driver() -> Any:
    """``pycuda.driver``, initialised. EngineUnavailable without a driver, PyCUDA or a device."""
    cuda = require_driver()
    try:
        cuda.init()
        count = cuda.Device.count()
    except cuda.Error as error:
        raise EngineUnavailable(f"the NVIDIA driver finds no usable device: {error}", hint=_USE_CPU) from None
    if count == 0:
        raise EngineUnavailable("the NVIDIA driver finds no device", hint=_USE_CPU)
    return cuda


def open_device(ordinal: int = 0) -> Device:
    """The GPU of this number, its primary context current on the calling thread (left again at exit)."""
    opened = _devices.get(ordinal)
    if opened is not None:
        return opened
    cuda = driver()
    count = cuda.Device.count()
    if not 0 <= ordinal < count:
        raise UsageError(f"there is no device {ordinal}", hint=f"devices here: 0 to {count - 1}")
    handle = cuda.Device(ordinal)
    try:
        context = handle.retain_primary_context()
        context.push()
    except cuda.Error as error:
        raise EngineUnavailable(
            f"device {ordinal} ({handle.name()}) cannot be used: {error}", hint=_USE_CPU
        ) from None
    # PyCUDA aborts the process when a context is still current at exit.
    atexit.register(_leave, cuda, context)
    attribute = cuda.device_attribute
    major, minor = handle.compute_capability()
    device = Device(
        ordinal=ordinal,
        name=handle.name(),
        arch=10 * major + minor,
        num_multiprocessors=handle.get_attribute(attribute.MULTIPROCESSOR_COUNT),
        shared_memory_bytes=handle.get_attribute(attribute.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        memory_bytes=handle.total_memory(),
        handle=handle,
        context=context,
    )
    _devices[ordinal] = device
    return device


def _leave(cuda: Any, context: Any) -> None:
    _modules.clear()
    with contextlib.suppress(
        cuda.Error
    ):  # after a kernel fault every call fails, and the process ends anyway
        context.pop()


def load_kernels(part: str, device: Device) -> Any:
    """The PyCUDA module of ``cuda/kernels/PART.cu``: packaged, else cached, else compiled by nvcc now."""
    key = (device.ordinal, part)
    module = _modules.get(key)
    if module is None:
        module = _modules[key] = _load(part, device)
    return module


def kernel_images(part: str, device: Device) -> Iterator[tuple[bytes, str]]:
    """What could be loaded for this device, best first, each with its name: the packaged fatbin, then our cubin."""
    packaged = cuda_sources.packaged_kernel(part)
    if packaged is not None:
        yield packaged.read_bytes(), str(packaged)
    compiled = cuda_sources.cached_kernel(part, device.arch)
    yield compiled.read_bytes(), str(compiled)


def _load(part: str, device: Device) -> Any:
    import pycuda.driver as cuda

    reason = ""
    for image, name in kernel_images(part, device):
        try:
            return cuda.module_from_buffer(image)
        except cuda.Error as error:  # a fatbin may lack this architecture; then the cubin is tried
            reason = f"{name} cannot be loaded: {error}"
    raise EngineUnavailable(reason, hint="delete it and try again")
