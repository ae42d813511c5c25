"""Kernels launched on a caller's stream, through the driver's own C interface.

PyCUDA launches only on streams that it made itself, and a draft tree is built in the middle of somebody
else's work: the module is therefore loaded and its kernels launched here, in whatever context is current.
"""

from __future__ import annotations

import ctypes
from typing import Any

from flashtrie_cli.errors import EngineUnavailable

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_DEFAULT_SHARED = 48 << 10  # what a kernel may ask for without being allowed more

_driver: Any = None


def driver() -> Any:
    """libcuda, initialised. EngineUnavailable where there is none."""
    global _driver
    if _driver is None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise EngineUnavailable(
                "no NVIDIA driver here (libcuda.so.1 is missing)", hint="--engine cpu needs no GPU"
            ) from None
        code = library.cuInit(0)
        _driver = library
        check(code, "cuInit")
    return _driver


def check(code: int, call: str) -> None:
    """Turn a driver's error code into an exception that names it."""
    if code == 0:
        return
    name = ctypes.c_char_p()
    _driver.cuGetErrorName(code, ctypes.byref(name))
    raise EngineUnavailable(f"{call} failed: {(name.value or b'error').decode()} ({code})")


def device_of(pointer: int) -> int:
    """Number of the device that a device pointer belongs to."""
    ordinal = ctypes.c_int()
    code = driver().cuPointerGetAttribute(ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_void_p(pointer))
    check(code, "cuPointerGetAttribute")
    return ordinal.value


def zero(pointer: int, num_words: int, stream: int) -> None:
    """Queue the clearing of 32-bit words."""
    code = driver().cuMemsetD32Async(
        ctypes.c_void_p(pointer), 0, ctypes.c_size_t(num_words), ctypes.c_void_p(stream)
    )
    check(code, "cuMemsetD32Async")


def wait(stream: int) -> None:
    """Until everything queued on a stream is done."""
    check(driver().cuStreamSynchronize(ctypes.c_void_p(stream)), "cuStreamSynchronize")


class KernelModule:
    """A compiled module, loaded into the current context; its kernels take one structure by value."""

    def __init__(self, image: bytes):
        self._handle = ctypes.c_void_p()
        self._kernels: dict[str, ctypes.c_void_p] = {}
        check(driver().cuModuleLoadData(ctypes.byref(self._handle), image), "cuModuleLoadData")

    def kernel(self, name: str, shared_bytes: int) -> ctypes.c_void_p:
        """The kernel ``name``, allowed ``shared_bytes`` of dynamic shared memory."""
        function = self._kernels.get(name)
        if function is None:
            function = ctypes.c_void_p()
            code = driver().cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode())
            check(code, f"cuModuleGetFunction({name})")
            self._kernels[name] = function
        if shared_bytes > _DEFAULT_SHARED:
            code = driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes)
            check(code, f"cuFuncSetAttribute({name}, {shared_bytes} bytes of shared memory)")
        return function


class _Attribute(ctypes.Structure):
    """Twin of CUlaunchAttribute, as far as it is used: an id, and a value of 64 bytes that begins with a flag."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("_padding", ctypes.c_uint),
        ("flag", ctypes.c_uint),
        ("_rest", ctypes.c_uint * 15),
    )


class _Config(ctypes.Structure):
    """Twin of CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class OverlappingLaunch:
    """One kernel that may take its places while the one before it in the stream ends.

    Only for kernels that wait for that one before they touch anything (`simt::await_previous_kernel`), on devices of
    compute capability 9.0 and newer.
    """

    def __init__(self, function: ctypes.c_void_p, num_blocks: int, threads: int, params: ctypes.Structure):
        self._params = params
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, flag=1)
        self._config = _Config(
            (num_blocks, 1, 1), (threads, 1, 1), 0, None, ctypes.pointer(self._attribute), 1
        )
        self._function = function
        self._launch = driver().cuLaunchKernelEx

    def __call__(self, stream: int) -> None:
        self._config.stream = stream
        code = self._launch(ctypes.byref(self._config), self._function, self._arguments, ctypes.c_void_p())
        if code:
            check(code, "cuLaunchKernelEx")


class PreparedLaunch:
    """One kernel with its grid and parameters: launching it again costs one driver call."""

    def __init__(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        params: ctypes.Structure,
    ):
        self._params = params
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._shape = tuple(ctypes.c_uint(size) for size in (*grid, threads, 1, 1, shared_bytes))
        self._function = function
        self._launch = driver().cuLaunchKernel

    def __call__(self, stream: int) -> None:
        code = self._launch(
            self._function, *self._shape, ctypes.c_void_p(stream), self._arguments, ctypes.c_void_p()
        )
        if code:
            check(code, "cuLaunchKernel")
