"""Standard streams and result files: stdout carries results only, ``-`` is written out, files appear whole."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from flashtrie_cli.files import STANDARD, atomic_output, check_output, writing_to_stdout


def check_results(path: str, *, force: bool, inputs: Iterable[str | None] = ()) -> None:
    """As `files.check_output`, where ``-`` is stdout."""
    if path != STANDARD:
        check_output(path, force=force, inputs=inputs)


@contextlib.contextmanager
def open_results(path: str, *, force: bool = True) -> Iterator[BinaryIO]:
    """Where results go: stdout for ``-``, else a file that appears once the block has ended well."""
    if path != STANDARD:
        with atomic_output(path, force=force) as file:
            yield file
        return
    with writing_to_stdout():
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()


def json_line(value: Any) -> bytes:
    """One line of compact JSON; lone surrogates (text that was no UTF-8) go out as the bytes they stand for."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "surrogateescape") + b"\n"


def text_bytes(text: str) -> bytes:
    """Text as UTF-8; lone surrogates as the bytes they stand for."""
    return text.encode("utf-8", "surrogateescape")


class TsvWatch:
    """Warns, once, where a text on its way into TSV holds what separates columns or lines there."""

    def __init__(self) -> None:
        self._has_warned = False

    def check(self, texts: Sequence[str]) -> None:
        """Look at some more texts."""
        if self._has_warned:
            return
        joined = "\n".join(texts)
        if joined.count("\n") >= max(len(texts), 1) or "\t" in joined or "\r" in joined:
            self._has_warned = True
            warn("a text holds a TAB or a line break, and stands in the output as it is (hint: --json)")


def print_json(value: Any) -> None:
    """One indented JSON object on stdout, in UTF-8 whatever the terminal speaks."""
    with open_results(STANDARD) as out:
        out.write(text_bytes(json.dumps(value, indent=2, ensure_ascii=False) + "\n"))


def warn(message: str) -> None:
    """A warning on stderr; --quiet does not silence it."""
    sys.stderr.write(f"flashtrie: warning: {message}\n")
