"""Builds, checks and searches the 5.9 M entity titles; prints the tables of titles.md.

    python docs/benchmarks/titles.py ENTITIES.txt.zst TOKENIZER.json GRIDS.npz QUERIES.tsv PHRASES.tsv [WORK_FOLDER]

Needs the extras tokenizers and, for the comparison, marisa-trie from PyPI. PHRASES.tsv: phrase TAB count.
Everything runs in one process after another on one machine; times are medians of several passes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli import Index, SearchPlan
from flashtrie_cli.inputs.source import read_whole
from flashtrie_cli.keys.tokenizers import HuggingFaceTokenizer

EOS = 50256
PASSES = 7


def run(*arguments: str) -> dict[str, Any]:
    """A flashtrie command with --json, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "flashtrie_cli", *arguments, "--json", "--quiet"],
        check=True,
        capture_output=True,
    )
    return json.loads(done.stdout)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def build(name: str, source: str, target: Path, *options: str) -> None:
    for threads in ("1", "2"):
        report = run(
            "build", source, "-o", str(target), "--force", "--memory", "512M", "-j", threads, *options
        )
        seconds = sum(report["seconds"].values())
        print(
            f"| {name} | {threads} | {report['num_keys_read'] / seconds / 1e6:.2f} M | {seconds:.2f} | "
            + " ".join(f"{stage} {spent:.2f}" for stage, spent in report["seconds"].items())
            + f" | {report['peak_bytes'] >> 20} MiB | {report['file_size'] / 1e6:.1f} MB | "
            f"{report['bits_per_key']:.2f} | {report['num_nodes'] / report['num_keys']:.3f} |"
        )


def tokenise(lines: list[str], tokenizer: HuggingFaceTokenizer, target: Path) -> None:
    if not target.exists():
        tokens, offsets = tokenizer.encode_batch(lines)
        np.savez(target, tokens=tokens, offsets=offsets)


def check_membership(index: Index, tokens: np.ndarray, offsets: np.ndarray) -> None:
    """Every key is found, under ids that are a permutation; 1 M mutated keys are found exactly if they are keys."""
    ids = index.lookup(tokens, offsets)
    keys = {tokens[a:b].tobytes() for a, b in itertools.pairwise(offsets)}
    assert np.array_equal(np.sort(ids), np.arange(len(keys)))
    dumped = sum(
        keys_.tokens[a:b].tobytes() in keys
        for keys_ in index.keys()
        for a, b in zip(keys_.offsets[:-1].tolist(), keys_.offsets[1:].tolist(), strict=True)
    )
    assert dumped == index.num_keys == len(keys)
    generator = random.Random(7)
    mutated = []
    for _ in range(1_000_000):
        at = generator.randrange(len(offsets) - 1)
        key = tokens[offsets[at] : offsets[at + 1]].tolist()
        kind = generator.randrange(3)
        if kind == 0:
            key[generator.randrange(len(key))] = int(tokens[generator.randrange(len(tokens))])
        elif kind == 1:
            del key[generator.randrange(len(key))]
        else:
            key.insert(generator.randrange(len(key) + 1), int(tokens[generator.randrange(len(tokens))]))
        mutated.append(key)
    flat = np.array([token for key in mutated for token in key], np.uint32)
    ends = np.cumsum([0, *(len(key) for key in mutated)])
    found = index.lookup(flat, ends) >= 0
    truth = np.array([np.array(key, np.uint32).tobytes() in keys for key in mutated])
    assert np.array_equal(found, truth)
    print(f"{len(keys):,} keys dumped and found, none other.")
    print(f"1,000,000 mutated keys, {truth.sum():,} of them keys: all answered right.")


def recall(index: Index, grids: Any, titles: list[str]) -> None:
    tokens, logprobs = grids["tokens"].astype(np.uint32), grids["logprobs"].astype(np.float32)
    wanted = index.lookup(*index_encode(index, titles))
    print(
        "| alpha | EOS | " + " | ".join(f"beam {b}" for b in (10, 50, 100, 256)) + " | first place at 100 |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for alpha in (0.0, 1.0, 5.0):
        for eos in (None, EOS):
            cells, first = [], 0.0
            for beam in (10, 50, 100, 256):
                steps = 9 if eos is not None else 8
                found = index.search(
                    tokens[:, :steps, :beam],
                    logprobs[:, :steps, :beam],
                    SearchPlan(beam_width=beam, alpha=alpha, eos=eos),
                )
                ends = found.hit_offsets
                ids = [found.key_ids[a:b] for a, b in itertools.pairwise(ends)]
                cells.append(np.mean([key in hits for key, hits in zip(wanted, ids, strict=True)]))
                if beam == 100:
                    first = np.mean(
                        [len(hits) > 0 and hits[0] == key for key, hits in zip(wanted, ids, strict=True)]
                    )
            row = " | ".join(f"{cell:.3f}" for cell in cells)
            print(f"| {alpha:g} | {'yes' if eos else 'no'} | {row} | {first:.3f} |")


def index_encode(index: Index, titles: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return TOKENIZER.encode_batch(titles)


def latency(path: Path, grids: Any) -> None:
    print("| K = B | threads | mean | p50 | p90 | p99 | queries/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for width in (10, 50, 100, 256):
        for threads in (1, 2):
            index = Index.open(str(path), threads=threads, engine="cpu")
            tokens = np.ascontiguousarray(grids["tokens"][:, :8, :width], np.uint32)
            logprobs = np.ascontiguousarray(grids["logprobs"][:, :8, :width], np.float32)
            plan = SearchPlan(beam_width=width)
            samples, walls = [], []
            for _ in range(PASSES + 1):
                wall, _ = timed(lambda: index.engine.search(tokens, logprobs, plan))  # noqa: B023
                samples.append(index.engine.last_query_ns / 1e3)  # type: ignore[attr-defined]
                walls.append(wall)
            best = np.median(
                np.array(samples[1:]), axis=0
            )  # a query's median over the passes; the first warms up
            cuts = np.percentile(best, [50, 90, 99])
            rate = len(tokens) / statistics.median(walls[1:])
            print(
                f"| {width} | {threads} | {best.mean():.0f} µs | "
                + " | ".join(f"{cut:.0f} µs" for cut in cuts)
                + f" | {rate:,.0f} |"
            )


def compare_marisa(
    name: str, lines: list[str], index_path: Path, sequences: tuple[np.ndarray, np.ndarray]
) -> None:
    try:
        import marisa_trie
    except ImportError:
        print("marisa-trie is not installed: no comparison")
        return
    tokens, offsets = sequences
    index = Index.open(str(index_path))
    sample = np.random.default_rng(3).permutation(len(offsets) - 1)[:500_000]
    flat = np.concatenate([tokens[offsets[i] : offsets[i + 1]] for i in sample])
    ends = np.concatenate(([0], np.cumsum(offsets[sample + 1] - offsets[sample])))
    wide = int(tokens.max(initial=0)) > 0xFFFF
    packed = tokens.astype(">u4" if wide else ">u2").tobytes()
    item = 4 if wide else 2
    encodings: dict[str, tuple[Any, list[Any]]] = {
        "text": (marisa_trie.Trie, lines),
        "ids": (
            marisa_trie.BinaryTrie,
            [
                packed[item * a : item * b]
                for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            ],
        ),
    }
    size = os.path.getsize(index_path)
    lookups = [timed(lambda: index.lookup(flat, ends))[0] for _ in range(5)]
    print(
        f"| {name} | flashtrie, ids in | | {size / 1e6:.1f} MB | {size * 8 / len(lines):.2f} | "
        f"{statistics.median(lookups) / len(sample) * 1e9:.0f} ns |"
    )
    if index.vocabulary is not None:
        texts = [lines[i] for i in sample]
        spoken = [timed(lambda: index.lookup(*index.encode(texts)))[0] for _ in range(3)]
        print(
            f"| {name} | flashtrie, text in | | | | {statistics.median(spoken) / len(sample) * 1e9:.0f} ns |"
        )
    for encoding, (kind, keys) in encodings.items():
        for num_tries in (1, 3, 5):
            spent, trie = timed(lambda: kind(keys, num_tries=num_tries))  # noqa: B023
            path = index_path.with_suffix(".marisa")
            trie.save(str(path))
            asked = [keys[i] for i in sample]
            one, _ = timed(lambda: [trie.get(key) for key in asked])  # noqa: B023
            print(
                f"| {name} | marisa-trie, {encoding}, {num_tries} tries | {spent:.1f} s | "
                f"{path.stat().st_size / 1e6:.1f} MB | {path.stat().st_size * 8 / len(lines):.2f} | "
                f"{one / len(asked) * 1e9:.0f} ns |"
            )


def main(
    entities: str, tokenizer: str, grids_path: str, queries: str, phrases: str, work: str = "/tmp"
) -> None:
    global TOKENIZER
    folder = Path(work)
    TOKENIZER = HuggingFaceTokenizer.open(tokenizer)
    lines = read_whole(entities, 1 << 30).decode().splitlines()
    ids = folder / "titles_ids.npz"
    tokenise(lines, TOKENIZER, ids)
    print(
        "\n## Build\n\n| input | threads | keys/s | seconds | stages | peak memory | index | bits/key | nodes/key |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    build("GPT-2 ids (npz)", str(ids), folder / "titles.ft", "--input", "npz")
    build("text, words", entities, folder / "titles_words.ft", "--tokenizer", "words")
    build(
        "phrases with counts",
        phrases,
        folder / "phrases.ft",
        "--tokenizer",
        "words",
        "--values",
        "2",
        "--duplicates",
        "sum",
    )
    phrase_lines = sorted(line.split("\t")[0] for line in Path(phrases).read_text("utf-8").splitlines())
    plain = folder / "phrases.txt"
    plain.write_text("\n".join([*phrase_lines, ""]), "utf-8")
    build("phrases alone", str(plain), folder / "phrases_alone.ft", "--tokenizer", "words")
    arrays = np.load(ids)
    index = Index.open(str(folder / "titles.ft"))
    print("\n## Membership\n")
    check_membership(index, arrays["tokens"], arrays["offsets"])
    grids = np.load(grids_path)
    titles = [line.split("\t")[1] for line in Path(queries).read_text("utf-8").splitlines()]
    print("\n## Recall of the true title\n")
    recall(index, grids, titles)
    print("\n## Latency\n")
    latency(folder / "titles.ft", grids)
    print("\n## Beside marisa-trie\n\n| keys | structure | build | size | bits/key | exact look-up |")
    print("| --- | --- | --- | --- | --- | --- |")
    compare_marisa("titles", lines, folder / "titles.ft", (arrays["tokens"], arrays["offsets"]))
    words = Index.open(str(folder / "titles_words.ft"))
    compare_marisa("titles, words", lines, folder / "titles_words.ft", words.encode(lines))
    spoken = Index.open(str(folder / "phrases_alone.ft"))
    compare_marisa("phrases", phrase_lines, folder / "phrases_alone.ft", spoken.encode(phrase_lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
