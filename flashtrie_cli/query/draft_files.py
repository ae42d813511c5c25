"""Files of the draft command: logits and small integer arrays in, trees out."""

from __future__ import annotations

import io
import zipfile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.source import GZIP_MAGIC, NPY_MAGIC, STDIN, ZSTD_MAGIC, open_raw, unreadable

HEAD_SIZE = 16
"""Bytes that tell what a file is."""

Arrays = dict[str, npt.NDArray[Any]]


def read_logits(path: str) -> npt.NDArray[Any]:
    """Logits [B, block, V] of a .npy file (mapped, not read, but for one in another machine's byte order); a file of
    [block, V] is a batch of one."""
    array = read_array(path)
    if array.ndim == 2:
        array = array[None]
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def read_array(path: str) -> npt.NDArray[Any]:
    """The array of a .npy file; ``-`` reads stdin. InputError for anything else."""
    head = b""
    try:
        with open_raw(path) as source:
            if path == STDIN:
                whole = source.read()
                head = whole[:HEAD_SIZE]
                array = np.load(io.BytesIO(whole), allow_pickle=False)
            else:
                head = source.read(HEAD_SIZE)
                array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _no_array(path, head) from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not isinstance(array, np.ndarray):
        raise InputError("is an .npz of several arrays, not one .npy array", file=path)
    return array


def _no_array(path: str, head: bytes) -> InputError:
    if head.startswith(NPY_MAGIC):
        return InputError("is a .npy array that is cut short or damaged", file=path)
    if head.startswith((GZIP_MAGIC, ZSTD_MAGIC)):
        return InputError("is compressed, and arrays are not read so", file=path, hint="decompress it")
    return InputError("is not a .npy array", file=path, hint="np.save writes what is read here")


def read_integers(path: str | None, size: int, default: int) -> npt.NDArray[Any]:
    """``size`` integers of a .npy file; all ``default`` without one."""
    if path is None:
        return np.full(size, default, np.int64)
    array = read_array(path)
    if array.dtype.kind not in "iu" or array.shape != (size,):
        raise InputError(f"holds {array.dtype} {list(array.shape)}, not {size} integers", file=path)
    return array


def read_trees(path: str) -> Arrays:
    """Every array of an .npz file; ``-`` reads stdin. Raises InputError."""
    try:
        with open_raw(path) as source:
            file = io.BytesIO(source.read()) if path == STDIN else source
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise InputError(
            "is not an .npz of draft trees", file=path, hint="flashtrie draft LOGITS.npy -o TREE.npz"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def write_trees(out: BinaryIO, arrays: Arrays) -> None:
    """An .npz of the arrays; the same arrays give the same bytes."""
    np.savez(out, **arrays)  # type: ignore[arg-type]
