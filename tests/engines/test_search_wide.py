"""Searches over wide nodes: asked for their proposals or scanned in pieces, with labels above 16 bits."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import pytest

from flashtrie_cli import Index, SearchPlan, build_index
from flashtrie_cli.engine import cpu

STEPS = 3
HIGHEST = 3 << 16
"""Tokens of the keys lie below; with 16 bits there are three that share each low half."""


def first_tokens() -> npt.NDArray[np.int64]:
    return np.arange(0, HIGHEST, 67)


@functools.cache
def keys() -> list[tuple[int, ...]]:
    """A root of 2,935 children; under it nodes of 4,800 (in both halves), of 2,500, and of one to nine."""
    rng = np.random.default_rng(7)
    first = first_tokens().tolist()
    found = [(token,) for token in first]
    wide = [int(token) for token in rng.choice(HIGHEST, 4_800, replace=False)]
    found += [(first[3], token) for token in wide] + [(first[-2], token) for token in wide[::2]]
    found += [(first[3], wide[0], token) for token in range(2_500)]
    for token in first[:400]:
        found += [(token, int(rest), 5) for rest in rng.integers(0, HIGHEST, rng.integers(1, 10))]
    return found


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Index, Index]:
    path = str(tmp_path_factory.mktemp("wide") / "wide.ft")
    build_index(keys(), path)
    return Index.open(path, engine="cpu"), Index.open(path, engine="reference")


@functools.cache
def tokens_at(step: int) -> npt.NDArray[np.int64]:
    return np.unique([key[step] for key in keys() if len(key) > step])


def grid(
    rng: np.random.Generator, slots: int, shared: bool
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Proposals that keys hold, as a rule, in no order; ``shared``: several that differ above 16 bits alone."""
    tokens = np.stack([rng.choice(tokens_at(step), slots) for step in range(STEPS)])[None].astype(np.uint32)
    if shared:
        tokens[:, :, 1::3] = tokens[:, :, 0::3][:, :, : tokens[:, :, 1::3].shape[2]] ^ (1 << 16)
    tokens[0, 0, :2] = first_tokens()[[3, -2]]
    logprobs = -rng.exponential(4, tokens.shape).astype(np.float32)
    logprobs[0, 0, :2] = -0.25
    return tokens, logprobs


@pytest.mark.skipif(not cpu.is_available(), reason="the extension is not built")
@pytest.mark.parametrize("slots", [2, 5, 24, 300, 1_200])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("beam_width", [3, 40, 500])
@pytest.mark.parametrize("eos", [None, 5])
def test_wide_nodes(
    indexes: tuple[Index, Index], slots: int, shared: bool, beam_width: int, eos: int | None
) -> None:
    ours, reference = indexes
    plan = SearchPlan(beam_width=beam_width, eos=eos)
    for seed in range(3):
        tokens, logprobs = grid(np.random.default_rng(seed), slots, shared)
        answer = ours.search(tokens, logprobs, plan)
        assert answer.identical(reference.search(tokens, logprobs, plan))
        assert answer.num_hits > 0 or eos is not None
