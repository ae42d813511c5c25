"""Ways to make a file lie under valid checksums."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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


def other_frame(data: bytes, lie: Lie) -> bytes:
    """The file with another frame for the louds."""
    parts = take_apart(data)
    frame = lie(parts["louds"].stored)
    parts["louds"] = replace(parts["louds"], stored=frame, frame_sizes=[len(frame)])
    return put_together(parts)


def same_bytes(data: bytes) -> bytes:
    """The terminal bits lie where the louds do, and the checksum is right."""
    parts = take_apart(data)
    parts["terminal"] = replace(parts["terminal"], offset=64, checksum=zlib.crc32(parts["louds"].stored))
    return put_together(parts)


def rows_swapped(data: bytes) -> bytes:
    """A file as it is, but for two rows of its table."""
    table = int.from_bytes(data[-56:-48], "little")
    rows = data[table + 64 : table + 128] + data[table : table + 64]
    header, rest = data[:64], data[table + 128 : -64]
    digest = hashlib.blake2b(header + rows + rest, digest_size=16).digest()
    return data[:table] + rows + rest + data[-64:-32] + digest + data[-16:]


def frame_too_many(data: bytes) -> bytes:
    """Behind those of the last section, which does not count it."""
    parts = take_apart(data)
    last = list(parts.values())[-1]
    last.num_frames = len(last.frame_sizes)
    last.frame_sizes.append(1)
    return put_together(parts)


def frame_sizes(data: bytes) -> bytes:
    parts = take_apart(data)
    parts["louds"].frame_sizes[0] += 1
    parts["louds"].stored_size = len(parts["louds"].stored)
    return put_together(parts)
