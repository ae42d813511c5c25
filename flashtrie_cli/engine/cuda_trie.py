"""The resident trie on a GPU: the arrays of the native trie, uploaded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import BUCKET_PLACES, CHILD_TABLE, TABLE_FAN_OUT, TRIE, root_end
from flashtrie_cli.engine.cuda_loader import Device, load_kernels
from flashtrie_cli.errors import EngineUnavailable

_MAX_ROOT_PLACES = 1 << 22
_MIN_ROOT_FAN_OUT = 4096
"""A smaller root is scanned like any other node."""

_BUCKET_LOAD = 5
"""Children a bucket of the child table, of the eight that it has room for: one child in forty finds its bucket full."""

_CHUNK_BYTES = 64 << 20


class DeviceTrie:
    """``trie``: the native trie (``CpuEngine.trie``). ``view`` is what the kernels take; ``size`` in bytes.

    ``for_search``: with the tables that only the search kernels want.
    """

    def __init__(self, trie: Any, device: Device, *, for_search: bool = True):
        self.device = device
        self.depth = int(trie.depth)
        self.num_nodes = int(trie.num_nodes)
        sizes = np.diff(np.asarray(trie.level_starts)[:4].astype(np.int64))
        self.fan_out = float(sizes[2] / sizes[1]) if len(sizes) > 2 else 0.0
        """Mean fan-out of the root's children: what the second step of a search has to scan."""
        arrays = {
            "louds": np.asarray(trie.louds),
            "lines": np.asarray(trie.lines),
            "wide": np.asarray(trie.wide),
            "label_low": np.asarray(trie.label_low),
            "high_flags": np.asarray(trie.high_flags),
            "high_bits": np.asarray(trie.label_high),
        }
        num_lines = -(-self.num_nodes // 64)
        needed = sum(array.nbytes for array in arrays.values())
        self._check_room(needed + 4 * self.num_nodes + 8 * num_lines)
        self._memory: list[Any] = []
        view = np.zeros((), TRIE)
        for name, array in arrays.items():
            view[name] = self._upload(array) if array.size else 0
        view["num_nodes"], view["num_keys"], view["high_width"] = (
            trie.num_nodes,
            trie.num_keys,
            trie.high_width,
        )
        self.view: npt.NDArray[Any] = view
        self.tags, self.heads = self._allocate(4 * self.num_nodes + 64), self._allocate(8 * num_lines)
        self._tag_nodes()
        self.root_last = root_end(arrays["louds"])
        self.children: npt.NDArray[Any] = np.zeros((), CHILD_TABLE)
        self.root_table, self.root_shift, self.root_places = 0, 0, 0
        if for_search:
            self._build_child_table()
            if self.root_last > _MIN_ROOT_FAN_OUT:
                self._build_root_table(trie)
        self.size = sum(self._sizes)

    def _check_room(self, needed: int) -> None:
        import pycuda.driver as cuda

        free, total = cuda.mem_get_info()
        if needed > free:
            raise EngineUnavailable(
                f"the index needs {needed >> 20} MiB on the GPU, {free >> 20} of {total >> 20} MiB are free",
                hint="another --device, or --engine cpu",
            )

    def _allocate(self, num_bytes: int) -> int:
        import pycuda.driver as cuda

        try:
            memory = cuda.mem_alloc(num_bytes)
        except cuda.MemoryError:
            raise EngineUnavailable(
                f"the GPU has no {num_bytes >> 20} MiB left for the index",
                hint="another --device, or --engine cpu",
            ) from None
        self._memory.append(memory)
        self._sizes = [*getattr(self, "_sizes", []), num_bytes]
        return int(memory)

    def _upload(self, array: npt.NDArray[Any]) -> int:
        """Copies in pieces, so that a mapped file need not be in memory as a whole; padded for 16-byte reads."""
        import pycuda.driver as cuda

        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self._allocate(raw.nbytes + 64)
        cuda.memset_d8(address + raw.nbytes, 0xFF, 64)
        for at in range(0, raw.nbytes, _CHUNK_BYTES):
            cuda.memcpy_htod(address + at, raw[at : at + _CHUNK_BYTES])
        return address

    def _tag_nodes(self) -> None:
        """What the search reads of a matching node, taken from the trie once (``cuda/flashtrie/node_tags.cuh``)."""
        function = load_kernels("search", self.device).get_function("tag_nodes")
        function.prepare([self.view.dtype, np.uint64, np.uint64])
        function.prepared_call(
            (-(-self.num_nodes // 256), 1), (256, 1, 1), self.view.tobytes(), self.tags, self.heads
        )

    def _build_child_table(self) -> None:
        """Of the children of wide nodes (``cuda/flashtrie/child_table.cuh``)."""
        import pycuda.driver as cuda

        module = load_kernels("search", self.device)
        blocks = (-(-self.num_nodes // 256), 1)
        counter = cuda.mem_alloc(4)
        cuda.memset_d8(int(counter), 0, 4)
        count = module.get_function("count_children")
        count.prepare([self.view.dtype, np.uint32, np.uint64])
        count.prepared_call(blocks, (256, 1, 1), self.view.tobytes(), TABLE_FAN_OUT, int(counter))
        num_children = np.zeros(1, np.uint32)
        cuda.memcpy_dtoh(num_children, int(counter))
        num_buckets = int(num_children[0]) // _BUCKET_LOAD + 1
        num_bytes = 4 * BUCKET_PLACES * num_buckets
        places = self._allocate(num_bytes)
        cuda.memset_d32(places, 0, num_bytes // 4)
        self.children["places"], self.children["num_buckets"] = places, num_buckets
        self.children["fan_out"] = TABLE_FAN_OUT
        put = module.get_function("put_in_table")
        put.prepare([self.view.dtype, self.children.dtype, np.uint64])
        put.prepared_call(blocks, (256, 1, 1), self.view.tobytes(), self.children.tobytes(), places)

    def _build_root_table(self, trie: Any) -> None:
        largest = self._root_label(trie)
        shift = max((largest + 1).bit_length() - _MAX_ROOT_PLACES.bit_length() + 1, 0)
        places = (largest >> shift) + 1
        table = self._allocate(4 * (places + 1))
        function = load_kernels("search", self.device).get_function("build_root_table")
        function.prepare([self.view.dtype, np.uint32, np.int32, np.uint32, np.uint64])
        function.prepared_call(
            (-(-(places + 1) // 256), 1),
            (256, 1, 1),
            self.view.tobytes(),
            self.root_last,
            shift,
            places,
            table,
        )
        self.device.context.synchronize()
        self.root_table, self.root_shift, self.root_places = table, shift, places

    def _root_label(self, trie: Any) -> int:
        """The largest label below the root."""
        node, width = self.root_last - 1, int(trie.high_width)
        low = int(np.asarray(trie.label_low)[node])
        if width == 0:
            return low
        flags = int(np.asarray(trie.high_flags)[node >> 6])
        if not flags >> (node & 63) & 1:
            return low
        line = np.asarray(trie.lines)[32 * (node >> 6) : 32 * (node >> 6) + 32].view(np.uint32)
        rank = int(line[7]) + (flags & ((1 << (node & 63)) - 1)).bit_count()
        words = np.asarray(trie.label_high)[rank * width >> 6 :][:2]
        both = int(words[0]) | int(words[1]) << 64
        return low | (both >> (rank * width & 63) & ((1 << width) - 1)) << 16
