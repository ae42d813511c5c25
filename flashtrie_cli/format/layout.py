"""Magic, section names and structs of an index file: the code twin of docs/format.md, held to it by a test."""

from __future__ import annotations

import struct
from dataclasses import dataclass

VERSION = 1
MASKS_VERSION = 2
"""Of token masks. Version 1 had an entry for every token; it was never released and is not read."""
TAILS_VERSION = 2
"""Of a token trie whose unbranched ends lie in a tail store; all other files are of VERSION."""
MAGIC = b"\x89FTRIE\r\n"
END_MAGIC = b"FTRIEEND"
BYTE_ORDER = 0x0102_0304

KIND_TOKEN_TRIE = 1
KIND_TOKEN_MASKS = 2
KIND_NAMES = {KIND_TOKEN_TRIE: "token trie", KIND_TOKEN_MASKS: "byte trie with token masks"}

CODEC_RAW = 0
CODEC_ZSTD = 1
CODEC_NAMES = {CODEC_RAW: "raw", CODEC_ZSTD: "zstd"}

FRAME_SIZE = 1 << 20
"""Raw bytes of a section that one frame holds; the last frame of a section may hold fewer."""

ALIGNMENT = 64
"""Sections begin at multiples of this, so that raw ones can be mapped and used in place."""

# magic, version, kind, byte order, frame size, reserved zeros, checksum of the bytes before it
HEADER = struct.Struct("<8sHHII40sI")
# name, codec, element size of the byte shuffle (0: none), reserved, offset, stored size, raw size, frames, checksum
SECTION = struct.Struct("<24sBBHQQQII4s")
# stored size of one frame
FRAME = struct.Struct("<I")
# magic, offset of the table, sections, frames in all, size of the file, digest of header and table, reserved zeros
FOOTER = struct.Struct("<8sQIIQ16s16s")

assert HEADER.size == SECTION.size == FOOTER.size == 64

MAX_SECTIONS = 256
MAX_NAME_SIZE = 24

META = "meta"
LOUDS = "louds"
LABEL_LOW = "label_low"
LABEL_DELTA = "label_delta"
HIGH_FLAGS = "high_flags"
LABEL_HIGH = "label_high"
TERMINAL = "terminal"
INNER_TERMINAL = "inner_terminal"
LINK_FLAGS = "link_flags"
TAIL_LINKS = "tail_links"
TAIL_ENDS = "tail_ends"
TAIL_LABELS = "tail_labels"
VALUES = "values"
VALUE_COUNTS = "value_counts"
WORD_TEXT = "word_text"
WORD_ENDS = "word_ends"
TOKENIZER = "tokenizer"

SECTION_NAMES = {
    META: "JSON: counts, options, digests",
    LOUDS: "fan-outs in level order, unary",
    LABEL_LOW: "low 16 bits of each node's label",
    LABEL_DELTA: "the same, less that of the sibling before",
    HIGH_FLAGS: "a bit a node: its label has more than 16 bits",
    LABEL_HIGH: "the bits above 16 of the flagged labels, packed",
    TERMINAL: "a bit a node: a key ends here",
    INNER_TERMINAL: "the same, for the root and nodes with children only",
    LINK_FLAGS: "a bit a leaf: its key goes on in the tail store",
    TAIL_LINKS: "where in the tail store each tail begins, packed",
    TAIL_ENDS: "a bit a label of the tail store: a tail ends here",
    TAIL_LABELS: "the labels of the tails",
    VALUES: "8 bytes a value, by key id",
    VALUE_COUNTS: "number of values of each key",
    WORD_TEXT: "the words of the vocabulary, UTF-8, end to end",
    WORD_ENDS: "where each word ends in word_text",
    TOKENIZER: "the tokenizer.json that the keys were encoded with",
}
"""Sections of a token trie. A reader refuses names that the file's kind does not know."""

MASK_SECTION_PREFIX = "mask_"
"""Sections of kind 2 beside `meta` begin with this."""

MAX_JSON_SIZE = 1 << 24
"""Most bytes of a section of JSON."""


TAIL_SECTIONS = (LINK_FLAGS, TAIL_LINKS, TAIL_ENDS, TAIL_LABELS)
"""All of them in a file of TAILS_VERSION, none in others."""


def is_known_section(kind: int, name: str, version: int = VERSION) -> bool:
    """Whether files of this kind and version may hold a section of this name."""
    if kind == KIND_TOKEN_MASKS:
        return name == META or name.startswith(MASK_SECTION_PREFIX)
    return name in SECTION_NAMES and (version == TAILS_VERSION or name not in TAIL_SECTIONS)


def is_known_version(kind: int, version: int) -> bool:
    """Whether this flashtrie reads files of this kind and version."""
    if kind == KIND_TOKEN_MASKS:
        return version == MASKS_VERSION
    return version in (VERSION, TAILS_VERSION)


@dataclass(frozen=True)
class Section:
    """One row of the section table."""

    name: str
    codec: int
    element_size: int
    offset: int
    stored_size: int
    raw_size: int
    num_frames: int
    checksum: int

    def pack(self) -> bytes:
        assert len(self.name) <= MAX_NAME_SIZE, self.name
        return SECTION.pack(
            self.name.encode("ascii"),
            self.codec,
            self.element_size,
            0,
            self.offset,
            self.stored_size,
            self.raw_size,
            self.num_frames,
            self.checksum,
            b"",
        )


MAX_TEXT_RATIO = 1000
MIN_TEXT_LIMIT = 64 << 20
"""Bytes that a vocabulary may take whatever its stored size: one word may be as long as a line."""


def has_sound_size(section: Section, num_nodes: int) -> bool:
    """Whether a vocabulary's section unpacks to no more than can be true, so that a few bytes claim no gigabytes.

    Text compresses tenfold, not a thousandfold. Ends of words that are equally long do, but each word labels a node.
    What builds an index refuses what this refuses.
    """
    limit = MIN_TEXT_LIMIT + MAX_TEXT_RATIO * section.stored_size
    if section.name == WORD_ENDS:
        limit = max(limit, 8 * num_nodes)
    return section.raw_size <= limit
