"""Lines of text to keys, by the tokenizer's kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashtrie_cli.keys.batch import MAX_DEPTH
from flashtrie_cli.keys.parse_python import LineProblem, parse_lines
from flashtrie_cli.keys.parsing import LineFault, LineFormat, ParsedLines
from flashtrie_cli.keys.tokenizers import Tokenizer


def parse_text(tokenizer: Tokenizer, block: bytes, form: LineFormat) -> ParsedLines:
    """Keys of whole lines; the block may hold a fault (see `ParsedLines.check`)."""
    parse_block: Any = getattr(tokenizer, "parse_block", None)
    return (
        parse_block(block, form) if parse_block is not None else _parse_with_library(tokenizer, block, form)
    )


def _parse_with_library(tokenizer: Tokenizer, block: bytes, form: LineFormat) -> ParsedLines:
    """Cut and check the lines first, tokenise all of them in one go, then put the tokens in."""
    texts: list[str] = []

    def collect(column: bytes) -> list[int]:
        try:
            text = column.decode("utf-8")
        except UnicodeDecodeError as error:
            raise LineProblem(LineFault.INVALID_UTF8, error.start, error.start + 1) from None
        if not text or text.isspace():
            return []
        texts.append(text)
        return [0]

    parsed = parse_lines(block, form, collect)
    # Also after a fault: a key before it may turn out too deep, and the first fault is told.
    tokens, offsets = tokenizer.encode_batch(texts[: len(parsed.lines)])
    counts = np.diff(offsets)
    if (deep := np.flatnonzero(counts > MAX_DEPTH)).size:
        parsed.fault, parsed.fault_line = LineFault.TOO_DEEP, int(parsed.lines[deep[0]])
    parsed.tokens, parsed.offsets = tokens, offsets
    if (empty := counts == 0).any():  # a normaliser may leave nothing of a line
        parsed.offsets = np.concatenate([offsets[:1], offsets[1:][~empty]])
        parsed.lines = parsed.lines[~empty]
        parsed.values = parsed.values[~empty] if parsed.values is not None else None
        parsed.num_empty += int(empty.sum())
    return parsed
