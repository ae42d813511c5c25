"""A query's launch by the extension: no Python between the caller's arrays and the driver.

Modules, memory, streams and the context are PyCUDA's. It keeps its function handles to itself, but what a stream
captures can be asked which function it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from flashtrie_cli.engine.cpu import native
from flashtrie_cli.engine.cuda_launch import check, driver
from flashtrie_cli.errors import EngineUnavailable

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING

_COPY_THREADS = 8


class _KernelNode(ctypes.Structure):
    """Twin of CUDA_KERNEL_NODE_PARAMS, with room for what later versions add behind it."""

    _fields_ = (("function", ctypes.c_void_p), ("_rest", ctypes.c_uint64 * 15))


def function_handle(launch: Callable[[], None], stream: int) -> int:
    """The driver's handle of the kernel that ``launch()`` would launch on ``stream``; nothing runs."""
    library = driver()
    graph, node, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(1)
    begun = library.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _RELAXED)
    check(begun, "cuStreamBeginCapture")
    try:
        launch()
    finally:
        ended = library.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    check(ended, "cuStreamEndCapture")
    try:
        found = _KernelNode()
        check(library.cuGraphGetNodes(graph, ctypes.byref(node), ctypes.byref(count)), "cuGraphGetNodes")
        code = library.cuGraphKernelNodeGetParams(node, ctypes.byref(found))
        check(code, "cuGraphKernelNodeGetParams")
    finally:
        library.cuGraphDestroy(graph)
    if not found.function:
        raise EngineUnavailable("a captured launch does not say what it launches")
    return int(found.function)


def driver_calls() -> list[int]:
    """Addresses of the driver's functions, as ``GpuQuery`` takes them."""
    library = driver()
    names = ("cuLaunchKernel", "cuStreamQuery", "cuStreamSynchronize", "cuEventRecord")
    return [int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0) for name in names]


def batch_calls() -> list[int]:
    """The same, as ``GpuBatch`` takes them. EngineUnavailable where one is missing."""
    library = driver()
    names = (
        "cuLaunchKernel", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize",
    )  # fmt: skip
    try:
        return [int(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0) for name in names]
    except AttributeError as error:
        raise EngineUnavailable(f"the NVIDIA driver is too old: {error}", hint="--engine cpu") from None


class NativeEvent:
    """An event of the driver's own, since PyCUDA keeps what its events are to itself."""

    def __init__(self, *, has_time: bool = False):
        event = ctypes.c_void_p()
        check(
            driver().cuEventCreate(ctypes.byref(event), 0 if has_time else _DISABLE_TIMING), "cuEventCreate"
        )
        self.handle = int(event.value or 0)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            driver().cuEventDestroy_v2(ctypes.c_void_p(self.handle))


class NativeStream:
    """A stream that does not wait for the default one. ``is_urgent``: its kernels get the first free place."""

    def __init__(self, *, is_urgent: bool = False):
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        code = driver().cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        check(code, "cuCtxGetStreamPriorityRange")
        priority = greatest if is_urgent else least
        code = driver().cuStreamCreateWithPriority(ctypes.byref(stream), _NON_BLOCKING, priority)
        check(code, "cuStreamCreateWithPriority")
        self.handle = int(stream.value or 0)

    def __del__(self) -> None:
        if getattr(self, "handle", 0):
            driver().cuStreamDestroy_v2(ctypes.c_void_p(self.handle))


class KernelClock:
    """Two events around kernels."""

    def __init__(self) -> None:
        self._events = NativeEvent(has_time=True), NativeEvent(has_time=True)

    @property
    def handles(self) -> list[int]:
        return [event.handle for event in self._events]

    def elapsed_ns(self) -> int:
        """From the first event to the second, once that is over."""
        begun, ended = (ctypes.c_void_p(handle) for handle in self.handles)
        milliseconds = ctypes.c_float()
        check(driver().cuEventSynchronize(ended), "cuEventSynchronize")
        check(driver().cuEventElapsedTime(ctypes.byref(milliseconds), begun, ended), "cuEventElapsedTime")
        return int(1e6 * milliseconds.value)


def gpu_query(
    launch: Callable[[], None], stream: int, *, times_kernels: bool = False, **parts: Any
) -> tuple[Any, KernelClock | None] | None:
    """The extension's ``GpuQuery`` over the kernel that ``launch()`` launches, and the clock that it runs by if wanted.

    None where the extension or one of the driver's functions is missing: searches then go by PyCUDA's launch.
    """
    try:
        clock = KernelClock() if times_kernels else None
        query = native().GpuQuery(
            driver=driver_calls(), function=function_handle(launch, stream), stream=stream,
            events=clock.handles if clock else [0, 0], **parts,
        )  # fmt: skip
    except (AttributeError, EngineUnavailable):  # ctypes' word for a function that the library lacks
        return None
    return query, clock


def copy_pool(threads: int) -> Any:
    """Threads that copy grids on their way to the GPU and answers on theirs to the caller.

    They sleep but for the milliseconds of a large batch, so they may be more than the engine's ``threads``.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return native().CopyPool(max(min(_COPY_THREADS, processors // 2), min(threads, processors)))
