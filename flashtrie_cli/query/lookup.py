"""Exact and prefix questions, line by line: what `flashtrie lookup` and `dump` ask of an index."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError, UsageError

if TYPE_CHECKING:
    from flashtrie_cli.engine.protocol import KeyList
    from flashtrie_cli.index import Index

LINES_PER_BATCH = 1 << 14
PREFIXES_PER_BATCH = 256


@dataclass(frozen=True)
class Questions:
    """Lines as given and their tokens: line i is ``tokens[offsets[i]:offsets[i + 1]]``, number ``first + i``."""

    lines: list[bytes]
    first: int
    tokens: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Answer:
    """One answer to one line; ``key_id`` None: there is none. ``is_new``: the first answer to its line."""

    line: bytes
    number: int
    is_new: bool
    key: str | None
    key_id: int | None
    value: Any


def read_questions(index: Index, path: str, *, as_ids: bool = False) -> Iterator[Questions]:
    """Lines of a file (``-``: stdin) in batches, as tokens of the index. Raises InputError with file and line."""
    from flashtrie_cli.inputs.source import open_raw

    if not as_ids and index.meta["tokenizer"] != "ids" and index.vocabulary is None:
        raise UsageError(f"the index speaks text, but {index.text_missing}")
    speaks_text = index.vocabulary is not None and not as_ids
    with open_raw(path) as raw, io.BufferedReader(raw) as file:  # type: ignore[type-var]
        first = 1
        while lines := _some_lines(file, path, first):
            if speaks_text:
                tokens, offsets = _encode(index, lines, path, first)
            else:
                tokens, offsets = _parse_ids(lines, path, first)
            yield Questions(lines, first, tokens, offsets)
            first += len(lines)


def _some_lines(file: BinaryIO, path: str, first: int) -> list[bytes]:
    lines: list[bytes] = []
    for line in file:
        if first == 1 and not lines:
            line = line.removeprefix(b"\xef\xbb\xbf")
        lines.append(line.rstrip(b"\n").removesuffix(b"\r"))
        if len(lines) == LINES_PER_BATCH:
            break
    return lines


def _encode(
    index: Index, lines: list[bytes], path: str, first: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    try:
        texts = [line.decode("utf-8") for line in lines]
    except UnicodeDecodeError:
        for number, line in enumerate(lines, first):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"is not UTF-8 at byte {error.start + 1}", file=path, line=number) from None
        raise
    return index.encode(texts)


def _parse_ids(
    lines: list[bytes], path: str, first: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    flat: list[int] = []
    offsets = [0]
    for number, line in enumerate(lines, first):
        for word in line.split():
            if not word.isdigit():
                shown = word[:40].decode("utf-8", "replace")
                raise InputError(f"{shown!r} is not a token id", file=path, line=number)
            flat.append(min(int(word), 0xFFFF_FFFE))  # beyond every label: matches nothing
        offsets.append(len(flat))
    return np.array(flat, np.uint32), np.array(offsets, np.int64)


def exact(index: Index, questions: Questions) -> Iterator[Answer]:
    """One answer a line."""
    ids = index.lookup(questions.tokens, questions.offsets).tolist()
    for i, (line, key_id) in enumerate(zip(questions.lines, ids, strict=True)):
        found = key_id >= 0
        value = index.value_of(key_id) if found else None
        yield Answer(line, questions.first + i, True, None, key_id if found else None, value)


def extensions(index: Index, questions: Questions, limit: int) -> Iterator[Answer]:
    """For each line the keys that extend it, in lexicographic order of tokens; one empty answer where there is none."""
    for i, line in enumerate(questions.lines):
        prefix = questions.tokens[questions.offsets[i] : questions.offsets[i + 1]]
        left = limit or None
        is_new = True
        size = min(limit, LINES_PER_BATCH) if limit else LINES_PER_BATCH
        for keys in index.prefix(prefix, batch_size=size):
            for key, key_id in zip(key_texts(index, keys), keys.key_ids.tolist(), strict=True):
                if left == 0:
                    break
                yield Answer(line, questions.first + i, is_new, key, key_id, index.value_of(key_id))
                is_new = False
                left = None if left is None else left - 1
            if left == 0:
                break
        if is_new:
            yield Answer(line, questions.first + i, True, None, None, None)


def prefixes(index: Index, questions: Questions, limit: int) -> Iterator[Answer]:
    """For each line the keys that it begins with, shortest first; one empty answer where there is none."""
    for i, line in enumerate(questions.lines):
        tokens = questions.tokens[questions.offsets[i] : questions.offsets[i + 1]]
        _, key_ids = index.common_prefix(tokens)
        key_ids = key_ids[: limit or len(key_ids)]
        # Not all at once: the prefixes of a long line together are as long as its square.
        for begin in range(0, len(key_ids), PREFIXES_PER_BATCH):
            found = index.key_tokens(key_ids[begin : begin + PREFIXES_PER_BATCH])
            for at, (key, key_id) in enumerate(
                zip(key_texts(index, found), found.key_ids.tolist(), strict=True)
            ):
                yield Answer(line, questions.first + i, begin + at == 0, key, key_id, index.value_of(key_id))
        if not len(key_ids):
            yield Answer(line, questions.first + i, True, None, None, None)


def key_texts(index: Index, keys: KeyList, *, as_ids: bool = False) -> list[str]:
    """Keys as the index speaks: text, or token ids between blanks."""
    if index.vocabulary is not None and not as_ids:
        return index.decode(keys.tokens, keys.offsets)
    words = list(map(str, keys.tokens.tolist()))
    ends = keys.offsets.tolist()
    return [" ".join(words[begin:end]) for begin, end in itertools.pairwise(ends)]


def value_text(value: Any) -> str:
    """A value as text; several between blanks."""
    if isinstance(value, list):
        return " ".join(map(value_text, value))
    return repr(value) if isinstance(value, float) else str(value)
