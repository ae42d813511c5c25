"""An opened index: the library's front door, on which the commands are thin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.choose import make_engine
from flashtrie_cli.engine.protocol import KeyList
from flashtrie_cli.errors import IndexFileError, InputError, UsageError
from flashtrie_cli.format import layout
from flashtrie_cli.format.reader import IndexFile
from flashtrie_cli.keys.tokenizers import HuggingFaceTokenizer
from flashtrie_cli.keys.vocabulary import FrozenVocabulary
from flashtrie_cli.query.plan import SearchPlan
from flashtrie_cli.query.results import SearchResults
from flashtrie_cli.trie.stored import StoredTrie

if TYPE_CHECKING:
    from flashtrie_cli.query.trie_steps import TrieSteps

WALK_BATCH = 1 << 14

META_FIELDS = {
    "num_keys": int,
    "num_nodes": int,
    "num_tokens": int,
    "num_highs": int,
    "high_width": int,
    "depth": int,
    "label_entropy": float,
    "value_kind": str,
    "has_value_counts": bool,
    "tokenizer": str,
    "lowercase": bool,
    "keys_digest": str,
}
"""What section meta of a token trie must say; it may say more."""


@dataclass(frozen=True)
class Values:
    """Values by key id, uint64 or float64; with several a key, key i has ``values[offsets[i]:offsets[i + 1]]``."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64] | None

    def of(self, key_id: int) -> int | float | list[int | float]:
        """The value of a key; a list where keys may have several."""
        if self.offsets is None:
            return self.values[key_id].item()
        return self.values[self.offsets[key_id] : self.offsets[key_id + 1]].tolist()


class Index:
    """A token trie with its vocabulary and values. Open with ``Index.open``; closed by the garbage collector.

    Threads may share one; each process opens its own (it is not pickled). Token arrays are uint32 (any integer type is
    taken), sequences of a batch are ``tokens`` flat with ``offsets`` int64 [n + 1].
    """

    def __init__(self, file: IndexFile, *, engine: str = "auto", threads: int = 1, device: int = 0):
        if file.kind != layout.KIND_TOKEN_TRIE:
            raise IndexFileError(
                f"is a {layout.KIND_NAMES[file.kind]}, not a token trie",
                file=file.path,
                hint="see flashtrie mask",
            )
        if threads < 1:
            raise UsageError(f"{threads} threads are none")
        self.file = file
        self.meta: dict[str, Any] = self._checked_meta(file.json(layout.META))
        self.threads = threads
        stored = StoredTrie.load(file, self.meta, threads=threads)
        self.engine = make_engine(engine, stored, threads=threads, device=device)
        self.stored = self.engine.stored
        self.values = self._load_values()
        self.vocabulary = self._load_vocabulary()
        self._check_labels()
        self._steps_engine: Any = None

    @classmethod
    def open(cls, path: str, *, engine: str = "auto", threads: int = 1, device: int = 0) -> Index:
        """Open and check an index.

        ``engine``: auto, cpu, cuda or reference; ``threads`` open it, and share the queries of a batch; ``device``:
        which GPU. Raises IndexFileError, EngineUnavailable, UsageError.
        """
        return cls(IndexFile.open(path), engine=engine, threads=threads, device=device)

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def num_keys(self) -> int:
        return self.stored.num_keys

    @property
    def num_nodes(self) -> int:
        return self.stored.num_nodes

    def __len__(self) -> int:
        return self.num_keys

    def __repr__(self) -> str:
        return f"<Index {self.path!r}: {self.num_keys} keys, engine {self.engine.name}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Index is not pickled: each process opens it anew, with Index.open(path)")

    def search(
        self, tokens: npt.ArrayLike, logprobs: npt.ArrayLike, plan: SearchPlan | None = None, **options: Any
    ) -> SearchResults:
        """Beam search. ``tokens`` integers and ``logprobs`` floats, [queries, steps, slots], or [steps, slots] for one.

        ``options`` are the fields of `SearchPlan`, in place of a ``plan``. Contract in docs/search.md. Raises
        InputError for grids that do not fit together, negative tokens other than -1 (an empty slot) and log-probs that
        are NaN or +inf; UsageError for a plan that there cannot be.
        """
        if plan is not None and options:
            raise UsageError("options go into the plan, not beside it", hint="dataclasses.replace(plan, …)")
        token_grid, logprob_grid = as_grids(tokens, logprobs)
        return self.engine.search(token_grid, logprob_grid, plan or SearchPlan(**options))

    def lookup(self, tokens: npt.ArrayLike, offsets: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """Key id of each sequence, -1 where it is no key; int64 [n]. Without ``offsets``, one sequence."""
        return self.engine.find_key_ids(*as_sequences(tokens, offsets))

    def prefix(self, tokens: npt.ArrayLike, *, batch_size: int = WALK_BATCH) -> Iterator[KeyList]:
        """The keys that extend a sequence (itself included), in lexicographic order, some at a time."""
        if batch_size < 1:
            raise UsageError(f"batches of {batch_size} keys hold none")
        return self.engine.keys_below(as_sequence(tokens), batch_size)

    def common_prefix(self, tokens: npt.ArrayLike) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """Lengths and key ids of the keys that are prefixes of a sequence, shortest first."""
        return self.engine.common_prefixes(as_sequence(tokens))

    def keys(self, *, batch_size: int = WALK_BATCH) -> Iterator[KeyList]:
        """All keys in lexicographic order of their tokens, some at a time."""
        return self.prefix(np.zeros(0, np.uint32), batch_size=batch_size)

    def key_tokens(self, key_ids: npt.ArrayLike) -> KeyList:
        """The keys of these ids; IndexError for an id that is none. Raises InputError for what is no integer."""
        ids = np.asarray(key_ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise InputError(f"key ids are {ids.dtype}, not integers")
        if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < self.num_keys):
            raise IndexError(
                f"key ids are from 0 to {self.num_keys - 1}, not {int(ids.min())} to {int(ids.max())}"
            )
        return self.engine.key_tokens(np.ascontiguousarray(ids, np.uint32))

    def step(self, nodes: npt.ArrayLike) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Tokens and nodes of the children of each node (root 0), ascending: flat uint32, and offsets int64 [n + 1]."""
        return self.steps(eos=()).children(nodes)

    def steps(self, *, eos: Iterable[int], vocab_size: int = 1 << 31) -> TrieSteps:
        """The trie for a model that speaks token by token: masks, advances, and what ``generate`` takes.

        ``eos``: ids that end an answer; ``vocab_size``: the width of the model's logits, for mask rows. Raises
        EngineUnavailable without the native engine.
        """
        from flashtrie_cli.engine.cpu import CpuEngine
        from flashtrie_cli.query.trie_steps import TrieSteps

        if self._steps_engine is None:
            engine = self.engine
            self._steps_engine = engine if isinstance(engine, CpuEngine) else CpuEngine(self.stored)
        return TrieSteps(
            self._steps_engine.trie, self.num_nodes, eos=eos, vocab_size=vocab_size,
            resident=getattr(self.engine, "device_trie", None),
        )  # fmt: skip

    def encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Texts to tokens by the index's own vocabulary; UsageError where it holds none."""
        if self.vocabulary is None:
            raise UsageError("the index holds token ids only and cannot read text", file=self.path)
        lowered = [text.lower() for text in texts] if self.meta["lowercase"] else list(texts)
        return self.vocabulary.encode_batch(lowered)

    def decode(self, tokens: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> list[str]:
        """Token sequences to texts; UsageError where the index holds no vocabulary."""
        if self.vocabulary is None:
            raise UsageError("the index holds token ids only and has no text", file=self.path)
        return self.vocabulary.decode_batch(tokens, offsets)

    def value_of(self, key_id: int) -> int | float | list[int | float] | None:
        """The value of a key, a list where keys may have several, None in an index without values."""
        return None if self.values is None else self.values.of(key_id)

    def _checked_meta(self, meta: Any) -> dict[str, Any]:
        known = isinstance(meta, dict) and all(
            type(meta.get(name)) is kind for name, kind in META_FIELDS.items()
        )
        if not known or meta["value_kind"] not in ("none", "unsigned", "float"):
            self._refuse("section meta lacks what an index says of itself")
        if any(meta[name] < 0 for name, kind in META_FIELDS.items() if kind is int):
            self._refuse("section meta has a negative count")
        if not 0 <= meta["label_entropy"] <= 32:
            self._refuse("section meta has a label entropy out of range")
        return meta

    def _refuse(self, why: str) -> None:
        raise IndexFileError(why, file=self.file.path, hint="rebuild the index")

    def _load_values(self) -> Values | None:
        if self.meta["value_kind"] == "none":
            return None
        dtype = np.float64 if self.meta["value_kind"] == "float" else np.uint64
        offsets = None
        num_values = self.num_keys
        if self.meta["has_value_counts"]:
            if self.file.raw_size(layout.VALUE_COUNTS) != 4 * self.num_keys:
                self._refuse("has another number of value counts than keys")
            counts = self.file.array(layout.VALUE_COUNTS, np.uint32, threads=self.threads)
            if len(counts) and not counts.all():
                self._refuse("has a key without a value")
            offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))
            num_values = int(offsets[-1])
        if self.file.raw_size(layout.VALUES) != 8 * num_values:
            self._refuse("has another number of values than its keys need")
        values = self.file.array(layout.VALUES, dtype, threads=self.threads)
        if dtype is np.float64 and not np.isfinite(values).all():
            self._refuse("has a value that is no finite number")
        return Values(values, offsets)

    def _load_vocabulary(self) -> FrozenVocabulary | HuggingFaceTokenizer | None:
        kind = self.meta["tokenizer"]
        if kind == "words":
            self._check_size(layout.WORD_TEXT)
            self._check_size(layout.WORD_ENDS)
            text = self.file.array(layout.WORD_TEXT, np.uint8, threads=self.threads)
            ends = self.file.array(layout.WORD_ENDS, np.int64, threads=self.threads)
            return FrozenVocabulary(text, np.concatenate((np.zeros(1, np.int64), ends)), self.path)
        if kind == "hf":
            self._check_size(layout.TOKENIZER)
            try:
                return HuggingFaceTokenizer.from_index(self.file.bytes(layout.TOKENIZER), self.path)
            except UsageError:
                return None  # the library is not installed: ids only, and `text_missing` says so
        if kind != "ids":
            self._refuse(f"has an unknown tokenizer {kind!r}")
        return None

    def _check_size(self, name: str) -> None:
        """No count bounds a vocabulary, so a few bytes must not unpack to gigabytes."""
        if not layout.has_sound_size(self.file.section(name), self.num_nodes):
            self._refuse(f"section {name} unpacks to more than {layout.MAX_TEXT_RATIO} times its size")

    def _check_labels(self) -> None:
        """Every token of an index of words must be one of its words."""
        if not isinstance(self.vocabulary, FrozenVocabulary) or self.num_nodes == 1:
            return
        if self.engine.largest_label >= len(self.vocabulary):
            self._refuse("has a token that is none of its words")

    @property
    def text_missing(self) -> str | None:
        """Why an index that could speak text does not, or None."""
        if self.meta["tokenizer"] == "hf" and self.vocabulary is None:
            return "the library tokenizers is not installed (hint: pip install 'flashtrie[tokenizers]')"
        return None


def as_tokens(tokens: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Any integers as contiguous uint32; negative ones are an InputError."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise InputError("sequences of several lengths", hint="give them flat, with offsets") from None
    if array.size == 0:
        return np.zeros(array.shape, np.uint32)
    if array.dtype.kind not in "iu":
        raise InputError(f"tokens are {array.dtype}, not integers")
    if array.dtype.kind == "i" and int(array.min()) < 0:
        raise InputError(f"token {int(array.min())} is negative")
    if array.dtype.itemsize > 4 and int(array.max()) > 0xFFFF_FFFF:
        array = np.minimum(array, 0xFFFF_FFFE)  # beyond every label: matches nothing
    return np.ascontiguousarray(array, np.uint32)


def as_sequence(tokens: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """One sequence, checked. Raises InputError."""
    return as_sequences(tokens, None)[0]


def as_sequences(
    tokens: npt.ArrayLike, offsets: npt.ArrayLike | None
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """Flat tokens and offsets, checked; one sequence without offsets. Raises InputError."""
    flat = as_tokens(tokens)
    if flat.ndim != 1:
        raise InputError(f"tokens have {flat.ndim} dimensions; sequences are flat with offsets")
    given = np.array([0, len(flat)]) if offsets is None else np.asarray(offsets)
    if given.dtype.kind not in "iu":
        raise InputError(f"offsets are {given.dtype}, not integers")
    ends = np.ascontiguousarray(given, np.int64)
    if ends.ndim != 1 or not len(ends) or ends[0] < 0 or ends[-1] > len(flat) or (np.diff(ends) < 0).any():
        raise InputError("offsets do not ascend within the tokens")
    return flat, ends


def as_grids(
    tokens: npt.ArrayLike, logprobs: npt.ArrayLike
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Proposal grids as contiguous uint32 and float32 [queries, steps, slots]; -1 marks an empty slot."""
    token_grid, logprob_grid = np.asarray(tokens), np.asarray(logprobs)
    if token_grid.shape != logprob_grid.shape:
        raise InputError(f"tokens are {token_grid.shape} and log-probs {logprob_grid.shape}; they must agree")
    if token_grid.ndim == 2:
        token_grid, logprob_grid = token_grid[None], logprob_grid[None]
    if token_grid.ndim != 3:
        raise InputError(f"grids have {token_grid.ndim} dimensions, not queries, steps, slots")
    if token_grid.dtype.kind not in "iu":
        raise InputError(f"tokens are {token_grid.dtype}, not integers")
    if logprob_grid.dtype.kind != "f":
        raise InputError(f"log-probs are {logprob_grid.dtype}, not floats")
    if token_grid.dtype.kind == "i" and token_grid.size and int(token_grid.min()) < -1:
        raise InputError(f"token {int(token_grid.min())} is negative (an empty slot is -1)")
    if token_grid.dtype.itemsize == 8 and token_grid.size:
        token_grid = np.where(token_grid.astype(np.uint64) > 0xFFFF_FFFF, 0xFFFF_FFFF, token_grid)
    with np.errstate(over="ignore"):  # beyond float32 is infinite, and judged as such
        return np.ascontiguousarray(token_grid, np.uint32), np.ascontiguousarray(logprob_grid, np.float32)
