"""Searches by every kernel under compute-sanitizer: memcheck, then racecheck. Needs a GPU, PyCUDA and nvcc.

usage: sanitize_search.py [KERNEL …]     (from the checkout; no kernel named: all)

The kernels are compiled with FLASHTRIE_SANITIZE, which leaves out the reads that bring a word near and are never waited
for. Answers are compared with the cpu engine's, every frontier by pairs where a kernel can. Exit 1 where a tool reports
an error, or an answer differs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import numpy as np
from compute_sanitizer import under_tools

from flashtrie_cli import BuildOptions, Index, SearchPlan, build_index
from flashtrie_cli.engine import cuda_layout, cuda_session, cuda_sources
from flashtrie_cli.keys.batch import KeyBatch

VOCABULARY = 3000


def searched(index: Index, kernel: str) -> tuple[int, int]:
    """Searches by one kernel, and those that differ from the cpu engine."""
    import pycuda.driver as cuda

    from flashtrie_cli.engine.cuda_loader import open_device
    from flashtrie_cli.engine.cuda_trie import DeviceTrie

    trie = DeviceTrie(index.engine.trie, open_device(0))  # type: ignore[attr-defined]
    rng = np.random.default_rng(3)
    done = differ = 0
    for width, plan in (
        (40, SearchPlan(beam_width=40)),
        (24, SearchPlan(beam_width=20, num_results=60, eos=1)),
    ):
        shape = (2, 4, width)
        tokens = np.minimum(rng.zipf(1.2, shape) - 1, VOCABULARY - 1).astype(np.uint32)
        logprobs = -np.sort(rng.gamma(2, 2, shape).astype(np.float32), axis=2)
        session = cuda_session.SearchSession(trie, len(tokens), *shape[1:], plan, kernel=kernel)
        grids = cuda.to_device(tokens), cuda.to_device(logprobs)
        session.launch(int(grids[0]), int(grids[1]), len(tokens))
        num_hits = cuda.from_device(session.address("num_hits"), len(tokens), np.uint32)
        ids = cuda.from_device(session.address("key_ids"), (len(tokens), session.result_capacity), np.uint32)
        expected = index.search(tokens, logprobs, plan)
        for query in range(len(tokens)):
            begin, end = expected.hit_offsets[query : query + 2]
            found = ids[query, : num_hits[query]]
            differ += not np.array_equal(found, expected.key_ids[begin:end])
            done += 1
    return done, differ


def always_pairs() -> None:
    """Every frontier is heavy, the first bar is high, and asking costs nothing."""
    fill = cuda_layout.Launch.fill

    def filled(self: Any, batch: Any) -> None:
        fill(self, batch)
        batch["heavy_groups"], batch["bar_slot"], batch["ask_cost"] = 16, 0, 0

    cuda_layout.Launch.fill = filled  # type: ignore[method-assign]


def worker(kernels: list[str]) -> int:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 6, 60_000)
    tokens = np.minimum(rng.zipf(1.3, lengths.sum()) - 1, VOCABULARY - 1).astype(np.uint32)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "small.ft")
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        build_index(
            [KeyBatch(tokens, offsets, None, None, "random")], path, options=BuildOptions(codec="raw")
        )
        index = Index.open(path, engine="cpu")
        always_pairs()
        wrong = 0
        for kernel in kernels:
            done, differ = searched(index, kernel)
            wrong += differ
            print(f"{kernel}: {done} searches, {differ} differ", flush=True)
    return 1 if wrong else 0


def main(kernels: list[str]) -> int:
    nvcc = cuda_sources.find_nvcc()
    assert nvcc is not None, "no nvcc"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["FLASHTRIE_CACHE"] = cache
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        from flashtrie_cli.engine.cuda_loader import open_device

        arch = open_device(0).arch
        version = cuda_sources.nvcc_version(nvcc)
        for part in ("search", "search_pairs"):
            name = f"{part}-{cuda_sources.source_digest(part)}-sm_{arch}-nvcc{version}.bin"
            target = cuda_sources.cache_folder() / name
            cuda_sources.compile_kernel(part, nvcc, arch, target, ("-DFLASHTRIE_SANITIZE",))
        return under_tools(__file__, kernels, keep="searches")


if __name__ == "__main__":
    named = [argument for argument in sys.argv[1:] if argument != "--worker"]
    chosen = named or list(cuda_layout.KERNELS)
    sys.exit(worker(chosen) if "--worker" in sys.argv else main(chosen))
