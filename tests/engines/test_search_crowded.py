"""Searches over nodes of every fan-out, on both sides of 16 bits: where children are listed, scanned and searched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from flashtrie_cli import Index, SearchPlan, build_index
from flashtrie_cli.engine import cpu

WIDE = 9000
"""Children of some nodes: more than 32 are scanned, and more than 192 a proposal searched."""
FAN_OUTS = (WIDE, 1, 2, 7, 8, 9, 31, 32, 33, 64, 511, 512, 513)

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="the extension is not built")


@pytest.fixture(scope="module", params=[60_000, 66_000, 3_000_000], ids=["16 bits", "both", "above"])
def universe(request: pytest.FixtureRequest) -> np.ndarray:
    """Tokens of a vocabulary: all 16 bits; some above; most above."""
    rng = np.random.default_rng(5)
    return np.sort(rng.choice(request.param, 12_000, replace=False)).astype(np.uint32)


@pytest.fixture(scope="module")
def path(universe: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 first tokens, whose nodes have fan-outs of all kinds; a third of the grandchildren go on."""
    path = tmp_path_factory.mktemp("crowded") / "crowded.ft"
    rng = np.random.default_rng(6)

    def keys() -> Iterator[tuple[int, ...]]:
        for place, first in enumerate(universe[:: len(universe) // 40][:40]):
            for second in rng.choice(universe, FAN_OUTS[place % len(FAN_OUTS)], replace=False):
                yield (int(first), int(second))
                if rng.random() < 0.3:
                    yield (int(first), int(second), int(rng.choice(universe)))

    build_index(keys(), str(path))
    return str(path)


@pytest.mark.parametrize("beam_width", [1, 130, 300, 600])
@pytest.mark.parametrize("num_slots", [1, 3, 40, 128, 129, 700])
def test_every_fan_out(path: str, universe: np.ndarray, beam_width: int, num_slots: int) -> None:
    rng = np.random.default_rng([beam_width, num_slots])
    tokens = np.stack([[rng.permutation(universe)[:num_slots] for _ in range(4)] for _ in range(3)])
    tokens[:, 0, : min(num_slots, 40)] = universe[:: len(universe) // 40][: min(num_slots, 40)]
    above = universe[universe > 0xFFFF][:1]  # the first behind the border, where a node holds it
    tokens[:, 1, : len(above)] = above
    logprobs = -np.sort(rng.integers(0, 60, tokens.shape), axis=2).astype(np.float32) / 8
    logprobs[2] = rng.permutation(logprobs[2], axis=1)  # out of order, too
    plan = SearchPlan(beam_width=beam_width)
    answers = Index.open(path, engine="cpu").search(tokens, logprobs, plan)
    assert answers.num_hits > 0 or beam_width == 1 or num_slots < 40
    assert answers.identical(Index.open(path, engine="reference").search(tokens, logprobs, plan))
