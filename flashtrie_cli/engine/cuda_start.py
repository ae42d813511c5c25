"""The driver's start, on a thread of its own: it takes as long as everything else that a command does first."""

from __future__ import annotations

import ctypes
import threading


def begin_start(ordinal: int) -> None:
    """Begin to make the driver and the primary context of this device ready; returns at once.

    Whatever fails here fails again, and is told, where the device is opened.
    """
    threading.Thread(target=_start, args=(ordinal,), name="cuda-start", daemon=True).start()


def _start(ordinal: int) -> None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if library.cuInit(0) == 0 and library.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
