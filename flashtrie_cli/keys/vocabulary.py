"""Words of the text itself as the vocabulary: one that grows while reading, one that an index holds."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import IndexFileError, InputError
from flashtrie_cli.inputs.native import native
from flashtrie_cli.keys.batch import UNKNOWN_TOKEN
from flashtrie_cli.keys.parsing import LineFormat, ParsedLines, as_bytes_array

Words = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], npt.NDArray[np.int64]]


class WordVocabulary:
    """Words to ids in order of first sight. `sorted` gives the ids that go into an index.

    Words are what Unicode white space separates, as by ``str.split()``.
    """

    kind = "words"

    def __init__(self) -> None:
        self._table = _new_table()

    def __len__(self) -> int:
        return len(self._table)

    def add(self, word: str) -> int:
        """Id of one word, which is added where it is new. It must have no white space (ValueError)."""
        if word.split() != [word]:
            raise ValueError(f"{word!r} is not one word")
        return int(self._table.add(word.encode("utf-8")))

    def parse_block(self, block: bytes, form: LineFormat) -> ParsedLines:
        """Keys of whole lines of text, new words added; or a fault (see `ParsedLines.check`)."""
        return ParsedLines(
            *self._table.parse(
                as_bytes_array(block), form.first_line, form.value_column, form.float_values, True
            )
        )

    def encode_batch(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of each text: flat uint32 and int64 offsets [len(texts) + 1]; new words are added.

        A text above MAX_DEPTH words is an InputError whose ``line`` is the text's place in the list.
        """
        return _encode_texts(texts, self._table, grow=True)

    def clear(self) -> None:
        """Forget all words, and give their memory back."""
        self._table = _new_table()

    def sorted(self) -> Words:
        """The words in byte order, and where each went.

        Returns ``new_ids`` uint32 [W] (old id -> rank in byte order), ``text`` uint8 (the words in that
        order, end to end) and ``offsets`` int64 [W + 1]. Ranks depend on the set of words alone, whatever
        order they came in.
        """
        return self._table.sorted()


class FrozenVocabulary:
    """The vocabulary of an index: word ids are ranks in byte order.

    ``text`` uint8 and ``offsets`` int64 [W + 1] as `WordVocabulary.sorted` gives them; both may be views of a
    mapped file. A vocabulary that breaks its rules is an IndexFileError.
    """

    kind = "words"
    # Below this many words a binary search in Python answers sooner than a table is filled.
    _FEW_WORDS = 256

    def __init__(
        self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], source: str | None = None
    ):
        self.text = np.ascontiguousarray(text, dtype=np.uint8)
        self.offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        self._full_table: Any | None = None
        self._check(source)

    def _check(self, source: str | None) -> None:
        offsets = self.offsets
        fits = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(self.text)
        if not fits or np.any(offsets[1:] < offsets[:-1]):
            raise IndexFileError("damaged vocabulary: its offsets do not fit its text", file=source)
        module = native()
        check = module.first_bad_word if module is not None else _first_bad_word
        if (bad := check(self.text, offsets)) >= 0:
            raise IndexFileError(f"damaged vocabulary: word {bad} is out of order or is no word", file=source)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def word(self, token: int) -> str:
        """The word of an id; IndexError where there is none."""
        if not 0 <= token < len(self):
            raise IndexError(f"token {token} is not in the vocabulary of {len(self)} words")
        return self._bytes_of(token).decode("utf-8")

    def _bytes_of(self, token: int) -> bytes:
        return self.text[self.offsets[token] : self.offsets[token + 1]].tobytes()

    def id(self, word: str) -> int | None:
        """The id of a word, None where the vocabulary has none."""
        wanted = word.encode("utf-8", "surrogatepass")
        at = bisect_left(range(len(self)), wanted, key=self._bytes_of)
        return at if at < len(self) and self._bytes_of(at) == wanted else None

    def ids(self, words: list[str]) -> npt.NDArray[np.uint32]:
        """The id of each word; UNKNOWN_TOKEN for the ones that the vocabulary lacks."""
        if len(words) < self._FEW_WORDS:
            found = [self.id(word) for word in words]
            return np.array([UNKNOWN_TOKEN if at is None else at for at in found], dtype=np.uint32)
        find = self._table().find
        return np.array([find(word.encode("utf-8", "surrogatepass")) for word in words], dtype=np.uint32)

    def words(self, tokens: npt.NDArray[np.integer[Any]] | list[int]) -> list[str]:
        """The word of each id; IndexError where one has none."""
        return [self.word(int(token)) for token in tokens]

    def parse_block(self, block: bytes, form: LineFormat) -> ParsedLines:
        """Keys of whole lines of text; words that the vocabulary lacks become UNKNOWN_TOKEN."""
        return ParsedLines(
            *self._table().parse(
                as_bytes_array(block), form.first_line, form.value_column, form.float_values, False
            )
        )

    def encode_batch(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Tokens of each text: flat uint32 and int64 offsets; UNKNOWN_TOKEN for a word it lacks."""
        if len(texts) < self._FEW_WORDS and sum(map(len, texts)) < 16 * self._FEW_WORDS:
            keys = [self.ids(text.split()) for text in texts]
            offsets = np.zeros(len(keys) + 1, dtype=np.int64)
            np.cumsum([len(key) for key in keys], out=offsets[1:])
            return np.concatenate([np.empty(0, np.uint32), *keys]), offsets
        return _encode_texts(texts, self._table(), grow=False)

    def decode_batch(self, tokens: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> list[str]:
        """Each key as its words joined by single spaces; IndexError for a token that has no word."""
        tokens = np.ascontiguousarray(tokens, dtype=np.uint32)
        offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        used = tokens[offsets[0] : offsets[-1]] if len(offsets) else tokens[:0]
        if len(used) and int(used.max()) >= len(self):
            raise IndexError(f"token {int(used.max())} is not in the vocabulary of {len(self)} words")
        module = native()
        if module is None:
            return [" ".join(self.words(tokens[a:b])) for a, b in pairwise(offsets)]
        # No word has white space, so a newline ends a key and nothing else.
        return module.join_words(self.text, self.offsets, tokens, offsets).decode("utf-8").split("\n")[:-1]

    def _table(self) -> Any:
        """All words in a hash table, filled at the first use."""
        if self._full_table is None:
            self._full_table = _new_table()
            self._full_table.fill(self.text, self.offsets)
        return self._full_table


def _new_table() -> Any:
    module = native()
    return module.WordTable() if module is not None else _PythonTable()


def _encode_texts(
    texts: list[str], table: Any, *, grow: bool
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """By the parser of lines, one text each; so newlines within texts go first, and empty texts come back."""
    cleaned = [" ".join(text.split()) if "\n" in text else text for text in texts]
    try:
        block = "\n".join(cleaned).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("a lone surrogate cannot be written as UTF-8") from None
    parsed = ParsedLines(*table.parse(as_bytes_array(block), 0, 0, False, grow))
    parsed.check(block, "text", 0)
    counts = np.zeros(len(texts), dtype=np.int64)
    counts[parsed.lines] = np.diff(parsed.offsets)
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return parsed.tokens, offsets


class _PythonTable:
    """Twin of the C++ `WordTable`."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, word: bytes) -> int:
        return self._ids.setdefault(word, len(self._ids))

    def find(self, word: bytes) -> int:
        return self._ids.get(word, UNKNOWN_TOKEN)

    def fill(self, text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> None:
        words = text.tobytes()
        for begin, end in pairwise(offsets.tolist()):
            self.add(words[begin:end])

    def parse(
        self,
        block: npt.NDArray[np.uint8],
        first_line: int,
        value_column: int,
        float_values: bool,
        grow: bool,
    ) -> tuple[Any, ...]:
        from flashtrie_cli.keys.parse_python import parse_words

        look_up = self.add if grow else self.find
        form = LineFormat(first_line, value_column, float_values)
        parsed = parse_words(block.tobytes(), form, lambda word: look_up(word.encode("utf-8")))
        return tuple(vars(parsed).values())

    def sorted(self) -> Words:
        words = sorted(self._ids)
        new_ids = np.empty(len(words), dtype=np.uint32)
        for rank, word in enumerate(words):
            new_ids[self._ids[word]] = rank
        offsets = np.zeros(len(words) + 1, dtype=np.int64)
        np.cumsum([len(word) for word in words], out=offsets[1:])
        return new_ids, np.frombuffer(b"".join(words), dtype=np.uint8), offsets


def _first_bad_word(text: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> int:
    """Twin of the C++ function of that name."""
    data, previous = text.tobytes(), b""
    for at, (begin, end) in enumerate(pairwise(offsets.tolist())):
        word = data[begin:end]
        try:
            parts = word.decode("utf-8").split()
        except UnicodeDecodeError:
            return at
        if len(parts) != 1 or len(parts[0].encode("utf-8")) != len(word) or word <= previous:
            return at
        previous = word
    return -1
