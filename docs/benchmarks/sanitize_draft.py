"""Draft-tree kernels under compute-sanitizer: memcheck, then racecheck. Needs a GPU, PyCUDA and nvcc.

usage: sanitize_draft.py     (from the checkout)

All types of logits, short and long lists, more chunks than a warp takes at once, ties, deep trees, and trees held to a
trie and to masks. Each tree is compared with the CPU's: the same where no two scores are near each other, else the same
scores. Exit 1 where a tool reports an error, or an answer differs.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from compute_sanitizer import under_tools

from flashtrie_cli import Index, build_index
from flashtrie_cli.query.draft import DraftTrees, build_draft_trees
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import NORMAL, SPECIAL, TokenBytes

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from draft_cases import assert_same_trees

SIZES = (
    ((2, 5, 20_001), 40, 6, "float32"), ((1, 4, 9_000), 256, 32, "float32"), ((1, 3, 180_000), 64, 8, "float32"),
    ((1, 3, 90_000), 64, 16, "float32"), ((1, 16, 9_000), 128, 8, "bfloat16"), ((2, 3, 300_000), 33, 8, "float16"),
)  # fmt: skip
"""Logits [batch, block, vocabulary], nodes, top_k, type."""


def built(logits: Any, num_nodes: int, top_k: int, **options: Any) -> DraftTrees:
    """The GPU's trees, which must be the CPU's."""
    zeros = np.zeros(len(logits), np.int32)
    found, wanted = (
        build_draft_trees(logits, zeros, zeros, num_nodes, top_k, engine=engine, **options)
        for engine in ("cuda", "cpu")
    )
    assert np.array_equal(found.status, wanted.status)
    assert_same_trees(found, wanted)
    return found


def as_type(logits: Any, kind: str) -> Any:
    if kind == "bfloat16":
        return (logits.view(np.uint32) >> 16).astype(np.uint16)
    return logits.astype(kind)


def some_masks(rng: np.random.Generator) -> tuple[TokenMasks, int]:
    letters = list("abcdefghijklmno")
    words = ["".join(word) for size in (1, 2, 3) for word in itertools.product(letters, repeat=size)]
    vocabulary = TokenBytes.from_tokens([(SPECIAL, b"</s>"), *((NORMAL, word.encode()) for word in words)])
    members = ["".join(rng.choice(letters, rng.integers(0, 9))) for _ in range(500)]
    return TokenMasks.from_strings(members, vocabulary, eos=[0]), len(words) + 1


def some_index(rng: np.random.Generator, folder: str) -> Index:
    sizes = rng.integers(1, 5, 3_000)
    keys = {tuple(map(int, rng.integers(0, 9_000 if rng.random() < 0.5 else 6, size))) for size in sizes}
    build_index([list(key) for key in sorted(keys)], f"{folder}/keys.ft")
    return Index.open(f"{folder}/keys.ft", engine="cuda")


def worker() -> None:
    rng = np.random.default_rng(3)
    for shape, num_nodes, top_k, kind in SIZES:
        logits = (rng.standard_normal(shape) * 3).astype(np.float32)
        trees = built(as_type(logits, kind), num_nodes, top_k, logit_type=kind)
        print(
            f"{kind} {shape}, {num_nodes} nodes, top_k {top_k}: equal, {trees.node_depths.max()} levels",
            flush=True,
        )
    for fill in (1.5, -np.inf):
        logits = np.full((2, 4, 20_000), fill, np.float32)
        logits[:, :, ::700] = 2.0
        built(logits, 50, 8)
    print("ties: equal", flush=True)
    deep = np.round(rng.standard_normal((1, 12, 3_000))).astype(np.float32)
    deep[:, :, 7] += 9
    print(f"deep: equal, {built(deep, 64, 8).node_depths.max()} levels", flush=True)
    masks, num_tokens = some_masks(rng)
    drafter = rng.permutation(num_tokens)[: num_tokens - 5].astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        index = some_index(rng, folder)
        for scoring in ("renorm", "global"):
            logits = (rng.standard_normal((2, 6, len(drafter))) * 3).astype(np.float32)
            built(logits, 64, 8, trie=masks, scoring=scoring, vocab_map=drafter)
            logits = (rng.standard_normal((2, 6, 9_000)) * 3).astype(np.float32)
            built(logits, 64, 8, trie=index, scoring=scoring, end_token=3)
            print(f"held to masks and to a trie, {scoring}: equal", flush=True)


def main() -> int:
    return under_tools(__file__, keep="equal")


if __name__ == "__main__":
    sys.exit(worker() if "--worker" in sys.argv else main())
