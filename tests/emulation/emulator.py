"""The search kernels on the emulated machine, called from Python with numpy arrays."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_layout
from flashtrie_cli.engine.cuda_layout import BATCH, PACKED, TRIE, Shape, plan_launch
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults

HERE = Path(__file__).resolve().parent


def build(folder: Path, *options: str) -> ctypes.CDLL:
    """Compile the kernels for the emulated machine."""
    target = folder / "emulated_search.so"
    source = HERE / "emulated_search.cpp"
    command = [
        "g++",
        "-std=c++20",
        "-O2",
        "-g",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
    ]
    command += [*options, "-fPIC", "-shared", f"-I{HERE}", f"-I{HERE.parent.parent / 'cuda'}"]
    subprocess.run([*command, "-o", str(target), str(source)], check=True)
    library = ctypes.CDLL(str(target))
    library.search_batch_size.restype = ctypes.c_uint64
    return library


def _address(array: np.ndarray[Any, Any] | None) -> int:
    return 0 if array is None or array.size == 0 else array.ctypes.data


def large_of(batch: Any) -> int:
    """Bytes of tables, frontier and pools."""
    pools = 20 * int(batch["candidate_places"]) + 18 * int(batch["result_places"])
    return (
        (8 << int(batch["log2_table"]))
        + 20 * (int(batch["num_slots"]) + 8)
        + 24 * int(batch["beam_capacity"])
        + pools
        + 512
    )


class EmulatedEngine:
    """Answers like the cuda engine; ``kernel`` and the sizes may be forced to reach rare paths."""

    def __init__(
        self, library: ctypes.CDLL, trie: Any, *, kernel: str | None = None, shared_bytes: int = 227 << 10
    ):
        self.library, self.kernel, self.shared_bytes = library, kernel, shared_bytes
        self.trie = trie
        self.places: tuple[int, int] | None = None
        self.scan_limit, self.table_fan_out = 1 << 14, 2
        self.pairs: tuple[int, int, int] | None = None
        self.shared_hits: int | None = None
        self.uses_root_table = True
        labels = np.zeros(
            (len(trie.label_low) + 15) // 8 * 8 + 8, np.uint16
        )  # aligned and padded like an upload
        offset = (-labels.ctypes.data // 2) % 8
        self._labels = labels[offset : offset + len(trie.label_low)]
        self._labels[:] = trie.label_low
        lines = np.zeros(len(trie.lines) + 32, np.uint8)
        self._lines = lines[(-lines.ctypes.data) % 32 :][: len(trie.lines)]
        self._lines[:] = trie.lines
        self._keep = (
            np.asarray(trie.louds),
            np.asarray(trie.wide),
            np.asarray(trie.high_flags),
            np.asarray(trie.label_high),
        )
        view = np.zeros((), TRIE)
        for name, array in zip(("louds", "wide", "high_flags", "high_bits"), self._keep, strict=True):
            view[name] = _address(array)
        view["label_low"], view["lines"] = _address(self._labels), _address(self._lines)
        view["num_nodes"], view["num_keys"], view["high_width"] = (
            trie.num_nodes,
            trie.num_keys,
            trie.high_width,
        )
        self.view = view
        self._tags = np.zeros(trie.num_nodes + 8, np.uint32)
        self._heads = np.zeros((trie.num_nodes + 63) // 64, np.uint64)
        library.emulate_tags(
            *(ctypes.c_void_p(array.ctypes.data) for array in (self.view, self._tags, self._heads))
        )
        self.root_last = cuda_layout.root_end(np.asarray(trie.louds))

    def _root_table(self, batch: Any) -> Any:
        if not self.uses_root_table or self.root_last <= 1:
            return None
        shift, places = 2, 512
        table = np.zeros(places + 1, np.uint32)
        view = self.view
        self.library.emulate_root_table(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_uint32(self.root_last),
            ctypes.c_int(shift),
            ctypes.c_uint32(places),
            ctypes.c_void_p(table.ctypes.data),
        )
        batch["root_table"], batch["root_shift"], batch["root_places"] = table.ctypes.data, shift, places
        return table

    def _child_table(self, batch: Any, fan_out: int) -> Any:
        """So full that many a bucket overflows."""
        view, children = ctypes.c_void_p(self.view.ctypes.data), batch["children"]
        count = self.library.emulate_count_children(view, ctypes.c_uint32(fan_out))
        children["num_buckets"], children["fan_out"] = count // 6 + 1, fan_out
        table = np.zeros((8 * (count // 6 + 1) + 8), np.uint32)
        table = table[-table.ctypes.data // 4 % 8 :][: 8 * (count // 6 + 1)]
        children["places"] = table.ctypes.data
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (children, table))
        self.library.emulate_put_in_table(view, *pointers)
        return table

    def differences_of_table(self, fan_out: int, tokens: np.ndarray[Any, Any]) -> int:
        batch = np.zeros((), BATCH)
        table = self._child_table(batch, fan_out)
        children = batch["children"]
        assert (table.reshape(-1, 8) != 0).all(axis=1).any(), "no bucket is full"
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (self.view, self._tags, children, tokens))
        return int(self.library.differences_of_table(*pointers, ctypes.c_uint32(len(tokens))))

    def search(
        self,
        tokens: Any,
        logprobs: Any,
        plan: SearchPlan,
        *,
        num_blocks: int | None = None,
        seed: int = 0,
        beam_widths: Any = None,
        step_counts: Any = None,
    ) -> SearchResults:
        num_queries, num_steps, num_slots = tokens.shape
        depth = min(num_steps, self.trie.depth)
        launch = plan_launch(
            Shape(plan.beam_width, plan.result_limit, num_slots, depth),
            max(num_queries, 1),
            arch=90,
            num_multiprocessors=2,
            shared_bytes=self.shared_bytes,
            kernel=self.kernel or "search_block",
        )
        batch = np.zeros((), BATCH)
        launch.fill(batch)
        if self.places:
            batch["candidate_places"], batch["result_places"] = self.places
        if self.pairs:
            batch["heavy_groups"], batch["bar_slot"], batch["ask_cost"] = self.pairs
        if self.shared_hits is not None:
            batch["shared_hits"] = self.shared_hits
        batch["trie"] = self.view
        batch["tags"], batch["heads"] = self._tags.ctypes.data, self._heads.ctypes.data
        factors = plan.length_factors(num_steps)
        search = batch["search"]
        search["token_threshold"], search["sequence_threshold"] = (
            plan.token_threshold,
            plan.sequence_threshold,
        )
        search["beam_width"], search["num_results"], search["padding"] = (
            plan.beam_width,
            plan.result_limit,
            plan.padding,
        )
        search["eos"] = cuda_layout.NO_TOKEN if plan.eos is None else plan.eos
        search["length_factors"] = factors.ctypes.data
        table = self._root_table(batch)
        batch["root_last"], batch["scan_limit"] = self.root_last, self.scan_limit
        children = self._child_table(batch, min(self.table_fan_out, self.scan_limit))
        batch["num_queries"], batch["num_steps"], batch["num_slots"], batch["max_depth"] = (
            *tokens.shape,
            depth,
        )
        batch["token_bytes"], batch["logprob_bytes"] = tokens.dtype.itemsize, logprobs.dtype.itemsize
        groups = (num_blocks or launch.blocks_per_group) // launch.blocks_per_group
        hits = num_queries * launch.result_capacity
        batch["workspace_bytes"] = large_of(batch) if launch.workspace_bytes else 0
        arrays: dict[str, Any] = {
            "counters": np.zeros(2, np.uint32),
            "history": np.zeros(launch.history_words * groups, np.uint32),
            "workspace": np.zeros((large_of(batch) if launch.workspace_bytes else 0) * groups, np.uint8),
            **{
                name: np.full(num_queries, 0xABABABAB, np.uint32)
                for name in ("num_hits", "num_tokens", "bad_slots")
            },
            **{name: np.zeros(hits, np.uint32) for name in ("key_ids", "token_ends")},
            **{name: np.zeros(hits, np.float32) for name in ("scores", "normalised_scores")},
            "hit_tokens": np.zeros(hits * depth, np.uint32),
            "tokens": np.ascontiguousarray(tokens),
            "logprobs": np.ascontiguousarray(logprobs),
            "beam_widths": beam_widths,
            "step_counts": step_counts,
        }
        for name, array in arrays.items():
            batch[name] = _address(array)
        fixed, large = ctypes.c_uint64(), ctypes.c_uint64()
        pointer = ctypes.c_void_p(batch.ctypes.data)
        self.library.search_sizes(
            pointer, launch.blocks_per_group, launch.num_threads, ctypes.byref(fixed), ctypes.byref(large)
        )
        needed = fixed.value + (0 if launch.workspace_bytes else large.value)
        if not self.places:
            assert needed == launch.shared_bytes, (needed, launch)
        code = self.library.emulate_search(
            pointer,
            launch.kernel.encode(),
            groups * launch.blocks_per_group,
            launch.num_threads,
            ctypes.c_size_t(needed),
            seed,
        )
        assert code == 0, f"emulation ended with {code}"
        assert not arrays["counters"].any()
        self.bad_slots = arrays["bad_slots"]
        del table, children
        return self._pack(batch, arrays, seed)

    def _pack(self, batch: Any, arrays: dict[str, Any], seed: int) -> SearchResults:
        num_queries = int(batch["num_queries"])
        hits, tokens = int(arrays["num_hits"].sum()), int(arrays["num_tokens"].sum())
        out = (
            np.zeros(num_queries + 1, np.int64), np.zeros(hits, np.uint32), np.zeros(hits, np.float32),
            np.zeros(hits, np.float32), np.zeros(hits + 1, np.int64), np.zeros(tokens, np.uint32),
        )  # fmt: skip
        packed, totals = np.zeros((), PACKED), np.zeros(6, np.uint64)
        bad_slots = np.zeros(num_queries, np.uint32)
        for name, array in zip(PACKED.names or (), out, strict=False):
            packed[name] = array.ctypes.data + (8 if name.endswith("_offsets") else 0)  # which begin with a 0
        for at, name in enumerate(("before", "after", "told")):
            packed[name] = totals.ctypes.data + 16 * at
        packed["begin"] = packed["before"]
        packed["bad_slots"] = bad_slots.ctypes.data
        code = self.library.emulate_pack(
            ctypes.c_void_p(batch.ctypes.data), ctypes.c_void_p(packed.ctypes.data), 64, seed
        )
        assert code == 0
        return SearchResults(*out)
