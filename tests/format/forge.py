"""Index files taken apart and put together again, honestly or not, with every checksum right.

Knows the format from docs/format.md and shares no code with the reader or the writer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zstandard

FRAME_SIZE = 1 << 20


@dataclass
class Part:
    """A section; what is None is computed when the file is put together."""

    name: str
    codec: int
    element_size: int
    stored: bytes
    raw_size: int
    frame_sizes: list[int] = field(default_factory=list)
    checksum: int | None = None
    offset: int | None = None
    stored_size: int | None = None
    num_frames: int | None = None
    reserved: int = 0

    def raw(self) -> bytes:
        if self.codec == 0:
            return self.stored
        pieces, at = [], 0
        for size in self.frame_sizes:
            piece = zstandard.ZstdDecompressor().decompress(self.stored[at : at + size])
            pieces.append(_unshuffled(piece, self.element_size))
            at += size
        return b"".join(pieces)

    def with_raw(self, raw: bytes) -> Part:
        """The same section with other contents, honestly packed."""
        if self.codec == 0:
            return dataclasses.replace(self, stored=raw, raw_size=len(raw))
        frames = [
            zstandard.ZstdCompressor(level=1).compress(
                _shuffled(raw[at : at + FRAME_SIZE], self.element_size)
            )
            for at in range(0, len(raw), FRAME_SIZE)
        ]
        return dataclasses.replace(
            self, stored=b"".join(frames), raw_size=len(raw), frame_sizes=[len(frame) for frame in frames]
        )


def _shuffled(data: bytes, size: int) -> bytes:
    if size < 2:
        return data
    whole = len(data) // size * size
    return b"".join(data[plane:whole:size] for plane in range(size)) + data[whole:]


def _unshuffled(data: bytes, size: int) -> bytes:
    if size < 2:
        return data
    count = len(data) // size
    out = bytearray(data)
    for plane in range(size):
        out[plane : count * size : size] = data[plane * count : (plane + 1) * count]
    return bytes(out)


Parts = dict[str, Part]


def take_apart(data: bytes) -> Parts:
    table_offset, num_sections, num_frames = struct.unpack_from("<QII", data, len(data) - 56)
    frames = struct.unpack_from(f"<{num_frames}I", data, table_offset + 64 * num_sections)
    parts, taken = {}, 0
    for number in range(num_sections):
        name, codec, element_size, _, offset, stored, raw, own, _, _ = struct.unpack_from(
            "<24sBBHQQQII4s", data, table_offset + 64 * number
        )
        text = name.rstrip(b"\0").decode()
        sizes = list(frames[taken : taken + own])
        parts[text] = Part(text, codec, element_size, data[offset : offset + stored], raw, sizes)
        taken += own
    return parts


def put_together(
    parts: Parts | list[Part],
    *,
    magic: bytes = b"\x89FTRIE\r\n",
    version: int | None = None,
    kind: int = 1,
    byte_order: int = 0x0102_0304,
    frame_size: int = FRAME_SIZE,
    header_reserved: bytes = b"",
    **footer: Any,
) -> bytes:
    """A whole file, of version 2 where it has tails.

    ``footer`` overrides its fields: table_offset, num_sections, num_frames, file_size, …
    """
    rows = list(parts.values()) if isinstance(parts, dict) else parts
    if version is None:
        version = 2 if any(part.name == "tail_labels" for part in rows) else 1
    header = struct.pack("<8sHHII40s", magic, version, kind, byte_order, frame_size, header_reserved)
    data = bytearray(header + struct.pack("<I", zlib.crc32(header)))
    table, frame_table = b"", b""
    for part in rows:
        data += b"\0" * (-len(data) % 64)
        offset = len(data) if part.offset is None else part.offset
        data += part.stored
        table += struct.pack(
            "<24sBBHQQQII4s",
            part.name.encode(),
            part.codec,
            part.element_size,
            part.reserved,
            offset,
            len(part.stored) if part.stored_size is None else part.stored_size,
            part.raw_size,
            len(part.frame_sizes) if part.num_frames is None else part.num_frames,
            zlib.crc32(part.stored) if part.checksum is None else part.checksum,
            b"",
        )
        frame_table += struct.pack(f"<{len(part.frame_sizes)}I", *part.frame_sizes)
    data += b"\0" * (-len(data) % 64)
    table_offset = len(data)
    table += frame_table
    table += b"\0" * (-len(table) % 64)
    data += table
    fields = {
        "magic": b"FTRIEEND",
        "table_offset": table_offset,
        "num_sections": len(rows),
        "num_frames": len(frame_table) // 4,
        "file_size": len(data) + 64,
        "digest": hashlib.blake2b(bytes(data[:64]) + table, digest_size=16).digest(),
        "reserved": b"",
        **footer,
    }
    return bytes(data + struct.pack("<8sQIIQ16s16s", *fields.values()))


def change(data: bytes, name: str, lie: Callable[[bytes], bytes]) -> bytes:
    """The file with the raw bytes of one section changed, checksums recomputed."""
    parts = take_apart(data)
    parts[name] = parts[name].with_raw(lie(parts[name].raw()))
    return put_together(parts)


def change_meta(data: bytes, **fields: Any) -> bytes:
    """The file with fields of its meta changed; ``...`` takes a field out."""

    def lie(raw: bytes) -> bytes:
        meta = {**json.loads(raw), **fields}
        return json.dumps({name: value for name, value in meta.items() if value is not ...}).encode()

    return change(data, "meta", lie)


def change_words(data: bytes, name: str, lie: Callable[[list[int]], None], size: int = 8) -> bytes:
    """The same for a section of integers of ``size`` bytes."""

    def inner(raw: bytes) -> bytes:
        values = [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
        lie(values)
        return b"".join(value.to_bytes(size, "little") for value in values)

    return change(data, name, inner)
