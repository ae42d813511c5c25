"""Bytes of input files: plain, gzip or Zstandard by content, hashed and counted on the way in."""

from __future__ import annotations

import hashlib
import io
import queue
import re
import stat
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from flashtrie_cli.errors import InputError

STDIN = "-"
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZIP_MAGIC = b"PK\x03\x04"
NPY_MAGIC = b"\x93NUMPY"
RAW_BLOCK_SIZE = 1 << 20
# A piece of a Zstandard file this small bounds what one call can unpack, whatever the ratio.
ZSTD_PIECE_SIZE = 1 << 15
# Whole magics: a line of text may well begin with BZh.
_OTHER_FORMATS = {rb"\xfd7zXZ\x00": "xz", rb"BZh[1-9]1AY&SY": "bzip2"}


@dataclass
class ReadStats:
    """Counts while reading; they grow as batches are taken, so a progress bar can poll them.

    ``num_bytes_read``: raw bytes, before decompression; ``num_text_bytes``: after it. Both run ahead of the
    batches by what is buffered. ``num_lines``: lines, or rows of arrays.
    """

    num_keys_read: int = 0
    num_empty_lines_skipped: int = 0
    num_lines: int = 0
    num_bytes_read: int = 0
    num_text_bytes: int = 0
    files: list[str] = field(default_factory=list)


def open_raw(path: str) -> BinaryIO:
    """The file, unbuffered; ``-`` is stdin. A file that can't be opened is an InputError."""
    try:
        if path == STDIN:
            # Not sys.stdin: its lock, held by a reading thread, would abort the interpreter's exit.
            return io.FileIO(0, closefd=False)
        return io.FileIO(path)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: str, error: OSError) -> InputError:
    return InputError(f"cannot be read: {error.strerror or error}", file=path)


def file_size(path: str) -> int | None:
    """Bytes of a regular file; None for stdin, pipes, and what can't be asked."""
    try:
        status = Path(path).stat() if path != STDIN else None
    except OSError:
        return None
    return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None


class RawReader:
    """A raw file that counts and hashes what is read from it."""

    def __init__(self, path: str, file: BinaryIO, stats: ReadStats, digest: Any | None):
        self.path = path
        self._file = file
        self._stats = stats
        self._digest = digest
        self._pushed_back = b""

    def read(self, size: int) -> bytes:
        """Up to ``size`` bytes, fewer from a pipe; b"" at the end."""
        if self._pushed_back:
            data, self._pushed_back = self._pushed_back[:size], self._pushed_back[size:]
            return data
        try:
            data = self._file.read(size) or b""
        except OSError as error:
            raise unreadable(self.path, error) from None
        self._stats.num_bytes_read += len(data)
        if self._digest is not None:
            self._digest.update(data)
        return data

    def peek(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer only at the end of the file; they are read again later."""
        data = b""
        while len(data) < size:
            more = self.read(size - len(data))
            if not more:
                break
            data += more
        self._pushed_back = data
        return data


def new_digest() -> Any:
    return hashlib.blake2b(digest_size=32)


def read_chunks(raw: RawReader, chunk_size: int) -> Iterator[bytes]:
    """The decompressed bytes of a file in pieces of about ``chunk_size``, whatever its compression."""
    head = raw.peek(10)
    for magic, name in _OTHER_FORMATS.items():
        if re.match(magic, head):
            raise InputError(
                f"is compressed with {name}, which is not read",
                file=raw.path,
                hint=f"{'xz' if name == 'xz' else 'bzip2'} -dc FILE | flashtrie … -",
            )
    if head.startswith(GZIP_MAGIC):
        return _gzip_chunks(raw, chunk_size)
    if head.startswith(ZSTD_MAGIC) or _is_skippable_frame(head):
        return _zstd_chunks(raw, chunk_size)
    return _plain_chunks(raw, chunk_size)


def read_whole(path: str, limit: int) -> bytes:
    """All decompressed bytes of a small file; one above ``limit`` bytes is an InputError."""
    with open_raw(path) as file:
        parts, size = [], 0
        for chunk in read_chunks(RawReader(path, file, ReadStats(), None), RAW_BLOCK_SIZE):
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise InputError(f"larger than {limit >> 20} MiB", file=path)
    return b"".join(parts)


def _plain_chunks(raw: RawReader, chunk_size: int) -> Iterator[bytes]:
    while data := raw.read(chunk_size):
        yield data


def _gzip_chunks(raw: RawReader, chunk_size: int) -> Iterator[bytes]:
    """Members one after the other, as gzip itself reads them; zero bytes behind the last one are padding."""
    data = raw.read(RAW_BLOCK_SIZE)
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            try:
                text = member.decompress(data, chunk_size)
            except zlib.error as error:
                raise _corrupt(raw, "gzip", str(error).rpartition(": ")[2]) from None
            if text:
                yield text
            data = member.unused_data if member.eof else member.unconsumed_tail
            if not data and not member.eof:
                data = raw.read(RAW_BLOCK_SIZE)
                if not data:
                    # Output that max_length held back comes before the verdict.
                    while text := member.decompress(b"", chunk_size):
                        yield text
                    if not member.eof:
                        raise _truncated(raw, "gzip")
        data = data or raw.read(RAW_BLOCK_SIZE)
        while data and not data.strip(b"\0"):
            data = raw.read(RAW_BLOCK_SIZE)


def _is_skippable_frame(head: bytes) -> bool:
    return len(head) >= 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50


def _zstd_chunks(raw: RawReader, chunk_size: int) -> Iterator[bytes]:
    """Frames one after the other, by the push interface: the only one that tells a cut frame."""
    import zstandard

    pending: list[bytes] = []
    pending_size = 0
    data = raw.read(ZSTD_PIECE_SIZE)
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        while not frame.eof:
            if not data:
                data = raw.read(ZSTD_PIECE_SIZE)
                if not data:
                    raise _truncated(raw, "zstd")
            try:
                text = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _zstd_fault(raw, str(error)) from None
            data = frame.unused_data if frame.eof else b""
            if text:
                pending.append(text)
                pending_size += len(text)
            if pending_size >= chunk_size:
                yield b"".join(pending)
                pending, pending_size = [], 0
        data = data or raw.read(ZSTD_PIECE_SIZE)
    if pending:
        yield b"".join(pending)


def _zstd_fault(raw: RawReader, reason: str) -> InputError:
    if "memory" in reason:
        return InputError(
            "zstd window above 128 MiB", file=raw.path, hint="zstd -dc --long=31 FILE | flashtrie … -"
        )
    return _corrupt(raw, "zstd", reason.rpartition(": ")[2])


def _corrupt(raw: RawReader, name: str, reason: str) -> InputError:
    return InputError(f"corrupt {name} data: {reason}", file=raw.path)


def _truncated(raw: RawReader, name: str) -> InputError:
    return InputError(
        f"truncated {name} data: the file ends too early",
        file=raw.path,
        hint="was the copy or download cut short?",
    )


def prefetched(chunks: Callable[[], Iterator[bytes]], depth: int = 2) -> Generator[bytes, None, None]:
    """The same chunks, made by a thread that stays at most ``depth`` ahead.

    Reading, hashing and decompression release the interpreter lock, so they overlap with the parser.
    """
    ready: queue.Queue[bytes | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for chunk in chunks():
                if not put(chunk):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=produce, name="flashtrie-read", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(0.3)  # so that it is done with the file, unless it waits for a pipe
