"""Proposal grids made from an index's own keys: position marginals, NAR-style grids, noise behind a real
head.

A sampled key is a row of a matrix padded with ``NO_TOKEN``; a position's marginal is the column without
padding, so drawing from it follows the empirical frequency of each token at that position over all keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.index import Index

NO_TOKEN = np.uint32(0xFFFF_FFFF)
SAMPLE = 1 << 18
"""Keys sampled for marginals: a token of frequency 1e-4 is met 26 times."""

U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class KeySample:
    """Keys drawn uniformly from an index: ``matrix`` uint32 [n, steps], padded with NO_TOKEN; ``lengths``
    int64 [n]."""

    matrix: U32
    lengths: npt.NDArray[np.int64]
    key_ids: U32

    @classmethod
    def of(cls, index: Index, num_steps: int, seed: int, count: int = SAMPLE) -> KeySample:
        """At most ``count`` keys, cut at ``num_steps`` tokens (lengths stay whole)."""
        if index.num_keys == 0:
            raise InputError("holds no keys to make grids from", file=index.path)
        rng = np.random.default_rng([seed, 41])
        key_ids = rng.integers(0, index.num_keys, min(count, index.num_keys)).astype(np.uint32)
        keys = index.key_tokens(key_ids)
        lengths = np.diff(keys.offsets)
        places = np.arange(num_steps)
        inside = places[None, :] < lengths[:, None]
        matrix = np.full((len(keys), num_steps), NO_TOKEN, np.uint32)
        matrix[inside] = keys.tokens[(keys.offsets[:-1, None] + places[None, :])[inside]]
        return cls(matrix, lengths, key_ids)

    def marginal(self, step: int) -> U32:
        """The tokens of all sampled keys at a position; empty behind the longest."""
        column = self.matrix[:, step]
        return column[column != NO_TOKEN]


def draw_tail(rng: np.random.Generator, head: U32, marginal: U32, count: int, num_tokens: int) -> U32:
    """``count`` distinct tokens drawn from a marginal, none of them in ``head``; uniform tokens where it
    runs dry. Where ``num_tokens`` are too few for that, some are larger, and match nothing."""
    tail = np.zeros(0, np.uint32)
    for oversampling in (2, 6, 20):
        if len(tail) == count or not len(marginal):
            break
        draws = marginal[rng.integers(0, len(marginal), count * oversampling + 64)]
        tail = _distinct(draws, head)[:count]
    if num_tokens < len(head) + count:
        num_tokens = 2 * (len(head) + count)  # half of them are always left to draw
    while len(tail) < count:
        draws = rng.integers(0, num_tokens, 2 * count + 64).astype(np.uint32)
        tail = np.concatenate((tail, _distinct(draws, np.concatenate((head, tail)))))[:count]
    return tail


def _distinct(draws: U32, excluded: U32) -> U32:
    """Draws in order, each token once, without the excluded ones."""
    _, first = np.unique(draws, return_index=True)
    kept = draws[np.sort(first)]
    return kept[~np.isin(kept, excluded)]


# Means of the best token's probability by position, measured on the titles' grids; its spread is that of a
# Beta law of concentration 2.5. The log-prob then falls with the log of the rank, at 1.18 (0.15 standard
# deviation), so that 95 % of the mass lies within the best 256.
_BEST_MEANS = (0.60, 0.52, 0.47, 0.49, 0.55, 0.60, 0.66, 0.77)
_BEST_CONCENTRATION = 2.5
_SLOPE, _SLOPE_SPREAD = 1.18, 0.15
_MASS_WITHIN, _WITHIN = 0.95, 256


def draw_logprobs(rng: np.random.Generator, step: int, num_slots: int) -> F32:
    """A row of log-probs like those of a trained non-autoregressive model, falling; float32 [num_slots]."""
    mean = _BEST_MEANS[min(step, len(_BEST_MEANS) - 1)]
    best = float(np.clip(rng.beta(mean * _BEST_CONCENTRATION, (1 - mean) * _BEST_CONCENTRATION), 0.01, 0.99))
    slope = float(np.clip(rng.normal(_SLOPE, _SLOPE_SPREAD), 0.8, 1.6))
    ranks = np.arange(1, num_slots + 1, dtype=np.float64)
    within = np.arange(2, _WITHIN + 1, dtype=np.float64)
    scale = (1 - best) * _MASS_WITHIN / float((within**-slope).sum())
    row = np.log(scale) - slope * np.log(ranks)
    row[0] = np.log(best)
    return np.minimum.accumulate(row).astype(np.float32)


@dataclass(frozen=True)
class Grids:
    """``tokens`` uint32 and ``logprobs`` float32 [queries, steps, slots]; ``targets``: the key id that each
    query is meant to find, -1 where it is unknown or no key; int64 [queries]."""

    tokens: U32
    logprobs: F32
    targets: npt.NDArray[np.int64] | None = None

    def at_least(self, count: int) -> Grids:
        """The same, or ``count`` queries that repeat these: a call holds as many as its row says."""
        here = len(self.tokens)
        if here >= count:
            return self
        which = np.arange(count) % here
        targets = None if self.targets is None else self.targets[which]
        return Grids(self.tokens[which], self.logprobs[which], targets)

    def slots(self, count: int) -> Grids:
        """The best ``count`` slots of each row (rows fall by log-prob)."""
        return Grids(
            np.ascontiguousarray(self.tokens[:, :, :count]),
            np.ascontiguousarray(self.logprobs[:, :, :count]),
            self.targets,
        )

    def queries(self, count: int) -> Grids:
        """The first ``count`` queries."""
        return Grids(
            self.tokens[:count], self.logprobs[:count], None if self.targets is None else self.targets[:count]
        )


def nar_grids(
    sample: KeySample,
    *,
    num_queries: int,
    num_slots: int,
    num_tokens: int,
    coherent: float = 0.1,
    seed: int = 0,
) -> Grids:
    """Grids as a non-autoregressive model makes them: coherent keys mixed with position-stratified marginals.

    A query is about a target key. The head of each row, a share ``coherent`` of the slots, holds the tokens
    that the target, keys beginning with the same token, and random keys have there (the target's first in
    half of the rows); the rest is drawn from the marginal of the position.
    """
    num_steps = sample.matrix.shape[1]
    marginals = [sample.marginal(step) for step in range(num_steps)]
    by_first = np.argsort(sample.matrix[:, 0], kind="stable")
    firsts = sample.matrix[by_first, 0]
    num_coherent = max(1, round(coherent * num_slots))
    tokens = np.zeros((num_queries, num_steps, num_slots), np.uint32)
    logprobs = np.zeros(tokens.shape, np.float32)
    targets = np.zeros(num_queries, np.int64)
    for query in range(num_queries):
        rng = np.random.default_rng([seed, 23, query])
        target = int(rng.integers(0, len(firsts)))
        targets[query] = sample.key_ids[target]
        begin, end = (
            np.searchsorted(firsts, sample.matrix[target, 0], "left"),
            np.searchsorted(firsts, sample.matrix[target, 0], "right"),
        )
        alike = by_first[rng.integers(begin, end, max(1, (2 * num_coherent) // 3))]
        others = rng.integers(0, len(firsts), max(1, num_coherent - len(alike)))
        chosen = sample.matrix[np.concatenate((alike, others))]
        for step in range(num_steps):
            head = _head(rng, chosen[:, step], sample.matrix[target, step])[: min(num_coherent, num_slots)]
            tail = draw_tail(rng, head, marginals[step], num_slots - len(head), num_tokens)
            tokens[query, step] = np.concatenate((head, tail))
            logprobs[query, step] = draw_logprobs(rng, step, num_slots)
    return Grids(tokens, logprobs, targets)


def _head(rng: np.random.Generator, column: U32, own: np.uint32) -> U32:
    """Distinct tokens of the coherent keys at a position, the frequent ones first, the target's among the
    first."""
    values, counts = np.unique(column[column != NO_TOKEN], return_counts=True)
    head = values[np.argsort(-(counts + rng.random(len(counts))), kind="stable")]
    if own == NO_TOKEN:
        return head
    rest = head[head != own]
    place = 0 if rng.random() < 0.5 else min(int(rng.geometric(0.25)), len(rest))
    return np.concatenate((rest[:place], np.array([own], np.uint32), rest[place:]))


def head_noise(grids: Grids, head: int, sample: KeySample, num_tokens: int, seed: int = 0) -> Grids:
    """The paper's appendix K: ranks below ``head`` kept, the others replaced by tokens of the position's
    marginal.

    The log-probs stay, so that the grid looks to a scorer like the model's own.
    """
    if head >= grids.tokens.shape[2]:
        return grids
    tokens = grids.tokens.copy()
    for query in range(len(tokens)):
        rng = np.random.default_rng([seed, 29, head, query])
        for step in range(tokens.shape[1]):
            row = tokens[query, step]
            row[head:] = draw_tail(rng, row[:head], sample.marginal(step), len(row) - head, num_tokens)
    return Grids(tokens, grids.logprobs, grids.targets)


def widened(grids: Grids, num_slots: int, sample: KeySample, num_tokens: int, seed: int = 0) -> Grids:
    """Rows made longer: more slots from the position's marginal, their log-probs on the line (over the log
    of the rank) that each row's last three quarters follow."""
    num_queries, num_steps, have = grids.tokens.shape
    if num_slots <= have:
        return grids.slots(num_slots)
    tokens = np.zeros((num_queries, num_steps, num_slots), np.uint32)
    logprobs = np.zeros(tokens.shape, np.float32)
    tokens[:, :, :have], logprobs[:, :, :have] = grids.tokens, grids.logprobs
    anchor = max(1, have // 4)
    ranks = np.log(np.arange(have + 1, num_slots + 1) / have)
    fall = (grids.logprobs[:, :, -1] - grids.logprobs[:, :, anchor - 1]) / np.log(have / anchor)
    logprobs[:, :, have:] = grids.logprobs[:, :, -1:] + np.minimum(fall, -0.01)[:, :, None] * ranks
    marginals = [sample.marginal(step) for step in range(num_steps)]
    for query in range(num_queries):
        rng = np.random.default_rng([seed, 37, query])
        for step in range(num_steps):
            row = tokens[query, step]
            row[have:] = draw_tail(rng, row[:have], marginals[step], num_slots - have, num_tokens)
    return Grids(tokens, logprobs, grids.targets)
