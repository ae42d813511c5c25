"""Files of the draft command: logits and small integer arrays in, trees out."""

from __future__ import annotations

import io
import zipfile
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.source import open_raw

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
    try:
        if path == "-":
            with open_raw(path) as source:
                array = np.load(io.BytesIO(source.read()), allow_pickle=False)
        else:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError("is no .npy array", file=path) from error
    except OSError as error:
        raise InputError(error.strerror or str(error), file=path) from error
    if not isinstance(array, np.ndarray):
        raise InputError("is an .npz of several arrays, not one .npy array", file=path)
    return array


def read_integers(path: str | None, size: int, default: int) -> npt.NDArray[np.int64]:
    """``size`` integers of a .npy file; all ``default`` without one."""
    if path is None:
        return np.full(size, default, np.int64)
    array = read_array(path)
    if array.dtype.kind not in "iu" or array.shape != (size,):
        raise InputError(f"holds {array.dtype} {list(array.shape)}, not {size} integers", file=path)
    return array.astype(np.int64)


def read_trees(path: str) -> Arrays:
    """Every array of an .npz file."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise InputError(
            "is no .npz of draft trees", file=path, hint="flashtrie draft LOGITS.npy -o TREE.npz"
        ) from error
    except OSError as error:
        raise InputError(error.strerror or str(error), file=path) from error


def write_trees(out: BinaryIO, arrays: Arrays) -> None:
    """An .npz of the arrays; the same arrays give the same bytes."""
    np.savez(out, **arrays)  # type: ignore[arg-type]
