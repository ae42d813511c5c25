"""Exact and prefix questions, line by line: what `flashtrie lookup` and `dump` ask of an index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs.lines import line_blocks, shown
from flashtrie_cli.inputs.source import RAW_BLOCK_SIZE, RawReader, ReadStats, open_raw, read_chunks
from flashtrie_cli.keys.parsing import LineFault, line_error

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
    """One answer to one line, the ``number``-th of the input, from 1; ``key_id`` None: there is none. ``is_new``: the
    first answer to its line."""

    line: bytes
    number: int
    is_new: bool
    key: str | None
    key_id: int | None
    value: Any


def read_questions(index: Index, path: str, *, as_ids: bool = False) -> Iterator[Questions]:
    """Lines of a file (``-``: stdin) in batches, as tokens of the index. Raises InputError with file and line."""
    if not as_ids and index.meta["tokenizer"] != "ids" and index.vocabulary is None:
        raise UsageError(f"the index speaks text, but {index.text_missing}")
    speaks_text = index.vocabulary is not None and not as_ids
    first = 1
    for lines in _some_lines(path):
        if speaks_text:
            tokens, offsets = _encode(index, lines, path, first)
        else:
            tokens, offsets = parse_ids(lines, path, first)
        yield Questions(lines, first, tokens, offsets)
        first += len(lines)


def _some_lines(path: str) -> Iterator[list[bytes]]:
    """The lines of a file, plain or compressed, LINES_PER_BATCH at a time, without their ends."""
    with open_raw(path) as file:
        chunks = read_chunks(RawReader(path, file, ReadStats(), None), RAW_BLOCK_SIZE)
        num_lines = 0
        blocks = line_blocks(
            chunks,
            path,
            RAW_BLOCK_SIZE,
            num_lines=lambda: num_lines,
            arrays_hint="one key a line is read here",
        )
        for block in blocks:
            lines = [line.removesuffix(b"\r") for line in block.removesuffix(b"\n").split(b"\n")]
            num_lines += len(lines)
            for begin in range(0, len(lines), LINES_PER_BATCH):
                yield lines[begin : begin + LINES_PER_BATCH]


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
                raise line_error(LineFault.INVALID_UTF8, line[error.start :], path, number, 0) from None
        raise
    return index.encode(texts)


def parse_ids(
    lines: list[bytes], path: str, first: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Decimal token ids between blanks, as tokens and offsets; one beyond every label matches nothing."""
    flat: list[int] = []
    offsets = [0]
    for number, line in enumerate(lines, first):
        for word in line.split():
            if not word.isdigit():
                raise InputError(f"{shown(word)} is not a token id", file=path, line=number)
            digits = word.lstrip(b"0")[:11]  # enough to be too large, whatever follows
            flat.append(min(int(digits or b"0"), 0xFFFF_FFFE))
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
