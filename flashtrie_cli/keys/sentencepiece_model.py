"""The few fields of a SentencePiece `.model` (a protocol buffer) that say what its pieces are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashtrie_cli.errors import InputError

# SentencePiece.Type in sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Field numbers there: ModelProto, SentencePiece, TrainerSpec
_PIECES, _TRAINER_SPEC = 1, 2
_PIECE_TEXT, _PIECE_TYPE = 1, 3
_EOS_ID = 42
_DEFAULT_EOS_ID = 2

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Model:
    """Pieces as (text, type) by id, and the end-of-sequence id where the model has one."""

    pieces: list[tuple[str, int]]
    eos: tuple[int, ...]


def looks_like_one(data: bytes) -> bool:
    """Field 1, a message that begins with its own field 1: the first piece and its text."""
    return len(data) > 3 and data[0] == _PIECES << 3 | _BYTES and data[2] == _PIECE_TEXT << 3 | _BYTES


def read(data: bytes) -> Model:
    """Raises InputError for what is no such file or is cut short."""
    pieces: list[tuple[str, int]] = []
    eos_id = _DEFAULT_EOS_ID
    for field, value in _fields(data):
        if field == _PIECES and isinstance(value, bytes):
            pieces.append(_piece(value))
        elif field == _TRAINER_SPEC and isinstance(value, bytes):
            for inner, setting in _fields(value):
                if inner == _EOS_ID and isinstance(setting, int):
                    eos_id = setting - (1 << 64) if setting >> 63 else setting  # -1: none
    return Model(pieces, (eos_id,) if 0 <= eos_id < len(pieces) else ())


def _piece(message: bytes) -> tuple[str, int]:
    text, kind = "", NORMAL
    for field, value in _fields(message):
        if field == _PIECE_TEXT and isinstance(value, bytes):
            text = value.decode()
        elif field == _PIECE_TYPE and isinstance(value, int):
            kind = value
    return text, kind


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field; numbers of fixed width come as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _varint(message, at)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise InputError(f"is no SentencePiece model (wire type {wire} at byte {at})")
        if at + size > len(message):
            raise InputError("is a SentencePiece model that is cut short")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise InputError("is a SentencePiece model that is cut short")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
