"""A small vocabulary with every trap of the real ones, the real ones where they are at hand, and walks."""

from __future__ import annotations

import io
import os
import random
import tarfile
from functools import cache
from pathlib import Path

import pytest
import zstandard

from flashtrie_cli.trie.token_bytes import ADDED, BYTE_FALLBACK, HOLE, NORMAL, SPECIAL, TokenBytes

PAD, EOS, BOS, EOT, IM_START, A_HOLE, EMPTY, THINK = range(8)
FIRST_BYTE = 8
PIECES = [
    "a", "b", "y", "ab", "abc", "bc", "yes", "ye", " no", " n", " ", "no", "account", ".L", ".", "List", ".List",
    "L", "is", "t", "ist", "un", "der", "under", "score", "_", "\n", "\n\n", "<", "|", "eot", "_id", "|>", "im_start",
    "s", ">", "</", "</s", "think", "user", '"', '":', '\\"', "ö", "é", "\u0301", "日本", "😀", "ca", "se",
]  # fmt: skip
RAW_PIECES = [b"\xc3", b"\xb6\xc3", b"\xf0\x9f", b"\xff", b"\xff\xfe", b"x" * 128, b"=" * 1024, b"\xe2\x96"]
FIRST_PIECE = FIRST_BYTE + 256

TOKENIZERS = ["cl100k", "gemma3", "llama3_1", "mistral_v3", "o200k", "qwen3", "r50k", "tekken_240911"]
SETS = [
    "airport_names", "aws_ops", "banking77", "cities500", "clinc150", "countries", "english_words",
    "google_product_taxonomy", "iana_tz", "icd10cm_codes",
]  # fmt: skip


def trap_vocabulary() -> TokenBytes:
    head = [
        (SPECIAL, b"<pad>"), (SPECIAL, b"</s>"), (SPECIAL, b"<bos>"), (SPECIAL, b"<|eot_id|>"),
        (SPECIAL, b"<|im_start|>"), (HOLE, b""), (NORMAL, b""), (ADDED, b"<think>"),
    ]  # fmt: skip
    fallback = [(BYTE_FALLBACK, bytes([byte])) for byte in range(256)]
    pieces = [(NORMAL, piece.encode()) for piece in PIECES] + [(NORMAL, raw) for raw in RAW_PIECES]
    return TokenBytes.from_tokens(head + fallback + pieces)


def piece(text: str | bytes) -> int:
    """The id of a piece of the trap vocabulary."""
    if isinstance(text, bytes):
        return FIRST_PIECE + len(PIECES) + RAW_PIECES.index(text)
    return FIRST_PIECE + PIECES.index(text)


def byte(text: str | bytes) -> int:
    """The id of a byte's fallback token in the trap vocabulary."""
    return FIRST_BYTE + (text if isinstance(text, bytes) else text.encode())[0]


def data_directory() -> Path:
    """Where tokenizers/NAME.tar.zst and sets/NAME.txt.zst lie; skips the test where that is not said."""
    found = os.environ.get("FLASHTRIE_DATA")
    if not found:
        pytest.skip("FLASHTRIE_DATA does not name a directory with tokenizers/ and sets/")
    return Path(found)


@cache
def real_vocabulary(name: str) -> tuple[TokenBytes, tuple[int, ...]]:
    """The token bytes of a real tokenizer, and the end-of-sequence ids of its models."""
    import json

    from flashtrie_cli.keys.token_vocabulary import _read_voc1

    packed = (data_directory() / "tokenizers" / f"{name}.tar.zst").read_bytes()
    unpacked = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read()
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as archive:
        files = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        meta = json.loads(files["meta.json"].read())
        tokens = _read_voc1(files["vocab.bin"].read())
    several = {"llama3_1": (128001, 128008, 128009), "gemma3": (1, 106)}
    return tokens, several.get(name, tuple(meta["eos"]))


@cache
def real_set(name: str) -> list[str]:
    packed = (data_directory() / "sets" / f"{name}.txt.zst").read_bytes()
    text = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read().decode()
    return text.split("\n")[:-1]


def random_states(masks, rng: random.Random, count: int) -> list[tuple[int, list[int]]]:
    """(state, tokens that led there) along random walks from the root to an end-of-sequence token."""
    found: list[tuple[int, list[int]]] = []
    matcher = masks.matcher()
    while len(found) < count:
        matcher.reset()
        path: list[int] = []
        while not matcher.is_terminated:
            found.append((matcher.state, list(path)))
            allowed = matcher.allowed()
            token = int(allowed[rng.randrange(len(allowed))])
            assert matcher.advance(token)
            path.append(token)
    return found[:count]


def bits_of(row) -> list[int]:
    """The ids whose bit is set in a row of int32 mask words."""
    return [32 * at + bit for at, word in enumerate(row.tolist()) for bit in range(32) if word >> bit & 1]
