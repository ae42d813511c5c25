"""Finite sets of strings: one a line, JSON, or the enum of a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs.lines import UTF8_BOM
from flashtrie_cli.inputs.source import read_whole

FORMS = ("text", "json", "jsonl")
MAX_FILE_SIZE = 1 << 30
LONE_SURROGATE = "a lone surrogate (\\ud800 to \\udfff) is no character"
MAX_REFERENCES = 64
"""From one to the next: more go round in a circle."""


@dataclass(frozen=True)
class StringSet:
    """Members as given, repeats included."""

    members: list[str | bytes]
    num_empty_lines_skipped: int = 0


def read_string_sets(paths: Sequence[str], form: str = "text") -> StringSet:
    """All members of some files, plain or compressed; ``-`` is stdin.

    ``text``: a member a line, byte for byte, whatever it holds; empty lines are skipped, a carriage return
    before the newline goes with it. ``json``: an array of strings a file. ``jsonl``: a JSON string a line.
    Raises InputError and UsageError.
    """
    if form not in FORMS:
        raise UsageError(f"sets come as {', '.join(FORMS)}, not {form!r}")
    members: list[str | bytes] = []
    num_skipped = 0
    for path in paths:
        data = read_whole(path, MAX_FILE_SIZE).removeprefix(UTF8_BOM)
        if form == "json":
            members += _strings(_parse(data, path), path, "the file")
            continue
        lines = [line.removesuffix(b"\r") for line in data.split(b"\n")]
        if lines[-1] == b"":
            lines.pop()  # what follows the last newline is no line
        if form == "jsonl":
            parsed = [
                (number, _parse(line, path, number)) for number, line in enumerate(lines, 1) if line.strip()
            ]
            for number, value in parsed:
                if not isinstance(value, str):
                    raise InputError(f"holds {_kind(value)} where a string belongs", file=path, line=number)
                if not _is_text(value):
                    raise InputError(LONE_SURROGATE, file=path, line=number)
            members += [value for _, value in parsed]
            num_skipped += len(lines) - len(parsed)
        else:
            kept = [line for line in lines if line]
            members += kept
            num_skipped += len(lines) - len(kept)
    return StringSet(members, num_skipped)


def read_schema_enum(path: str, pointer: str) -> StringSet:
    """The strings that a JSON schema allows at a place of it: its ``enum``, or its ``const``.

    ``pointer`` is a JSON pointer (RFC 6901) to the schema of that place, ``/properties/x``; local references
    are followed. Raises InputError.
    """
    schema = _parse(read_whole(path, MAX_FILE_SIZE), path)
    place = _resolve(schema, pointer, path)
    if isinstance(place, dict):
        place = _dereference(schema, place, path)
        values = place.get("enum", [place["const"]] if "const" in place else None)
    else:
        values = place
    if not isinstance(values, list):
        raise InputError(f"has neither enum nor const at {pointer!r}", file=path)
    return StringSet(list(_strings(values, path, f"the enum at {pointer!r}")))


def _parse(data: bytes, path: str, line: int | None = None) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise InputError(f"is not JSON: {error}", file=path, line=line) from None
    except RecursionError:
        raise InputError("is nested too deeply", file=path, line=line) from None


def _strings(values: Any, path: str, where: str) -> list[str]:
    if not isinstance(values, list):
        raise InputError(f"{where} holds {_kind(values)} where an array of strings belongs", file=path)
    for at, value in enumerate(values):
        if not isinstance(value, str):
            raise InputError(
                f"{where} holds {_kind(value)} at position {at} where a string belongs", file=path
            )
        if not _is_text(value):
            raise InputError(f"{where}, position {at}: {LONE_SURROGATE}", file=path)
    return values


def _is_text(value: str) -> bool:
    """Whether it has a UTF-8 form."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else "a string")


def _resolve(schema: Any, pointer: str, path: str, depth: int = 0) -> Any:
    if pointer not in ("", "#") and not pointer.removeprefix("#").startswith("/"):
        raise UsageError(f"{pointer!r} is not a JSON pointer", hint="for example /properties/name")
    place = schema
    for step in pointer.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = _dereference(schema, place, path, depth)
        try:
            place = place[int(name)] if isinstance(place, list) else place[name]
        except (KeyError, IndexError, ValueError, TypeError):
            raise InputError(f"has nothing at {pointer!r} ({name!r} is missing)", file=path) from None
    return place


def _dereference(schema: Any, place: dict[str, Any], path: str, depth: int = 0) -> dict[str, Any]:
    """Where a reference leads, through others; ``depth``: references that are being followed for it already."""
    for followed in range(depth, MAX_REFERENCES):
        reference = place.get("$ref")
        if not isinstance(reference, str):
            return place
        if not reference.startswith("#"):
            raise InputError(f"refers to another document ({reference!r})", file=path)
        place = _resolve(schema, reference, path, followed + 1)
        if not isinstance(place, dict):
            return {"enum": place}
    raise InputError("has references that go round in a circle", file=path)
