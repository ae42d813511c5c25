"""What turns text into tokens: the text's own words, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import IndexFileError, InputError, UsageError
from flashtrie_cli.inputs.source import read_whole
from flashtrie_cli.keys.batch import UNKNOWN_TOKEN
from flashtrie_cli.keys.vocabulary import WordVocabulary

MAX_TOKENIZER_SIZE = 256 << 20
# The library keeps about 1 kB a text until its batch is done, so batches stay small.
_TEXTS_PER_CALL = 2048


class Tokenizer(Protocol):
    """Text to tokens and back, many at a time."""

    kind: str
    """``words`` or ``hf``."""

    def encode_batch(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of each text: flat uint32, and int64 offsets [len(texts) + 1]."""

    def decode_batch(self, tokens: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> list[str]:
        """The text of each key."""


class HuggingFaceTokenizer:
    """A `tokenizer.json` through the library `tokenizers`: no special tokens added, nothing cut or padded.

    ``payload`` is the file's JSON, decompressed, for keeping in an index; ``digest`` its BLAKE2b-256 in hex.
    """

    kind = "hf"

    def __init__(
        self, payload: bytes, source: str, error: type[InputError] | type[IndexFileError] = InputError
    ):
        library = _library()
        self.payload = payload
        self.digest = hashlib.blake2b(payload, digest_size=32).hexdigest()
        self.source = source
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(payload.decode("utf-8"))
        except Exception as problem:  # the library raises plain Exception
            reason = " ".join(str(problem).split())
            raise error(f"is not a tokenizer.json: {reason}", file=source) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Leaving character offsets out is twice as fast; older versions have no such call.
        self._encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    @classmethod
    def open(cls, path: str) -> HuggingFaceTokenizer:
        """From a file, which may be compressed (gzip, Zstandard)."""
        return cls(read_whole(path, MAX_TOKENIZER_SIZE), path)

    @classmethod
    def from_index(cls, payload: bytes, source: str) -> HuggingFaceTokenizer:
        """From the bytes that an index holds; damage is an IndexFileError."""
        return cls(payload, source, IndexFileError)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode_batch(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of each text: flat uint32, and int64 offsets [len(texts) + 1]."""
        parts: list[npt.NDArray[np.uint32]] = []
        counts = np.zeros(len(texts) + 1, dtype=np.int64)
        for begin in range(0, len(texts), _TEXTS_PER_CALL):
            keys = [
                encoding.ids
                for encoding in self._encode(texts[begin : begin + _TEXTS_PER_CALL], add_special_tokens=False)
            ]
            counts[begin + 1 : begin + 1 + len(keys)] = [len(key) for key in keys]
            parts.append(np.array([token for key in keys for token in key], dtype=np.uint32))
        return np.concatenate([np.empty(0, np.uint32), *parts]), np.cumsum(counts)

    def decode_batch(self, tokens: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> list[str]:
        """The text of each key, special tokens included. Ids that the tokenizer lacks give no text."""
        texts: list[str] = []
        for begin in range(0, len(offsets) - 1, _TEXTS_PER_CALL):
            ends = offsets[begin : begin + _TEXTS_PER_CALL + 1].tolist()
            flat = tokens[ends[0] : ends[-1]].tolist()
            keys = [flat[a - ends[0] : b - ends[0]] for a, b in pairwise(ends)]
            texts += self._tokenizer.decode_batch(keys, skip_special_tokens=False)
        return texts

    def id(self, token: str) -> int | None:
        """The id of a token's own string (``Ġhello``), None where there is none."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def ids(self, tokens: list[str]) -> npt.NDArray[np.uint32]:
        """The id of each token's own string; UNKNOWN_TOKEN for one that it lacks."""
        found = map(self._tokenizer.token_to_id, tokens)
        return np.array([UNKNOWN_TOKEN if at is None else at for at in found], dtype=np.uint32)


def open_tokenizer(name: str) -> WordVocabulary | HuggingFaceTokenizer:
    """What ``--tokenizer`` names: ``words``, or the path of a `tokenizer.json`."""
    return WordVocabulary() if name == "words" else HuggingFaceTokenizer.open(name)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "a tokenizer.json needs the library `tokenizers`", hint="pip install 'flashtrie[tokenizers]'"
        ) from None
    return tokenizers
