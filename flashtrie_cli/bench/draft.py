"""Timings of draft-tree builds: the CPU engine, the CUDA engine, and the plain torch version beside them.

GPU inputs rotate among buffers that together exceed the L2 cache several times, so that every build finds its logits
in device memory ("cold"); with one buffer, small batches find them in L2 ("warm").
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashtrie_cli.query.draft import build_draft_trees, draft_workspace_size, prepare_draft_trees

BLOCK_SIZE = 16
TOP_K = 8
COLD_BYTES = 400 << 20
"""Bytes of inputs to rotate through: several times the 60 MB of an H200's L2."""
MIN_LAUNCHES = 24


@dataclass(frozen=True)
class DraftShape:
    """One size of the problem."""

    batch_size: int
    vocab_size: int
    num_nodes: int
    logit_type: str = "float32"
    block_size: int = BLOCK_SIZE
    top_k: int = TOP_K

    @property
    def row_bytes(self) -> int:
        return self.vocab_size * (4 if self.logit_type == "float32" else 2)

    @property
    def read_bytes(self) -> int:
        """Bytes of logits that a build must read."""
        return self.batch_size * (self.block_size - 1) * self.row_bytes


@dataclass(frozen=True)
class Timing:
    """Microseconds a build, one sample a repetition."""

    shape: DraftShape
    method: str
    samples_us: list[float] = field(default_factory=list)


def time_host(shape: DraftShape, engine: str, *, threads: int = 0, repeats: int = 7, seed: int = 0) -> Timing:
    """Wall-clock of one build from numpy arrays."""
    rng = np.random.default_rng(seed)
    sizes = (shape.batch_size, shape.block_size, shape.vocab_size)
    logits = (rng.standard_normal(sizes, dtype=np.float32) * 3).astype(np.float32)
    kind = None
    if shape.logit_type == "float16":
        logits = logits.astype(np.float16)
    elif shape.logit_type == "bfloat16":
        logits, kind = (logits.view(np.uint32) >> np.uint32(16)).astype(np.uint16), "bfloat16"
    roots = np.zeros(shape.batch_size, np.int32)

    def run() -> None:
        build_draft_trees(
            logits,
            roots,
            roots,
            shape.num_nodes,
            shape.top_k,
            engine=engine,
            threads=threads,
            logit_type=kind,
        )

    return Timing(shape, engine, _wall_clock(run, repeats))


def _wall_clock(run: Callable[[], Any], repeats: int) -> list[float]:
    run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


class DeviceInputs:
    """Random logits on the GPU, in as many buffers as ``total_bytes`` takes, shared by several timings."""

    def __init__(self, shape: DraftShape, *, total_bytes: int = COLD_BYTES, seed: int = 0):
        import torch

        self.torch, self.shape = torch, shape
        one = shape.batch_size * shape.block_size * shape.row_bytes
        generator = torch.Generator(device="cuda").manual_seed(seed)
        sizes = (shape.batch_size, shape.block_size, shape.vocab_size)
        dtype = getattr(torch, shape.logit_type)
        self.logits = []
        for _ in range(max(1, min(-(-total_bytes // one), 64))):
            values = torch.randn(sizes, generator=generator, device="cuda", dtype=torch.float32)
            self.logits.append((values * 3).to(dtype))
        self.roots = torch.zeros(shape.batch_size, dtype=torch.int32, device="cuda")

    def prepare(self, num_nodes: int) -> list[Any]:
        """A prepared build for each buffer, one workspace for all (they run in one stream)."""
        shape = self.shape
        size = draft_workspace_size(
            shape.batch_size, shape.block_size, num_nodes, shape.vocab_size, shape.top_k
        )
        workspace = self.torch.zeros(size, dtype=self.torch.uint8, device="cuda")
        return [
            prepare_draft_trees(logits, self.roots, self.roots, num_nodes, shape.top_k, workspace=workspace)
            for logits in self.logits
        ]

    def time_graph(self, num_nodes: int, *, repeats: int = 9) -> list[float]:
        """Microseconds a build, launched from a CUDA graph of many."""
        torch, drafts = self.torch, self.prepare(num_nodes)
        rounds = -(-MIN_LAUNCHES // len(drafts))
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        for draft in drafts:
            draft(torch.cuda.current_stream())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for draft in drafts:
                    draft(stream)
        return [us / (rounds * len(drafts)) for us in self._events(graph.replay, repeats)]

    def time_eager(self, num_nodes: int, *, repeats: int = 40) -> list[float]:
        """Wall-clock microseconds from a prepared call until its outputs are there."""
        torch, drafts = self.torch, self.prepare(num_nodes)
        calls = iter(range(10**9))

        def run() -> None:
            drafts[next(calls) % len(drafts)](torch.cuda.current_stream())
            torch.cuda.synchronize()

        return _wall_clock(run, repeats)

    def time_read(self, *, repeats: int = 9) -> list[float]:
        """Microseconds that torch's sum takes over as many bytes as a build reads, in float32."""
        torch, shape = self.torch, self.shape
        count = shape.read_bytes // 4
        flat = [logits.view(torch.float32).view(-1)[:count] for logits in self.logits]
        rounds = -(-MIN_LAUNCHES // len(flat))
        sums = torch.empty((), device="cuda")

        def run() -> None:
            for _ in range(rounds):
                for values in flat:
                    torch.sum(values, dim=0, out=sums)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return [us / (rounds * len(flat)) for us in self._events(graph.replay, repeats)]

    def time_plain_torch(self, num_nodes: int, *, repeats: int = 15) -> list[float]:
        """Wall-clock microseconds of the same tree from torch's own operations and a heap in Python."""
        calls = iter(range(10**9))

        def run() -> None:
            logits = self.logits[next(calls) % len(self.logits)]
            plain_torch(self.torch, logits, num_nodes, self.shape.top_k)
            self.torch.cuda.synchronize()

        return _wall_clock(run, repeats)

    def _events(self, run: Callable[[], Any], repeats: int) -> list[float]:
        torch = self.torch
        run()
        torch.cuda.synchronize()
        samples = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
        return samples


def plain_torch(torch: Any, logits: Any, num_nodes: int, top_k: int) -> Any:
    """What one writes first: log-sum-exp and top-k on the device, a heap on the host, tokens and mask copied back."""
    rows = logits[:, 1:].float()
    values, ids = torch.topk(rows, top_k, dim=-1)
    log_probs = (values - torch.logsumexp(rows, dim=-1, keepdim=True)).cpu().numpy()
    token_ids = ids.cpu().numpy()
    batch_size, depths = log_probs.shape[:2]
    tokens = np.zeros((batch_size, num_nodes), np.int32)
    depth_of = np.zeros((batch_size, num_nodes), np.int32)
    mask = np.zeros((batch_size, num_nodes, num_nodes), np.bool_)
    for batch in range(batch_size):
        mask[batch, 0, 0] = True
        scores = log_probs[batch].tolist()
        heap = [(-scores[0][0], 0, 0, 0)]
        for node in range(1, num_nodes):
            if not heap:
                break
            negated, parent, depth, rank = heapq.heappop(heap)
            tokens[batch, node] = token_ids[batch, depth, rank]
            depth_of[batch, node] = depth + 1
            mask[batch, node] = mask[batch, parent]
            mask[batch, node, node] = True
            if rank + 1 < top_k:
                better, worse = scores[depth][rank], scores[depth][rank + 1]
                heapq.heappush(heap, (negated + better - worse, parent, depth, rank + 1))
            if depth + 1 < depths:
                heapq.heappush(heap, (negated - scores[depth + 1][0], node, depth + 1, 0))
    return [torch.from_numpy(array).cuda() for array in (tokens, depth_of, mask)]
