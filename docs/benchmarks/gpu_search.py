"""The figures of docs/benchmarks/gpu_search.md: beam search on a GPU, checked against the cpu engine, then timed.

usage: gpu_search.py LOAD.npz [--titles INDEX GRIDS.npz] [--command QUERIES] [--large NODES] [--json OUT]
       (from the checkout, with PyCUDA; --large needs CuPy)

LOAD.npz holds keys (`keys_flat` uint32, `keys_off`) and grids (`tok` uint32, `lp` float32 [queries, steps, slots]).
--titles compares every setting with the cpu engine on another index and its grids, and times it. --command times the
whole process of `flashtrie search` over that many queries. --large makes a trie of so many nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli import BuildOptions, Index, SearchPlan, build_index
from flashtrie_cli.engine import cuda_sources
from flashtrie_cli.engine.cuda import CudaEngine
from flashtrie_cli.engine.cuda_session import SearchSession
from flashtrie_cli.keys.batch import KeyBatch

WIDTHS = (100, 300, 600, 1000)
BATCHES = (1, 8, 32, 128, 512, 1024, 2048, 4096)

PHASES = ("begin", "expand", "row", "wait", "prune", "cut", "survive", "finish")
started = time.time()
results: dict[str, Any] = {}


def say(name: str, value: Any) -> None:
    results[name] = value
    print(f"[{time.time() - started:6.1f}] {name}: {value}", flush=True)


def spread(samples: list[float]) -> dict[str, float]:
    names = ("mean", "p50", "p95", "p99")
    values = (np.mean(samples), *np.percentile(samples, [50, 95, 99]))
    return {name: round(float(value), 1) for name, value in zip(names, values, strict=True)}


def cut(
    grids: tuple[np.ndarray, np.ndarray], slots: int, queries: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = grids
    return tuple(np.ascontiguousarray(grid[:queries, :, :slots]) for grid in (tokens, logprobs))  # type: ignore[return-value]


def kernel_times(
    engine: CudaEngine,
    grids: tuple[np.ndarray, np.ndarray],
    width: int,
    kernel: str | None = None,
    module: Any = None,
) -> Any:
    """Microseconds of each query searched alone, by events around its launch; with ``module``, cycles by phase."""
    import pycuda.driver as cuda

    tokens, logprobs = cut(grids, width)
    queries, steps, slots = tokens.shape
    session = SearchSession(
        engine.device_trie, 1, steps, slots, SearchPlan(beam_width=width), kernel=kernel, module=module
    )
    to_tokens, to_logprobs = cuda.to_device(tokens), cuda.to_device(logprobs)
    phases = cuda.to_device(np.zeros(len(PHASES), np.int64))
    if module:
        session.set_phases(int(phases))
    events = [(cuda.Event(), cuda.Event()) for _ in range(queries)]
    samples: list[float] = []
    rounds = 4
    for turn in range(rounds):
        for query, (begin, end) in enumerate(events):
            offset = query * steps * slots * 4
            begin.record()
            session.launch(int(to_tokens) + offset, int(to_logprobs) + offset, 1)
            end.record()
        engine.device.context.synchronize()
        if turn > 0:
            samples += [end.time_since(begin) * 1e3 for begin, end in events]
    if module:
        cycles = np.zeros(len(PHASES), np.int64)
        cuda.memcpy_dtoh(cycles, phases)
        return {name: int(c) for name, c in zip(PHASES, cycles // (rounds * queries), strict=True)}
    return spread(samples)


def kernel_rate(engine: CudaEngine, grids: tuple[np.ndarray, np.ndarray], width: int, batch: int) -> int:
    """Queries a second of the kernel alone, grids on the device, others at every launch where there are enough."""
    import pycuda.driver as cuda

    tokens, logprobs = cut(grids, width)
    times = -(-max(batch, 1024) // len(tokens))
    tokens, logprobs = np.tile(tokens, (times, 1, 1)), np.tile(logprobs, (times, 1, 1))
    session = SearchSession(engine.device_trie, batch, *tokens.shape[1:], SearchPlan(beam_width=width))
    to_tokens, to_logprobs = cuda.to_device(tokens), cuda.to_device(logprobs)
    size = tokens[0].nbytes
    best = 0.0
    for _ in range(4):
        begin, end = cuda.Event(), cuda.Event()
        launches = max(min(len(tokens) // batch, 64), 1)
        begin.record()
        for at in range(launches):
            offset = at * batch * size
            session.launch(int(to_tokens) + offset, int(to_logprobs) + offset, batch)
        end.record()
        end.synchronize()
        best = max(best, launches * batch / end.time_since(begin) * 1e3)
    return int(best)


def host_times(engine: CudaEngine, grids: tuple[np.ndarray, np.ndarray], width: int) -> dict[str, float]:
    """Microseconds from grids in host memory to results in host memory, one query at a time."""
    tokens, logprobs = cut(grids, width)
    plan = SearchPlan(beam_width=width)
    samples: list[float] = []
    for turn in range(4):
        for query in range(len(tokens)):
            begin = time.perf_counter()
            engine.search(tokens[query : query + 1], logprobs[query : query + 1], plan)
            if turn > 0:
                samples.append((time.perf_counter() - begin) * 1e6)
    return spread(samples)


def pinned_batch(
    engine: CudaEngine, grids: tuple[np.ndarray, np.ndarray], width: int, queries: int
) -> tuple[np.ndarray, np.ndarray]:
    tokens, logprobs = cut(grids, width)
    pinned = engine.pinned_grids(queries, *tokens.shape[1:])
    for at in range(0, queries, len(tokens)):
        count = min(len(tokens), queries - at)
        pinned[0][at : at + count], pinned[1][at : at + count] = tokens[:count], logprobs[:count]
    return pinned


def kept_ms(
    engine: CudaEngine, grids: tuple[np.ndarray, np.ndarray], width: int, queries: int
) -> list[float]:
    """Milliseconds of each of six searches from ordinary memory, whose answers are all kept."""
    tokens, logprobs = map(np.array, pinned_batch(engine, grids, width, queries))
    kept, samples = [], []
    for _ in range(6):
        begin = time.perf_counter()
        kept.append(engine.search(tokens, logprobs, SearchPlan(beam_width=width)))
        samples.append(round((time.perf_counter() - begin) * 1e3, 2))
    return samples


def host_rate(
    engine: CudaEngine,
    grids: tuple[np.ndarray, np.ndarray],
    width: int,
    queries: int,
    *,
    is_pinned: bool = True,
) -> int:
    """Queries a second from host memory to results in host memory, which are let go."""
    batch = pinned_batch(engine, grids, width, queries)
    if not is_pinned:
        batch = tuple(map(np.array, batch))  # type: ignore[assignment]
    plan = SearchPlan(beam_width=width)
    best = 0.0
    for _ in range(4):
        begin = time.perf_counter()
        engine.search(*batch, plan)
        best = max(best, queries / (time.perf_counter() - begin))
    return int(best)


def open_load(path: str, folder: Path) -> tuple[CudaEngine, Index, tuple[np.ndarray, np.ndarray]]:
    data = np.load(path)
    index_path = str(folder / "load.ft")
    if not os.path.exists(index_path):
        batch = KeyBatch(data["keys_flat"], data["keys_off"].astype(np.int64), None, None, path)
        options = BuildOptions(memory=8 << 30, threads=os.cpu_count() or 1, codec="raw", force=True)
        build_index([batch], index_path, options=options)
    index = Index.open(index_path, engine="cpu", threads=os.cpu_count() or 1)
    engine = CudaEngine(index.stored, threads=os.cpu_count() or 1)
    return engine, index, (data["tok"], data["lp"])


def measure(name: str, engine: CudaEngine, index: Index | None, grids: tuple[np.ndarray, np.ndarray]) -> None:
    import pycuda.driver as cuda

    for width in (100, 1000):
        if index is not None:
            same = same_bytes(engine, index, cut(grids, width, 64), SearchPlan(beam_width=width))
            say(f"{name}: same bytes as cpu, {width}", same)
    for width in WIDTHS:
        say(f"{name}: kernel us, {width}", kernel_times(engine, grids, width))
        say(f"{name}: host to host us, {width}", host_times(engine, grids, width))
    for width in (100, 1000):
        rates = {batch: kernel_rate(engine, grids, width, batch) for batch in BATCHES}
        say(f"{name}: kernel queries/s by batch, {width}", rates)
    for width in (300, 600):
        say(f"{name}: kernel queries/s by batch, {width}", {4096: kernel_rate(engine, grids, width, 4096)})
    for width in (100, 1000):
        for is_pinned, memory in ((True, "pinned"), (False, "ordinary")):
            rates = {
                batch: host_rate(engine, grids, width, batch, is_pinned=is_pinned)
                for batch in (*BATCHES[1:], 16384)
            }
            say(f"{name}: host to host queries/s from {memory} memory by batch, {width}", rates)
        say(f"{name}: ms a batch of 4096, answers kept, {width}", kept_ms(engine, grids, width, 4096))
    nvcc = cuda_sources.find_nvcc()
    if nvcc is None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "phases.cubin"
        cuda_sources.compile_kernel("search", nvcc, engine.device.arch, target, ("-DFLASHTRIE_PHASES",))
        module = cuda.module_from_buffer(target.read_bytes())
    for width in (100, 1000):
        say(f"{name}: cycles by phase, {width}", kernel_times(engine, grids, width, module=module))


def same_bytes(
    engine: CudaEngine, index: Index, grids: tuple[np.ndarray, np.ndarray], plan: SearchPlan
) -> bool:
    return engine.search(*grids, plan).identical(index.engine.search(*grids, plan))


def measure_titles(index_path: str, grids_path: str) -> None:
    """All grids at several settings against the cpu engine, then times."""
    index = Index.open(index_path, engine="cpu", threads=os.cpu_count() or 1)
    engine = CudaEngine(index.stored, threads=os.cpu_count() or 1)
    with np.load(grids_path) as file:
        whole = file["tokens"].astype(np.uint32), file["logprobs"].astype(np.float32)
    differ, compared = [], 0
    eos = 50256
    for width in (10, 100, 256, 1000, 4000):
        for settings in ({}, {"eos": eos}, {"alpha": 5.0}, {"alpha": 0.0, "eos": eos},
                         {"token_threshold": -8.0, "sequence_threshold": -25.0}):  # fmt: skip
            compared += 1
            if not same_bytes(engine, index, whole, SearchPlan(beam_width=width, **settings)):
                differ.append((width, settings))
    say("titles: settings compared with cpu, and those that differ", [compared, differ])
    grids = whole[0][:256, :8], whole[1][:256, :8]
    for width in (100, 256):
        for kernel in (None, "search_alone"):
            say(
                f"titles: kernel us, {width}, {kernel or 'chosen'}",
                kernel_times(engine, grids, width, kernel),
            )
        say(f"titles: host to host us, {width}", host_times(engine, grids, width))
        say(f"titles: kernel queries/s, batch 4096, {width}", kernel_rate(engine, grids, width, 4096))


def measure_command(
    index_path: str, grids: tuple[np.ndarray, np.ndarray], queries: int, folder: Path
) -> None:
    """The whole process of `flashtrie search` from an uncompressed .npz in the page cache, and its parts."""
    tokens, logprobs = cut(grids, 100)
    times = -(-queries // len(tokens))
    path = folder / "queries.npz"
    np.savez(
        path,
        tokens=np.tile(tokens, (times, 1, 1))[:queries],
        logprobs=np.tile(logprobs, (times, 1, 1))[:queries],
    )
    for form in ("npz", "tsv"):
        command = [
            sys.executable,
            "-m",
            "flashtrie_cli",
            "search",
            index_path,
            str(path),
            "-b",
            "100",
            "--engine",
            "cuda",
        ]
        command += ["-j", "0", "--force", "--format", form, "-o", str(folder / f"hits.{form}")]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        lines = done.stderr.strip().splitlines()[-8:]
        say(
            f"command: {queries} queries to {form}",
            {"s": round(seconds, 2), "queries/s": int(queries / seconds)},
        )
        say(f"command: what it said, {form}", lines)
    path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("load")
    parser.add_argument("--large", type=int, default=0, help="nodes of a synthetic index to measure beside")
    parser.add_argument("--titles", nargs=2, metavar=("INDEX", "GRIDS"))
    parser.add_argument("--command", type=int, default=0, metavar="QUERIES")
    parser.add_argument("--json", default="")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    engine, index, grids = open_load(options.load, Path(options.folder))
    say("device", engine.device.name)
    say("load", {"nodes": index.num_nodes, "keys": index.num_keys, "resident bytes": engine.device_trie.size})
    measure("load", engine, index, grids)
    del engine, index
    if options.command:
        measure_command(str(Path(options.folder) / "load.ft"), grids, options.command, Path(options.folder))
    if options.titles:
        measure_titles(*options.titles)
    if options.large:
        from large_trie import large_trie

        engine, cpu, grids = large_trie(options.large)
        say("large", {"nodes": int(cpu.num_nodes), "louds bits": 2 * int(cpu.num_nodes) - 1})
        for width in (100, 1000):
            tokens, logprobs = cut(grids, width, 32)
            plan = SearchPlan(beam_width=width)
            answer = engine.search(tokens, logprobs, plan)
            same = answer.identical(super(CudaEngine, engine).search(tokens, logprobs, plan))
            say(f"large: same bytes as cpu, {width}", [same, answer.num_hits])
        for width in WIDTHS:
            say(f"large: kernel us, {width}", kernel_times(engine, grids, width))
        for width in (100, 1000):
            say(f"large: kernel queries/s, batch 4096, {width}", kernel_rate(engine, grids, width, 4096))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
