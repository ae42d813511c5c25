"""Building an index over a range of sizes: time, peak memory, size on disk; beside marisa-trie where it is
installed.

Each build runs in a process of its own, so that its peak memory is its own. Keys lie in a file before the
clock starts. marisa-trie (PyPI) takes text: each token becomes one character, as GENRE's users of it do;
making the strings is not counted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.bench.environment import environment
from flashtrie_cli.bench.nar_keys import NarKeys
from flashtrie_cli.bench.request import Request
from flashtrie_cli.bench.run import SCHEMA
from flashtrie_cli.bench.workloads import draws_for
from flashtrie_cli.errors import FlashtrieError
from flashtrie_cli.report import peak_memory

DEFAULT_SIZES = (10_000, 100_000, 1_000_000)
BUILDERS = ("flashtrie", "marisa-trie")
SURROGATES = 0xD800, 0x800
MAX_CHARACTER = 0x10FFFF


class BuildFailed(FlashtrieError):
    """A builder's process ended badly."""


def run_builds(
    request: Request,
    made: dict[str, Any],
    *,
    watch: Callable[[str, float], None],
    save: Callable[[], None],
) -> None:
    """Measure the builds of a request, adding rows to ``made``; ``save`` is called after each. Raises
    BuildFailed."""
    sizes = request.num_keys or DEFAULT_SIZES
    made.update(schema=SCHEMA, environment=environment(), request=request.as_json(), is_complete=False)
    made.update(options={"threads": request.threads, "memory": request.memory}, builds=[])
    builders = [name for name in BUILDERS if name == "flashtrie" or importlib.util.find_spec("marisa_trie")]
    for number, num_keys in enumerate(sizes):
        with tempfile.TemporaryDirectory(prefix="flashtrie-bench-") as scratch:
            watch(f"drawing {num_keys:,} keys", number / len(sizes))
            keys = os.path.join(scratch, "keys.npz")
            _write_keys(
                NarKeys(draws_for(num_keys), request.profile, request.seed, request.vocabulary), keys, request
            )
            for turn, builder in enumerate(builders):
                watch(
                    f"{builder}: {num_keys:,} keys", (number + (turn + 1) / (len(builders) + 1)) / len(sizes)
                )
                made["builds"].append(_measure(builder, keys, scratch, request))
                save()
    made["is_complete"] = True
    save()


def _write_keys(keys: NarKeys, path: str, request: Request) -> None:
    batches = list(keys.batches(threads=request.threads))
    tokens = np.concatenate([batch.tokens for batch in batches])
    lengths = np.concatenate([np.diff(batch.offsets) for batch in batches])
    np.savez(path, tokens=tokens, offsets=np.concatenate(([0], np.cumsum(lengths))))


def _measure(builder: str, keys: str, scratch: str, request: Request) -> dict[str, Any]:
    """One build in a fresh process of this interpreter."""
    job: dict[str, Any] = {
        "builder": builder,
        "keys": keys,
        "index": os.path.join(scratch, f"{builder}.index"),
    }
    job.update(threads=request.threads, memory=request.memory)
    command = [sys.executable, "-m", "flashtrie_cli.bench.builds", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BuildFailed(f"{builder} could not build: {last}")
    return {"builder": builder, **json.loads(done.stdout)}


def _build_flashtrie(job: dict[str, Any]) -> dict[str, Any]:
    from flashtrie_cli.build import BuildOptions, build_index
    from flashtrie_cli.keys.reader import KeyReader

    begin = time.perf_counter()
    reader = KeyReader([job["keys"]], kind="npz", threads=job["threads"])
    report = build_index(
        reader, job["index"], options=BuildOptions(threads=job["threads"], memory=job["memory"], force=True)
    )
    seconds = time.perf_counter() - begin
    return {"num_keys": report.counts["num_keys"], "seconds": seconds}


def _build_marisa(job: dict[str, Any]) -> dict[str, Any]:
    import marisa_trie

    with np.load(job["keys"]) as arrays:
        texts = as_texts(arrays["tokens"], arrays["offsets"])
    begin = time.perf_counter()
    trie = marisa_trie.Trie(texts)
    trie.save(job["index"])
    seconds = time.perf_counter() - begin
    return {"num_keys": len(trie), "seconds": seconds}


def as_texts(tokens: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> list[str]:
    """Keys as strings, a character a token, surrogates left out. Raises ValueError for a token beyond
    Unicode."""
    first, count = SURROGATES
    characters = tokens.astype(np.uint32) + 1
    characters[characters >= first] += count
    if len(characters) and int(characters.max()) > MAX_CHARACTER:
        raise ValueError("marisa-trie can hold 1.1 million different tokens at most")
    text = characters.astype("<u4").tobytes().decode("utf-32-le")
    return [text[begin:end] for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def _worker(job: dict[str, Any]) -> None:
    made = (_build_flashtrie if job["builder"] == "flashtrie" else _build_marisa)(job)
    made |= {"peak_bytes": peak_memory(), "index_bytes": os.path.getsize(job["index"])}
    sys.stdout.write(json.dumps(made))


if __name__ == "__main__":
    _worker(json.loads(sys.argv[1]))
