"""Blocks of lines to keys: what the parsers agree on, and the sentences their faults become.

The C++ parsers (`cuda/host/parse*`) and the Python ones (`parse_python.py`) give the same `ParsedLines`,
faults included; a test holds one against the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.lines import shown
from flashtrie_cli.keys.batch import MAX_DEPTH, MAX_TOKEN


class LineFault(IntEnum):
    """What can be wrong with a line; the numbers stand in `cuda/host/parse.hpp` too."""

    NONE = 0
    BAD_TOKEN = 1
    TOKEN_TOO_LARGE = 2
    TOO_DEEP = 3
    MISSING_COLUMN = 4
    BAD_VALUE = 5
    VALUE_TOO_LARGE = 6
    INVALID_UTF8 = 7


@dataclass(frozen=True)
class LineFormat:
    """Where a block stands and how its lines are made.

    ``first_line``: number of its first line. ``value_column``: 1-based among TAB separated ones, 0 for none;
    the key is then the first of the others. ``float_values``: an earlier value of this input was no unsigned
    integer.
    """

    first_line: int = 1
    value_column: int = 0
    float_values: bool = False


@dataclass
class ParsedLines:
    """Keys of one block, as in `KeyBatch`; or the first fault, with its byte range in the block."""

    tokens: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint64] | npt.NDArray[np.float64] | None
    num_lines: int
    num_empty: int
    fault: int = LineFault.NONE
    fault_line: int = 0
    fault_begin: int = 0
    fault_end: int = 0

    def check(self, block: bytes, source: str, value_column: int) -> None:
        """Raise the InputError of the fault, if there is one."""
        if self.fault != LineFault.NONE:
            text = block[self.fault_begin : self.fault_end]
            raise line_error(LineFault(self.fault), text, source, self.fault_line, value_column)


def as_bytes_array(block: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(block, dtype=np.uint8)


def parse_ids(module: Any | None, block: bytes, form: LineFormat) -> ParsedLines:
    """Decimal token ids separated by blanks; ``module`` is the extension, None for plain Python."""
    if module is None:
        from flashtrie_cli.keys.parse_python import parse_ids as parse

        return parse(block, form)
    answer = module.parse_ids(as_bytes_array(block), form.first_line, form.value_column, form.float_values)
    return ParsedLines(*answer)


def line_error(fault: LineFault, text: bytes, source: str, line: int, value_column: int) -> InputError:
    """The one-line error for a fault; ``text`` is what the parser pointed at."""
    message, hint = _SENTENCES[fault]
    filled = message.format(
        text=shown(text.strip(b" \t\r\n")),
        byte=text[:1].hex(),
        column=value_column,
        columns=text.count(b"\t") + 1,
    )
    return InputError(filled, file=source, line=line, hint=hint)


_SENTENCES: dict[LineFault, tuple[str, str | None]] = {
    LineFault.BAD_TOKEN: (
        "{text} is not a token id",
        "ids input is decimal numbers between blanks; words need --input text",
    ),
    LineFault.TOKEN_TOO_LARGE: (f"token id {{text}} is above {MAX_TOKEN}", None),
    LineFault.TOO_DEEP: (f"a key of more than {MAX_DEPTH} tokens", "one key a line?"),
    LineFault.MISSING_COLUMN: (
        "{columns} TAB separated column(s), but --values {column} needs a value there and a key in another",
        None,
    ),
    LineFault.BAD_VALUE: (
        "value {text} in column {column} is neither an unsigned integer nor a finite number",
        None,
    ),
    LineFault.VALUE_TOO_LARGE: ("value {text} in column {column} is above 18446744073709551615", None),
    LineFault.INVALID_UTF8: (
        "not valid UTF-8 (byte 0x{byte})",
        "convert it, for example: iconv -f LATIN1 -t UTF-8 FILE",
    ),
}
