"""Hits as lines of text, by the extension: ten million of them take seconds in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtrie_cli.engine import cpu

if TYPE_CHECKING:
    from flashtrie_cli.query.results import SearchResults


def hit_lines(
    results: SearchResults, first: int, *, names: list[str] | None, texts: list[str] | None, values: list[str] | None,
    threads: int,
) -> bytes | None:  # fmt: skip
    """A TSV line a hit, as ``query.output.TsvWriter`` describes it, or None where only Python can write it.

    ``first``: number of the first query, for those without ``names``. ``texts`` and ``values`` have one a hit.
    """
    if not cpu.is_available():
        return None
    columns: dict[str, bytes | None] = {"names": None, "texts": None, "values": None}
    for name, lines in (("names", names), ("texts", texts), ("values", values)):
        if lines is None:
            continue
        joined = "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")
        if joined.count(b"\n") != len(lines):
            return None  # a text with a line break of its own
        columns[name] = joined
    return cpu.native().format_hits(
        hit_offsets=results.hit_offsets, key_ids=results.key_ids, scores=results.scores,
        normalised_scores=results.normalised_scores, token_offsets=results.token_offsets, tokens=results.tokens,
        first_query=first, num_threads=threads, **columns,
    )  # fmt: skip
