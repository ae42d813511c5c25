"""`flashtrie mask`: the tokens that may follow a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashtrie_cli.commands.common import Debug, Force, IndexPath, Json, Output, Quiet, Threads

if TYPE_CHECKING:
    from flashtrie_cli.query.token_masks import TokenMasks

MAX_FILE_SIZE = 1 << 30
"""Of prefixes, which are all held at once."""


def command(
    index: IndexPath,
    prefixes: Annotated[
        str | None,
        typer.Argument(
            metavar="PREFIXES", help="A prefix a line; - is stdin. Without it, the empty prefix only."
        ),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Prefixes are token ids between blanks, not text.")
    ] = False,
    output: Output = "-",
    output_format: Annotated[
        str, typer.Option("--format", help="tsv, jsonl, or npy (int32 mask words, a row a prefix).")
    ] = "tsv",
    force: Force = False,
    threads: Threads = 1,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show which tokens are allowed after each prefix.

    TSV columns: prefix number, token id, text, with backslash escapes for control characters and stray bytes; an
    end-of-sequence token has the text <eos>. A prefix of no member allows nothing. --json is --format jsonl.
    """
    from flashtrie_cli.commands.common import thread_count
    from flashtrie_cli.errors import UsageError
    from flashtrie_cli.query.mask_output import FORMATS, mask_writer
    from flashtrie_cli.query.token_masks import TokenMasks
    from flashtrie_cli.streams import check_results, open_results

    chosen = "jsonl" if json else output_format
    if chosen not in FORMATS:
        raise UsageError(f"format {chosen!r} is not one of {', '.join(FORMATS)}")
    if chosen == "npy" and output == "-":
        raise UsageError("npy goes to a file", hint="--output OUT.npy")
    check_results(output, force=force, inputs=(index, prefixes))
    masks = TokenMasks.open(index, threads=thread_count(threads))
    lines = _lines(prefixes)
    states = _states_after_ids(masks, lines, prefixes) if ids else [masks.walk_bytes(line) for line in lines]
    with open_results(output, force=force) as out:
        mask_writer(chosen, masks, out)(states)


def _lines(path: str | None) -> list[bytes]:
    if path is None:
        return [b""]
    from flashtrie_cli.inputs.lines import UTF8_BOM
    from flashtrie_cli.inputs.source import read_whole

    lines = read_whole(path, MAX_FILE_SIZE).removeprefix(UTF8_BOM).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


def _states_after_ids(masks: TokenMasks, lines: list[bytes], path: str | None) -> list[int | None]:
    """The state after each line of token ids; None where no member begins with it."""
    import itertools

    from flashtrie_cli.query.lookup import parse_ids
    from flashtrie_cli.query.token_masks import REJECTED

    tokens, offsets = parse_ids(lines, path or "-", 1)
    rows = [tokens[begin:end] for begin, end in itertools.pairwise(offsets.tolist())]
    states = [int(masks.walk([row])[0]) if len(row) else 0 for row in rows]
    return [None if state == REJECTED else state for state in states]
