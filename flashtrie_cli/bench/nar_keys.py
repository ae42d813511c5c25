"""Seeded synthetic keys whose trie looks like that of real keyword sets, at any scale, streamed and in
parallel.

Nothing is stored: a key walks an implicit infinite trie. At depth d, in a context C (a hash of its last one
or two tokens), it draws the rank of a child: 1 where the context has a single child (a chance per depth),
else from a Zipf-Mandelbrot law P(r) ~ (r + q)^-s whose exponent varies with C. The token is a fixed
function of (C, rank), itself Zipf over the vocabulary, so that prefixes, siblings and popular tokens are
shared as in natural sets. The last token of most keys uses another salt, so that ends rarely coincide with
inner nodes. Every random number is a hash of (seed, draw, depth): draw i does not depend on batches or
threads. Profiles were fitted to real sets (`nar_profiles.json`).
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import UsageError
from flashtrie_cli.keys.batch import KeyBatch

U64 = npt.NDArray[np.uint64]
BATCH = 1 << 17
MAX_DRAWS = 1 << 31
_SOURCE = "nar"


@dataclass(frozen=True)
class NarKeys:
    """``num_draws`` keys of a profile (titles or phrases); as a set they are fewer, since popular keys come
    twice.

    ``vocabulary``: number of token ids, the profile's own when None.
    """

    num_draws: int
    profile: str = "titles"
    seed: int = 0
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.profile not in profiles():
            raise UsageError(f"profile {self.profile!r} is not one of {', '.join(profiles())}")
        if not 1 <= self.num_draws <= MAX_DRAWS:
            raise UsageError(f"number of keys {self.num_draws} is not between 1 and {MAX_DRAWS}")
        if self.vocabulary is not None and not 10_000 <= self.vocabulary < 1 << 31:
            raise UsageError(f"vocabulary {self.vocabulary} is not between 10000 and {(1 << 31) - 1}")

    @property
    def num_tokens(self) -> int:
        return self.vocabulary or int(profiles()[self.profile]["vocabulary"])

    def batches(self, *, threads: int = 1) -> Iterator[KeyBatch]:
        """The keys in order of their draws, made by ``threads`` threads; a few batches in memory at a
        time."""
        starts = range(0, self.num_draws, BATCH)
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            waiting: deque[Future[KeyBatch]] = deque()
            for begin in starts:
                waiting.append(pool.submit(self.draw, begin, min(BATCH, self.num_draws - begin)))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def draw(self, first: int, count: int) -> KeyBatch:
        """Draws ``first`` to ``first + count``."""
        law = profiles()[self.profile]
        draws = np.arange(first, first + count, dtype=np.uint64)
        lengths = _lengths(law, _mix(_mix_one(self.seed * 2 + 3), draws))
        tokens = np.zeros((count, int(lengths.max())), np.uint32)
        walk = _Walk(law, self.num_tokens, draws, _mix_one(self.seed * 2 + 1))
        for depth in range(tokens.shape[1]):
            tokens[walk.alive, depth] = walk.step(depth, lengths)
            walk.keep(lengths[walk.alive] > depth + 1)
        used = np.arange(tokens.shape[1])[None, :] < lengths[:, None]
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        return KeyBatch(tokens[used], offsets, None, None, _SOURCE)


class _Walk:
    """The keys of a batch that are not yet at their end: which they are, their contexts and last tokens."""

    def __init__(self, law: dict[str, Any], num_tokens: int, draws: U64, salt: np.uint64):
        self.law, self.num_tokens, self.draws, self.salt = law, num_tokens, draws, salt
        self.step_of = coprime_step(int(law["vocabulary_step"]), num_tokens)
        self.alive = np.arange(len(draws))
        self.context = np.full(len(draws), _mix_one(7922), np.uint64)
        self.last = np.zeros(len(draws), np.uint64)
        self.next_last = self.last

    def step(self, depth: int, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """The tokens that the living keys draw at this depth."""
        law, context = self.law, self.context
        draws = self.draws[self.alive]
        chance = _unit(_mix(_mix(draws, np.uint64(depth)), self.salt))
        if depth == 0:
            rank = np.searchsorted(_first_token_law(law["note"]), chance, side="right").astype(np.uint64)
            return self._finish(rank)
        exponent = _at(law["exponents"], depth) + law["exponent_spread"] * (
            _unit(_mix(context, np.uint64(12))) - 0.5
        )
        rank_drawn = _zipf_mandelbrot(
            chance, exponent, _at(law["shifts"], depth), _at(law["max_ranks"], depth)
        )
        single = _unit(_mix(context, np.uint64(11))) < _at(law["single_child_chances"], depth)
        rank = np.where(single, 1, rank_drawn).astype(np.uint64)
        end_chance = _unit(_mix(_mix(draws, np.uint64(depth + 1000)), self.salt))
        ends_apart = (lengths[self.alive] == depth + 1) & (end_chance >= law["inner_end_chance"])
        origin = np.where(ends_apart, _mix(context, np.uint64(77)), context)
        popular = _unit(_mix(origin, rank))
        exponents = np.full(len(popular), law["label_exponent"])
        return self._finish(_zipf_mandelbrot(popular, exponents, law["label_shift"], self.num_tokens) - 1)

    def _finish(self, popularity: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
        count = np.uint64(self.num_tokens)
        self.next_last = (popularity.astype(np.uint64) * np.uint64(self.step_of) + np.uint64(17)) % count
        return self.next_last.astype(np.uint32)

    def keep(self, living: npt.NDArray[np.bool_]) -> None:
        """Move to the next depth with the keys that go on."""
        token, before = self.next_last[living], self.last[living]
        sees_two = _unit(_mix(token, np.uint64(13))) < self.law["two_label_chance"]
        self.context = _mix(np.where(sees_two, _mix(token, before), token), np.uint64(5))
        self.last = token
        self.alive = self.alive[living]


def coprime_step(step: int, count: int) -> int:
    """The first step from ``step`` on that visits every residue of ``count``."""
    while math.gcd(step, count) != 1:
        step += 2
    return step


@lru_cache(maxsize=1)
def profiles() -> dict[str, dict[str, Any]]:
    """The fitted laws by name, with what was measured of the sets they were fitted to."""
    return json.loads((Path(__file__).parent / "nar_profiles.json").read_text("utf-8"))


@lru_cache(maxsize=4)
def _first_token_law(note: str) -> npt.NDArray[np.float64]:
    """Cumulative law of the first token's rank: log-log interpolation of (rank, probability)."""
    law = next(law for law in profiles().values() if law["note"] == note)
    known = np.array(law["first_token_law"], float)
    ranks = np.arange(1, int(known[-1, 0]) + 1)
    chances = np.cumsum(np.exp(np.interp(np.log(ranks), np.log(known[:, 0]), np.log(known[:, 1]))))
    return chances / chances[-1]


def _lengths(law: dict[str, Any], hashes: U64) -> npt.NDArray[np.int64]:
    chances = np.cumsum(np.array(law["length_law"], float))
    return np.searchsorted(chances / chances[-1], _unit(hashes), side="right").astype(np.int64)


def _at(values: list[float], depth: int) -> float:
    return values[min(depth, len(values) - 1)]


def _zipf_mandelbrot(
    chance: npt.NDArray[np.float64], exponent: npt.NDArray[np.float64], shift: float, max_rank: float
) -> npt.NDArray[np.float64]:
    """Ranks 1 to ``max_rank`` by the inverse of the continuous law P(r) ~ (r + shift)^-exponent."""
    power = 1 - np.where(np.abs(exponent - 1) < 1e-4, 1.0001, exponent)
    low, high = (1 + shift) ** power, (max_rank + 1 + shift) ** power
    return np.clip(np.floor((low + chance * (high - low)) ** (1 / power) - shift), 1, max_rank)


def _mix(a: Any, b: Any) -> U64:
    """A hash of two 64-bit numbers (splitmix64's finaliser, twice)."""
    with np.errstate(over="ignore"):
        return _splitmix(
            np.asarray(a, np.uint64) * np.uint64(0xD6E8FEB86659FD93) ^ _splitmix(np.asarray(b, np.uint64))
        )


def _mix_one(number: int) -> np.uint64:
    return np.uint64(_splitmix(np.uint64(number & 0xFFFF_FFFF_FFFF_FFFF)))


def _splitmix(x: Any) -> U64:
    with np.errstate(over="ignore"):
        x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _unit(hashes: U64) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1)."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
