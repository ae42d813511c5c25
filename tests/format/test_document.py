"""docs/format.md says what the code does: its tables against layout.py, its example rebuilt byte for byte."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from flashtrie_cli import BuildOptions, build_index
from flashtrie_cli.format import layout
from flashtrie_cli.index import META_FIELDS
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.trie.builder import MAX_NODES
from flashtrie_cli.trie.tails import MAX_UNFOLDING, TAIL_FIELDS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "format.md"
TEXT = DOCUMENT.read_text()


def tables() -> list[list[list[str]]]:
    """Every table of the document: rows of cells, the heading first."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in TEXT.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                found.append([])
            if not re.match(r"\|[ -]+\|", line.replace("| ---", "|-")) or "---" not in line:
                found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        previous = line
    return found


def table(*heading: str) -> list[list[str]]:
    """The rows of the one table with this heading."""
    fitting = [rows for rows in tables() if rows[0] == list(heading)]
    assert len(fitting) == 1, heading
    return fitting[0][1:]


def fields(packed: struct.Struct) -> list[tuple[int, int, str]]:
    """(offset, size, type) of each field of a struct."""
    found, offset = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", packed.format):
        for _ in range(1 if code == "s" else int(count or 1)):
            size = struct.calcsize(f"<{count}{code}" if code == "s" else f"<{code}")
            found.append((offset, size, "bytes" if code == "s" else "uint"))
            offset += size
    return found


STRUCTS = {"header": layout.HEADER, "section": layout.SECTION, "frame": layout.FRAME, "footer": layout.FOOTER}


@pytest.mark.parametrize(("number", "name"), list(enumerate(STRUCTS)))
def test_struct(number: int, name: str) -> None:
    documented = [rows[1:] for rows in tables() if rows[0][:3] == ["offset", "size", "type"]][number]
    assert [(int(row[0]), int(row[1]), row[2]) for row in documented] == fields(STRUCTS[name])


def test_magics_and_sizes() -> None:
    assert f"`{layout.MAGIC.hex(' ')}`" in TEXT
    assert f"`{layout.END_MAGIC.decode()}`" in TEXT
    assert f"`{layout.BYTE_ORDER:#010x}`" in TEXT
    assert f"| {layout.FRAME_SIZE}: raw bytes a frame holds |" in TEXT
    assert f"format version {layout.VERSION}, and of version {layout.TAILS_VERSION}" in TEXT
    assert f"a multiple of {layout.ALIGNMENT}" in TEXT
    assert f"at most {layout.MAX_SECTIONS}" in TEXT
    assert f"up to {layout.MAX_JSON_SIZE >> 20} MiB" in TEXT


def test_kinds_codecs_sections_and_meta() -> None:
    assert {int(row[0]): row[1] for row in table("kind", "holds")} == layout.KIND_NAMES
    assert {int(row[0]): row[1].split(":")[0] for row in table("codec", "meaning")} == layout.CODEC_NAMES
    documented = {row[0].strip("`"): row[2] for row in table("section", "size in bytes", "holds")}
    assert documented == layout.SECTION_NAMES
    assert list(documented) == list(layout.SECTION_NAMES)
    meta = {row[0].strip("`"): row[1] for row in table("field", "type", "meaning")}
    assert meta == {name: kind.__name__ for name, kind in META_FIELDS.items()}
    tails = {row[0].strip("`"): row[1] for row in table("field of tails", "type", "meaning")}
    assert tails == dict.fromkeys(TAIL_FIELDS, "int")


def test_limits() -> None:
    limits = {row[0]: row[1] for row in table("what", "limit", "because")}
    assert MAX_NODES == 2**32 - 1
    assert limits["nodes"] == limits["keys"] == "2^32 - 1"
    assert limits["token"] == "2^31 - 1"
    assert limits["sections"] == str(layout.MAX_SECTIONS)
    assert limits["nodes in tails"].startswith(f"{MAX_UNFOLDING} ")
    assert f"at most {MAX_UNFOLDING} nodes in tails" in TEXT


def example(path: Path) -> bytes:
    batch = KeyBatch(
        np.array([7, 7, 65537, 9], np.uint32),
        np.array([0, 1, 3, 4], np.int64),
        np.array([1, 2, 3], np.uint64),
        None,
        "example",
    )
    build_index([batch], str(path), options=BuildOptions(codec="raw"))
    return path.read_bytes()


def hex_dump(data: bytes) -> str:
    """As `hexdump -C` prints it, runs of equal lines as an asterisk."""
    lines: list[str] = []
    before = b""
    for at in range(0, len(data), 16):
        row = data[at : at + 16]
        if row == before:
            if lines[-1] != "*":
                lines.append("*")
            continue
        before = row
        halves = f"{row[:8].hex(' ')}  {row[8:].hex(' ')}"
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {halves:<48}  |{shown}|")
    return "\n".join([*lines, f"{len(data):08x}"])


def test_the_example_is_rebuilt(tmp_path: Path) -> None:
    documented = TEXT.split("```")[-2].strip()
    assert documented == hex_dump(example(tmp_path / "example.ft"))


def test_the_example_by_hand(tmp_path: Path) -> None:
    """The same file taken apart with nothing but the document: no reader, no layout."""
    data = example(tmp_path / "example.ft")
    magic, table_offset, num_sections = struct.unpack_from("<8sQI", data, len(data) - 64)
    assert magic == b"FTRIEEND"
    sections = {}
    for number in range(num_sections):
        name, codec, _, _, offset, stored, raw, _, _ = struct.unpack_from(
            "<24sBBHQQQII", data, table_offset + 64 * number
        )
        assert codec == 0
        assert stored == raw
        assert offset % 64 == 0
        sections[name.rstrip(b"\0").decode()] = data[offset : offset + raw]
    assert sections["louds"] == struct.pack("<Q", 0b0001011)
    assert struct.unpack("<4H", sections["label_low"]) == (0, 7, 9, 1)
    assert struct.unpack("<Q", sections["terminal"]) == (0b1110,)
    assert struct.unpack("<Q", sections["high_flags"]) == (0b1000,)
    assert struct.unpack("<Q", sections["label_high"]) == (1,)
    assert struct.unpack("<3Q", sections["values"]) == (1, 3, 2)
