"""Small indexes that between them have every section, and all that can be asked of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli import BuildOptions, Index, build_index
from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.format import layout
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.keys.vocabulary import WordVocabulary

Key = tuple[int, ...]


@dataclass
class Sample:
    """Keys as given; ``text`` instead of ``keys`` for an index of words."""

    keys: list[Key] = field(default_factory=list)
    values: list[int] | list[float] | None = None
    text: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)


SAMPLES = {
    "ids": Sample([(), (1,), (1, 2), (1, 2, 3), (5, 65535), (5, 7), (300, 1, 1)]),
    "highs": Sample([(7,), (7, 65537), (9, 2**31 - 1), (65536,), (131071, 3), (131071, 70000)]),
    "values": Sample(
        [(4, 2), (4,), (4, 2), (9,), (4, 2)], [10, 2**64 - 1, 7, 0, 10], options={"duplicates": "all"}
    ),
    "floats": Sample([(1,), (1, 1), (3,), (1,)], [0.5, -2.25, 1e300, 0.25], options={"duplicates": "min"}),
    "words": Sample(text=["new york", "new york city", "old york", "ça va", "日本 city", "york"]),
    "wide": Sample(
        [(a, b) for a in (0, 3, 65535) for b in range(0, 2000, 7)]
        + [(a,) for a in range(700)]
        + [(a, 1) for a in range(100, 200)]
    ),
    "tails": Sample(
        [(7, 1, 2, 3), (8, 2, 3), (8, 70_000, 9, 9), (9,), (9, 4, 2, 3), (65_536, 1, 1, 300), (300, 5)],
        [70, 80, 81, 90, 91, 100, 110],
        options={"tail": "on"},
    ),
    "empty": Sample([]),
}
CODECS = ("zstd", "raw")
SMALL = [name for name in SAMPLES if name != "wide"]


def version_of(name: str) -> int:
    """Of the files that hold a sample."""
    return layout.TAILS_VERSION if "tail" in SAMPLES[name].options else layout.VERSION


def batch_of(keys: list[Key], values: list[Any] | None = None) -> KeyBatch:
    return KeyBatch(
        np.array([token for key in keys for token in key], np.uint32),
        np.cumsum([0, *map(len, keys)], dtype=np.int64),
        None
        if values is None
        else np.array(values, np.float64 if isinstance(values[0], float) else np.uint64),
        np.arange(1, len(keys) + 1, dtype=np.int64),
        "sample",
    )


def build_sample(name: str, codec: str, path: Path) -> bytes:
    """Build one of the samples; its bytes."""
    sample = SAMPLES[name]
    options = BuildOptions(codec=codec, force=True, **sample.options)
    if sample.text is not None:
        vocabulary = WordVocabulary()
        tokens, offsets = vocabulary.encode_batch(sample.text)
        batch = KeyBatch(tokens, offsets, None, np.arange(1, len(offsets), dtype=np.int64), "sample")
        build_index([batch], str(path), tokenizer=vocabulary, options=options)
    else:
        build_index([batch_of(sample.keys, sample.values)] if sample.keys else [], str(path), options=options)
    return path.read_bytes()


def everything(index: Index) -> list[Any]:
    """Answers to every kind of question, as plain values."""
    keys = [keys for keys in index.keys(batch_size=50)]
    flat = [
        tuple(k.tokens[a:b].tolist()) for k in keys for a, b in zip(k.offsets, k.offsets[1:], strict=False)
    ]
    key_ids = [key_id for k in keys for key_id in k.key_ids.tolist()]
    values = [index.value_of(key_id) for key_id in key_ids]
    texts = (
        [text for k in keys for text in index.decode(k.tokens, k.offsets)]
        if index.vocabulary is not None
        else []
    )
    probes = flat[:40] + [(*key, 1) for key in flat[:40]] + [key[:-1] for key in flat[:40]]
    offsets = np.cumsum([0, *map(len, probes)], dtype=np.int64)
    tokens = np.array([token for key in probes for token in key], np.uint32)
    found = index.lookup(tokens, offsets).tolist()
    by_id = index.key_tokens(np.array(key_ids[:40], np.uint32)).tokens.tolist()
    prefixes = [[a.tolist() for a in index.common_prefix(np.array(key, np.uint32))] for key in probes[:80]]
    row = sorted({token for key in flat[:200] for token in key})[:60] or [1]
    grid = np.array([row] * 3)[None]
    logprobs = -np.linspace(0.1, 3, grid.size, dtype=np.float32).reshape(grid.shape)
    hits = [
        [(h.key_id, h.tokens, h.score, h.normalised_score) for h in query]
        for query in index.search(grid, logprobs)
    ]
    return [flat, key_ids, values, texts, found, by_id, prefixes, hits]


def answers_or_none(path: Path, engine: str = "auto") -> list[Any] | None:
    """Everything the index says, or None where it is refused as it must be: IndexFileError, exit code 3."""
    try:
        return everything(Index.open(str(path), engine=engine))
    except IndexFileError as refusal:
        code, line = refusal.exit_code, str(refusal)
    assert code == 3
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return None
