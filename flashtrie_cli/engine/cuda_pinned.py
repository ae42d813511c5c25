"""Host memory that the GPU reaches by itself."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import EngineUnavailable

_ranges: dict[int, int] = {}


def pinned(length: int, dtype: Any) -> tuple[npt.NDArray[Any], int]:
    """A pinned array that the GPU can reach, and its device address."""
    import pycuda.driver as cuda

    try:
        array = cuda.pagelocked_empty(max(length, 1), dtype, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
    except cuda.Error as error:
        raise EngineUnavailable(f"no memory to pin for the GPU: {error}", hint="a smaller batch") from None
    return array, int(array.base.get_device_pointer())


def pinned_empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An array in pinned memory. Grids that lie in such arrays are not copied on the host before they go over."""
    array, _ = pinned(int(np.prod(shape)), dtype)
    begin = array.ctypes.data
    _ranges[begin] = begin + array.nbytes
    weakref.finalize(array.base, _ranges.pop, begin, None)
    return array[: int(np.prod(shape))].reshape(shape)


def is_pinned(array: npt.NDArray[Any]) -> bool:
    """Whether an array lies in one that ``pinned_empty`` made."""
    if not _ranges:
        return False
    address = array.__array_interface__["data"][0]  # `ctypes.data` takes ten microseconds
    ranges = _ranges.copy()  # the collector may take one out at any time
    return any(begin <= address and address + array.nbytes <= end for begin, end in ranges.items())
