"""Blocks of whole lines out of chunks of bytes cut anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.source import NPY_MAGIC, ZIP_MAGIC

BLOCK_SIZE = 8 << 20
"""Bytes of text in a batch, about; a longer line makes a longer block."""
MAX_LINE_SIZE = 64 << 20
UTF8_BOM = b"\xef\xbb\xbf"
SHOWN_LENGTH = 40
"""Characters of an offending text that an error message shows."""


def line_blocks(
    chunks: Iterable[bytes],
    source: str,
    block_size: int = BLOCK_SIZE,
    *,
    num_lines: Callable[[], int],
    arrays_hint: str = "--input npz",
) -> Iterator[bytes]:
    """Blocks of at least ``block_size`` bytes (the last may be shorter) that end where a line ends.

    A byte order mark at the start is dropped. The last line may lack its newline. Raises InputError for a
    line above MAX_LINE_SIZE, which bounds the memory, and for a file of arrays. ``num_lines`` says how many lines the
    blocks taken so far had, which whoever parses them knows anyway.
    """
    pieces: list[bytes] = []
    size = 0  # of all pieces
    line_size = 0  # of the unfinished line at their end
    is_first = True

    def block() -> bytes:
        nonlocal is_first
        joined = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if is_first:
            is_first = False
            _refuse_arrays(joined, source, arrays_hint)
            joined = joined.removeprefix(UTF8_BOM)
        return joined

    for chunk in chunks:
        cut = chunk.rfind(b"\n") + 1
        line_size = len(chunk) - cut if cut else line_size + len(chunk)
        if line_size > MAX_LINE_SIZE:
            raise InputError(
                f"a line of more than {MAX_LINE_SIZE >> 20} MiB",
                file=source,
                line=num_lines() + sum(piece.count(b"\n") for piece in (*pieces, chunk)) + 1,
                hint="is this text, one key a line?",
            )
        if cut and size + cut >= block_size:
            pieces.append(chunk[:cut])
            yield block()
            pieces, size = ([chunk[cut:]], len(chunk) - cut) if cut < len(chunk) else ([], 0)
        else:
            pieces.append(chunk)
            size += len(chunk)
    if pieces:
        last = block()
        if last:
            yield last


def _refuse_arrays(block: bytes, source: str, hint: str) -> None:
    if block.startswith((ZIP_MAGIC, NPY_MAGIC)):
        raise InputError("holds numpy arrays, not lines", file=source, hint=hint)


def shown(text: bytes | str) -> str:
    """Text for an error message: quoted, control characters escaped, cut."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    cut = text if len(text) <= SHOWN_LENGTH else text[: SHOWN_LENGTH - 1] + "…"
    return repr(cut)
