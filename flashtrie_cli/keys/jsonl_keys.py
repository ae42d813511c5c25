"""Keys out of JSON lines.

A line is an array of token ids, an array of token strings, a string (tokenised), or an object with
``tokens`` (one of the arrays) or ``text`` (a string), and maybe ``value`` (a number). Other members are
passed over, so what `dump` writes can be read. An empty array is the empty key; a blank line, or text
without a token, is no key.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.lines import shown
from flashtrie_cli.inputs.native import native
from flashtrie_cli.keys.batch import MAX_DEPTH, MAX_TOKEN, UNKNOWN_TOKEN
from flashtrie_cli.keys.parsing import ParsedLines, as_bytes_array
from flashtrie_cli.keys.tokenizers import HuggingFaceTokenizer, Tokenizer
from flashtrie_cli.keys.vocabulary import FrozenVocabulary, WordVocabulary

_MAX_VALUE = (1 << 64) - 1


class _BadLine(Exception):
    """What is wrong with the line at hand."""

    def __init__(self, message: str, hint: str | None = None):
        self.message, self.hint = message, hint


def _refuse_constant(name: str) -> NoReturn:
    raise _BadLine(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class JsonlParser:
    """Parses blocks of lines; remembers across blocks and files whether keys have values, and which."""

    def __init__(self, tokenizer: Tokenizer | None, *, lowercase: bool = False):
        self._tokenizer = tokenizer
        self._lowercase = lowercase
        self._has_values: bool | None = None  # None until the first key
        self._float_values = False

    def parse(self, block: bytes, source: str, first_line: int) -> ParsedLines:
        """Keys of whole lines. Raises InputError with file and line.

        The extension takes the lines at the front that need no tokenizer, Python the first other one and all
        behind it.
        """
        module = native()
        if module is None or isinstance(self._tokenizer, WordVocabulary):
            return self._parse_any(block, source, first_line)
        state = {None: 0, True: 1, False: 2}[self._has_values]
        answer, state, size = module.parse_jsonl_keys(
            as_bytes_array(block), first_line, state, self._float_values
        )
        front = ParsedLines(*answer)
        self._has_values = {0: None, 1: True, 2: False}[state]
        self._float_values = front.values is not None and front.values.dtype.kind == "f"
        if size == len(block):
            return front
        return _joined(front, self._parse_any(block[size:], source, first_line + front.num_lines))

    def _parse_any(self, block: bytes, source: str, first_line: int) -> ParsedLines:
        keys: list[list[int] | str] = []
        lines: list[int] = []
        values: list[int | float] = []
        num_empty = 0
        fault: InputError | None = None
        text_lines = block.split(b"\n")
        if not text_lines[-1]:
            text_lines.pop()
        for number, line in enumerate(text_lines, first_line):
            if not line.strip():
                num_empty += 1
                continue
            try:
                key, value = self._parse_line(line)
                self._note_value(value)
            except _BadLine as problem:
                fault = InputError(problem.message, file=source, line=number, hint=problem.hint)
                break  # the lines before may still turn out too deep, and the first fault is told
            keys.append(key)
            lines.append(number)
            if value is not None:
                values.append(value)
        try:
            tokens, offsets, is_key = self._tokens_of(keys)
        except InputError as problem:  # of a text, by its number among the texts
            text_lines_at = [line for key, line in zip(keys, lines, strict=True) if isinstance(key, str)]
            raise InputError(problem.message, file=source, line=text_lines_at[problem.line or 0]) from None
        deep = np.flatnonzero(np.diff(offsets) > MAX_DEPTH)
        if deep.size:
            at = np.flatnonzero(is_key)[deep[0]]
            raise InputError(f"a key of more than {MAX_DEPTH} tokens", file=source, line=lines[at])
        if fault is not None:
            raise fault
        kept_values = self._value_array(values)
        return ParsedLines(
            tokens,
            offsets,
            np.array(lines, dtype=np.int64)[is_key],
            kept_values[is_key] if kept_values is not None else None,
            len(text_lines),
            num_empty + len(keys) - int(is_key.sum()),
        )

    def _parse_line(self, line: bytes) -> tuple[list[int] | str, int | float | None]:
        try:
            parsed = _DECODER.decode(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _BadLine(f"not valid UTF-8 (byte 0x{line[error.start]:02x})", "JSON is UTF-8") from None
        except json.JSONDecodeError as error:
            raise _BadLine(f"not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise _BadLine("not a key: nested too deeply") from None
        except ValueError:  # Python reads at most 4,300 digits of a number
            raise _BadLine("not a key: a number of thousands of digits") from None
        if not isinstance(parsed, dict):
            return self._parse_key(parsed), None
        value = _checked_value(parsed["value"]) if "value" in parsed else None
        return self._parse_key(self._key_member(parsed)), value

    def _key_member(self, line: dict[str, Any]) -> Any:
        """``tokens`` where they can be used: a growing vocabulary can't use ids, but the text beside them."""
        tokens, text = line.get("tokens"), line.get("text")
        if tokens is None and text is None:
            raise _BadLine("object with neither `tokens` nor `text`")
        foreign = isinstance(self._tokenizer, WordVocabulary) and tokens and type(tokens[0]) is int
        return text if tokens is None or (foreign and text is not None) else tokens

    def _parse_key(self, key: Any) -> list[int] | str:
        if isinstance(key, str):
            if self._tokenizer is None:
                raise _BadLine(
                    "text, but there is no tokenizer for it", "--tokenizer words, or a tokenizer.json"
                )
            return self._checked_text(key)
        if not isinstance(key, list):
            raise _BadLine("a key must be an array of tokens, a string or an object")
        kinds = set(map(type, key))
        if kinds <= {int}:
            return self._checked_ids(key)
        if kinds == {str}:
            return [self._id_of(self._checked_text(word)) for word in key]
        raise _BadLine("a key's tokens must all be integers, or all strings")

    def _checked_text(self, text: str) -> str:
        text = text.lower() if self._lowercase else text
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise _BadLine("a lone surrogate (\\ud800 to \\udfff) is no character") from None
        return text

    def _checked_ids(self, key: list[int]) -> list[int]:
        if key and isinstance(self._tokenizer, WordVocabulary):
            raise _BadLine("token ids, but --tokenizer words makes its own ids of words")
        if key and not (min(key) >= 0 and max(key) <= MAX_TOKEN):
            bad = next(token for token in key if not 0 <= token <= MAX_TOKEN)
            raise _BadLine(f"token id {shown(str(bad))[1:-1]} is outside 0 to {MAX_TOKEN}")
        return key

    def _id_of(self, word: str) -> int:
        tokenizer = self._tokenizer
        if isinstance(tokenizer, WordVocabulary):
            try:
                return tokenizer.add(word)
            except ValueError:
                raise _BadLine(
                    f"{shown(word)} is not one word", "give several words as text, or apart"
                ) from None
        if isinstance(tokenizer, FrozenVocabulary):
            found = tokenizer.id(word)
            return UNKNOWN_TOKEN if found is None else found
        if isinstance(tokenizer, HuggingFaceTokenizer):
            found = tokenizer.id(word)
            if found is None:
                raise _BadLine(f"{shown(word)} is not a token of the tokenizer")
            return found
        raise _BadLine("token strings, but there is no vocabulary", "--tokenizer words, or a tokenizer.json")

    def _note_value(self, value: int | float | None) -> None:
        """All keys have values or none has; else a missing value would need a guess."""
        if self._has_values is None:
            self._has_values = value is not None
        elif self._has_values and value is None:
            raise _BadLine("no `value`, but the keys before have one")
        elif not self._has_values and value is not None:
            raise _BadLine("a `value`, but the keys before have none")

    def _value_array(
        self, values: list[int | float]
    ) -> npt.NDArray[np.uint64] | npt.NDArray[np.float64] | None:
        if not self._has_values:
            return None
        self._float_values = self._float_values or float in set(map(type, values))
        if self._float_values:
            return np.array(values, dtype=np.float64)
        return np.array(values, dtype=np.uint64)

    def _tokens_of(
        self, keys: list[list[int] | str]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """All tokens in order, and which of ``keys`` are keys: text without a token is none."""
        texts = [key for key in keys if isinstance(key, str)]
        from_text: list[int] = []
        ends = iter([0])
        if texts:
            assert self._tokenizer is not None
            flat, bounds = self._tokenizer.encode_batch(texts)
            from_text, ends = flat.tolist(), iter(bounds.tolist())
        tokens: list[int] = []
        offsets, is_key = [0], np.ones(len(keys), dtype=np.bool_)
        begin = next(ends)
        for at, key in enumerate(keys):
            if isinstance(key, str):
                end = next(ends)
                key, begin = from_text[begin:end], end
                if not key:
                    is_key[at] = False
                    continue
            tokens += key
            offsets.append(len(tokens))
        return np.array(tokens, dtype=np.uint32), np.array(offsets, dtype=np.int64), is_key


def _checked_value(value: Any) -> int | float:
    if type(value) is int:
        if value > _MAX_VALUE:
            raise _BadLine(f"value {shown(str(value))[1:-1]} is above {_MAX_VALUE}")
        if value >= 0:
            return value
        if value.bit_length() <= 1023:
            return float(value)
    elif type(value) is float and math.isfinite(value):
        return value
    raise _BadLine(f"value {shown(json.dumps(value))[1:-1]} is not a finite number")


def _joined(front: ParsedLines, back: ParsedLines) -> ParsedLines:
    """Both as one; numpy makes the values of both floats where one of them has floats."""
    values = back.values
    if front.values is not None and values is not None:
        values = np.concatenate([front.values, values])
    return ParsedLines(
        np.concatenate([front.tokens, back.tokens]),
        np.concatenate([front.offsets, back.offsets[1:] + front.offsets[-1]]),
        np.concatenate([front.lines, back.lines]),
        values,
        front.num_lines + back.num_lines,
        front.num_empty + back.num_empty,
    )
