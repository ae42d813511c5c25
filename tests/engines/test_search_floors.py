"""Searches with far more candidates than a buffer holds, scores a rounding step apart: where the floors decide."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from flashtrie_cli import Index, SearchPlan, build_index
from flashtrie_cli.engine import cpu

FAN_OUT = 30
BEAM_WIDTH = 130
"""Candidates of a later step: 130 x 30, against buffers of 195."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every sequence of one to three tokens below FAN_OUT."""
    path = tmp_path_factory.mktemp("floors") / "dense.ft"

    def keys() -> Iterator[tuple[int, ...]]:
        for length in (1, 2, 3):
            yield from itertools.product(range(FAN_OUT), repeat=length)

    build_index(keys(), str(path))
    return str(path)


@pytest.fixture(scope="module")
def reference(path: str) -> Index:
    return Index.open(path, engine="reference")


@pytest.mark.skipif(not cpu.is_available(), reason="the extension is not built")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "plan",
    [
        SearchPlan(beam_width=BEAM_WIDTH),
        SearchPlan(beam_width=BEAM_WIDTH, num_results=700, alpha=0.0),
        SearchPlan(beam_width=520, num_results=9, alpha=5.0),
        SearchPlan(beam_width=BEAM_WIDTH, eos=3),
    ],
    ids=["default", "many results", "few results", "eos"],
)
@pytest.mark.parametrize("steps_apart", [1, 40])
def test_floors_drop_nothing_that_counts(
    path: str, reference: Index, plan: SearchPlan, threads: int, steps_apart: int
) -> None:
    rng = np.random.default_rng(steps_apart)
    tokens = np.stack([rng.permutation(FAN_OUT) for _ in range(4)])[None].astype(np.uint32)
    step = np.float32(2.0**-23 * steps_apart)
    logprobs = (np.float32(-1) - step * rng.integers(0, 12, tokens.shape)).astype(np.float32)
    index = Index.open(path, engine="cpu", threads=threads)
    assert index.search(tokens, logprobs, plan).identical(reference.search(tokens, logprobs, plan))
