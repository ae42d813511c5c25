"""Masks as text, JSON lines and packed words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from flashtrie_cli.query.token_masks import TokenMasks

FORMATS = ("tsv", "jsonl", "npy")
States = Sequence["int | None"]
_ROWS_PER_BLOCK = 256


def mask_writer(form: str, masks: TokenMasks, out: BinaryIO) -> Callable[[States], None]:
    """What writes the masks of some states, in order; None is the state of a prefix that no member has."""
    writers: dict[str, Callable[[TokenMasks, BinaryIO, States], None]] = {
        "tsv": _write_tsv,
        "jsonl": _write_jsonl,
        "npy": _write_npy,
    }
    return lambda states: writers[form](masks, out, states)


def escaped(text: bytes) -> str:
    """Readable on one line, and reversible: backslash escapes for controls, backslashes and bytes that are no text."""
    decoded = text.replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
    return "".join(_printable(character) for character in decoded)


def _printable(character: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in named:
        return named[character]
    return f"\\x{ord(character):02x}" if ord(character) < 0x20 or ord(character) == 0x7F else character


def _write_tsv(masks: TokenMasks, out: BinaryIO, states: States) -> None:
    for number, state in enumerate(states):
        for token, text in _allowed(masks, state):
            shown = "<eos>" if text is None else escaped(text)
            out.write(f"{number}\t{token}\t{shown}\n".encode())


def _write_jsonl(masks: TokenMasks, out: BinaryIO, states: States) -> None:
    for number, state in enumerate(states):
        allowed = [_as_json(token, text) for token, text in _allowed(masks, state)]
        forced = masks.forced(state) if state is not None else None
        line = {
            "schema": "flashtrie.mask/1",
            "prefix": number,
            "state": state,
            "is_terminal": any("eos" in token for token in allowed),
            "num_allowed": len(allowed),
            "allowed": allowed,
            "forced": _text_or_bytes(forced.bytes) if forced is not None else {"text": ""},
            "forced_tokens": forced.tokens if forced is not None else [],
        }
        out.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


def _write_npy(masks: TokenMasks, out: BinaryIO, states: States) -> None:
    header = {"descr": "<i4", "fortran_order": False, "shape": (len(states), masks.num_words)}
    np.lib.format.write_array_header_1_0(out, header)
    for begin in range(0, len(states), _ROWS_PER_BLOCK):
        block = states[begin : begin + _ROWS_PER_BLOCK]
        rows = masks.bitmask(len(block))
        masks.fill([masks.ended if state is None else state for state in block], rows)
        out.write(rows.astype("<i4", copy=False).tobytes())


def _allowed(masks: TokenMasks, state: int | None) -> Iterator[tuple[int, bytes | None]]:
    """(id, bytes) of each allowed token, None for the bytes of an end-of-sequence token."""
    if state is None:
        return
    for token in masks.allowed(state).tolist():
        yield token, None if token in masks.eos else masks.tokens[token]


def _as_json(token: int, text: bytes | None) -> dict[str, Any]:
    return {"id": token, "eos": True} if text is None else {"id": token, **_text_or_bytes(text)}


def _text_or_bytes(text: bytes) -> dict[str, str]:
    """``text``, or ``bytes`` in hex where it is a part of a character."""
    try:
        return {"text": text.decode()}
    except UnicodeDecodeError:
        return {"bytes": text.hex()}
