"""Tables keep all that they hold, in a pipe and in a terminal of any width."""

from __future__ import annotations

import io
import re
import sys

import pytest

from flashtrie_cli.report import table

CELL = "0123456789abcdef" * 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]) -> None:
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    table("a title of more than forty columns, which stays on one line", [("name", "left")], [[CELL]])
    title, *lines = re.sub(r"\x1b\[\d*m", "", out.getvalue()).splitlines()
    assert title.rstrip() == "a title of more than forty columns, which stays on one line"
    assert "".join(character for line in lines for character in line if character.isalnum()) == "name" + CELL
    assert (max(map(len, lines)) <= 40) == out.isatty()


def test_no_headings_no_row_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    table("title", [("", "left"), ("", "left")], [["a", "b"]])
    assert len(out.getvalue().splitlines()) == 4  # the title and a row between two rules
