"""numpy arrays of `.npz` and `.npy` files, read front to back in slices and never loaded whole."""

from __future__ import annotations

import math
import zipfile
import zlib
from contextlib import ExitStack
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs.source import GZIP_MAGIC, NPY_MAGIC, STDIN, ZSTD_MAGIC, open_raw

_READ_SIZE = 1 << 20


class ArrayStream:
    """One array in C order, taken row by row from the front (``take``).

    ``shape`` and ``dtype`` are known at once. Reading checks what is stored: a short or corrupt member is an
    InputError. An array in Fortran order can't be streamed by rows and is loaded whole.
    """

    def __init__(self, file: IO[bytes], source: str, name: str):
        self._file = file
        self._source = source
        self.name = name
        self.shape, fortran_order, self.dtype = self._read_header()
        if self.dtype.hasobject:
            raise self.fault("holds Python objects, not numbers")
        if any(size < 0 for size in self.shape):
            raise self.fault(f"has the impossible shape {list(self.shape)}")
        self._row_size = math.prod(self.shape[1:]) * self.dtype.itemsize
        self.num_taken = 0
        self._whole: npt.NDArray[Any] | None = None
        if fortran_order and len(self.shape) > 1:
            flat = np.frombuffer(self._read(self.num_rows * self._row_size), dtype=self.dtype)
            self._whole = flat.reshape(self.shape, order="F")

    def fault(self, message: str) -> InputError:
        """An InputError about this array."""
        prefix = f"`{self.name}` " if self.name else ""
        return InputError(prefix + message, file=self._source)

    @property
    def num_rows(self) -> int:
        return int(self.shape[0]) if self.shape else 0

    @property
    def fraction_taken(self) -> float:
        """How much of it was taken, 0 to 1."""
        return self.num_taken / self.num_rows if self.num_rows else 1.0

    def take(self, num_rows: int) -> npt.NDArray[Any]:
        """The next rows, at most ``num_rows``; fewer at the end."""
        count = max(0, min(num_rows, self.num_rows - self.num_taken))
        begin = self.num_taken
        self.num_taken += count
        if self._whole is not None:
            return np.ascontiguousarray(self._whole[begin : begin + count])
        data = self._read(count * self._row_size)
        if self.num_taken == self.num_rows:
            self._finish()
        return np.frombuffer(data, dtype=self.dtype).reshape((count, *self.shape[1:]))

    def _read_header(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            version = npy_format.read_magic(self._file)
            read = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(
                version
            )
            if read is None:
                raise self.fault(f"has .npy version {version[0]}.{version[1]}, which is not read")
            return read(self._file)
        except (
            ValueError,
            EOFError,
            zipfile.BadZipFile,
            zlib.error,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise self.fault(f"is not a numpy array: {_first_line(error)}") from None

    def _read(self, size: int) -> bytearray:
        data = bytearray()  # no more than the file turns out to hold, whatever its header says
        try:
            while len(data) < size:
                more = self._file.read(min(size - len(data), _READ_SIZE))
                if not more:
                    raise self.fault("is truncated: the file ends too early")
                data += more
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise self.fault(f"is corrupt: {_first_line(error)}") from None
        return data

    def _finish(self) -> None:
        """Read past the end: zip compares its checksum there, and nothing may follow."""
        try:
            extra = self._file.read(1)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise self.fault(f"is corrupt: {_first_line(error)}") from None
        if extra:
            raise self.fault("has bytes behind its end")


class ArrayFile:
    """An open `.npz` (its arrays by name) or `.npy` (one array, named "")."""

    def __init__(self, path: str):
        if path == STDIN:
            raise UsageError("arrays cannot be read from stdin", hint="write them to a file first")
        self.path = path
        self._stack = ExitStack()
        try:
            self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: str) -> None:
        file: BinaryIO = self._stack.enter_context(open_raw(path))
        if not file.seekable():
            raise InputError(
                "arrays cannot be read from a pipe", file=path, hint="write them to a file first"
            )
        head = file.read(len(NPY_MAGIC))
        file.seek(0)
        self._zip: zipfile.ZipFile | None = None
        self._npy: BinaryIO | None = None
        if head == NPY_MAGIC:
            self._npy = file
            self.names = [""]
            return
        if not head.startswith(b"PK"):
            if head.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
                raise InputError(
                    "is compressed, and arrays are not read so",
                    file=path,
                    hint="decompress it; np.savez_compressed compresses what is read here",
                )
            what = "is empty" if not head else "is neither .npz nor .npy"
            raise InputError(what, file=path, hint="np.savez writes what is read here")
        try:
            self._zip = self._stack.enter_context(zipfile.ZipFile(file))
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise InputError(f"is not a readable .npz: {_first_line(error)}; truncated?", file=path) from None
        self.names = [name.removesuffix(".npy") for name in self._zip.namelist() if name.endswith(".npy")]

    def has(self, name: str) -> bool:
        return name in self.names

    def stream(self, name: str) -> ArrayStream:
        """One array; InputError where the file has none of that name."""
        if not self.has(name):
            have = ", ".join(f"`{n}`" for n in sorted(self.names) if n) or "none"
            raise InputError(f"has no array `{name}` (it has {have})", file=self.path)
        if self._zip is None:
            assert self._npy is not None
            return ArrayStream(self._npy, self.path, name)
        try:
            member = self._stack.enter_context(self._zip.open(name + ".npy"))
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
            raise InputError(f"`{name}` cannot be read: {_first_line(error)}", file=self.path) from None
        return ArrayStream(member, self.path, name)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:120]
