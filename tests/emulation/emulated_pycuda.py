"""PyCUDA on the emulated machine: device memory is host memory, and a launch runs the kernels' source on fibers.

Enough of ``pycuda.driver`` for the search engine, so that uploads, sessions and pipelines are tested without a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import types
from typing import Any

import numpy as np

from flashtrie_cli.engine.cuda_layout import BATCH, KERNELS

NAMES = (*KERNELS, "pack_hits")


class Allocation:
    """Device memory; an integer where an address is wanted."""

    def __init__(self, num_bytes: int):
        self._room = np.full(num_bytes + 256, 0xA5, np.uint8)
        self._address = -(-self._room.ctypes.data // 256) * 256

    def __int__(self) -> int:
        return self._address

    __index__ = __int__

    def __add__(self, offset: int) -> int:
        return self._address + offset


class HostAllocation:
    """Pinned memory, as the base of an array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        whole = np.zeros(size + 4096, np.uint8)  # on a page of its own, as memory that is pinned is
        at = -whole.ctypes.data % 4096
        self._room = whole[at : at + size].view(dtype).reshape(shape)
        self.__array_interface__ = self._room.__array_interface__

    def get_device_pointer(self) -> int:
        return self._room.ctypes.data


class Function:
    def __init__(self, machine: EmulatedDriver, name: str):
        self.machine, self.name = machine, name

    def prepare(self, types_: Any) -> Function:
        return self

    def set_attribute(self, which: str, value: int) -> None:
        assert value <= self.machine.shared_bytes
        self.machine.most_shared[self.name] = value

    def prepared_call(self, grid: tuple[int, int], block: tuple[int, int, int], *arguments: Any) -> None:
        self.prepared_async_call(grid, block, None, *arguments)

    def prepared_async_call(
        self,
        grid: tuple[int, int],
        block: tuple[int, int, int],
        stream: Any,
        *arguments: Any,
        shared_size: int = 0,
    ) -> None:
        assert shared_size <= self.machine.most_shared.get(self.name, 48 << 10)
        self.machine.launch(self.name, grid[0], block[0], shared_size, arguments)


class EmulatedDriver(types.ModuleType):
    """In the place of ``pycuda.driver``; ``launched`` lists the kernels but that with which every index begins."""

    def __init__(self, library: ctypes.CDLL):
        super().__init__("pycuda.driver")
        self.library, self.launched, self.seed = library, [], 0
        self.streams: Any = None  # where the extension's launches go
        self.captured: list[str] | None = None  # kernels that a stream takes note of instead of running them
        self.shared_bytes, self.arch = 227 << 10, (9, 0)
        self.free_bytes = 1 << 36
        self.most_shared: dict[str, int] = {}  # of each kernel, as last set; all modules are one
        outer = self

        class Error(Exception):
            pass

        class MemoryError_(Error):
            pass

        class Stream:
            handle = 0

            def __init__(self, flags: int = 0):
                pass

            def synchronize(self) -> None:
                pass

            def wait_for_event(self, event: Any) -> None:
                pass

        class Event:
            def __init__(self, flags: int = 0):
                pass

            def record(self, stream: Any = None) -> None:
                pass

            synchronize = record

            def time_since(self, begin: Any) -> float:
                return 0.25 * (self is not begin)

        class Device:
            def __init__(self, ordinal: int):
                pass

            @staticmethod
            def count() -> int:
                return 1

            def name(self) -> str:
                return "emulated"

            def retain_primary_context(self) -> Any:
                return types.SimpleNamespace(push=lambda: None, pop=lambda: None, synchronize=lambda: None)

            def compute_capability(self) -> tuple[int, int]:
                return outer.arch

            def get_attribute(self, which: str) -> int:
                return {"sms": 9, "shared": outer.shared_bytes}[which]

            def total_memory(self) -> int:
                return outer.free_bytes

        self.Error, self.MemoryError = Error, MemoryError_
        self.Stream, self.Event, self.Device = Stream, Event, Device
        self.event_flags = types.SimpleNamespace(DISABLE_TIMING=2)
        self.host_alloc_flags = types.SimpleNamespace(DEVICEMAP=2)
        self.function_attribute = types.SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
        self.device_attribute = types.SimpleNamespace(
            MULTIPROCESSOR_COUNT="sms", MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared"
        )

    def init(self) -> None:
        pass

    def function_handle(self, launch: Any, stream: int) -> int:
        """In the place of ``cuda_native.function_handle``: a kernel's number."""
        self.captured = []
        launch()
        (name,), self.captured = self.captured, None
        return 1 + NAMES.index(name)

    def mem_get_info(self) -> tuple[int, int]:
        return self.free_bytes, self.free_bytes

    def mem_alloc(self, num_bytes: int) -> Allocation:
        if num_bytes > self.free_bytes:
            raise self.MemoryError("out of memory")
        return Allocation(num_bytes)

    def memset_d8(self, address: int, value: int, count: int) -> None:
        ctypes.memset(int(address), value, count)

    def memset_d32(self, address: int, value: int, count: int) -> None:
        assert value == 0
        ctypes.memset(int(address), 0, 4 * count)

    def memcpy_htod(self, address: Any, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(int(address), array.ctypes.data, array.nbytes)

    def memcpy_htod_async(self, address: Any, array: np.ndarray, stream: Any = None) -> None:
        self.memcpy_htod(address, array)

    def memcpy_dtoh(self, array: np.ndarray, address: Any) -> None:
        self.memcpy_dtoh_async(array, address)

    def memcpy_dtoh_async(self, array: np.ndarray, address: Any, stream: Any = None) -> None:
        assert array.flags.c_contiguous
        ctypes.memmove(array.ctypes.data, int(address), array.nbytes)

    def pagelocked_empty(self, shape: Any, dtype: Any, mem_flags: int = 0) -> np.ndarray:
        return np.asarray(HostAllocation(shape, dtype))

    def module_from_buffer(self, image: bytes) -> Any:
        return types.SimpleNamespace(get_function=lambda name: Function(self, name))

    def launch(self, name: str, blocks: int, threads: int, shared: int, arguments: tuple[Any, ...]) -> None:
        if self.captured is not None:
            self.captured.append(name)
            return
        self.seed += 1
        if name not in ("tag_nodes", "count_children", "put_in_table"):
            self.launched.append(name)
        if name == "build_root_table":
            view, root_last, shift, places, table = arguments
            self.library.emulate_root_table(
                ctypes.c_char_p(view), ctypes.c_uint32(root_last), ctypes.c_int(shift), ctypes.c_uint32(places),
                ctypes.c_void_p(table),
            )  # fmt: skip
            return
        if name == "tag_nodes":
            view, tags, heads = arguments
            self.library.emulate_tags(ctypes.c_char_p(view), ctypes.c_void_p(tags), ctypes.c_void_p(heads))
            return
        if name == "count_children":
            view, fan_out, counter = arguments
            count = self.library.emulate_count_children(ctypes.c_char_p(view), ctypes.c_uint32(fan_out))
            ctypes.c_uint32.from_address(counter).value = count
            return
        if name == "put_in_table":
            view, children, places = arguments
            self.library.emulate_put_in_table(
                ctypes.c_char_p(view), ctypes.c_char_p(children), ctypes.c_void_p(places)
            )
            return
        batch = ctypes.create_string_buffer(arguments[0], BATCH.itemsize)
        if name == "pack_hits":
            packed = ctypes.create_string_buffer(arguments[1], len(arguments[1]))
            code = self.library.emulate_pack(batch, packed, threads, self.seed)
        else:
            assert blocks % KERNELS[name][0] == 0
            assert shared <= self.shared_bytes
            size = ctypes.c_size_t(shared)
            code = self.library.emulate_search(batch, name.encode(), blocks, threads, size, self.seed)
        assert code == 0, f"{name} ended with {code}"


class NativeCalls:
    """The driver's C functions that the extension calls, on the emulated machine.

    ``stall``: launches that do nothing; ``delay_s``: that run so much later; ``launch_code``: what a launch returns;
    ``is_told``: the stream says when a launch is done, else it never does.
    """

    def __init__(self, driver: EmulatedDriver):
        self._driver = driver
        self.stall, self.delay_s, self.launch_code, self.launches = False, 0.0, 0, 0
        self.is_told = False
        self.set_status(600)
        word, pointer, code = ctypes.c_uint, ctypes.c_void_p, ctypes.c_int
        launch_type = ctypes.CFUNCTYPE(code, pointer, *[word] * 7, pointer, ctypes.POINTER(pointer), pointer)
        library = driver.library
        self._functions = (
            launch_type(self._launch), library.query_stream, library.synchronize_stream, library.record_event,
        )  # fmt: skip

    def set_status(self, code: int) -> None:
        """What a stream's query says from now on."""
        ctypes.c_int.in_dll(self._driver.library, "stream_status").value = code

    @property
    def num_recorded(self) -> int:
        """Events recorded by any test so far."""
        return ctypes.c_int.in_dll(self._driver.library, "num_recorded").value

    def addresses(self) -> list[int]:
        return [int(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in self._functions]

    def _launch(self, function: int, blocks: int, *rest: Any) -> int:
        _, _, threads, _, _, shared, _, parameters, _ = rest
        self.launches += 1
        if self.stall or self.launch_code:
            return self.launch_code
        record = ctypes.string_at(parameters[0], BATCH.itemsize)
        work = (NAMES[function - 1], blocks, threads, shared, (record,))
        self.set_status(600)
        if self.delay_s:
            threading.Timer(self.delay_s, self._work, work).start()
        else:
            self._work(*work)
        return 0

    def _work(self, *work: Any) -> None:
        self._driver.launch(*work)
        if self.is_told:
            self.set_status(0)


class EmulatedClock:
    """In the place of ``KernelClock``."""

    handles = (8, 16)

    def elapsed_ns(self) -> int:
        return 125_000
