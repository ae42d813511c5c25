"""Where marisa-opt's time goes (cpu_systems.md): compiles marisa_opt.cpp and runs it on an index and its grids.

Milliseconds of processor time of a query, the fastest of some passes, mean over 64 queries; in brackets: times cpu.

PYTHONPATH=. python docs/benchmarks/marisa_opt.py titles.ft grids.npz  # an index without tokens above 65,535
PYTHONPATH=. python docs/benchmarks/marisa_opt.py nar.ft --keys 10M    # synthetic; made where it is missing
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from flashtrie_cli import Index, SearchPlan
from flashtrie_cli.bench.grids import Grids, KeySample, widened
from flashtrie_cli.bench.request import parse_counts
from flashtrie_cli.bench.workloads import Workload, own_index, synthetic

ROOT = Path(__file__).resolve().parents[2]
HOST = ("trie", "louds_cuts", "search", "expander", "scan", "step_row", "child_ranges", "baseline_marisa_opt")
OPTIONS = ("-std=c++20", "-O3", "-march=x86-64-v2", "-ffp-contract=off", "-pthread")
SYSTEMS = (
    "cpu",
    "marisa-opt as shipped",
    "the same, in marisa_opt.cpp",
    "with a heap locked, popped and pushed for every match",
    "with MARISA's nodes",
    "with both",
)


def dump(index: Index, grids: Grids, widths: list[int], folder: Path) -> None:
    """The arrays of a trie, and grids of each width, as plain files."""
    trie = index.engine.trie  # type: ignore[attr-defined]
    if trie.high_width:
        raise SystemExit("the index has tokens above 65,535")
    np.asarray(trie.louds).tofile(folder / "louds")
    np.asarray(trie.label_low).tofile(folder / "label_low")
    lines = np.asarray(trie.lines).reshape(-1, 32)
    np.ascontiguousarray(lines[:, :8]).tofile(folder / "terminal")
    SearchPlan().length_factors(grids.tokens.shape[1]).tofile(folder / "factors")
    sample = KeySample.of(index, grids.tokens.shape[1], 0)
    for width in widths:
        slots = grids.tokens.shape[2]
        own = widened(grids, width, sample, 1 << 16) if width > slots else grids.slots(width)
        own.tokens.astype(np.uint32).tofile(folder / f"tokens.{width}")
        own.logprobs.astype(np.float32).tofile(folder / f"logprobs.{width}")
        np.array(own.tokens.shape, np.uint64).tofile(folder / f"shape.{width}")


def workload(arguments: argparse.Namespace, scratch: str, widths: list[int]) -> Workload:
    if arguments.grids:
        return own_index(arguments.index, arguments.grids, num_queries=64, engine="cpu", threads=1)
    return synthetic(
        scratch,
        num_keys=parse_counts(arguments.keys, "--keys")[0],
        num_queries=64,
        num_slots=max(widths),
        keep=arguments.index,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index")
    parser.add_argument("grids", nargs="?")
    parser.add_argument("--keys", default="10M")
    parser.add_argument("--widths", default="100,300,600,1000")
    parser.add_argument("--passes", default="5")
    arguments = parser.parse_args()
    widths = [int(width) for width in arguments.widths.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "marisa_opt"
        sources = [
            Path(__file__).with_suffix(".cpp"),
            *(ROOT / "cuda" / "host" / f"{name}.cpp" for name in HOST),
        ]
        subprocess.run(["g++", *OPTIONS, "-I", ROOT / "cuda", "-o", program, *sources], check=True)
        made = workload(arguments, scratch, widths)
        dump(made.index, made.grids, widths, Path(scratch))
        rows = []
        for width in widths:
            run = [program, scratch, str(width), arguments.passes]
            rows.append(json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout))
    print("| K = B | " + " | ".join(SYSTEMS) + " |")
    print("| ---: |" + " ---: |" * len(SYSTEMS))
    for width, row in zip(widths, rows, strict=True):
        shown = [f"{row['ms'][0]:.3g}", *(f"{ms:.3g} ({ms / row['ms'][0]:.2f})" for ms in row["ms"][1:])]
        print(f"| {width} | " + " | ".join(shown) + " |")
    names = [name for name in rows[0] if name not in ("ms", "queries")]
    print("\n| K = B | " + " | ".join(names) + " |")
    print("| ---: |" + " ---: |" * len(names))
    for width, row in zip(widths, rows, strict=True):
        print(f"| {width} | " + " | ".join(f"{row[name]:,}" for name in names) + " |")


if __name__ == "__main__":
    main()
