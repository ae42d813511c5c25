"""What is measured: an opened index with proposal grids for it, and a line that says how to get the same
again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli.bench.grids import NO_TOKEN, Grids, KeySample, head_noise, nar_grids, widened
from flashtrie_cli.bench.nar_keys import NarKeys
from flashtrie_cli.build import BuildOptions, build_index
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.index import Index

SAMPLE_DIRECTORY = "sample_data"
GPT2_END = 50256
Say = Callable[[str], None]


@dataclass
class Workload:
    """An index and grids of [queries, steps, slots]; ``eos``: token that ends a key, None without one.

    ``about`` names data, seed and sizes, so that the same can be made again.
    """

    name: str
    index: Index
    grids: Grids
    eos: int | None = None
    about: dict[str, Any] = field(default_factory=dict)
    head: int | None = None
    seed: int = 0
    _sample: KeySample | None = None

    @property
    def sample(self) -> KeySample:
        """Keys of the index, drawn once, for marginals."""
        if self._sample is None:
            self._sample = KeySample.of(self.index, self.grids.tokens.shape[1], self.seed)
        return self._sample

    @property
    def num_tokens(self) -> int:
        """One more than the largest token of the sampled keys."""
        matrix = self.sample.matrix
        return int(matrix[matrix != NO_TOKEN].max(initial=0)) + 1

    def slots(self, count: int) -> Grids:
        """The grids with ``count`` slots a row: cut, or continued from the positions' marginals."""
        if count <= self.grids.tokens.shape[2]:
            return self.grids.slots(count)
        return widened(self.grids, count, self.sample, self.num_tokens, self.seed)

    def with_head(self, head: int, num_slots: int) -> Workload:
        """The same with noise behind the best ``head`` slots (the paper's appendix K)."""
        noisy = head_noise(self.slots(num_slots), head, self.sample, self.num_tokens, self.seed)
        about = {**self.about, "head": head}
        return Workload(
            f"{self.name} r={head}", self.index, noisy, self.eos, about, head, self.seed, self._sample
        )

    def describe(self) -> dict[str, Any]:
        """What the export says of it."""
        num_queries, num_steps, num_slots = self.grids.tokens.shape
        return {
            "name": self.name,
            "digest": self.index.file.digest,
            "num_keys": self.index.num_keys,
            "num_nodes": self.index.num_nodes,
            "num_queries": num_queries,
            "num_steps": num_steps,
            "own_slots": num_slots,
            "eos": self.eos,
            **self.about,
        }


def find_sample_data(directory: str | None = None) -> Path | None:
    """The directory of the sample data: as named, in the working directory, or in this checkout."""
    if directory is not None:
        if not (Path(directory) / "grids.npz").exists():
            raise InputError("holds no sample data", file=directory, hint="it is the checkout's sample_data")
        return Path(directory)
    for place in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (place / SAMPLE_DIRECTORY / "grids.npz").exists():
            return place / SAMPLE_DIRECTORY
    return None


def sample_titles(
    directory: Path, scratch: str, *, num_queries: int, engine: str, threads: int, say: Say
) -> Workload:
    """Wikipedia titles, and the grids of a trained non-autoregressive model for aliases of some of them."""
    from flashtrie_cli.keys.reader import KeyReader
    from flashtrie_cli.keys.tokenizers import HuggingFaceTokenizer

    tokenizer = HuggingFaceTokenizer.open(str(directory / "tokenizer.json.zst"))
    path = os.path.join(scratch, "titles.ft")
    say("building the titles' index")
    reader = KeyReader([str(directory / "titles.txt.zst")], kind="text", tokenizer=tokenizer, threads=threads)
    build_index(
        reader, path, tokenizer=tokenizer, options=BuildOptions(codec="raw", threads=threads, force=True)
    )
    made = own_index(
        path, str(directory / "grids.npz"), num_queries=num_queries, engine=engine, threads=threads,
        targets=str(directory / "queries.tsv"),
    )  # fmt: skip
    made.name, made.eos = "titles", GPT2_END
    made.about = {"keys": "sample_data/titles.txt.zst", "grids": "sample_data/grids.npz"}
    return made


def own_index(
    path: str, grids: str, *, num_queries: int, engine: str, threads: int, targets: str | None = None
) -> Workload:
    """A user's index and proposal file; ``targets``: lines whose last TAB-separated column is the wanted
    key's text."""
    from flashtrie_cli.query.proposals import read_proposals

    index = Index.open(path, engine=engine, threads=threads)
    batches = []
    left = num_queries
    for batch in read_proposals(grids, batch_size=min(num_queries, 1024), vocabulary=index.vocabulary):
        batches.append((batch.tokens[:left], batch.logprobs[:left]))
        left -= len(batches[-1][0])
        if left <= 0:
            break
    if not batches:
        raise InputError("holds no queries", file=grids)
    shapes = {tokens.shape[1:] for tokens, _ in batches}
    if len(shapes) > 1:
        raise InputError("its queries differ in steps or slots; a benchmark needs them alike", file=grids)
    made = Grids(np.concatenate([t for t, _ in batches]), np.concatenate([p for _, p in batches]))
    if targets is not None:
        made = Grids(made.tokens, made.logprobs, _read_targets(targets, index, len(made.tokens)))
    about = {"keys": os.path.basename(path), "grids": os.path.basename(grids)}
    return Workload("index", index, made, None, about)


def _read_targets(path: str, index: Index, num_queries: int) -> Any:
    from flashtrie_cli.inputs.source import read_whole

    lines = read_whole(path, 1 << 30).decode("utf-8", "surrogateescape").splitlines()[:num_queries]
    if len(lines) < num_queries:
        raise InputError(f"has {len(lines)} targets for {num_queries} queries", file=path)
    tokens, offsets = index.encode([line.rsplit("\t", 1)[-1] for line in lines])
    return index.lookup(tokens, offsets)


def synthetic(
    scratch: str,
    *,
    num_keys: int,
    num_queries: int,
    num_slots: int,
    num_steps: int = 8,
    profile: str = "titles",
    vocabulary: int | None = None,
    seed: int = 0,
    keep: str | None = None,
    engine: str = "cpu",
    threads: int = 1,
    memory: int = 1 << 30,
    say: Say = lambda text: None,
) -> Workload:
    """Seeded keys and NAR-style grids at any scale. ``keep``: index file to make, or to use where it
    exists."""
    keys = NarKeys(draws_for(num_keys), profile, seed, vocabulary)
    path = keep or os.path.join(scratch, "nar.ft")
    if not (keep and os.path.exists(keep)):
        say(f"drawing and building {num_keys:,} synthetic keys")
        options = BuildOptions(codec="raw", threads=threads, memory=memory, force=True)
        build_index(keys.batches(threads=threads), path, options=options)
    index = Index.open(path, engine=engine, threads=threads)
    say("drawing grids")
    sample = KeySample.of(index, num_steps, seed)
    grids = nar_grids(
        sample, num_queries=num_queries, num_slots=num_slots, num_tokens=keys.num_tokens, seed=seed
    )
    about = {
        "keys": f"{keys.num_draws} draws of profile {profile}, seed {seed}, vocabulary {keys.num_tokens}",
        "grids": f"seed {seed}",
    }
    return Workload("nar", index, grids, None, about, None, seed, sample)


_DISTINCT = ((1e4, 1.02), (1e5, 1.05), (1e6, 1.17), (5e6, 1.33), (1e7, 1.43), (1e8, 1.9), (1e9, 2.0))
"""Draws a distinct key, by number of keys, measured up to ten million."""


def draws_for(num_keys: int) -> int:
    """About how many draws give this many distinct keys."""
    if num_keys < 1:
        raise UsageError(f"number of keys {num_keys} is not at least 1")
    scales, factors = zip(*_DISTINCT, strict=True)
    return int(num_keys * np.interp(np.log(num_keys), np.log(scales), factors))


def level_rows(index: Index, depths: int = 9) -> list[dict[str, Any]]:
    """Statistics of the upper levels, in the terms in which `nar_profiles.json` keeps those of real sets."""
    from flashtrie_cli.trie.statistics import level_statistics

    return [
        {
            "depth": level.depth,
            "num_nodes": level.num_nodes,
            "num_keys": level.num_keys,
            "single_child_share": round(level.fan_out_classes[1] / max(level.num_nodes, 1), 4),
            "mean_fan_out": round(level.mean_fan_out, 3),
            "max_fan_out": level.max_fan_out,
        }
        for level in level_statistics(index.stored)[:depths]
    ]
