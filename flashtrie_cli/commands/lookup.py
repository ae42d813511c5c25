"""`flashtrie lookup`: which of these keys are in the index, which extend them, which are prefixes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, Engine, IndexPath, Json, Quiet, Threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashtrie_cli.index import Index
    from flashtrie_cli.query.lookup import Answer

MODES = ("exact", "prefix", "common-prefix")


def command(
    index: IndexPath,
    keys: Annotated[
        str,
        typer.Argument(metavar="KEYS", help="File of keys, one a line, as the index speaks; - is stdin."),
    ] = "-",
    mode: Annotated[
        str,
        typer.Option(
            help="exact; prefix (keys that extend each line); common-prefix (keys each line begins with)."
        ),
    ] = "exact",
    limit: Annotated[int, typer.Option(min=0, help="Most answers a line; 0 is all.")] = 0,
    ids: Annotated[
        bool, typer.Option("--ids", help="Lines are token ids, also where the index holds words.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Exit with 1 unless every line has an answer.")
    ] = False,
    engine: Engine = "auto",
    threads: Threads = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Look keys up.

    TSV: the line as given, then `key id` and `value` (exact; - where not found), or `key`, `key id` and `value` of
    each answer. Lines come in input order; with `--json` each says which line it answers, `query`, from 0.
    """
    from flashtrie_cli.commands.common import thread_count
    from flashtrie_cli.errors import UsageError
    from flashtrie_cli.index import Index
    from flashtrie_cli.query.lookup import read_questions
    from flashtrie_cli.report import summary
    from flashtrie_cli.streams import TsvWatch, open_results

    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not one of {', '.join(MODES)}")
    if limit and mode == "exact":
        raise UsageError("--limit goes with --mode prefix or common-prefix")
    opened = Index.open(index, engine=engine, threads=thread_count(threads))
    asked = found = 0
    watch = TsvWatch()
    with open_results("-") as out:
        for batch in read_questions(opened, keys, as_ids=ids):
            for answer in _answers(opened, batch, mode, limit):
                asked += answer.is_new
                found += answer.is_new and answer.key_id is not None
                if not json:
                    watch.check([answer.line.decode("utf-8", "replace"), answer.key or ""])
                out.write(_json(answer, mode) if json else _tsv(answer, mode))
    summary([("lines", f"{asked:,}"), ("found", f"{found:,}")], quiet=quiet)
    if every and found < asked:
        raise typer.Exit(1)


def _answers(index: Index, batch: Any, mode: str, limit: int) -> Iterator[Answer]:
    from flashtrie_cli.query import lookup

    if mode == "exact":
        return lookup.exact(index, batch)
    if mode == "prefix":
        return lookup.extensions(index, batch, limit)
    return lookup.prefixes(index, batch, limit)


def _tsv(answer: Answer, mode: str) -> bytes:
    from flashtrie_cli.query.lookup import value_text
    from flashtrie_cli.streams import text_bytes

    found = answer.key_id is not None
    if mode != "exact" and not found:
        return b""
    columns = [answer.line]
    if mode != "exact":
        columns.append(text_bytes(answer.key or ""))
    columns.append(str(answer.key_id).encode() if found else b"-")
    if answer.value is not None:
        columns.append(value_text(answer.value).encode())
    return b"\t".join(columns) + b"\n"


def _json(answer: Answer, mode: str) -> bytes:
    from flashtrie_cli.streams import json_line

    if mode != "exact" and answer.key_id is None:
        return b""
    row: dict[str, Any] = {
        "schema": "flashtrie.lookup/1",
        "query": answer.number - 1,  # from 0, as everywhere in results
        "line": answer.line.decode("utf-8", "surrogateescape"),
    }
    if mode == "exact":
        row["found"] = answer.key_id is not None
    else:
        row["key"] = answer.key
    row["key_id"] = answer.key_id
    if answer.value is not None:
        row["value"] = answer.value
    return json_line(row)
