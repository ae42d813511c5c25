"""Reads the vocabulary of a language model out of whatever file its tokenizer comes in.

Understood, by content: Hugging Face `tokenizer.json` (byte-level BPE; BPE and Unigram of SentencePiece
families), `tekken.json`, tiktoken ranks (base64 and a rank a line), SentencePiece `.model`, and the plain
``VOC1`` layout (``VOC1``, u32 count, then u8 kind, u16 length and the bytes of each id).
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.source import read_whole
from flashtrie_cli.keys import sentencepiece_model
from flashtrie_cli.trie.token_bytes import (
    ADDED,
    BYTE_FALLBACK,
    HOLE,
    MAX_VOCAB_SIZE,
    NORMAL,
    SPECIAL,
    TokenBytes,
)

MAX_FILE_SIZE = 512 << 20
VOC1_MAGIC = b"VOC1"
SPACE_SYMBOL = "▁"  # U+2581, how SentencePiece writes a space

Tokens = dict[int, tuple[int, bytes]]


@dataclass(frozen=True)
class TokenVocabulary:
    """The bytes behind every id, and the end-of-sequence ids as far as the files say."""

    tokens: TokenBytes
    eos: tuple[int, ...]
    form: str


def open_vocabulary(path: str) -> TokenVocabulary:
    """Read a vocabulary file, plain or compressed; raises InputError where it is none that is understood."""
    data = read_whole(path, MAX_FILE_SIZE)
    try:
        if data.startswith(VOC1_MAGIC):
            return TokenVocabulary(_read_voc1(data), (), "VOC1")
        if data.lstrip()[:1] == b"{":
            return _read_json(json.loads(data), path)
        if sentencepiece_model.looks_like_one(data):
            model = sentencepiece_model.read(data)
            return TokenVocabulary(_dense(_sentencepiece_tokens(model)), model.eos, "SentencePiece")
        return TokenVocabulary(_dense(_tiktoken_tokens(data)), (), "tiktoken")
    except InputError as error:
        raise InputError(error.message, file=path, line=error.line, hint=error.hint) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"is not a vocabulary that is understood ({reason})", file=path) from None


def _dense(tokens: Tokens) -> TokenBytes:
    """One entry for every id up to the largest; what the tokenizer skips is a hole."""
    if not tokens:
        raise InputError("holds no tokens")
    largest = max(tokens)
    if min(tokens) < 0 or largest >= MAX_VOCAB_SIZE:
        raise InputError(f"has token ids outside 0 to {MAX_VOCAB_SIZE - 1}")
    hole = (HOLE, b"")
    return TokenBytes.from_tokens(tokens.get(token, hole) for token in range(largest + 1))


def _read_voc1(data: bytes) -> TokenBytes:
    (count,) = struct.unpack_from("<I", data, 4)
    tokens, at = [], 8
    for token in range(count):
        kind, length = struct.unpack_from("<BH", data, at)
        at += 3
        if kind > ADDED or at + length > len(data):
            raise InputError(f"is damaged at token {token}")
        tokens.append((kind, data[at : at + length]))
        at += length
    if at != len(data):
        raise InputError("has bytes behind its last token")
    return TokenBytes.from_tokens(tokens)


def _read_json(document: dict[str, Any], path: str) -> TokenVocabulary:
    if isinstance(document.get("model"), dict):
        tokens = _huggingface_tokens(document)
        return TokenVocabulary(_dense(tokens), _configured_eos(Path(path).parent, document), "tokenizer.json")
    if "config" in document and isinstance(document.get("vocab"), list):
        return _read_tekken(document)
    raise InputError("is JSON, but neither a tokenizer.json nor a tekken.json")


# --- Hugging Face ---


def _huggingface_tokens(document: dict[str, Any]) -> Tokens:
    """Ids of `model.vocab` and `added_tokens`; the latter win where both name an id, as in the library."""
    decode = _piece_decoder(document)
    vocab = document["model"]["vocab"]
    byte_fallback = bool(document["model"].get("byte_fallback"))
    pairs = vocab.items() if isinstance(vocab, dict) else ((piece, at) for at, (piece, _) in enumerate(vocab))
    tokens: Tokens = {}
    for piece, token in pairs:
        byte = _fallback_byte(piece) if byte_fallback else None
        tokens[int(token)] = (NORMAL, decode(piece)) if byte is None else (BYTE_FALLBACK, byte)
    is_byte_level = decode is _byte_level_bytes
    for added in document.get("added_tokens") or []:
        content = added["content"]
        text = content.encode() if is_byte_level else decode(content)
        tokens[int(added["id"])] = (SPECIAL, content.encode()) if added.get("special") else (ADDED, text)
    return tokens


def _piece_decoder(document: dict[str, Any]) -> Any:
    """How a piece of this tokenizer becomes bytes, read off its decoder."""
    steps = _steps(document.get("decoder"), "decoders")
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if "Metaspace" in kinds or SPACE_SYMBOL in [_replaced(step) for step in steps]:
        return _sentencepiece_bytes
    pre_tokenizers = [step.get("type") for step in _steps(document.get("pre_tokenizer"), "pretokenizers")]
    if not kinds and "ByteLevel" in pre_tokenizers:
        return _byte_level_bytes
    named = ", ".join(str(kind) for kind in kinds) or "none"
    raise InputError(
        f"has a decoder whose tokens are not plain pieces of text ({named})",
        hint="byte-level BPE and SentencePiece families are understood",
    )


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[inner] if part.get("type") == "Sequence" else [part]


def _replaced(step: dict[str, Any]) -> str | None:
    """What a Replace step turns into a space."""
    if step.get("type") != "Replace" or step.get("content") != " ":
        return None
    return step["pattern"].get("String")


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print stand for themselves, the others for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_of_symbol()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF_SYMBOL[symbol] for symbol in piece])
    except KeyError:
        return piece.encode()  # so does the library's decoder with a piece that is not of these symbols


def _sentencepiece_bytes(piece: str) -> bytes:
    return piece.replace(SPACE_SYMBOL, " ").encode()


def _fallback_byte(piece: str) -> bytes | None:
    """The byte of ``<0xNN>``."""
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    try:
        return bytes([int(piece[3:5], 16)])
    except ValueError:
        return None


def _configured_eos(directory: Path, document: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids from the files that lie beside a tokenizer.json, the most specific first."""
    for name in ("generation_config.json", "config.json"):
        found = _optional_json(directory / name).get("eos_token_id")
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found and all(isinstance(token, int) for token in found):
            return tuple(sorted(set(found)))
    named = _optional_json(directory / "tokenizer_config.json").get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    ids = [added["id"] for added in document.get("added_tokens") or [] if added["content"] == text]
    return tuple(ids[:1])


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- others ---


def _read_tekken(document: dict[str, Any]) -> TokenVocabulary:
    """Special ids first, then the ranks, of which the file may list more than the vocabulary takes."""
    config = document["config"]
    num_special = int(config["default_num_special_tokens"])
    num_ranks = int(config["default_vocab_size"]) - num_special
    tokens: Tokens = {token: (SPECIAL, b"") for token in range(num_special)}
    eos = 2  # where the specials are not listed, they are the first three of all Mistral tokenizers
    for special in document.get("special_tokens") or []:
        tokens[int(special["rank"])] = (SPECIAL, special["token_str"].encode())
        if special["token_str"] == "</s>":
            eos = int(special["rank"])
    for entry in document["vocab"]:
        if entry["rank"] < num_ranks:
            tokens[num_special + int(entry["rank"])] = (NORMAL, base64.b64decode(entry["token_bytes"]))
    return TokenVocabulary(_dense(tokens), (eos,), "tekken.json")


def _tiktoken_tokens(data: bytes) -> Tokens:
    """``BASE64 RANK`` a line. Special tokens are not in the file: their ids stay holes, which is as good."""
    tokens: Tokens = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        parts = line.split()
        try:
            if len(parts) != 2:
                raise ValueError("not two fields")
            tokens[int(parts[1])] = (NORMAL, base64.b64decode(parts[0], validate=True))
        except (ValueError, binascii.Error):
            raise InputError(
                "is no vocabulary that is understood: neither JSON, nor SentencePiece, nor `BASE64 RANK` lines",
                line=number,
            ) from None
    return tokens


def _sentencepiece_tokens(model: sentencepiece_model.Model) -> Tokens:
    kinds = {
        sentencepiece_model.NORMAL: NORMAL,
        sentencepiece_model.USER_DEFINED: ADDED,
        sentencepiece_model.BYTE: BYTE_FALLBACK,
        sentencepiece_model.UNUSED: HOLE,
    }
    tokens: Tokens = {}
    for token, (piece, piece_type) in enumerate(model.pieces):
        kind = kinds.get(piece_type, SPECIAL)
        byte = _fallback_byte(piece) if kind == BYTE_FALLBACK else None
        if kind == BYTE_FALLBACK and byte is None:
            raise InputError(f"has a byte piece {piece!r} that names no byte")
        text = piece.encode() if kind in (SPECIAL, HOLE) else _sentencepiece_bytes(piece)
        tokens[token] = (kind, text if byte is None else byte)
    return tokens
