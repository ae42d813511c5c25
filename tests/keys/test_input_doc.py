"""docs/input.md says what the readers do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashtrie_cli.inputs import lines
from flashtrie_cli.keys import batch
from flashtrie_cli.keys.jsonl_keys import JsonlParser
from flashtrie_cli.keys.parsing import LineFault, line_error
from flashtrie_cli.keys.vocabulary import WordVocabulary
from flashtrie_cli.query.proposals import read_proposals

DOC = (Path(__file__).parents[2] / "docs" / "input.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", DOC, re.S)


def test_numbers() -> None:
    assert f"{batch.MAX_DEPTH:,} tokens" in DOC
    assert f"0 to {batch.MAX_TOKEN}" in DOC
    assert f"up to {lines.MAX_LINE_SIZE >> 20} MiB long" in DOC
    assert f"about {lines.BLOCK_SIZE >> 20} MiB of text" in DOC


def test_error() -> None:
    (text,) = [block for kind, block in BLOCKS if kind == "text"]
    assert text == f"flashtrie: {line_error(LineFault.INVALID_UTF8, bytes([0xE9]), 'titles.txt', 812, 0)}\n"


@pytest.mark.parametrize(
    "line", [line for kind, block in BLOCKS if kind == "jsonl" for line in block.splitlines()]
)
def test_json_lines(tmp_path: Path, line: str) -> None:
    if "logprobs" in line:
        path = tmp_path / "grids"
        path.write_text(line)
        (grids,) = read_proposals(str(path), batch_size=1)
        assert grids.tokens.shape == (1, 2, 2)
    else:
        is_ids = re.search(r"\d{3}", line)
        tokenizer = None if is_ids else WordVocabulary()
        parsed = JsonlParser(tokenizer).parse(line.encode(), "x", 1)
        assert parsed.offsets.tolist() == [0, 2]
        assert (parsed.values is not None) == ("value" in line)
