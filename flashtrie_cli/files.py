"""Outputs that appear whole or not at all: written beside, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from flashtrie_cli.errors import OutputError


def check_output(path: str, *, force: bool) -> None:
    """Refuse, before any work, an output that could not be put in place; raises OutputError."""
    if path == "-":
        return
    directory = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise OutputError("is a directory", file=path, hint="name a file")
    if not os.path.isdir(directory):
        raise OutputError("its directory does not exist", file=path, hint=f"mkdir -p {directory}")
    if not os.access(directory, os.W_OK):
        raise OutputError("its directory cannot be written to", file=path)
    if os.path.exists(path) and not force and not is_special(path):
        raise OutputError("exists already", file=path, hint="--force replaces it")


def is_special(path: str) -> bool:
    """Whether there is something that a rename must not replace, such as /dev/null."""
    return os.path.exists(path) and not os.path.isfile(path)


@contextlib.contextmanager
def atomic_output(path: str, *, force: bool = True) -> Iterator[BinaryIO]:
    """A binary file that takes the name ``path`` once the block ends without an error, and vanishes otherwise.

    A symbolic link stays and its target is replaced; a device or a named pipe is written to as it is. Raises
    OutputError where the file cannot be written; other exceptions of the block pass through.
    """
    check_output(path, force=force)
    target = os.path.realpath(path)
    if is_special(target):
        with open(target, "wb") as special:
            yield special
        return
    directory = os.path.dirname(target)
    try:
        descriptor, beside = tempfile.mkstemp(
            prefix=f".{os.path.basename(target)[:100]}.", suffix=".part", dir=directory
        )
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", file=path) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                if error.filename is not None:  # some other file's trouble
                    raise
                raise OutputError(f"cannot be written: {error.strerror or error}", file=path) from error
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync_directory(directory)


def _sync_directory(directory: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
