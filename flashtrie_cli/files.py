"""Outputs that appear whole or not at all: written beside, synced, renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from flashtrie_cli.errors import OutputError

STANDARD = "-"
"""Stdin or stdout, where a file may be one of them."""


def check_output(path: str, *, force: bool, inputs: Iterable[str | None] = ()) -> None:
    """Refuse, before any work, an output that could not be put in place, or that would replace one of the ``inputs``
    (others than files count for nothing, nor does None). Raises OutputError."""
    if path in ("", STANDARD):
        raise OutputError(f"{path!r} is no name of an output file", hint="name a file")
    directory = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise OutputError("is a directory", file=path, hint="name a file")
    if not os.path.isdir(directory):
        raise OutputError("its directory does not exist", file=path, hint=f"mkdir -p {directory}")
    if is_special(path):
        if not os.access(path, os.W_OK):
            raise OutputError("cannot be written to", file=path)
        return
    if not os.access(directory, os.W_OK):
        raise OutputError("its directory cannot be written to", file=path)
    if any(_is_same(path, other) for other in inputs if other not in (None, "", STANDARD)):
        raise OutputError("is also an input", file=path, hint="write to another file")
    if os.path.exists(path) and not force:
        raise OutputError("exists already", file=path, hint="--force replaces it")


def _is_same(path: str, other: str | None) -> bool:
    try:
        return other is not None and os.path.samefile(path, other)
    except OSError:  # one of them is not there
        return False


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
        with naming(path), open(target, "wb") as special:
            yield special
        return
    directory = os.path.dirname(target)
    beside = os.path.join(directory, f".{os.path.basename(target)[:100]}.{secrets.token_hex(8)}.part")
    try:  # from before there is a file: a signal may come as soon as there is one
        try:
            file = open(beside, "xb")
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", file=path) from error
        with naming(path), file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    _sync_directory(directory)


@contextlib.contextmanager
def naming(output: str, *, but_closed_pipes: bool = False) -> Iterator[None]:
    """Trouble while the block writes to an output becomes an OutputError that names it.

    ``but_closed_pipes``: a reader that has gone stays a BrokenPipeError, which is no trouble for results on stdout.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or (but_closed_pipes and isinstance(error, BrokenPipeError)):
            raise  # some other file's, or no trouble
        raise OutputError(f"cannot be written: {error.strerror or error}", file=output) from error


def writing_to_stdout() -> contextlib.AbstractContextManager[None]:
    """`naming` for stdout."""
    return naming("stdout", but_closed_pipes=True)


@contextlib.contextmanager
def scratch_directory(path: str) -> Iterator[str]:
    """A directory for temporary files, beside the output, which has the room if any disk has; it goes with the block.

    What is written to a device or a pipe has no room beside it: there it is the system's. Raises OutputError.
    """
    beside = tempfile.gettempdir() if is_special(path) else os.path.dirname(os.path.realpath(path))
    scratch = os.path.join(beside, f".flashtrie-{secrets.token_hex(8)}")
    try:  # from before there is a directory: a signal may come as soon as there is one
        try:
            os.mkdir(scratch, 0o700)
        except OSError as error:
            raise OutputError(f"no temporary files beside it: {error.strerror}", file=path) from error
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sync_directory(directory: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
