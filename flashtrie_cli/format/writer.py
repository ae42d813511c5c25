"""Writes an index file as a stream: sections one after another, then the table and the footer. No seeking back."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import zstandard

from flashtrie_cli.errors import OutputError, UsageError
from flashtrie_cli.files import atomic_output
from flashtrie_cli.format import frames, layout

CODECS = {"raw": layout.CODEC_RAW, "zstd": layout.CODEC_ZSTD}
DEFAULT_LEVEL = 3
MAX_LEVEL = 22


def check_codec(codec: str, level: int) -> None:
    """UsageError for a codec or a level that there is not."""
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not one of {', '.join(CODECS)}")
    if not 1 <= level <= MAX_LEVEL:
        raise UsageError(f"level {level} is not between 1 and {MAX_LEVEL}")


class IndexWriter:
    """A context manager; the file appears under its name when the block ends without an error.

    ``codec`` "zstd" compresses every section at ``level`` on ``threads`` threads; "raw" leaves them as they are,
    64-byte aligned. The same sections give the same bytes, whatever the number of threads. Raises OutputError.
    """

    def __init__(
        self,
        path: str,
        *,
        kind: int,
        codec: str = "zstd",
        level: int = DEFAULT_LEVEL,
        threads: int = 1,
        force: bool = False,
        version: int = layout.VERSION,
    ):
        check_codec(codec, level)
        self.path = path
        self._codec = CODECS[codec]
        self._level = level
        self._threads = max(threads, 1)
        self._kind = kind
        self._version = version
        self._output = atomic_output(path, force=force)
        self.sections: list[layout.Section] = []
        self._frame_sizes: list[int] = []
        self._offset = 0

    def __enter__(self) -> IndexWriter:
        self._file = self._output.__enter__()
        header = layout.HEADER.pack(
            layout.MAGIC, self._version, self._kind, layout.BYTE_ORDER, layout.FRAME_SIZE, b"", 0
        )[:-4]
        self._header = header + zlib.crc32(header).to_bytes(4, "little")
        self._write(self._header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
            except BaseException as failure:
                if not self._output.__exit__(type(failure), failure, failure.__traceback__):
                    raise
                return
        self._output.__exit__(kind, error, traceback)

    def add(self, name: str, array: np.ndarray, *, element_size: int = 0) -> None:
        """A section from an array, or anything with a buffer; ``element_size`` > 1 shuffles its bytes by planes."""
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        step = layout.FRAME_SIZE
        self.add_chunks(
            name, (data[at : at + step] for at in range(0, len(data), step)), element_size=element_size
        )

    def add_json(self, name: str, value: Any) -> None:
        """A section of JSON with sorted keys."""
        self.add_chunks(name, [json.dumps(value, sort_keys=True, ensure_ascii=False).encode()])

    def add_chunks(self, name: str, chunks: Iterable[bytes | memoryview], *, element_size: int = 0) -> None:
        """A section from pieces of any size."""
        with self.section(name, element_size=element_size) as put:
            for chunk in reframe(chunks):
                put(chunk)

    @contextmanager
    def section(self, name: str, *, element_size: int = 0) -> Iterator[Callable[[bytes | memoryview], None]]:
        """A section that grows by what is put: pieces of FRAME_SIZE bytes, the last one maybe shorter.

        Pieces are compressed a few ahead, and written in order; no more of the section than that is held.
        """
        if len(self.sections) == layout.MAX_SECTIONS:
            raise OutputError("too many sections", file=self.path)
        self._write(b"\0" * (-self._offset % layout.ALIGNMENT))
        begin, raw_size, checksum = self._offset, 0, 0
        frame_sizes: list[int] = []
        ahead: deque[Future[bytes | memoryview]] = deque()
        is_framed = self._codec != layout.CODEC_RAW
        pool = ThreadPoolExecutor(self._threads) if is_framed and self._threads > 1 else None

        def compress(chunk: bytes | memoryview) -> bytes:
            compressor = zstandard.ZstdCompressor(level=self._level, write_content_size=True)
            return compressor.compress(frames.shuffle(chunk, element_size))

        def keep(stored: bytes | memoryview) -> None:
            nonlocal checksum
            self._write(stored)
            checksum = zlib.crc32(stored, checksum)
            if is_framed:
                frame_sizes.append(len(stored))

        def put(chunk: bytes | memoryview) -> None:
            nonlocal raw_size
            if len(chunk) > layout.FRAME_SIZE or raw_size % layout.FRAME_SIZE:
                raise ValueError("a frame holds FRAME_SIZE bytes, and only the last one fewer")
            raw_size += len(chunk)
            if pool is None:
                keep(compress(chunk) if is_framed else chunk)
                return
            ahead.append(pool.submit(compress, chunk))
            if len(ahead) > 2 * self._threads:
                keep(ahead.popleft().result())

        try:
            yield put
            while ahead:
                keep(ahead.popleft().result())
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
        self._frame_sizes += frame_sizes
        self.sections.append(
            layout.Section(
                name,
                self._codec,
                element_size if is_framed else 0,
                begin,
                self._offset - begin,
                raw_size,
                len(frame_sizes),
                checksum,
            )
        )

    def _write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", file=self.path) from error
        self._offset += len(data)

    def _finish(self) -> None:
        self._write(b"\0" * (-self._offset % layout.ALIGNMENT))
        table_offset = self._offset
        table = b"".join(section.pack() for section in self.sections)
        table += np.array(self._frame_sizes, "<u4").tobytes()
        table += b"\0" * (-len(table) % layout.ALIGNMENT)
        digest = hashlib.blake2b(self._header + table, digest_size=16).digest()
        self._write(table)
        size = self._offset + layout.FOOTER.size
        self._write(
            layout.FOOTER.pack(
                layout.END_MAGIC, table_offset, len(self.sections), len(self._frame_sizes), size, digest, b""
            )
        )
        self.digest = digest.hex()
        self.file_size = size


def reframe(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of FRAME_SIZE, the last one shorter."""
    held = bytearray()
    for chunk in chunks:
        if not held and len(chunk) == layout.FRAME_SIZE:
            yield chunk
            continue
        held += chunk
        while len(held) >= layout.FRAME_SIZE:
            yield bytes(held[: layout.FRAME_SIZE])
            del held[: layout.FRAME_SIZE]
    if held:
        yield bytes(held)
