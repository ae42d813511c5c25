"""The builder that runs here: native where it was compiled, else plain Python with the same bytes."""

from __future__ import annotations

from typing import Any

from flashtrie_cli.engine import cpu
from flashtrie_cli.trie import builder as plain


def make_builder(
    *,
    memory: int,
    threads: int,
    temp_directory: str,
    duplicates: str,
    value_kind: int,
    is_sorted: bool,
    is_compact: bool,
    tails: str = "off",
) -> tuple[Any, type[Exception]]:
    """A builder and the exception by which it reports two keys in conflict.

    ``memory``: bytes for sorting and levels; past it, sorted runs and levels go to unnamed files in
    ``temp_directory``. ``is_compact``: sections for compression (label_delta, inner_terminal) instead of the mapped
    ones. ``tails``: off (the trie as it is), on (unbranched ends cut off) or auto (both, until ``use_tails`` says which
    is read). The conflict's arguments: message, file and line of one key, file and line of the other, tokens.
    """
    if not cpu.is_available():
        builder = plain.PlainBuilder(
            duplicates=duplicates,
            value_kind=value_kind,
            is_sorted=is_sorted,
            is_compact=is_compact,
            tails=tails,
        )
        return builder, plain.KeyConflict
    module = cpu.native()
    return (
        module.IndexBuilder(
            memory=memory,
            threads=threads,
            temp_directory=temp_directory,
            duplicates=duplicates,
            value_kind=value_kind,
            is_sorted=is_sorted,
            is_compact=is_compact,
            tails=tails,
        ),
        module.KeyConflict,
    )
