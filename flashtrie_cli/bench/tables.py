"""A record as tables: headings and rows of text, for the terminal and for Markdown alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.bench.gate import Verdict
from flashtrie_cli.bench.nar_keys import profiles
from flashtrie_cli.bench.run import YARDSTICK
from flashtrie_cli.report import duration_text, size_text


@dataclass(frozen=True)
class Table:
    """``columns`` are (heading, "left" or "right")."""

    title: str
    columns: tuple[tuple[str, str], ...]
    rows: list[list[str]]


def milliseconds(value_us: float) -> str:
    """Three figures."""
    return f"{value_us / 1e3:,.0f}" if value_us >= 1e5 else f"{value_us / 1e3:.3g}"


def latency_table(record: dict[str, Any]) -> Table:
    """A row a case and system; milliseconds."""
    has_kernel = any(s["kernel_us"] for case in record["cases"] for s in case["systems"].values())
    headings = ["workload", "K", "B", "batch", "system", "mean", "p50", "p90", "p95", "p99", "spread", "CPU"]
    headings += [*(["kernel"] if has_kernel else []), "queries/s", "times ours", "95 %", "timed"]
    rows = []
    for case in record["cases"]:
        for name, system in case["systems"].items():
            if name == YARDSTICK:
                continue
            latency = system["latency_us"]
            row = [case["workload"], *(str(case[k]) for k in ("num_slots", "beam_width", "batch_size")), name]
            row += [milliseconds(latency[q]) for q in ("mean", "p50", "p90", "p95", "p99", "spread")]
            row.append(milliseconds(system["cpu_us"]["p50"]))
            if has_kernel:
                row.append(milliseconds(system["kernel_us"]["mean"]) if system["kernel_us"] else "")
            row += [f"{system['queries_per_s']:,.0f}", *_ratio(case, name)]
            rows.append([*row, f"{system['num_calls']}x{system['num_passes']}"])
    left = {"workload", "system"}
    columns = tuple((heading, "left" if heading in left else "right") for heading in headings)
    return Table("latency of a call, host to host, in milliseconds", columns, rows)


def _ratio(case: dict[str, Any], name: str) -> tuple[str, str]:
    """How many times our best engine's time, with the interval."""
    own = [r for r in case["ratios"] if r["of"] == name]
    if not own:
        return "", ""
    best = own[-1]  # cuda's behind cpu's
    of = "" if best["to"] == "cpu" else f" {best['to']}"
    return f"{best['ratio']:.3g}{of}", f"{best['low']:.3g} to {best['high']:.3g}"


def quality_table(record: dict[str, Any]) -> Table | None:
    """Recall of known targets by beam width, and agreement of the systems; None where no targets are
    known."""
    entries = [entry for entry in record["quality"] if entry.get("num_targets")]
    if not entries:
        return None
    headings = (
        "workload",
        "K",
        "B",
        "targets",
        "recall",
        "at 1",
        "at 10",
        "at 100",
        "precision",
        "MRR",
        "agreement",
    )
    rows = [
        [
            entry["workload"], f"{entry['num_slots']:,}", f"{entry['beam_width']:,}",
            f"{entry['num_targets']:,}", *(f"{entry[k]:.3f}" for k in ("recall", "recall_at_1",
            "recall_at_10", "recall_at_100")), f"{entry['precision']:.4f}",
            f"{entry['mean_reciprocal_rank']:.3f}", _agreement(entry["agreement"]),
        ]
        for entry in entries
    ]  # fmt: skip
    columns = tuple(
        (heading, "left" if heading in ("workload", "agreement") else "right") for heading in headings
    )
    return Table("known targets among the hits", columns, rows)


def _agreement(shares: dict[str, float]) -> str:
    apart = [f"{name} {share:.3f}" for name, share in shares.items() if share < 1]
    return ", ".join(apart) if apart else "all the same hits"


def workload_table(record: dict[str, Any]) -> Table:
    """What was measured."""
    rows = []
    for workload in record["workloads"]:
        shape = f"{workload['num_queries']} x {workload['num_steps']} x {workload['own_slots']}"
        resident = max(workload.get("resident_bytes", {"": 0}).values())
        rows.append(
            [
                workload["name"], f"{workload['num_keys']:,}", f"{workload['num_nodes']:,}",
                size_text(resident), shape, workload["digest"][:12],
                f"{workload.get('keys', '')}; {workload.get('grids', '')}",
            ]
        )  # fmt: skip
    columns = (
        ("workload", "left"), ("keys", "right"), ("nodes", "right"), ("resident", "right"),
        ("queries x steps x slots", "right"), ("digest", "left"), ("made from", "left"),
    )  # fmt: skip
    return Table("workloads", columns, rows)


def levels_table(record: dict[str, Any]) -> Table | None:
    """Levels of a synthetic index beside those of the real set it resembles, at the measured size next to it."""
    levels = record.get("levels")
    if not levels:
        return None
    num_keys = record["workloads"][0]["num_keys"]
    profile = record["request"]["profile"]
    measured = profiles()[profile]["measured"]
    near = min(measured, key=lambda set_: abs(math.log(set_["num_keys"] / num_keys)))
    rows = []
    for level, real in zip(levels, near["levels"], strict=False):
        rows.append([str(level["depth"]), *_level(level, num_keys), *_level(real, near["num_keys"])])
    names = ("nodes/key", "one child", "fan-out", "largest")
    columns = (
        ("depth", "right"),
        *((name, "right") for name in names),
        *((f"{profile}: {name}", "right") for name in names),
    )
    return Table(f"levels, beside {near['num_keys']:,} real {profile}", columns, rows)


def _level(level: dict[str, Any], num_keys: int) -> list[str]:
    return [
        f"{level['num_nodes'] / num_keys:.4f}",
        f"{level['single_child_share']:.2f}",
        f"{level['mean_fan_out']:.2f}",
        f"{level['max_fan_out']:,}",
    ]


def gate_table(verdicts: list[Verdict], max_slowdown: float) -> Table:
    """A row a case and engine of ours."""
    rows = [
        [
            verdict.case,
            verdict.system,
            f"{verdict.slowdown:.3f}",
            f"{verdict.noise:.3f}",
            verdict.reference or "the clock",
            "" if verdict.reference_slowdown is None else f"{verdict.reference_slowdown:.3f}",
            "SLOWER" if verdict.is_slower(max_slowdown) else "ok",
        ]
        for verdict in verdicts
    ]
    columns = (
        ("case", "left"), ("engine", "left"), ("slow-down", "right"), ("noise", "right"), ("against", "left"),
        ("that against the yardstick", "right"), (f"at most {max_slowdown:.2f}", "left"),
    )  # fmt: skip
    return Table("against the base", columns, rows)


def build_table(record: dict[str, Any]) -> Table:
    """A row a number of keys and builder."""
    rows = [
        [
            f"{row['num_keys']:,}", row["builder"], duration_text(row["seconds"]),
            f"{row['num_keys'] / row['seconds']:,.0f}",
            size_text(row["peak_bytes"]), size_text(row["index_bytes"]),
            f"{row['index_bytes'] * 8 / row['num_keys']:.1f}",
        ]
        for row in record["builds"]
    ]  # fmt: skip
    headings = ("keys", "builder", "time", "keys/s", "peak memory", "index", "bits a key")
    columns = tuple((heading, "left" if heading == "builder" else "right") for heading in headings)
    return Table("building an index", columns, rows)


def all_tables(record: dict[str, Any]) -> list[Table]:
    """Every table that a record has something for."""
    if "builds" in record:
        return [build_table(record)]
    if "masks" in record:
        return [mask_table(record)]
    if "drafts" in record:
        return draft_tables(record)
    tables = (workload_table(record), levels_table(record), latency_table(record), quality_table(record))
    return [table for table in tables if table is not None and table.rows]


def mask_table_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Text for a table with MASK_COLUMNS."""
    return [_row_text(row) for row in rows]


MASK_COLUMNS = (
    ("set", "left"), ("members", "right"), ("system", "left"), ("compile ms", "right"), ("CPU ms", "right"),
    ("times ours", "right"), ("fill µs p50", "right"), ("mean", "right"), ("p99", "right"),
    ("advance µs p50", "right"), ("MB", "right"),
    ("batch 256 µs: in step", "right"), ("staggered", "right"), ("shared", "right"), ("advance", "right"),
)  # fmt: skip


def _row_text(row: dict[str, Any]) -> list[str]:
    head = [row["set"], f"{row['num_members']:,}", row["system"]]
    if "compile_us" not in row:
        return [*head, row.get("failed") or row.get("left_out", ""), *[""] * (len(MASK_COLUMNS) - 4)]
    batch = row.get("batch_us")
    return [
        *head,
        f"{row['compile_us'] / 1e3:,.3g}" if row["compile_us"] < 1e6 else f"{row['compile_us'] / 1e3:,.0f}",
        f"{row['compile_cpu_us'] / 1e3:,.3g}"
        if row["compile_cpu_us"] < 1e6
        else f"{row['compile_cpu_us'] / 1e3:,.0f}",
        f"{row['times_ours']:,.1f}",
        *(f"{row['fill_us'][name]:,.2f}" for name in ("median", "mean", "p99")),
        f"{row['advance_us']['median']:,.2f}",
        f"{row['memory'] / 1e6:,.2f}" if row["memory"] is not None else "",
        f"{batch['in_step_fill_us']['median']:,.1f}" if batch else "",
        f"{batch['staggered_fill_us']['median']:,.1f}" if batch else "",
        f"{batch['shared_fill_us']['median']:,.1f}" if batch else "",
        f"{batch['advance_us']['median']:,.1f}" if batch else "",
    ]


def mask_table(record: dict[str, Any]) -> Table:
    """A row a set, size and system."""
    return Table("token masks", MASK_COLUMNS, mask_table_rows(record["masks"]))


def draft_tables(record: dict[str, Any]) -> list[Table]:
    """Times of draft trees, a row a size and way; then what a trie buys them."""
    columns = (
        ("batch", "right"), ("vocabulary", "right"), ("nodes", "right"), ("system", "left"), ("µs p50", "right"),
        ("min", "right"), ("p90", "right"),
    )  # fmt: skip
    rows = [
        [f"{row['batch_size']}", f"{row['vocab_size']:,}", f"{row['num_nodes']}", row["system"],
         *(f"{row['us'][name]:,.1f}" for name in ("p50", "min", "p90"))]
        for row in record["drafts"]
    ]  # fmt: skip
    tables = [Table("draft trees", columns, rows)]
    if record.get("draft_constraint"):
        headings = ("nodes", "tree", "queries", "illegal nodes", "expected accepted", "true title accepted")
        held = [
            [f"{row['num_nodes']}", row["method"], f"{row['num_queries']}", f"{row['illegal_share']:.1%}",
             f"{row['expected']:.3f}", f"{row['accepted']:.3f}"]
            for row in record["draft_constraint"]
        ]  # fmt: skip
        tables.append(
            Table(
                "draft trees under a trie",
                tuple((h, "left" if h == "tree" else "right") for h in headings),
                held,
            )
        )
    return tables
