"""The export: schema ``flashtrie.bench/1``, written whole after every case, read back with checks."""

from __future__ import annotations

import json
from typing import Any

from flashtrie_cli.bench.run import SCHEMA
from flashtrie_cli.bench.statistics import finite
from flashtrie_cli.errors import InputError
from flashtrie_cli.files import atomic_output


def save(record: dict[str, Any], path: str) -> None:
    """Write a record; the file is always a whole one. Raises OutputError."""
    with atomic_output(path) as file:
        file.write(json.dumps(finite(record), separators=(",", ":"), ensure_ascii=False).encode() + b"\n")


def load(path: str) -> dict[str, Any]:
    """A record as it was written. Raises InputError for anything else."""
    try:
        with open(path, "rb") as file:
            record = json.load(file)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from error
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except RecursionError as error:
        raise InputError("is nested too deeply", file=path) from error
    if not isinstance(record, dict) or not str(record.get("schema", "")).startswith("flashtrie.bench/"):
        raise InputError("is not an export of flashtrie bench", file=path)
    if record["schema"] != SCHEMA:
        raise InputError(f"has schema {record['schema']}; this flashtrie compares {SCHEMA}", file=path)
    if not record.get("is_complete"):
        raise InputError("is of a run that was interrupted", file=path, hint="make the base again")
    return record
