"""Token masks through the C++ engine: the vocabulary automaton with its cache on disk, and compiling."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu import native
from flashtrie_cli.errors import FlashtrieError, InputError, UsageError
from flashtrie_cli.format import layout
from flashtrie_cli.format.reader import IndexFile
from flashtrie_cli.format.writer import IndexWriter
from flashtrie_cli.trie.token_bytes import MAX_VOCAB_SIZE, TokenBytes

AUTOMATON_VERSION = 1
"""Goes up whenever the arrays of the automaton change their meaning."""
ROW_HALVES = 3
"""16-bit words of a node's row."""
_TERMINAL_BIT, _ENTRY_BITS = np.uint32(1 << 31), np.uint32((1 << 30) - 1)
_SLOTS, _OUTPUTS = "mask_automaton_slots", "mask_automaton_outs"


@dataclass(frozen=True)
class MaskArrays:
    """The byte trie with its masks, as it is stored (cuda/flashtrie/masks.cuh says what each array means).

    ``rows`` uint16, three of each node and of two behind the last; the others uint32.
    """

    rows: npt.NDArray[np.uint16]
    entries: npt.NDArray[np.uint32]
    far_entries: npt.NDArray[np.uint32]
    far_targets: npt.NDArray[np.uint32]

    @property
    def num_nodes(self) -> int:
        return len(self.rows) // ROW_HALVES - 2

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())


def read_rows(rows: npt.NDArray[np.uint16]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where the entries of each node begin, and those of the last end (int64 [num_nodes + 1]); where members end
    (bool [num_nodes])."""
    halves = rows.reshape(-1, ROW_HALVES)[:-1].astype(np.uint32)
    words = halves[:, 0] | halves[:, 1] << np.uint32(16)
    return (words & _ENTRY_BITS).astype(np.int64), (words[:-1] & _TERMINAL_BIT) != 0


@dataclass(frozen=True)
class ByteTokens:
    """The ids that spell one byte: ``tokens[begins[b]:begins[b + 1]]`` of byte b, ascending. Both uint32."""

    begins: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, tokens: TokenBytes, kept: npt.NDArray[np.bool_]) -> ByteTokens:
        """``kept``: the ids that count as text (`TokenBytes.is_text`)."""
        single, begins = tokens.of_single_bytes(kept)
        return cls(begins, single)


@dataclass(frozen=True)
class Automaton:
    """A vocabulary made ready: compile any number of sets with it. Arrays may be views of a mapped file."""

    tokens: TokenBytes
    eos: tuple[int, ...]
    added_is_text: bool
    digest: str
    slots: npt.NDArray[np.uint32]
    outputs: npt.NDArray[np.uint32]
    byte_tokens: ByteTokens
    from_cache: bool

    def compile(
        self,
        members: Sequence[str | bytes],
        vocab_size: int,
        *,
        json_quoted: bool = False,
        prefix_space: bool = False,
    ) -> tuple[MaskArrays, int]:
        """The masks of a set and its number of distinct members. Raises InputError for a set that is too large."""
        try:
            *arrays, num_members = native().compile_masks(
                self.slots, self.outputs, vocab_size, members, json_quoted, prefix_space
            )
        except OverflowError as error:
            raise InputError(f"the set is too large for one index: {error}", hint="split it") from None
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from None
        return MaskArrays(*arrays), num_members


def open_automaton(
    tokens: TokenBytes,
    eos: Sequence[int],
    *,
    added_is_text: bool = True,
    cache_dir: Path | None = None,
    use_cache: bool = True,
) -> Automaton:
    """The automaton of a vocabulary, from the cache on disk where it is there, else built and left there.

    ``eos`` ids never count as text. The cache is keyed by the digest of what the tokens spell; a file in it is
    whole (its checksums are checked) or is built again. ``cache_dir`` defaults to `cache_directory`.
    """
    kept = tokens.is_text(added_is_text=added_is_text, eos=eos)
    digest = tokens.digest(kept)
    path = (cache_dir or cache_directory()) / f"vocabulary-{digest}.v{AUTOMATON_VERSION}.ftrie"
    arrays = _read_cached(path, digest) if use_cache else None
    from_cache = arrays is not None
    if arrays is None:
        arrays = native().build_automaton(*tokens.select(kept))
        if use_cache:
            _write_cached(path, digest, arrays)
    return Automaton(
        tokens,
        tuple(sorted(set(eos))),
        added_is_text,
        digest,
        arrays[0],
        arrays[1],
        ByteTokens.of(tokens, kept),
        from_cache,
    )


def cache_directory() -> Path:
    """``$FLASHTRIE_CACHE``, or ``flashtrie`` within the user's cache directory."""
    if chosen := os.environ.get("FLASHTRIE_CACHE"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "flashtrie"


def _read_cached(path: Path, digest: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]] | None:
    if not path.exists():
        return None
    try:
        file = IndexFile.open(str(path))
        if file.json(layout.META).get("automaton") != digest:
            return None
        return file.array(_SLOTS, np.uint32), file.array(_OUTPUTS, np.uint32)
    except FlashtrieError:
        return None  # damaged: built again, and replaced


def _write_cached(path: Path, digest: str, arrays: tuple[Any, Any]) -> None:
    """A cache that cannot be written costs the next run some time, and this one nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with IndexWriter(
            str(path), kind=layout.KIND_TOKEN_MASKS, codec="raw", force=True, version=layout.MASKS_VERSION
        ) as writer:
            writer.add_json(layout.META, {"automaton": digest})
            writer.add(_SLOTS, arrays[0])
            writer.add(_OUTPUTS, arrays[1])
    except (OSError, FlashtrieError):
        pass


def open_mask_set(
    arrays: MaskArrays, byte_tokens: ByteTokens, eos: Sequence[int], vocab_size: int, *, check: bool
) -> Any:
    """The native object that answers. ``check`` reads every entry once; ValueError names the first flaw."""
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise UsageError(f"a vocabulary has 1 to {MAX_VOCAB_SIZE} ids, not {vocab_size}")
    ids = np.array(sorted(set(eos)), np.uint32)
    return native().MaskSet(
        *vars(arrays).values(), byte_tokens.begins, byte_tokens.tokens, ids, vocab_size, check
    )
