"""Token masks of a finite set: which tokens may come next, at every place of every member.

States are nodes of the set's byte trie, 0 the root; ``ended`` is the state after an end-of-sequence token.
A token is allowed where the trie goes on along all of its bytes, an end-of-sequence id where a member ends
(Xu and Bouyarmane 2026, "Trie Automata for Constrained Decoding over Large Finite Sets").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu_masks import (
    Automaton,
    ByteTokens,
    MaskArrays,
    open_automaton,
    open_mask_set,
)
from flashtrie_cli.errors import IndexFileError, UsageError
from flashtrie_cli.format import layout
from flashtrie_cli.format.reader import IndexFile
from flashtrie_cli.format.writer import IndexWriter
from flashtrie_cli.query.token_states import REJECTED, TokenStates
from flashtrie_cli.trie.token_bytes import MAX_VOCAB_SIZE, TokenBytes

_ARRAYS = {
    "rows": np.uint16,
    "entries": np.uint32,
    "far_entries": np.uint32,
    "far_targets": np.uint32,
}
_TOKEN_ARRAYS = {"kinds": np.uint8, "begins": np.uint64, "data": np.uint8}


class Forced(NamedTuple):
    """What must follow a state whatever the model says.

    ``bytes``: the longest text that every member goes through; ``tokens``: one spelling of as much of it as
    whole tokens can spell, the longest token at each place. Every one of them is allowed in turn, but a
    model's own tokenizer may cut the text differently.
    """

    bytes: bytes
    tokens: list[int]


class TokenMasks(TokenStates):
    """Compiled masks. Make them with `from_strings`, or open an index that ``flashtrie build --masks`` made."""

    def __init__(
        self,
        arrays: MaskArrays,
        tokens: TokenBytes,
        byte_tokens: ByteTokens,
        meta: dict[str, Any],
        *,
        check: bool = False,
    ):
        self.arrays = arrays
        self.tokens = tokens
        self.meta = meta
        self.eos: tuple[int, ...] = tuple(meta["eos"])
        self.vocab_size: int = meta["vocab_size"]
        self.set = open_mask_set(arrays, byte_tokens, self.eos, self.vocab_size, check=check)
        super().__init__(self.set, arrays.num_nodes)
        self._first_token_of_byte: list[int | None] | None = None

    # --- making and keeping ---

    @classmethod
    def from_strings(
        cls,
        members: Sequence[str | bytes],
        vocabulary: TokenBytes | Automaton,
        *,
        eos: Iterable[int] = (),
        vocab_size: int | None = None,
        json_quoted: bool = False,
        prefix_space: bool = False,
        added_is_text: bool = True,
    ) -> TokenMasks:
        """Compile a set; ``str`` members count as their UTF-8 bytes, and order and repeats do not matter.

        ``vocabulary``: the bytes behind each id, or an `Automaton` of it, which saves looking it up again (its
        own ``eos`` and ``added_is_text`` then hold). ``vocab_size``: the width of the model's logits, where it is
        more than the tokenizer's. ``json_quoted`` compiles each member as a JSON string, ``prefix_space`` with a
        space before it. Raises InputError and UsageError.
        """
        if isinstance(vocabulary, TokenBytes):
            ids = tuple(sorted(set(eos)))
            _check_eos(ids, vocab_size or len(vocabulary))
            vocabulary = open_automaton(vocabulary, ids, added_is_text=added_is_text)
        width = len(vocabulary.tokens) if vocab_size is None else vocab_size
        if width < len(vocabulary.tokens):
            raise UsageError(
                f"a vocabulary size of {width} is below the tokenizer's {len(vocabulary.tokens)} ids",
                hint="take the width of the model's logits",
            )
        if not 1 <= width <= MAX_VOCAB_SIZE:
            raise UsageError(f"a vocabulary size of {width} is not between 1 and {MAX_VOCAB_SIZE}")
        _check_eos(vocabulary.eos, width)
        arrays, num_members = vocabulary.compile(
            members, width, json_quoted=json_quoted, prefix_space=prefix_space
        )
        meta = {
            "num_members": num_members,
            "vocab_size": width,
            "eos": list(vocabulary.eos),
            "json_quoted": json_quoted,
            "prefix_space": prefix_space,
            "added_is_text": vocabulary.added_is_text,
            "vocabulary_digest": vocabulary.digest,
        }
        return cls(arrays, vocabulary.tokens, vocabulary.byte_tokens, meta)

    @classmethod
    def open(cls, path: str, *, threads: int = 1) -> TokenMasks:
        """Open an index of token masks, everything in it checked once; raises IndexFileError."""
        file = IndexFile.open(path)
        if file.kind != layout.KIND_TOKEN_MASKS:
            raise IndexFileError(
                f"is a {layout.KIND_NAMES[file.kind]}, without token masks",
                file=path,
                hint="build it with --masks",
            )
        meta = file.json(layout.META)
        if not _is_sound(meta):
            raise IndexFileError("says nothing of its vocabulary", file=path, hint="rebuild the index")
        try:
            arrays = MaskArrays(
                **{name: _section(file, name, kind, threads) for name, kind in _ARRAYS.items()}
            )
            tokens = TokenBytes(
                **{
                    name: _section(file, f"token_{name}", kind, threads)
                    for name, kind in _TOKEN_ARRAYS.items()
                }
            )
            _check_tokens(tokens)
            kept = tokens.is_text(added_is_text=meta["added_is_text"], eos=meta["eos"])
            return cls(arrays, tokens, ByteTokens.of(tokens, kept), meta, check=True)
        except ValueError as error:
            raise IndexFileError(f"holds {error}", file=path, hint="rebuild the index") from None

    def save(
        self, path: str, *, codec: str = "zstd", level: int = 3, threads: int = 1, force: bool = False
    ) -> None:
        """Write an index; it appears whole or not at all. Raises OutputError."""
        with IndexWriter(
            path,
            kind=layout.KIND_TOKEN_MASKS,
            codec=codec,
            level=level,
            threads=threads,
            force=force,
            version=layout.MASKS_VERSION,
        ) as writer:
            writer.add_json(layout.META, self.meta)
            for name, array in vars(self.arrays).items():
                writer.add(layout.MASK_SECTION_PREFIX + name, array)
            for name in _TOKEN_ARRAYS:
                writer.add(f"{layout.MASK_SECTION_PREFIX}token_{name}", getattr(self.tokens, name))

    # --- counts ---

    @property
    def num_nodes(self) -> int:
        return self.arrays.num_nodes

    @property
    def num_members(self) -> int:
        return int(self.meta["num_members"])

    @property
    def num_allowed(self) -> int:
        """Allowed (node, token) pairs, end-of-sequence ids aside."""
        return int(self.set.num_allowed)

    @property
    def resident_bytes(self) -> int:
        """Memory of the masks: the arrays and the dense copies of the few long rows (not the token texts)."""
        return self.arrays.num_bytes + int(self.set.dense_bytes)

    # --- one generation ---

    def matcher(self) -> Any:
        """A `Matcher` at the root.

        ``advance(token) -> bool`` (False changes nothing), ``allowed() -> uint32 ids``, ``fill(bitmask, index=0)``
        (int32 words, bit ``t % 32`` of word ``t // 32``), ``forced() -> (bytes, tokens)``, ``rollback(count=1)``,
        ``fork()``, ``reset()``; ``state``, ``is_terminal`` (a member ends here), ``is_terminated`` (an
        end-of-sequence token was taken) and ``num_accepted``.
        """
        return self.set.matcher()

    # --- states by number ---

    def allowed(self, state: int) -> npt.NDArray[np.uint32]:
        """Allowed ids of a state, ascending, end-of-sequence ids included."""
        return self.set.allowed(state)

    def forced(self, state: int) -> Forced:
        return Forced(*self.set.forced(state))

    def walk_bytes(self, text: bytes) -> int | None:
        """The state after some bytes, None where no tokens lead there."""
        if self._first_token_of_byte is None:
            self._first_token_of_byte = self._tokens_of_single_bytes()
        state = 0
        for byte in text:
            token = self._first_token_of_byte[byte]
            if token is None:
                return self._walk_by_any_tokens(text)
            after, allowed = self.advance([state], [token])
            if not allowed[0]:
                return None
            state = int(after[0])
        return state

    def _open_device(self, device: int) -> Any:
        from flashtrie_cli.engine.cuda_masks import CudaMasks

        return CudaMasks(self.arrays, self.set, self.eos, self.vocab_size, device)

    def rows(self, num_rows: int) -> Any:
        """A bitmask of its own for a batch, the quickest way to fill one at every step.

        ``fill(states uint32 [n])`` shows the masks of the states in rows 0 to n - 1 of ``words``, an int32 array
        [num_rows, num_words], and touches only the words that change. ``share(states)`` does without copying even
        that for states with long lists (the root, mostly): it returns ``at`` int32 [n], and row ``at[i]`` of ``table``
        shows state i until the next call. ``table`` is ``words`` and, behind them, rows for long lists. Equal states
        may have one row, and row i of ``words`` shows nothing in particular where ``at[i]`` is not i. Whoever writes
        into ``words`` or ``table`` says so with ``forget()``. Raises ValueError for rows of more than 2^31 - 1 words
        in all.
        """
        return self.set.mask_rows(num_rows)

    def _tokens_of_single_bytes(self) -> list[int | None]:
        found: list[int | None] = [None] * 256
        for token in np.flatnonzero(np.diff(self.tokens.begins) == 1)[::-1]:
            if self._spells_text[token]:
                found[self.tokens[int(token)][0]] = int(token)
        return found

    @property
    def _spells_text(self) -> npt.NDArray[np.bool_]:
        return self.tokens.is_text(added_is_text=self.meta["added_is_text"], eos=self.eos)

    def _walk_by_any_tokens(self, text: bytes) -> int | None:
        """For vocabularies that lack some byte: the places of the text that tokens reach, in order."""
        reached = {0: 0}
        for at in range(len(text)):
            if at not in reached:
                continue
            for token in self.allowed(reached[at]).tolist():
                spelled = self.tokens[token] if token not in self.eos else b""
                if spelled and text.startswith(spelled, at):
                    reached[at + len(spelled)] = int(self.advance([reached[at]], [token])[0][0])
        return reached.get(len(text))


def _check_eos(eos: Sequence[int], vocab_size: int) -> None:
    if not eos:
        raise UsageError("no end-of-sequence id, so that no answer could end", hint="--eos ID")
    if not all(0 <= token < vocab_size for token in eos):
        raise UsageError(
            f"an end-of-sequence id outside the vocabulary of {vocab_size}", hint="--vocab-size N"
        )


def _is_sound(meta: Any) -> bool:
    if not isinstance(meta, dict):
        return False
    eos, size = meta.get("eos"), meta.get("vocab_size")
    return (
        isinstance(size, int)
        and 0 < size <= MAX_VOCAB_SIZE
        and isinstance(eos, list)
        and all(isinstance(token, int) and 0 <= token < size for token in eos)
        and eos == sorted(set(eos))
        and isinstance(meta.get("num_members"), int)
        and isinstance(meta.get("added_is_text"), bool)
    )


def _section(file: IndexFile, name: str, dtype: Any, threads: int) -> npt.NDArray[Any]:
    return file.array(layout.MASK_SECTION_PREFIX + name, dtype, threads=threads)


def _check_tokens(tokens: TokenBytes) -> None:
    begins = tokens.begins
    if len(begins) != len(tokens.kinds) + 1 or begins[0] != 0 or begins[-1] != len(tokens.data):
        raise ValueError("token texts that do not fit together")
    if np.any(begins[1:] < begins[:-1]):
        raise ValueError("token texts that overlap")


__all__ = ["REJECTED", "Forced", "TokenMasks"]
