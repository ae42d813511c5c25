"""Masks and steps on the emulated machine: the engine's own code, with a driver that runs kernels as fibers.

Device memory is host memory, so numpy arrays stand for device arrays (`on_device` wraps them).
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_launch, cuda_masks, cuda_trie_steps
from flashtrie_cli.engine.cuda_layout import TRIE

ROOT = Path(__file__).resolve().parent.parent.parent


def compile_library(folder: Path) -> ctypes.CDLL:
    target = folder / "emulated_tokens.so"
    command = ["g++", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]
    command += ["-fPIC", "-shared", f"-I{ROOT / 'tests/emulation'}", f"-I{ROOT / 'cuda'}", "-o", str(target)]
    subprocess.run([*command, str(ROOT / "tests/emulation/emulated_tokens.cpp")], check=True)
    return ctypes.CDLL(str(target))


class EmulatedDriver:
    """Stands for libcuda: a launch runs its kernel to the end."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._names: list[str] = []
        self.launches: list[tuple[str, int, int]] = []
        """Kernel, blocks and stream of each."""

    def cuModuleGetFunction(self, function, module, name):
        self._names.append(name.decode())
        function._obj.value = len(self._names)
        return 0

    def cuLaunchKernel(self, function, *arguments):
        *shape, stream, params, _ = arguments
        return self._run(function, shape[0].value, shape[3].value, stream.value, params)

    def cuLaunchKernelEx(self, config, function, params, _):
        config = config._obj
        attribute = config.attributes[0]
        assert (config.num_attributes, attribute.id, attribute.flag) == (1, 6, 1)
        return self._run(function, config.grid[0], config.block[0], config.stream, params)

    def cuStreamSynchronize(self, stream):
        return 0

    def _run(self, function, num_blocks, num_threads, stream, params):
        name = self._names[function.value - 1]
        self.launches.append((name, num_blocks, stream or 0))
        code = self._library.emulate_tokens(
            name.encode(), ctypes.c_void_p(params[0]), num_blocks, num_threads, len(self.launches)
        )
        assert code == 0, f"{name} ended with {code}"
        return 0


class DeviceNumpy:
    """A numpy array as a device array."""

    def __init__(self, array: np.ndarray, typestr: str | None = None):
        self.array = array
        self.__cuda_array_interface__ = {
            "typestr": typestr or array.dtype.str, "shape": array.shape, "data": (array.ctypes.data, False),
            "strides": None if array.flags.c_contiguous else array.strides, "version": 3,
        }  # fmt: skip


class Machine:
    """Makes the engine's objects here. ``arch`` decides whether launches overlap."""

    def __init__(self, library: ctypes.CDLL, monkeypatch: Any, arch: int = 90, num_multiprocessors: int = 1):
        self.driver = EmulatedDriver(library)
        self._arch, self._num_multiprocessors = arch, num_multiprocessors
        monkeypatch.setattr(cuda_launch, "_driver", self.driver)
        for module in (cuda_masks, cuda_trie_steps):
            monkeypatch.setattr(module, "upload", self._upload)
        self._held: list[np.ndarray] = []

    def _upload(self, arrays: dict[str, np.ndarray]) -> dict[str, int]:
        held = {}
        for name, array in arrays.items():
            room = np.full(array.nbytes + 64, 0xA5, np.uint8)
            begin = -room.ctypes.data % 32
            room[begin : begin + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
            self._held.append(room)
            held[name] = room.ctypes.data + begin
        return held

    def _module(self) -> Any:
        module = object.__new__(cuda_launch.KernelModule)
        module._handle, module._kernels = ctypes.c_void_p(1), {}
        return module

    def masks(self, masks: Any) -> cuda_masks.CudaMasks:
        made = object.__new__(cuda_masks.CudaMasks)
        source = cuda_masks.MaskLists(
            num_nodes=masks.num_nodes, num_far=len(masks.arrays.far_entries), vocab_size=masks.vocab_size,
            hop_bits=masks.set.hop_bits,
        )  # fmt: skip
        made._set_up(source, self._module(), self._num_multiprocessors, self._arch)
        made._place(masks.set, masks.eos)
        return made

    def trie_steps(self, steps: Any) -> cuda_trie_steps.CudaTrieSteps:
        trie = steps._trie
        names = {"louds": "louds", "lines": "lines", "wide": "wide", "label_low": "label_low",
                 "high_flags": "high_flags", "high_bits": "label_high"}  # fmt: skip
        at = self._upload({name: np.asarray(getattr(trie, stored)) for name, stored in names.items()})
        view = np.zeros((), TRIE)
        for name, address in at.items():
            view[name] = address if np.asarray(getattr(trie, names[name])).size else 0
        for name in ("num_nodes", "num_keys", "high_width"):
            view[name] = getattr(trie, name)
        made = object.__new__(cuda_trie_steps.CudaTrieSteps)
        source = cuda_trie_steps.TrieChildren(
            trie=cuda_trie_steps.TrieStruct.from_buffer_copy(view.tobytes()), vocab_size=steps.vocab_size
        )
        made._set_up(source, self._module(), self._num_multiprocessors, self._arch)
        made._place(trie, steps._native, steps.eos)
        return made


MINUS_INFINITY = {"float32": 0xFF800000, "float16": 0xFC00, "bfloat16": 0xFF80}
TYPESTRS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<V2"}
