"""A synthetic trie of a billion nodes, laid out on the GPU in seconds; for gpu_search.py. Needs CuPy."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from flashtrie_cli.engine.cpu import native
from flashtrie_cli.engine.cuda import CudaEngine
from flashtrie_cli.engine.cuda_loader import open_device

VOCABULARY = 2_200_000
HIGH_WIDTH = 6
SHARES = (0.001, 0.06, 0.25, 0.3, 0.2, 0.12, 0.05, 0.019)  # of the nodes, by level from 1

_BITS = r"""
extern "C" __global__ void set_bits(const long long* at, long long count, unsigned* words) {
  long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i < count) atomicOr(&words[at[i] >> 5], 1u << (at[i] & 31));
}
extern "C" __global__ void pack(const long long* rank, const unsigned* label, long long count, unsigned* words) {
  long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= count || label[i] >> 16 == 0) return;
  long long bit = rank[i] * 6;
  unsigned high = label[i] >> 16;
  atomicOr(&words[bit >> 5], high << (bit & 31));
  if ((bit & 31) > 26) atomicOr(&words[(bit >> 5) + 1], high >> (32 - (bit & 31)));
}
"""


def _fan_outs(cp: Any, parents: int, children: int, rng: Any) -> Any:
    """Heavy-tailed, some zero, the sum exactly ``children``."""
    weight = rng.random(parents, dtype=cp.float32)
    weight = cp.minimum((weight + 1e-7) ** -0.9, 1e5) * (rng.random(parents, dtype=cp.float32) < 0.5)
    edges = cp.cumsum(weight, dtype=cp.float64)
    edges = cp.rint(edges * (children / edges[-1])).astype(cp.int64)
    return cp.diff(edges, prepend=cp.zeros(1, cp.int64))


def large_trie(
    num_nodes: int, num_queries: int = 64
) -> tuple[CudaEngine, Any, tuple[np.ndarray, np.ndarray]]:
    """The engine, the native trie, and grids of 8 steps and 1000 slots, half of whose tokens lie on common keys."""
    import cupy as cp

    open_device(0)
    rng = cp.random.default_rng(7)
    module = cp.RawModule(code=_BITS)
    set_bits, pack = module.get_function("set_bits"), module.get_function("pack")

    def run(function: Any, count: int, *arguments: Any) -> None:
        function((-(-count // 256),), (256,), arguments)

    sizes = [1, *(int(share * num_nodes) for share in SHARES)]
    sizes[3] += num_nodes - sum(sizes)
    fan_outs, labels = [], [cp.zeros(1, cp.uint32)]
    for parents, children in zip(sizes, [*sizes[1:], 0], strict=True):
        fans = cp.full(1, children, cp.int64) if parents == 1 else _fan_outs(cp, parents, children, rng)
        fan_outs.append(fans)
        if children == 0:
            break
        ends = cp.cumsum(fans)
        place = cp.arange(children, dtype=cp.int64)
        parent = cp.searchsorted(ends, place, side="right")
        place -= (ends - fans)[parent]
        fans = fans[parent]
        low = place * VOCABULARY // fans  # siblings take strata, so they ascend
        width = (place + 1) * VOCABULARY // fans - low
        labels.append(
            (low + (rng.random(children, dtype=cp.float32) * width).astype(cp.int64) % width).astype(
                cp.uint32
            )
        )
        del ends, place, parent, fans, low, width
    fans, label = cp.concatenate(fan_outs), cp.concatenate(labels)
    del fan_outs, labels
    count = len(fans)
    node = cp.arange(count, dtype=cp.int64)
    zeros = cp.cumsum(fans) + node
    spare = 4
    words = cp.zeros((2 * count - 1 + 63) // 64 * 2 + 2 * spare, cp.uint32)
    run(set_bits, count, zeros, count, words)
    louds = (~words).view(cp.uint64).get()
    del zeros, words
    is_leaf = fans == 0
    terminal = cp.zeros((count + 63) // 64 * 2, cp.uint32)
    ends_here = node[is_leaf | (rng.random(count, dtype=cp.float32) < 0.2)]
    ends_here = ends_here[ends_here > 0]
    run(set_bits, len(ends_here), ends_here, len(ends_here), terminal)
    is_high = label >> 16 != 0
    flags = cp.zeros((count + 63) // 64 * 2, cp.uint32)
    high_nodes = node[is_high]
    run(set_bits, len(high_nodes), high_nodes, len(high_nodes), flags)
    rank = cp.cumsum(is_high, dtype=cp.int64) - is_high
    packed = cp.zeros((len(high_nodes) * HIGH_WIDTH + 63) // 64 * 2 + 2 * spare, cp.uint32)
    run(pack, count, rank, label, count, packed)
    arrays = [
        terminal.view(cp.uint64).get(),
        (label & 0xFFFF).astype(cp.uint16).get(),
        flags.view(cp.uint64).get(),
    ]
    arrays.append(packed.view(cp.uint64).get())
    del fans, label, node, is_leaf, terminal, ends_here, is_high, flags, high_nodes, rank, packed
    cp.get_default_memory_pool().free_all_blocks()
    module_ = native()
    trie = module_.Trie(
        louds=louds, terminal=arrays[0], label_low=arrays[1], high_flags=arrays[2], label_high=arrays[3],
        high_width=HIGH_WIDTH, num_nodes=count, num_threads=os.cpu_count() or 1,
    )  # fmt: skip
    engine = CudaEngine.__new__(CudaEngine)  # there is no file behind this trie
    engine._native, engine.trie, engine.threads = module_, trie, os.cpu_count() or 1
    engine.device = open_device(0)
    engine._upload()
    return engine, trie, _grids(trie, module_, num_queries)


def _grids(trie: Any, module: Any, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    steps, slots = 8, 1000
    tokens = rng.integers(0, VOCABULARY, (num_queries, steps, slots)).astype(np.uint32)
    for query in range(num_queries):
        ids = np.sort(rng.integers(0, int(trie.num_keys), 2000)).astype(np.uint32)
        _, flat, offsets = module.key_tokens(trie, ids)
        for step in range(steps):
            at = offsets[:-1][np.diff(offsets) > step] + step
            own = np.unique(flat[at])
            rng.shuffle(own)
            own = own[: slots // 2]
            tokens[query, step, : len(own)] = own
    logprobs = np.sort(-rng.gamma(4.0, 2.0, tokens.shape).astype(np.float32), axis=2)[:, :, ::-1]
    return tokens, np.ascontiguousarray(logprobs)
