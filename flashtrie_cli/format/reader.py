"""The door: opens an index file, checks everything once, and hands out arrays that can be trusted."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import zstandard

from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.files import STANDARD
from flashtrie_cli.format import frames, layout
from flashtrie_cli.format.layout import Section

SPARE_BYTES = 64
"""Readable bytes behind every array (the footer guarantees them in a mapped file)."""


class IndexFile:
    """An opened index file: header, section table, and sections on demand.

    Opening checks header, table and footer; reading a section checks its checksum and sizes. Whatever is wrong
    raises IndexFileError (exit 3). ``digest`` names the contents: equal digests, equal files.
    """

    def __init__(
        self,
        path: str,
        data: memoryview,
        kind: int,
        sections: dict[str, Section],
        digest: str,
        version: int = layout.VERSION,
    ):
        self.path = path
        self.kind = kind
        self.version = version
        self.sections = sections
        self.digest = digest
        self.file_size = len(data)
        self._data = data
        self._frame_sizes: dict[str, npt.NDArray[np.uint32]] = {}

    @classmethod
    def open(cls, path: str) -> IndexFile:
        """Map the file and check its frame; raises IndexFileError, also for a file that cannot be read."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise IndexFileError(
                        "is a pipe or a device", file=path, hint="an index is mapped, so it must be a file"
                    )
                if status.st_size == 0:
                    raise IndexFileError("is empty", file=path)
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            hint = "an index is mapped, so it must be a file, not stdin" if path == STANDARD else None
            raise IndexFileError(f"cannot be read: {reason}", file=path, hint=hint) from error
        return _open(path, data)

    def has(self, name: str) -> bool:
        return name in self.sections

    def raw_size(self, name: str) -> int:
        return self.section(name).raw_size

    def array(self, name: str, dtype: npt.DTypeLike, *, threads: int = 1, spare: int = 0) -> npt.NDArray[Any]:
        """A section as a one-dimensional array; a raw one is a view of the mapped file, read-only.

        ``spare`` more elements are readable behind the section's own (their values mean nothing).
        """
        section = self.section(name)
        item = np.dtype(dtype).newbyteorder("<")
        if section.raw_size % item.itemsize:
            self._refuse(f"section {name} is not a whole number of {item.itemsize}-byte elements")
        spare_bytes = spare * item.itemsize
        if spare_bytes > SPARE_BYTES:
            raise ValueError(f"at most {SPARE_BYTES} spare bytes")
        self._check_sum(section)
        if section.codec == layout.CODEC_RAW:
            end = section.offset + section.raw_size + spare_bytes
            return np.frombuffer(self._data[section.offset : end], item)
        try:
            raw = np.empty(section.raw_size + spare_bytes, np.uint8)
        except (MemoryError, ValueError):
            self._refuse(f"section {name} says that it needs {section.raw_size:,} bytes, more than there are")
        raw[section.raw_size :] = 0
        self._decompress(section, raw[: section.raw_size], threads)
        return raw.view(item)

    def bytes(self, name: str) -> bytes:
        return self.array(name, np.uint8).tobytes()

    def json(self, name: str) -> Any:
        if self.section(name).raw_size > layout.MAX_JSON_SIZE:
            self._refuse(f"section {name} is larger than {layout.MAX_JSON_SIZE} bytes")
        try:
            return json.loads(self.bytes(name))
        except (ValueError, RecursionError) as error:
            self._refuse(f"section {name} is not JSON ({error})")

    def verify_checksums(self) -> None:
        """Check every section, whether or not anyone reads it."""
        for section in self.sections.values():
            self._check_sum(section)

    def section(self, name: str) -> Section:
        """A row of the section table; IndexFileError where there is none."""
        if name not in self.sections:
            self._refuse(f"section {name} is missing")
        return self.sections[name]

    def _check_sum(self, section: Section) -> None:
        stored = self._data[section.offset : section.offset + section.stored_size]
        if zlib.crc32(stored) != section.checksum:
            self._refuse(f"section {section.name} is damaged (its checksum differs)")

    def _decompress(self, section: Section, target: npt.NDArray[np.uint8], threads: int) -> None:
        sizes = self._frame_sizes[section.name]
        begins = section.offset + np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))

        def unpack(i: int) -> None:
            begin = i * layout.FRAME_SIZE
            want = min(layout.FRAME_SIZE, len(target) - begin)
            stored = self._data[int(begins[i]) : int(begins[i + 1])]
            # The frame says its size before anything is allocated, so a lying frame cannot fill the memory.
            if zstandard.get_frame_parameters(stored).content_size != want:
                raise zstandard.ZstdError("frame has another size than its section says")
            raw = zstandard.ZstdDecompressor().decompress(
                stored, max_output_size=want, allow_extra_data=False
            )
            if len(raw) != want:
                raise zstandard.ZstdError("frame is cut short")
            frames.unshuffle_into(raw, section.element_size, target[begin : begin + want])

        try:
            if threads > 1 and len(sizes) > 1:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(unpack, range(len(sizes))))
            else:
                for i in range(len(sizes)):
                    unpack(i)
        except zstandard.ZstdError as error:
            self._refuse(f"section {section.name} cannot be decompressed ({error})")

    def _refuse(self, why: str) -> NoReturn:
        raise IndexFileError(why, file=self.path, hint="rebuild the index")


def _open(path: str, data: memoryview) -> IndexFile:
    def refuse(why: str, hint: str = "rebuild the index") -> NoReturn:
        raise IndexFileError(why, file=path, hint=hint)

    if bytes(data[: len(layout.MAGIC)]) != layout.MAGIC:
        refuse("is not a flashtrie index", "build one with flashtrie build")
    if len(data) < layout.HEADER.size + layout.FOOTER.size:
        refuse("is cut short")
    header = bytes(data[: layout.HEADER.size])
    _, version, kind, byte_order, frame_size, reserved, checksum = layout.HEADER.unpack(header)
    if zlib.crc32(header[:-4]) != checksum:
        refuse("has a damaged header")
    if version not in (layout.VERSION, layout.TAILS_VERSION):
        refuse(
            f"has format version {version}; this flashtrie reads up to {layout.TAILS_VERSION}",
            "a newer flashtrie reads it, or rebuild the index",
        )
    if kind not in layout.KIND_NAMES:
        refuse(f"is of an unknown kind ({kind})")
    if not layout.is_known_version(kind, version):
        refuse(f"has format version {version}, which a {layout.KIND_NAMES[kind]} does not have")
    if byte_order != layout.BYTE_ORDER or frame_size != layout.FRAME_SIZE or any(reserved):
        refuse("has a header that this flashtrie does not understand")

    footer = layout.FOOTER.unpack(data[len(data) - layout.FOOTER.size :])
    end_magic, table_offset, num_sections, num_frames, file_size, digest, spare = footer
    if end_magic != layout.END_MAGIC or file_size != len(data) or any(spare):
        refuse("is cut short or has bytes behind its end")
    table_size = num_sections * layout.SECTION.size + num_frames * layout.FRAME.size
    table_size += -table_size % layout.ALIGNMENT
    if (
        num_sections > layout.MAX_SECTIONS
        or table_offset % layout.ALIGNMENT
        or table_offset + table_size + layout.FOOTER.size != len(data)
    ):
        refuse("has a damaged footer")
    table = bytes(data[table_offset : table_offset + table_size])
    if hashlib.blake2b(header + table, digest_size=16).digest() != digest:
        refuse("has a damaged section table")

    index = IndexFile(path, data, kind, {}, digest.hex(), version)
    sizes = np.frombuffer(table, "<u4", num_frames, num_sections * layout.SECTION.size)
    at = 0
    end = layout.HEADER.size
    for i in range(num_sections):
        section = _section(kind, version, table[i * layout.SECTION.size : (i + 1) * layout.SECTION.size])
        if section is None:
            refuse(f"has a damaged entry {i} in its section table")
        own = sizes[at : at + section.num_frames]
        at += section.num_frames
        if section.name in index.sections or section.offset < end or not _fits(section, own, table_offset):
            refuse(f"has a section table that contradicts itself at {section.name!r}")
        end = section.offset + section.stored_size
        index.sections[section.name] = section
        index._frame_sizes[section.name] = own
    if at != num_frames:
        refuse("has more frames than its sections")
    return index


def _section(kind: int, version: int, row: bytes) -> Section | None:
    name, codec, element_size, reserved, offset, stored, raw, num_frames, checksum, spare = (
        layout.SECTION.unpack(row)
    )
    try:
        text = name.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        return None
    is_known = layout.is_known_section(kind, text, version) and codec in layout.CODEC_NAMES
    if not is_known or reserved or any(spare):
        return None
    return Section(text, codec, element_size, offset, stored, raw, num_frames, checksum)


def _fits(section: Section, frame_sizes: npt.NDArray[np.uint32], table_offset: int) -> bool:
    """Whether a section lies within the file and its sizes agree with its frames."""
    if section.offset % layout.ALIGNMENT:
        return False
    if section.offset + section.stored_size > table_offset:
        return False
    if section.codec == layout.CODEC_RAW:
        return (
            section.num_frames == 0 and section.stored_size == section.raw_size and section.element_size == 0
        )
    frames_needed = -(-section.raw_size // layout.FRAME_SIZE)
    return (
        section.num_frames == len(frame_sizes) == frames_needed
        and int(frame_sizes.sum(dtype=np.uint64)) == section.stored_size
    )
