"""What each id of a language model's vocabulary stands for: bytes, or nothing that text could spell."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NORMAL = 0
SPECIAL = 1
"""Control tokens: never text, even where a member spells their name."""
HOLE = 2
"""Ids that the tokenizer skips."""
BYTE_FALLBACK = 3
"""``<0xNN>`` of SentencePiece families: that one byte."""
ADDED = 4
"""Added by hand and not special (``<think>``): text, unless an option says otherwise."""

MAX_VOCAB_SIZE = 1 << 24


@dataclass(frozen=True)
class TokenBytes:
    """Kinds uint8 [V], the bytes of all tokens end to end (uint8), and where each begins (uint64 [V + 1])."""

    kinds: npt.NDArray[np.uint8]
    begins: npt.NDArray[np.uint64]
    data: npt.NDArray[np.uint8]

    @classmethod
    def from_tokens(cls, tokens: Iterable[tuple[int, bytes]]) -> TokenBytes:
        """From (kind, bytes) of each id in order."""
        pairs = list(tokens)
        begins = np.zeros(len(pairs) + 1, np.uint64)
        np.cumsum([len(text) for _, text in pairs], out=begins[1:], dtype=np.uint64)
        kinds = np.array([kind for kind, _ in pairs], np.uint8)
        return cls(kinds, begins, np.frombuffer(b"".join(text for _, text in pairs), np.uint8))

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of an id; IndexError where the vocabulary has none."""
        if not 0 <= token < len(self):
            raise IndexError(f"token {token} is not in the vocabulary of {len(self)}")
        return self.data[int(self.begins[token]) : int(self.begins[token + 1])].tobytes()

    def is_text(self, *, added_is_text: bool = True, eos: Iterable[int] = ()) -> npt.NDArray[np.bool_]:
        """Which ids may spell text: bool [V]. Ids without bytes and end-of-sequence ids never do."""
        kept = (self.kinds == NORMAL) | (self.kinds == BYTE_FALLBACK)
        if added_is_text:
            kept |= self.kinds == ADDED
        kept &= self.begins[1:] > self.begins[:-1]
        kept[[token for token in eos if 0 <= token < len(self)]] = False
        return kept

    def select(
        self, kept: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """The chosen ids (uint32 [n]), where their bytes begin (uint64 [n + 1]), and those bytes."""
        lengths = np.diff(self.begins.astype(np.int64))
        begins = np.zeros(int(kept.sum()) + 1, np.uint64)
        np.cumsum(lengths[kept], out=begins[1:], dtype=np.uint64)
        return (
            np.flatnonzero(kept).astype(np.uint32),
            begins,
            self.data[np.repeat(kept, lengths.astype(np.intp))],
        )

    def of_single_bytes(
        self, kept: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """The chosen ids that spell one byte, by byte and then ascending (uint32), and where those of each byte begin
        (uint32 [257])."""
        tokens = np.flatnonzero(kept & (np.diff(self.begins) == 1))
        spelled = self.data[self.begins[tokens].astype(np.intp)]
        begins = np.zeros(257, np.uint32)
        np.cumsum(np.bincount(spelled, minlength=256), out=begins[1:])
        return tokens[np.argsort(spelled, kind="stable")].astype(np.uint32), begins

    def digest(self, kept: npt.NDArray[np.bool_] | None = None) -> str:
        """Names the vocabulary, or the part of it that spells text: BLAKE2b-128 in hex."""
        made = hashlib.blake2b(digest_size=16)
        arrays = (self.kinds, self.begins, self.data) if kept is None else self.select(kept)
        for array in arrays:
            made.update(len(array).to_bytes(8, "little"))
            made.update(np.ascontiguousarray(array).data)
        return made.hexdigest()
