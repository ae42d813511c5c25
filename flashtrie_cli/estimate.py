"""What a build would take, from a sample at the front of its input."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from flashtrie_cli.build import PROCESS_BYTES, BuildOptions, build_index
from flashtrie_cli.errors import UsageError
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.keys.reader import KeyReader
from flashtrie_cli.keys.tokenizers import Tokenizer

SAMPLE_KEYS = 400_000
SORT_BYTES_PER_KEY = 32
BYTES_PER_TOKEN = 4
LEVEL_BYTES_PER_NODE = 3


def estimate_build(reader: KeyReader, tokenizer: Tokenizer | None, options: BuildOptions) -> dict[str, Any]:
    """Keys, nodes, bytes and seconds that a build is likely to need.

    Builds the first SAMPLE_KEYS keys in a scratch folder, and scales: time and memory with the input, nodes and bytes
    with the power of the number of keys that two samples, half and whole, show. Input in one sorted piece makes nodes
    look rarer than they are. Needs files whose size is known; UsageError for stdin. What comes back is what
    ``--estimate --json`` prints.
    """
    if reader.total_size is None:
        raise UsageError("an estimate needs files, whose size is known, not stdin")
    began = time.perf_counter()
    batches = list(_first(reader, SAMPLE_KEYS))
    read_seconds = time.perf_counter() - began
    num_keys = sum(batch.num_keys for batch in batches)
    num_tokens = sum(len(batch.tokens) for batch in batches)
    fraction = min(reader.stats.num_bytes_read / max(reader.total_size, 1), 1.0)
    if num_keys < SAMPLE_KEYS:
        fraction = 1.0
    with tempfile.TemporaryDirectory(prefix="flashtrie-estimate-") as scratch:
        began = time.perf_counter()
        whole = build_index(
            iter(batches), os.path.join(scratch, "whole"), tokenizer=tokenizer, options=options
        )
        build_seconds = time.perf_counter() - began
        half = build_index(
            iter(batches[: max(len(batches) // 2, 1)]), os.path.join(scratch, "half"), options=options
        )
    scale = 1 / max(fraction, 1e-9)
    nodes = _extrapolate(half.counts, whole.counts, "num_nodes", scale)
    keys = _extrapolate(half.counts, whole.counts, "num_keys", scale)
    sorting = scale * (num_keys * SORT_BYTES_PER_KEY + num_tokens * BYTES_PER_TOKEN)
    wanted = PROCESS_BYTES + sorting + nodes * LEVEL_BYTES_PER_NODE
    return {
        "num_sample_keys": num_keys,
        "sample_fraction": fraction,
        "num_keys": round(keys),
        "num_nodes": round(nodes),
        "file_size": round(whole.file_size * nodes / max(whole.counts["num_nodes"], 1)),
        "seconds": (read_seconds + build_seconds) * scale,
        "memory_bytes": round(min(wanted, options.memory)),
        "spills": bool(wanted > options.memory),
    }


def _first(reader: KeyReader, limit: int) -> Iterator[KeyBatch]:
    taken = 0
    for batch in reader:
        yield batch
        taken += batch.num_keys
        if taken >= limit:
            return


def _extrapolate(half: dict[str, Any], whole: dict[str, Any], name: str, scale: float) -> float:
    """``whole`` scaled by the power law through the two samples, between not growing and growing in proportion."""
    import math

    read = whole["num_keys_read"] / max(half["num_keys_read"], 1)
    if read <= 1 or half[name] == 0:
        return float(whole[name] * scale)
    power = math.log(max(whole[name] / half[name], 1.0)) / math.log(read)
    return float(whole[name] * scale ** min(power, 1.0))
