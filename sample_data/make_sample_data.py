"""Cuts the sample data out of the full sets. Same inputs, same bytes: the seed is fixed.

    python sample_data/make_sample_data.py TITLES SETS TOKENIZER OUT

TITLES: folder with entities.txt.zst, queries.tsv, grids.npz. SETS: folder with phrases/keywords_sample.tsv
and semantic_ids/rqk_debian_20k_3x256.npz. TOKENIZER: r50k's tokenizer.json. OUT: where the files go.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
import zstandard

SEED = 20_240
NUM_TITLES = 200_000
NUM_QUERIES = 64
NUM_SLOTS = 128


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(data)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("titles", "sets", "tokenizer", "out"):
        parser.add_argument(name, type=Path)
    paths = parser.parse_args()
    paths.out.mkdir(parents=True, exist_ok=True)
    choose = random.Random(SEED)

    pairs = [line.split("\t") for line in (paths.titles / "queries.tsv").read_text("utf-8").splitlines()]
    chosen = sorted(choose.sample(range(len(pairs)), NUM_QUERIES))
    sample = [pairs[at] for at in chosen]
    lines = "".join(f"{alias}\t{title}\n" for alias, title in sample)
    (paths.out / "queries.tsv").write_text(lines, encoding="utf-8")

    grids = np.load(paths.titles / "grids.npz")
    np.savez_compressed(
        paths.out / "grids.npz",
        tokens=grids["tokens"][chosen, :, :NUM_SLOTS],
        logprobs=grids["logprobs"][chosen, :, :NUM_SLOTS],
        ids=np.array([alias for alias, _ in sample]),
    )

    with (paths.titles / "entities.txt.zst").open("rb") as file:
        titles = zstandard.ZstdDecompressor().stream_reader(file).read().decode("utf-8").split("\n")[:-1]
    wanted = {title for _, title in sample} & set(titles)
    others = sorted(set(titles) - wanted)
    kept = sorted([*wanted, *choose.sample(others, NUM_TITLES - len(wanted))])
    text = "".join(title + "\n" for title in kept)
    (paths.out / "titles.txt.zst").write_bytes(compress(text.encode("utf-8")))

    (paths.out / "tokenizer.json.zst").write_bytes(compress(paths.tokenizer.read_bytes()))
    keywords = (paths.sets / "phrases" / "keywords_sample.tsv").read_bytes()
    (paths.out / "keywords.tsv").write_bytes(keywords)
    items = np.load(paths.sets / "semantic_ids" / "rqk_debian_20k_3x256.npz")
    np.savez_compressed(
        paths.out / "semantic_ids.npz", tokens=items["codes"], values=items["row"].astype(np.uint32)
    )


if __name__ == "__main__":
    main()
