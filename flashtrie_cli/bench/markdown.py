"""A record as a Markdown report: environment, tables, pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from flashtrie_cli.bench.gate import Verdict
from flashtrie_cli.bench.tables import Table, all_tables, gate_table
from flashtrie_cli.files import atomic_output


def write_report(
    record: dict[str, Any],
    path: str,
    *,
    pictures: Sequence[str] = (),
    verdicts: Sequence[Verdict] = (),
    max_slowdown: float = 1.1,
) -> None:
    """Write the report; links to pictures are relative to it. Raises OutputError."""
    parts = ["# flashtrie bench", _environment(record)]
    if not record["is_complete"]:
        parts.append("**Interrupted: only the cases below were finished.**")
    if verdicts:
        parts.append(_table(gate_table(list(verdicts), max_slowdown)))
    parts += [_table(table) for table in all_tables(record)]
    directory = os.path.dirname(os.path.abspath(path))
    parts += [f"![{os.path.basename(p)}]({os.path.relpath(p, directory)})" for p in pictures]
    with atomic_output(path) as file:
        file.write(("\n\n".join(parts) + "\n").encode())


def _environment(record: dict[str, Any]) -> str:
    environment = dict(record["environment"])
    gpu = environment.pop("gpu")
    if gpu:
        environment["gpu"] = f"{gpu['name']}, driver {gpu['driver']}, {gpu['power_limit']}"
    options = {**environment, **record.get("options", {})}
    return "\n".join(
        f"- {name.replace('_', ' ')}: {value}" for name, value in options.items() if value is not None
    )


def _table(table: Table) -> str:
    rows = [
        [heading for heading, _ in table.columns],
        ["---:" if side == "right" else ":---" for _, side in table.columns],
        *table.rows,
    ]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return f"## {table.title}\n\n" + "\n".join(lines)
