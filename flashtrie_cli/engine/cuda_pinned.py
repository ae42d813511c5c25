"""Host memory that the GPU reaches by itself."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu_extension import native
from flashtrie_cli.errors import EngineUnavailable


def pinned(length: int, dtype: Any) -> tuple[npt.NDArray[Any], int]:
    """A pinned array that the GPU can reach, and its device address."""
    import pycuda.driver as cuda

    try:
        array = cuda.pagelocked_empty(max(length, 1), dtype, mem_flags=cuda.host_alloc_flags.DEVICEMAP)
    except cuda.Error as error:
        raise EngineUnavailable(f"no memory to pin for the GPU: {error}", hint="a smaller batch") from None
    return array, int(array.base.get_device_pointer())


def pinned_empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An array in pinned memory. The extension knows of it, and does not copy grids in it before they go over."""
    array, _ = pinned(int(np.prod(shape)), dtype)
    begin, module = array.ctypes.data, native()
    module.note_pinned(begin, begin + array.nbytes)
    weakref.finalize(array.base, module.forget_pinned, begin)
    return array[: int(np.prod(shape))].reshape(shape)
