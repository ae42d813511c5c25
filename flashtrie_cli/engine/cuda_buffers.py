"""What callers hand to kernels: arrays on a device, and streams.

Device arrays are torch tensors or anything with ``__cuda_array_interface__``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtrie_cli.errors import InputError


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


def checked(name: str, array: Any, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """The pointer of a contiguous device array of this type and shape, or InputError."""
    found = device_array(name, array)
    if found.dtype not in dtypes or found.shape != shape:
        raise InputError(f"{name}: {found.dtype} {list(found.shape)} instead of {dtypes[0]} {list(shape)}")
    if not found.is_contiguous:
        raise InputError(f"{name} are not contiguous")
    return found.pointer


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
