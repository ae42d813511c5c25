"""What an index must answer, from a plain Python list of keys: no trie, no bits. The judge of every engine."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli import BuildOptions, Index, SearchPlan, build_index
from flashtrie_cli.keys.batch import KeyBatch

Key = tuple[int, ...]
Slot = tuple[int, float]

SCRATCH = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
"""In memory where that can be had: a build syncs its file, and there are thousands of builds."""


def scratch(name: str) -> str:
    return str(Path(SCRATCH.name) / name)


def batch_of(keys: Sequence[Key], values: Sequence[Any] | None = None, source: str = "test") -> KeyBatch:
    return KeyBatch(
        np.array([token for key in keys for token in key], np.uint32),
        np.cumsum([0, *map(len, keys)], dtype=np.int64),
        None
        if values is None
        else np.array(values, np.float64 if isinstance(values[0], float) else np.uint64),
        np.arange(1, len(keys) + 1, dtype=np.int64),
        source,
    )


def built(keys: Sequence[Key], values: Sequence[Any] | None = None, **options: Any) -> str:
    """Path of an index of these keys."""
    path = scratch("oracle.ft")
    batches = [batch_of(keys, values)] if keys else []
    build_index(batches, path, options=BuildOptions(force=True, **options))
    return path


def engines(keys: Sequence[Key], **options: Any) -> tuple[Index, Index]:
    """The same index opened by the cpu and the reference engine."""
    path = built(keys, **options)
    return Index.open(path, engine="cpu"), Index.open(path, engine="reference")


def flat(sequences: Sequence[Key]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array([token for key in sequences for token in key], np.int64)
    return tokens, np.cumsum([0, *map(len, sequences)], dtype=np.int64)


class Oracle:
    """Key ids and node ids follow from the order of levels: shorter first, then lexicographic."""

    def __init__(self, keys: Sequence[Key]):
        self.keys = sorted(set(keys))
        by_level = sorted(self.keys, key=lambda key: (len(key), key))
        self.key_ids = {key: number for number, key in enumerate(by_level)}
        self.by_id = by_level
        prefixes = {key[:size] for key in self.keys for size in range(len(key) + 1)} | {()}
        self.nodes = {p: number for number, p in enumerate(sorted(prefixes, key=lambda p: (len(p), p)))}
        self.inner = {p[:-1] for p in prefixes if p}

    def key_id(self, key: Key) -> int:
        return self.key_ids.get(key, -1)

    def extensions(self, prefix: Key) -> list[Key]:
        return [key for key in self.keys if key[: len(prefix)] == prefix]

    def common_prefixes(self, key: Key) -> list[Key]:
        return [key[:size] for size in range(len(key) + 1) if key[:size] in self.key_ids]

    def search(self, grid: Sequence[Sequence[Slot]], plan: SearchPlan) -> list[tuple[int, Key, float, float]]:
        """(key id, key, score, normalised score) of the hits of one query, best first; docs/search.md read aloud."""
        f32 = np.float32
        rows: list[dict[int, Any]] = []
        for row in grid:
            best: dict[int, Any] = defaultdict(lambda: f32("-inf"))
            for token, logprob in row:
                if token != plan.padding:
                    best[token] = max(best[token], f32(logprob))
            rows.append({token: logprob for token, logprob in best.items() if logprob > f32("-inf")})
        beams: list[tuple[Key, Any]] = [((), f32(0))]
        results = []
        for step, row in enumerate(rows):
            reached = []
            for prefix, score in beams:
                for token, logprob in row.items():
                    total = f32(score + logprob)
                    if (
                        (*prefix, token) in self.nodes
                        and logprob > f32(plan.token_threshold)
                        and total > f32(plan.sequence_threshold)
                    ):
                        reached.append(((*prefix, token), total))
            for key, score in reached:
                if key not in self.key_ids:
                    continue
                if plan.eos is not None:
                    after = rows[step + 1] if step + 1 < len(rows) else {}
                    if plan.eos not in after:
                        continue
                    score = f32(score + after[plan.eos])
                factor = f32((6.0 / (5.0 + len(key))) ** plan.alpha)
                results.append((-f32(score * factor), self.nodes[key], key, score))
            inner = [(-score, self.nodes[key], key) for key, score in reached if key in self.inner]
            beams = [(key, -score) for score, _, key in sorted(inner)[: plan.beam_width]]
        limit = plan.beam_width if plan.num_results is None else plan.num_results
        return [
            (self.key_ids[key], key, float(score), float(-normalised))
            for normalised, _, key, score in sorted(results)[:limit]
        ]
