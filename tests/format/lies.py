"""Files that lie under valid checksums: how each is made from an honest sample, and what its refusal says."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zstandard
from forge import Part, change, change_meta, change_words, put_together, take_apart

Lie = Callable[[bytes], bytes]


def set_bits(*bits: int, value: bool = True) -> Callable[[list[int]], None]:
    """Sets bits of a section of 64-bit words."""

    def lie(words: list[int]) -> None:
        for bit in bits:
            words[bit // 64] = words[bit // 64] & ~(1 << bit % 64) | value << bit % 64

    return lie


def words(name: str, lie: Callable[[list[int]], None], size: int = 8) -> Lie:
    return lambda data: change_words(data, name, lie, size)


def meta(**fields: Any) -> Lie:
    return lambda data: change_meta(data, **fields)


def section(name: str, lie: Lie) -> Lie:
    return lambda data: change(data, name, lie)


def without(name: str) -> Lie:
    return lambda data: put_together({n: part for n, part in take_apart(data).items() if n != name})


def also(name: str, raw: bytes) -> Lie:
    """The file with one more section."""

    def lie(data: bytes) -> bytes:
        parts = take_apart(data)
        parts[name] = Part(name, 0, 0, raw, len(raw))
        return put_together(parts)

    return lie


def part(target: str, **fields: Any) -> Lie:
    """The file with a row of its table changed."""

    def lie(data: bytes) -> bytes:
        parts = take_apart(data)
        parts[target] = replace(parts[target], **fields)
        return put_together(parts)

    return lie


def fan_outs(*counts: int) -> Lie:
    """Other fan-outs for as many nodes."""
    bits = "".join("1" * count + "0" for count in counts)
    word = int(bits[::-1], 2)
    return section("louds", lambda raw: word.to_bytes(len(raw), "little"))


def swapped(i: int, j: int) -> Callable[[list[int]], None]:
    def lie(values: list[int]) -> None:
        values[i], values[j] = values[j], values[i]

    return lie


# The sample `ids` has the keys (), 1, 1 2, 1 2 3, 5 7, 5 65535 and 300 1 1, so 10 nodes: the root (0);
# 1 5 300 (1-3); 2 (4), 7 65535 (5-6), 1 (7); 3 (8), 1 (9). Its fan-outs are 3, 1 2 1, 1 0 0 1, 0 0.

# name: sample, codec, the lie, what the refusal says
LIES: dict[str, tuple[str, str, Lie, str]] = {
    # counts
    "nodes: one more": ("ids", "raw", meta(num_nodes=11), "label_low"),
    "nodes: none": ("ids", "raw", meta(num_nodes=0), "out of range"),
    "nodes: too many to number": ("ids", "raw", meta(num_nodes=2**32), "out of range"),
    "nodes: as many as there may be": ("ids", "raw", meta(num_nodes=2**32 - 1), "louds"),
    "nodes: a float": ("ids", "raw", meta(num_nodes=10.0), "meta"),
    "nodes: a truth": ("ids", "raw", meta(num_nodes=True), "meta"),
    "nodes: text": ("ids", "raw", meta(num_nodes="10"), "meta"),
    "nodes: not said": ("ids", "raw", meta(num_nodes=...), "meta"),
    "keys: one more": ("ids", "zstd", meta(num_keys=8), "number of keys"),
    "keys: one fewer": ("ids", "raw", meta(num_keys=6), "number of keys"),
    "keys: negative": ("ids", "raw", meta(num_keys=-1), "negative"),
    "keys: more than nodes": ("ids", "raw", meta(num_keys=12), "out of range"),
    "high width: too wide": ("highs", "raw", meta(high_width=16), "out of range"),
    "high width: wider": ("highs", "raw", meta(high_width=15 + 2**40), "out of range"),
    "high width: none": ("highs", "raw", meta(high_width=0), "high parts"),
    "high width: some": ("ids", "raw", meta(high_width=3), "high parts"),
    # meta
    "meta: a list": ("ids", "zstd", section("meta", lambda _: b"[]"), "meta"),
    "meta: no JSON": ("ids", "zstd", section("meta", lambda raw: raw[:-1]), "not JSON"),
    "meta: no UTF-8": ("ids", "zstd", section("meta", lambda _: b'{"a": "\xff"}'), "not JSON"),
    "meta: deep": ("ids", "zstd", section("meta", lambda _: b"[" * 200_000), "not JSON"),
    "meta: a number of many digits": ("ids", "raw", section("meta", lambda _: b"9" * 100_000), "JSON"),
    "meta: empty": ("ids", "raw", section("meta", lambda _: b""), "not JSON"),
    "meta: missing": ("ids", "raw", without("meta"), "meta is missing"),
    "meta: not a number": ("ids", "raw", meta(label_entropy=float("nan")), "entropy"),
    "meta: endless": ("ids", "raw", meta(label_entropy=float("inf")), "entropy"),
    "meta: unknown tokenizer": ("ids", "raw", meta(tokenizer="magic"), "magic"),
    "meta: unknown values": ("values", "raw", meta(value_kind="complex"), "meta"),
    "meta: words without words": ("ids", "raw", meta(tokenizer="words"), "word_"),
    "meta: no digest": ("ids", "raw", meta(keys_digest=...), "meta"),
    "meta: no entropy": ("ids", "raw", meta(label_entropy=...), "meta"),
    # the tree
    "louds: fewer zeros": ("ids", "raw", words("louds", set_bits(18)), "louds"),
    "louds: fewer zeros, compact": ("ids", "zstd", words("louds", set_bits(18)), "louds"),
    "louds: all zeros": ("ids", "raw", section("louds", lambda raw: bytes(len(raw))), "louds"),
    "louds: all ones": ("ids", "raw", section("louds", lambda raw: b"\xff" * len(raw)), "louds"),
    "louds: all ones, compact": ("ids", "zstd", section("louds", lambda raw: b"\xff" * len(raw)), "louds"),
    "louds: a node below itself": ("ids", "raw", fan_outs(0, 3, 1, 2, 1, 1, 0, 0, 1, 0), "louds"),
    "louds: a cycle further down": ("ids", "raw", fan_outs(1, 1, 0, 0, 4, 1, 1, 0, 1, 0), "louds"),
    "louds: a cycle, compact": ("ids", "zstd", fan_outs(1, 1, 0, 0, 4, 1, 1, 0, 1, 0), "louds"),
    "louds: one child too many": ("ids", "raw", fan_outs(4, 1, 2, 1, 1, 0, 0, 1, 0), "louds"),
    "louds: one child too few": ("ids", "raw", fan_outs(2, 1, 2, 1, 1, 0, 0, 1, 0, 0), "louds"),
    "louds: too short": ("wide", "raw", section("louds", lambda raw: raw[:-8]), "louds"),
    "louds: too long": ("ids", "raw", section("louds", lambda raw: raw + bytes(8)), "louds"),
    "louds: no whole words": ("ids", "raw", section("louds", lambda raw: raw[:-1]), "louds"),
    "louds: missing": ("ids", "raw", without("louds"), "louds"),
    # labels
    "labels: siblings swapped": ("ids", "raw", words("label_low", swapped(1, 2), 2), "siblings"),
    "labels: siblings equal": (
        "ids",
        "zstd",
        words("label_delta", lambda v: v.__setitem__(2, 0), 2),
        "siblings",
    ),
    "labels: siblings wrap": (
        "ids",
        "zstd",
        words("label_delta", lambda v: v.__setitem__(3, 65534), 2),
        "siblings",
    ),
    "labels: one missing": ("ids", "raw", section("label_low", lambda raw: raw[:-2]), "label_low"),
    "labels: half a label": ("ids", "raw", section("label_low", lambda raw: raw[:-1]), "label_low"),
    "labels: one more": ("ids", "zstd", section("label_delta", lambda raw: raw + b"\0\0"), "label_delta"),
    "labels: in both forms": ("ids", "raw", also("label_delta", bytes(20)), "label_delta"),
    "labels: in no form": ("ids", "zstd", without("label_delta"), "label_delta"),
    "highs: in the wrong order": (
        "highs",
        "raw",
        words("label_high", set_bits(0, value=False)),
        "",
    ),
    "highs: none": ("highs", "raw", section("label_high", lambda raw: bytes(len(raw))), "flagged"),
    "highs: too few": ("highs", "raw", section("label_high", lambda raw: b""), "label_high"),
    "highs: more flags": ("highs", "raw", words("high_flags", set_bits(1)), ""),
    "highs: flags behind the last": ("highs", "raw", words("high_flags", set_bits(63)), ""),
    "highs: flags missing": ("highs", "raw", without("high_flags"), "high parts"),
    "highs: flags too long": (
        "highs",
        "zstd",
        section("high_flags", lambda raw: raw + bytes(8)),
        "high_flags",
    ),
    # terminals
    "terminal: a leaf is none": ("ids", "raw", words("terminal", set_bits(9, value=False)), "key"),
    "terminal: one too many": ("ids", "raw", words("terminal", set_bits(2)), "number of keys"),
    "terminal: moved": (
        "ids",
        "raw",
        words("terminal", lambda v: (set_bits(2)(v), set_bits(8, value=False)(v))),
        "key",
    ),
    "terminal: behind the last": ("ids", "raw", words("terminal", lambda v: set_bits(63)(v)), ""),
    "terminal: compact, one too many": (
        "ids",
        "zstd",
        words("inner_terminal", set_bits(2)),
        "number of keys",
    ),
    "terminal: too short": ("ids", "raw", section("terminal", lambda raw: b""), "terminal"),
    "terminal: compact, too short": (
        "wide",
        "zstd",
        section("inner_terminal", lambda raw: raw[:8]),
        "inner_terminal",
    ),
    "terminal: compact, too long": (
        "ids",
        "zstd",
        section("inner_terminal", lambda raw: raw + bytes(8)),
        "terminal",
    ),
    "terminal: in both forms": ("ids", "raw", also("inner_terminal", bytes(8)), "terminal"),
    # values
    "values: one missing": ("floats", "raw", section("values", lambda raw: raw[:-8]), "values"),
    "values: half a value": ("floats", "raw", section("values", lambda raw: raw[:-4]), "values"),
    "values: one more": ("values", "zstd", section("values", lambda raw: raw + bytes(8)), "values"),
    "values: missing": ("values", "raw", without("values"), "values"),
    "values: counts missing": ("values", "raw", without("value_counts"), "value_counts"),
    "values: counts too short": (
        "values",
        "raw",
        section("value_counts", lambda raw: raw[:-4]),
        "value counts",
    ),
    "values: counts add up to more": (
        "values",
        "raw",
        words("value_counts", lambda v: v.__setitem__(0, 9), 4),
        "values",
    ),
    "values: counts add up to far more": (
        "values",
        "raw",
        section("value_counts", lambda raw: b"\xff" * len(raw)),
        "values",
    ),
    "values: infinite": (
        "floats",
        "raw",
        words("values", lambda v: v.__setitem__(1, 0x7FF0_0000_0000_0000)),
        "finite",
    ),
    "values: not a number": (
        "floats",
        "zstd",
        words("values", lambda v: v.__setitem__(0, 0x7FF8_0000_0000_0000)),
        "finite",
    ),
    "values: a key without one": (
        "values",
        "raw",
        words("value_counts", lambda v: (v.__setitem__(0, 0), v.__setitem__(1, 4)), 4),
        "without a value",
    ),
    # tails: links are 7 (1 2 3), 8 70000 (9 9), 9 4 (2 3) and 65536 (1 1 300); what 8 2 leads to is too short
    "tails: nodes: one more": ("tails", "raw", meta(num_nodes=20), "nodes"),
    "tails: nodes in tails: one more": ("tails", "raw", meta(num_tail_nodes=11), ""),
    "tails: nodes in tails: more than nodes": ("tails", "raw", meta(num_tail_nodes=2**32), "out of range"),
    "tails: nodes in tails: not said": ("tails", "raw", meta(num_tail_nodes=...), "tails"),
    "tails: links: one fewer": ("tails", "raw", meta(num_links=3), ""),
    "tails: links: none": ("tails", "raw", meta(num_links=0), "tails"),
    "tails: links: as many as nodes": ("tails", "raw", meta(num_links=2**31), "out of range"),
    "tails: labels: one fewer": ("tails", "raw", meta(num_tail_labels=7), "tail_labels"),
    "tails: labels: negative": ("tails", "raw", meta(num_tail_labels=-8), "tails"),
    "tails: labels: of three bytes": ("tails", "raw", meta(tail_label_size=3), "out of range"),
    "tails: labels: of one byte": ("tails", "raw", meta(tail_label_size=1), "tail_labels"),
    "tails: labels: a truth": ("tails", "raw", meta(tail_label_size=True), "tails"),
    "tails: labels too large": (
        "tails",
        "raw",
        lambda data: change(
            change_meta(data, tail_label_size=4), "tail_labels", lambda raw: b"\xff" * 2 * len(raw)
        ),
        "larger labels",
    ),
    "tails: ends: none": (
        "tails",
        "raw",
        section("tail_ends", lambda raw: bytes(len(raw))),
        "without an end",
    ),
    "tails: ends: everywhere": ("tails", "raw", words("tail_ends", set_bits(*range(8))), "number of nodes"),
    "tails: ends: the last one missing": (
        "tails",
        "zstd",
        words("tail_ends", set_bits(7, value=False)),
        "end",
    ),
    "tails: ends: too long": ("tails", "raw", section("tail_ends", lambda raw: raw + bytes(8)), "tail_ends"),
    "tails: ends: missing": ("tails", "raw", without("tail_ends"), "tail_ends"),
    "tails: links past the end": ("tails", "raw", words("tail_links", set_bits(*range(12))), ""),
    "tails: links elsewhere": (
        "tails",
        "raw",
        words("tail_links", lambda v: v.__setitem__(0, 0)),
        "number of nodes",
    ),
    "tails: links too short": ("tails", "raw", section("tail_links", lambda raw: b""), "tail_links"),
    "tails: flags: one more": (
        "tails",
        "raw",
        words("link_flags", lambda v: v.__setitem__(0, v[0] | 63)),
        "links",
    ),
    "tails: flags: behind the last leaf": ("tails", "raw", words("link_flags", set_bits(40)), "leaves"),
    "tails: flags: too long": (
        "tails",
        "raw",
        section("link_flags", lambda raw: raw + bytes(8)),
        "link_flags",
    ),
    "tails: flags: missing": ("tails", "zstd", without("link_flags"), "link_flags"),
    "tails: all missing": ("tails", "zstd", without("tail_labels"), "table"),
    "tails: a high part of none": (
        "tails",
        "raw",
        words("label_high", set_bits(0, value=False)),
        "flagged",
    ),
    "tails: a link is no key": ("tails", "raw", words("terminal", set_bits(1, value=False)), "key"),
    # words
    "words: out of order": (
        "words",
        "raw",
        section("word_text", lambda raw: b"zity" + raw[4:]),
        "vocabulary",
    ),
    "words: twice": (
        "words",
        "raw",
        section("word_text", lambda raw: raw.replace(b"york", b"york")[::-1]),
        "vocabulary",
    ),
    "words: no UTF-8": ("words", "zstd", section("word_text", lambda raw: raw[:-1] + b"\xff"), "vocabulary"),
    "words: a space in one": (
        "words",
        "raw",
        section("word_text", lambda raw: b"ci y" + raw[4:]),
        "vocabulary",
    ),
    "words: text cut": ("words", "raw", section("word_text", lambda raw: raw[:-1]), "vocabulary"),
    "words: ends descend": ("words", "raw", words("word_ends", swapped(0, 1)), "vocabulary"),
    "words: ends negative": (
        "words",
        "raw",
        words("word_ends", lambda v: v.__setitem__(0, 2**64 - 4)),
        "vocabulary",
    ),
    "words: ends huge": (
        "words",
        "raw",
        words("word_ends", lambda v: v.__setitem__(-1, 2**62)),
        "vocabulary",
    ),
    "words: ends are odd": ("words", "raw", section("word_ends", lambda raw: raw[:-3]), "word_ends"),
    "words: fewer than tokens": (
        "words",
        "raw",
        lambda data: change(
            change(data, "word_ends", lambda raw: raw[:-8]),
            "word_text",
            lambda raw: raw[: -len("日本".encode())],
        ),
        "none of its words",
    ),
    # the table
    "table: a name that no kind has": ("ids", "raw", also("secret", b""), "table"),
    "table: a name of another kind": ("ids", "raw", also("mask_rows", b""), "table"),
    "table: a name that is no ASCII": ("ids", "raw", part("louds", name="l\xf6uds"), "table"),
    "table: a name twice": ("ids", "raw", part("terminal", name="label_low"), "label_low"),
    "table: an unknown codec": ("ids", "raw", part("louds", codec=2), "table"),
    "table: reserved bytes": ("ids", "raw", part("louds", reserved=1), "table"),
    "table: a raw section that grows": ("ids", "raw", part("louds", raw_size=2**40), "louds"),
    "table: a raw section with frames": ("ids", "raw", part("louds", num_frames=1), "louds"),
    "table: a raw section with planes": ("ids", "raw", part("louds", element_size=2), "louds"),
    "table: unaligned": ("ids", "raw", part("louds", offset=72), "louds"),
    "table: in the header": ("ids", "raw", part("louds", offset=0), "louds"),
    "table: behind the end": ("ids", "raw", part("terminal", offset=2**40), "terminal"),
    "table: at the end of the numbers": ("ids", "raw", part("terminal", offset=2**64 - 64), "terminal"),
    "table: sections share bytes": ("ids", "raw", part("terminal", offset=64), "terminal"),
    "table: two rows of the same bytes": ("ids", "raw", lambda data: _same_bytes(data), "contradicts"),
    "table: rows in another order than the file": (
        "ids",
        "raw",
        lambda data: _rows_swapped(data),
        "contradicts",
    ),
    "table: stored size": ("ids", "zstd", part("louds", stored_size=3), "louds"),
    "table: raw size": ("ids", "zstd", part("louds", raw_size=16), "louds"),
    "table: raw size of gigabytes": ("ids", "zstd", part("louds", raw_size=2**40), "louds"),
    "table: more frames": ("ids", "zstd", part("louds", num_frames=2), "table"),
    "table: far more frames": ("ids", "zstd", part("meta", num_frames=2**32 - 1), "table"),
    "table: a frame of no section": ("ids", "zstd", lambda data: _frame_too_many(data), "more frames"),
    "table: frame sizes": ("ids", "zstd", lambda data: _frame_sizes(data), "louds"),
    "header: version": ("ids", "raw", lambda data: put_together(take_apart(data), version=3), "version 3"),
    "header: version of tails": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), version=2),
        "tails",
    ),
    "header: version without tails": (
        "tails",
        "raw",
        lambda data: put_together(take_apart(data), version=1),
        "table",
    ),
    "header: kind": ("ids", "raw", lambda data: put_together(take_apart(data), kind=3), "kind"),
    "header: kind of masks": ("ids", "raw", lambda data: put_together(take_apart(data), kind=2), ""),
    "header: byte order": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), byte_order=0x04030201),
        "header",
    ),
    "header: frame size": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), frame_size=4096),
        "header",
    ),
    "header: reserved": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), header_reserved=b"x"),
        "header",
    ),
    "footer: sections": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), num_sections=2**32 - 1),
        "footer",
    ),
    "footer: one section fewer": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), num_sections=3),
        "",
    ),
    "footer: frames": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), num_frames=2**32 - 1),
        "footer",
    ),
    "footer: table": (
        "ids",
        "raw",
        lambda data: put_together(take_apart(data), table_offset=2**64 - 64),
        "footer",
    ),
    "footer: size": ("ids", "raw", lambda data: put_together(take_apart(data), file_size=1), "cut short"),
    "footer: reserved": ("ids", "raw", lambda data: put_together(take_apart(data), reserved=b"x"), ""),
    # frames
    "frame: bytes behind it": (
        "ids",
        "zstd",
        lambda data: _frames(data, lambda f: f + b"more"),
        "decompressed",
    ),
    "frame: two in one": ("ids", "zstd", lambda data: _frames(data, lambda f: f + f), "decompressed"),
    "frame: none": ("ids", "zstd", lambda data: _frames(data, lambda f: bytes(len(f))), "decompressed"),
    "frame: cut": ("ids", "zstd", lambda data: _frames(data, lambda f: f[:-1]), "decompressed"),
    "frame: one to be skipped": (
        "ids",
        "zstd",
        lambda data: _frames(data, lambda f: b"\x50\x2a\x4d\x18\x08\0\0\0" + bytes(8)),
        "decompressed",
    ),
    "frame: of another size": (
        "ids",
        "zstd",
        lambda data: _frames(data, lambda f: zstandard.ZstdCompressor().compress(bytes(9))),
        "another size",
    ),
    "frame: of no size": (
        "ids",
        "zstd",
        lambda data: _frames(
            data, lambda f: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))
        ),
        "decompressed",
    ),
    "frame: a gigabyte": (
        "ids",
        "zstd",
        lambda data: _frames(data, lambda f: zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))),
        "another size",
    ),
}


def _frames(data: bytes, lie: Lie) -> bytes:
    """The file with another frame for the louds."""
    parts = take_apart(data)
    frame = lie(parts["louds"].stored)
    parts["louds"] = replace(parts["louds"], stored=frame, frame_sizes=[len(frame)])
    return put_together(parts)


def _same_bytes(data: bytes) -> bytes:
    """The terminal bits lie where the louds do, and the checksum is right."""
    parts = take_apart(data)
    parts["terminal"] = replace(parts["terminal"], offset=64, checksum=zlib.crc32(parts["louds"].stored))
    return put_together(parts)


def _rows_swapped(data: bytes) -> bytes:
    """A file as it is, but for two rows of its table."""
    table = int.from_bytes(data[-56:-48], "little")
    rows = data[table + 64 : table + 128] + data[table : table + 64]
    header, rest = data[:64], data[table + 128 : -64]
    digest = hashlib.blake2b(header + rows + rest, digest_size=16).digest()
    return data[:table] + rows + rest + data[-64:-32] + digest + data[-16:]


def _frame_too_many(data: bytes) -> bytes:
    """Behind those of the last section, which does not count it."""
    parts = take_apart(data)
    last = list(parts.values())[-1]
    last.num_frames = len(last.frame_sizes)
    last.frame_sizes.append(1)
    return put_together(parts)


def _frame_sizes(data: bytes) -> bytes:
    parts = take_apart(data)
    parts["louds"].frame_sizes[0] += 1
    parts["louds"].stored_size = len(parts["louds"].stored)
    return put_together(parts)
