"""The parsers without the extension: slow, and the same answer as `cuda/host/parse*` to the last fault."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from flashtrie_cli.keys.batch import MAX_DEPTH, MAX_TOKEN
from flashtrie_cli.keys.parsing import LineFault, LineFormat, ParsedLines

_NUMBER = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(rb"[^ \t]+")
_MAX_VALUE = (1 << 64) - 1


class LineProblem(Exception):
    """A fault at a byte range of the line."""

    def __init__(self, fault: LineFault, begin: int, end: int):
        self.fault, self.begin, self.end = fault, begin, end


KeyParser = Callable[[bytes], "list[int]"]


def parse_ids(block: bytes, form: LineFormat) -> ParsedLines:
    """Twin of the C++ `parse_ids`."""
    return parse_lines(block, form, _ids_of_line)


def parse_words(block: bytes, form: LineFormat, id_of: Callable[[str], int]) -> ParsedLines:
    """Twin of the C++ `WordTable::parse`; ``id_of`` gives the id of a word."""

    def parse_key(column: bytes) -> list[int]:
        try:
            words = column.decode("utf-8").split()
        except UnicodeDecodeError as error:
            raise LineProblem(LineFault.INVALID_UTF8, error.start, error.start + 1) from None
        if len(words) > MAX_DEPTH:
            raise LineProblem(LineFault.TOO_DEEP, 0, len(column))
        return [id_of(word) for word in words]

    return parse_lines(block, form, parse_key)


def parse_lines(block: bytes, form: LineFormat, parse_key: KeyParser) -> ParsedLines:
    """Cut a block into lines and columns; ``parse_key`` gives a column's tokens or raises LineProblem."""
    tokens: list[int] = []
    offsets, lines, values = [0], [], _Values(form.float_values)
    num_lines = num_empty = 0
    fault = (LineFault.NONE, 0, 0, 0)
    begin = 0
    while begin < len(block):
        newline = block.find(b"\n", begin)
        end = newline if newline >= 0 else len(block)
        line = block[begin : end - 1 if end > begin and block[end - 1] == 0x0D else end]
        try:
            key = (
                _parse_columns(line, form.value_column, parse_key, values)
                if form.value_column
                else parse_key(line)
            )
        except LineProblem as problem:
            at_line = form.first_line + num_lines
            fault = (problem.fault, at_line, begin + problem.begin, begin + problem.end)
            break
        if key:
            tokens += key
            offsets.append(len(tokens))
            lines.append(form.first_line + num_lines)
        else:
            num_empty += 1
        num_lines += 1
        begin = end + 1
    return ParsedLines(
        np.array(tokens, dtype=np.uint32),
        np.array(offsets, dtype=np.int64),
        np.array(lines, dtype=np.int64),
        values.array() if form.value_column else None,
        num_lines,
        num_empty,
        *fault,
    )


class _Values:
    """Unsigned integers until the first other number, floats from then on."""

    def __init__(self, is_float: bool):
        self.is_float = is_float
        self.numbers: list[int | float] = []

    def add(self, line: bytes, begin: int, end: int) -> None:
        text = line[begin:end].strip(b" \t")
        bad = LineProblem(LineFault.BAD_VALUE, begin, end)
        if text.isdigit():  # of bytes: ASCII digits only
            digits = text.lstrip(b"0")
            if len(digits) > 20 or int(digits or b"0") > _MAX_VALUE:
                at = line.index(text, begin)
                raise LineProblem(LineFault.VALUE_TOO_LARGE, at, at + len(text))
            self.numbers.append(int(digits or b"0"))
            return
        self.is_float |= bool(text)
        if not _NUMBER.fullmatch(text):
            raise bad
        value = float(text)
        if not math.isfinite(value):
            raise bad
        self.numbers.append(value)

    def array(self) -> np.ndarray:
        return np.array(self.numbers, dtype=np.float64 if self.is_float else np.uint64)


def _parse_columns(line: bytes, value_column: int, parse_key: KeyParser, values: _Values) -> list[int]:
    key_at = _column(line, 2 if value_column == 1 else 1)
    missing = LineProblem(LineFault.MISSING_COLUMN, 0, len(line))
    if key_at is None:
        if line.strip(b" \t"):
            raise missing
        return []
    try:
        key = parse_key(line[key_at[0] : key_at[1]])
    except LineProblem as problem:
        raise LineProblem(problem.fault, problem.begin + key_at[0], problem.end + key_at[0]) from None
    if not key:
        return []
    value_at = _column(line, value_column)
    if value_at is None:
        raise missing
    values.add(line, *value_at)
    return key


def _column(line: bytes, column: int) -> tuple[int, int] | None:
    begin = 0
    for _ in range(column - 1):
        tab = line.find(b"\t", begin)
        if tab < 0:
            return None
        begin = tab + 1
    end = line.find(b"\t", begin)
    return begin, end if end >= 0 else len(line)


def _ids_of_line(line: bytes) -> list[int]:
    parts = line.replace(b"\t", b" ").split(b" ")
    words = [part for part in parts if part]
    tokens = []
    for word in words:
        digits = word.lstrip(b"0") or b"0"
        # Python reads at most 4,300 digits, and one above 10 is too large anyway.
        if not word.isdigit() or len(digits) > 10 or (token := int(digits)) > MAX_TOKEN:
            raise _word_problem(line)
        tokens.append(token)
    if len(tokens) > MAX_DEPTH:
        raise LineProblem(LineFault.TOO_DEEP, 0, len(line))
    return tokens


def _word_problem(line: bytes) -> LineProblem:
    """The first bad word of a line known to have one, with its place."""
    for match in _WORD.finditer(line):
        word = match.group()
        if not word.isdigit():
            return LineProblem(LineFault.BAD_TOKEN, match.start(), match.end())
        digits = word.lstrip(b"0") or b"0"
        if len(digits) > 10 or int(digits) > MAX_TOKEN:
            return LineProblem(LineFault.TOKEN_TOO_LARGE, match.start(), match.end())
    raise AssertionError("no bad word in the line")
