"""Small tries and grids for the benchmark's tests."""

from __future__ import annotations

import numpy as np
import pytest

from flashtrie_cli.build import BuildOptions, build_index
from flashtrie_cli.index import Index


def make_index(path, keys, *, codec="raw", engine="cpu", threads=1):
    """An opened index of these token sequences."""
    build_index(keys, str(path), options=BuildOptions(codec=codec, force=True))
    return Index.open(str(path), engine=engine, threads=threads)


def random_keys(seed, num_keys, vocabulary, max_depth=6):
    """Keys with shared prefixes and heavy-tailed fan-out."""
    rng = np.random.default_rng(seed)
    draws = np.minimum(rng.zipf(1.4, (num_keys, max_depth)), vocabulary) - 1
    return [draws[i, : rng.integers(1, max_depth + 1)].tolist() for i in range(num_keys)]


def random_grids(seed, num_queries, num_steps, num_slots, vocabulary):
    """Grids with duplicates, empty slots, ties of score, -inf and the padding token."""
    rng = np.random.default_rng(seed)
    shape = (num_queries, num_steps, num_slots)
    tokens = (np.minimum(rng.zipf(1.4, shape), vocabulary) - 1).astype(np.uint32)
    tokens[rng.random(shape) < 0.05] = 0xFFFF_FFFF
    logprobs = (-rng.integers(0, 8, shape) / 4).astype(np.float32)
    logprobs[rng.random(shape) < 0.03] = -np.inf
    return tokens, logprobs


@pytest.fixture
def small_index(tmp_path):
    return make_index(tmp_path / "small.ft", random_keys(1, 3000, 200))
