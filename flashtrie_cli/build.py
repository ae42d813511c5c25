"""From keys to an index file: read, sort, make unique, lay out, compress, write. The library behind `build`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import index
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cpu_build import make_builder
from flashtrie_cli.errors import InputError, OutputError, UsageError
from flashtrie_cli.files import check_output, scratch_directory
from flashtrie_cli.format import layout
from flashtrie_cli.format.writer import DEFAULT_LEVEL, IndexWriter, check_codec
from flashtrie_cli.inputs.lines import shown
from flashtrie_cli.keys.batch import MAX_DEPTH, MAX_TOKEN, KeyBatch
from flashtrie_cli.keys.tokenizers import HuggingFaceTokenizer, Tokenizer
from flashtrie_cli.keys.vocabulary import FrozenVocabulary, WordVocabulary
from flashtrie_cli.trie.builder import DUPLICATE_RULES, VALUE_FLOAT, VALUE_NONE, VALUE_UNSIGNED
from flashtrie_cli.trie.tails import (
    MAX_UNFOLDING,
    TAIL_FIELDS,
    TAIL_RULES,
    folding_ratio,
    unfolds_within_limits,
)

VALUE_KINDS = {VALUE_NONE: "none", VALUE_UNSIGNED: "unsigned", VALUE_FLOAT: "float"}

MIN_MEMORY = 128 << 20
PROCESS_BYTES = 120 << 20
"""What the interpreter, the libraries and the reader's blocks take of the cap, measured."""
THREAD_BYTES = 24 << 20
"""What each further thread adds: blocks read ahead, frames being compressed."""


@dataclass(frozen=True)
class BuildOptions:
    """How to build; the options of ``flashtrie build``, checked.

    ``duplicates``: what a key given twice gets (`DUPLICATE_RULES`); ``is_sorted``: keys ascend, which is checked;
    ``memory``: bytes that the process should stay within; ``threads``: for sorting and compressing; ``codec`` zstd (at
    ``level``) or raw; ``force`` replaces a file; ``lowercase``: texts are to be lowered before they are looked up (the
    keys are taken as they are); ``value_type`` auto or float; ``tail``: off, on or auto. Raises UsageError.
    """

    duplicates: str = "first"
    is_sorted: bool = False
    memory: int = 1 << 30
    threads: int = 1
    codec: str = "zstd"
    level: int = DEFAULT_LEVEL
    force: bool = False
    lowercase: bool = False
    value_type: str = "auto"
    tail: str = "off"

    def __post_init__(self) -> None:
        if self.duplicates not in DUPLICATE_RULES:
            raise UsageError(
                f"rule for duplicates {self.duplicates!r} is not one of {', '.join(DUPLICATE_RULES)}"
            )
        check_codec(self.codec, self.level)
        if self.value_type not in ("auto", "float"):
            raise UsageError(f"value type {self.value_type!r} is not auto or float")
        if self.tail not in TAIL_RULES:
            raise UsageError(f"rule for tails {self.tail!r} is not one of {', '.join(TAIL_RULES)}")
        if self.threads < 1:
            raise UsageError(f"{self.threads} threads are none")
        if self.memory < MIN_MEMORY:
            raise UsageError(
                f"memory of {self.memory >> 20} MiB is too little", hint="--memory 128M at least"
            )


@dataclass
class BuildReport:
    """What a build did: counts of the index, sizes in bytes, seconds by stage.

    ``folding_ratio``: what the tails take cut off, by what they take in the trie (``trie.tails``); 1 without any.
    """

    path: str = ""
    counts: dict[str, Any] = field(default_factory=dict)
    file_size: int = 0
    digest: str = ""
    has_tails: bool = False
    folding_ratio: float = 1.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def bits_per_key(self) -> float:
        return self.file_size * 8 / max(self.counts["num_keys"], 1)


def build_index(
    keys: Iterable[KeyBatch] | Iterable[Iterable[int]],
    path: str,
    *,
    tokenizer: Tokenizer | None = None,
    options: BuildOptions | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> BuildReport:
    """Build an index at ``path`` from batches of keys, or from any iterable of token sequences.

    ``tokenizer`` is kept in the index, so that it can speak text; a `WordVocabulary` has its ids replaced by ranks in
    byte order, so that the index depends on the set of keys alone. ``progress(stage, keys)`` is called now and then.
    The file appears whole or not at all. Raises InputError (a key out of range, a conflict, with file and line),
    OutputError, UsageError.
    """
    options = options or BuildOptions()
    check_output(path, force=options.force)
    with scratch_directory(path) as scratch:
        return _Build(path, scratch, tokenizer, options, progress or (lambda stage, keys: None)).run(keys)


def physical_memory() -> int:
    """Bytes of memory that this machine has; far more than any where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


class _Build:
    """One build, stage by stage, with a clock for each."""

    def __init__(
        self,
        path: str,
        scratch: str,
        tokenizer: Tokenizer | None,
        options: BuildOptions,
        progress: Callable[[str, int], None],
    ):
        self.path = path
        self.scratch = scratch
        self.tokenizer = tokenizer
        self.options = options
        self.progress = progress
        self.report = BuildReport(path)
        self.sources: list[str] = []
        self.value_kind = VALUE_NONE
        more_threads = min(options.threads - 1, 8)
        # A cap above what the machine has is none; the sorter asks for its share at once.
        cap = min(options.memory, physical_memory())
        self.memory = max(cap - PROCESS_BYTES - more_threads * THREAD_BYTES, 16 << 20)
        self.builder: Any = None
        self.conflict: type[Exception] = ValueError

    def run(self, keys: Iterable[Any]) -> BuildReport:
        clock = _Clock(self.report.seconds)
        try:
            batches = clock.timing("read", as_batches(keys))
            if isinstance(self.tokenizer, WordVocabulary):
                batches = self._with_final_words(batches, self.tokenizer)
            for batch in batches:
                with clock.stage("add"):
                    self._add(batch)
            if self.builder is None:
                self._start(None)
            self.progress("sort", 0)
            with clock.stage("sort and lay out"):
                self.builder.finish()
        except OSError as error:
            raise OutputError(
                f"temporary space is short: {error.strerror or error}",
                file=self.path,
                hint="temporary files lie beside the output; with more --memory there are fewer",
            ) from error
        except self.conflict as error:
            raise self._explained(error) from error
        self.report.counts = self.builder.counts()
        self._decide_tails()
        self.progress("write", self.report.counts["num_keys"])
        with clock.stage("compress and write"):
            self._write()
        return self.report

    def _decide_tails(self) -> None:
        """Whether the trie is written with its tails cut off."""
        counts, rule = self.report.counts, self.options.tail
        fits = unfolds_within_limits(counts)
        if rule == "on" and not fits:
            raise UsageError(
                f"with tails a reader would have to unfold more than {MAX_UNFOLDING} nodes for each one stored",
                file=self.path,
                hint="--tail off",
            )
        self.report.folding_ratio = folding_ratio(counts, is_compressed=self.options.codec != "raw")
        wanted = rule == "on" or (rule == "auto" and self.report.folding_ratio < 1)
        self.report.has_tails = counts["num_links"] > 0 and fits and wanted
        if rule == "auto":
            self.builder.use_tails(self.report.has_tails)

    def _start(self, first: KeyBatch | None) -> None:
        if first is not None and first.values is not None:
            is_float = self.options.value_type == "float" or first.values.dtype.kind == "f"
            self.value_kind = VALUE_FLOAT if is_float else VALUE_UNSIGNED
        self.builder, self.conflict = make_builder(
            memory=self.memory,
            threads=self.options.threads,
            temp_directory=self.scratch,
            duplicates=self.options.duplicates,
            value_kind=self.value_kind,
            is_sorted=self.options.is_sorted,
            is_compact=self.options.codec != "raw",
            tails=self.options.tail,
        )

    def _add(self, batch: KeyBatch) -> None:
        if self.builder is None:
            self._start(batch)
        values = self._values(batch)
        if not self.sources or self.sources[-1] != batch.source:
            self.sources.append(batch.source)
        self.builder.add(batch.tokens, batch.offsets, values, batch.lines, len(self.sources) - 1)
        self.progress("read", batch.num_keys)

    def _values(self, batch: KeyBatch) -> npt.NDArray[np.uint64] | None:
        """The values as 64-bit patterns of the one kind that the index has."""
        line = int(batch.lines[0]) if batch.lines is not None and len(batch.lines) else None
        if (batch.values is None) != (self.value_kind == VALUE_NONE):
            raise InputError("some keys have a value and some have none", file=batch.source, line=line)
        if batch.values is None:
            return None
        if self.value_kind == VALUE_FLOAT:
            return np.ascontiguousarray(batch.values, np.float64).view(np.uint64)
        if batch.values.dtype.kind == "f":
            raise InputError(
                "values begin as unsigned integers and go on as other numbers",
                file=batch.source,
                line=line,
                hint="--value-type float takes them all as floats",
            )
        return np.ascontiguousarray(batch.values, np.uint64)

    def _with_final_words(
        self, batches: Iterator[KeyBatch], vocabulary: WordVocabulary
    ) -> Iterator[KeyBatch]:
        """The same batches with final word ids, which are known once the last word has been seen."""
        stash = _Stash(self.scratch, self.memory // 4)
        for batch in batches:
            self.progress("read", batch.num_keys)
            stash.put(batch)
        new_ids, self.word_text, self.word_ends = vocabulary.sorted()
        vocabulary.clear()
        kept = new_ids.nbytes + self.word_text.nbytes + self.word_ends.nbytes + stash.held_bytes
        self.memory = max(self.memory - kept, 16 << 20)
        for batch in stash.take():
            batch.tokens = new_ids[batch.tokens]
            yield batch

    def _explained(self, error: Exception) -> InputError:
        what, file, line, other_file, other_line, tokens = error.args
        where = f"line {line}" if file == other_file else f"{self.sources[file]} line {line}"
        hints = {
            "keys are not in ascending order": "leave --sorted out, and the keys will be sorted",
            "the same key stands twice": "--duplicates first keeps one",
        }
        is_elsewhere = line and (file, line) != (other_file, other_line)
        detail = f"key {self._shown(tokens)}" + (f", see also {where}" if is_elsewhere else "")
        place = self.sources[other_file] if self.sources else self.path
        return InputError(f"{what}: {detail}", file=place, line=other_line or None, hint=hints.get(what))

    def _shown(self, tokens: list[int]) -> str:
        """A key for an error message: text where the index has any."""
        vocabulary: Any = self.tokenizer
        if isinstance(vocabulary, WordVocabulary):
            vocabulary = FrozenVocabulary(self.word_text, self.word_ends)
        if vocabulary is None:
            return (
                "[" + ",".join(str(token) for token in tokens[:20]) + ("…" if len(tokens) > 20 else "") + "]"
            )
        flat = np.array(tokens, np.uint32)
        return shown(vocabulary.decode_batch(flat, np.array([0, len(flat)], np.int64))[0])

    def _write(self) -> None:
        options, counts = self.options, self.report.counts
        digest = hashlib.blake2b(digest_size=16)
        with IndexWriter(
            self.path,
            kind=layout.KIND_TOKEN_TRIE,
            codec=options.codec,
            level=options.level,
            threads=options.threads,
            force=options.force,
            version=layout.TAILS_VERSION if self.report.has_tails else layout.VERSION,
        ) as writer:
            for name, element_size in TRIE_SECTIONS.items():
                if self.builder.has(name):
                    size = counts["tail_label_size"] if name == layout.TAIL_LABELS else element_size
                    with writer.section(name, element_size=size if size > 1 else 0) as put:
                        self.builder.read(name, layout.FRAME_SIZE, _both(digest.update, put))
            self._write_tokenizer(writer, digest)
            self._check_vocabulary(writer)
            writer.add_json(layout.META, self._meta(counts, digest.hexdigest()))
        self.report.file_size = writer.file_size
        self.report.digest = writer.digest

    def _write_tokenizer(self, writer: IndexWriter, digest: Any) -> None:
        if isinstance(self.tokenizer, WordVocabulary):
            for name, array in ((layout.WORD_TEXT, self.word_text), (layout.WORD_ENDS, self.word_ends[1:])):
                digest.update(np.ascontiguousarray(array).data)
                writer.add(name, array, element_size=8 if name == layout.WORD_ENDS else 0)
        elif isinstance(self.tokenizer, HuggingFaceTokenizer):
            digest.update(self.tokenizer.payload)
            writer.add(layout.TOKENIZER, np.frombuffer(self.tokenizer.payload, np.uint8))

    def _check_vocabulary(self, writer: IndexWriter) -> None:
        """What a reader would refuse is not written: hundreds of MiB of words that are nearly all the same."""
        for section in writer.sections:
            is_text = section.name in (layout.WORD_TEXT, layout.WORD_ENDS, layout.TOKENIZER)
            if is_text and not layout.has_sound_size(section, self.report.counts["num_nodes"]):
                raise InputError(
                    f"its words would compress more than {layout.MAX_TEXT_RATIO} times, which no reader believes",
                    file=self.path,
                    hint="--codec raw",
                )

    def _meta(self, counts: dict[str, Any], digest: str) -> dict[str, Any]:
        kept = ["num_keys", "num_nodes", "num_tokens", "num_highs", "high_width", "depth"]
        if self.report.has_tails:
            kept += TAIL_FIELDS
        return {
            **{name: counts[name] for name in kept},
            "label_entropy": round(counts["label_entropy"], 6),
            "value_kind": VALUE_KINDS[self.value_kind],
            "has_value_counts": self.value_kind != VALUE_NONE and self.options.duplicates == "all",
            "tokenizer": self.tokenizer.kind if self.tokenizer is not None else "ids",
            "lowercase": self.options.lowercase,
            "keys_digest": digest,
        }


TRIE_SECTIONS = {
    layout.LOUDS: 0,
    layout.LABEL_LOW: 0,
    layout.LABEL_DELTA: 2,
    layout.HIGH_FLAGS: 0,
    layout.LABEL_HIGH: 0,
    layout.TERMINAL: 0,
    layout.INNER_TERMINAL: 0,
    layout.LINK_FLAGS: 0,
    layout.TAIL_LINKS: 0,
    layout.TAIL_ENDS: 0,
    layout.TAIL_LABELS: 0,
    layout.VALUES: 8,
    layout.VALUE_COUNTS: 4,
}
"""Sections in the order of the file, with the element size by which their bytes are shuffled before compression."""


def _both(first: Callable[[bytes], Any], second: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    def take(chunk: bytes) -> None:
        first(chunk)
        second(chunk)

    return take


def as_batches(keys: Iterable[Any], *, keys_per_batch: int = 1 << 14) -> Iterator[KeyBatch]:
    """Batches as they are; other iterables of token sequences in batches of their own. Raises InputError."""
    pending: list[Any] = []
    first_line = 1
    for item in keys:
        if isinstance(item, KeyBatch):
            yield item
            continue
        pending.append(item)
        if len(pending) == keys_per_batch:
            yield _batch(pending, first_line)
            first_line += len(pending)
            pending = []
    if pending:
        yield _batch(pending, first_line)


def _batch(sequences: list[Any], first_line: int) -> KeyBatch:
    try:
        offsets = np.cumsum([0, *(len(sequence) for sequence in sequences)], dtype=np.int64)
        flat = np.array([index(token) for sequence in sequences for token in sequence], dtype=np.int64)
    except (TypeError, OverflowError):
        raise _bad_sequence(sequences, first_line) from None
    if flat.size and (flat.min() < 0 or flat.max() > MAX_TOKEN):
        raise _bad_sequence(sequences, first_line)
    if len(sequences) and int(np.diff(offsets).max()) > MAX_DEPTH:
        raise InputError(f"a key has more than {MAX_DEPTH:,} tokens", file="keys")
    lines = np.arange(first_line, first_line + len(sequences), dtype=np.int64)
    return KeyBatch(flat.astype(np.uint32), offsets, None, lines, "keys")


def _bad_sequence(sequences: list[Any], first_line: int) -> InputError:
    """What is wrong with the first sequence that is none of token ids."""
    for number, sequence in enumerate(sequences, first_line):
        try:
            bad = next((token for token in sequence if not 0 <= index(token) <= MAX_TOKEN), None)
            len(sequence)
        except TypeError:
            what = f"{sequence!r:.40} is no sequence of integers"
            return InputError(what, file="keys", line=number, hint="text is made into keys by KeyReader")
        if bad is not None:
            return InputError(f"token {bad} is not between 0 and {MAX_TOKEN}", file="keys", line=number)
    raise AssertionError("no bad sequence")


def _save(file: BinaryIO, array: npt.NDArray[Any]) -> None:
    """As np.save, which on a full disk says how many bytes it wrote, but not that the disk is full."""
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(np.ascontiguousarray(array).data)


class _Stash:
    """Batches put aside in order: in memory up to a limit, then in a file."""

    def __init__(self, directory: str, limit: int):
        self._directory = directory
        self._limit = limit
        self._held: list[KeyBatch] = []
        self.held_bytes = 0
        self._files: list[str] = []

    def put(self, batch: KeyBatch) -> None:
        self._held.append(batch)
        arrays = (batch.tokens, batch.offsets, batch.values, batch.lines)
        self.held_bytes += sum(array.nbytes for array in arrays if array is not None)
        if self.held_bytes > self._limit:
            self._spill()

    def _spill(self) -> None:
        path = os.path.join(self._directory, f"stash-{len(self._files)}")
        with open(path, "wb") as file:
            for batch in self._held:
                np.save(
                    file, np.array([batch.source, batch.values is not None, batch.lines is not None], object)
                )
                for array in (batch.tokens, batch.offsets, batch.values, batch.lines):
                    if array is not None:
                        _save(file, array)
        self._files.append(path)
        self._held, self.held_bytes = [], 0

    def take(self) -> Iterator[KeyBatch]:
        for path in self._files:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                while file.tell() < size:
                    source, has_values, has_lines = np.load(file, allow_pickle=True)
                    tokens, offsets = np.load(file), np.load(file)
                    yield KeyBatch(
                        tokens,
                        offsets,
                        np.load(file) if has_values else None,
                        np.load(file) if has_lines else None,
                        str(source),
                    )
            os.unlink(path)
        while self._held:
            yield self._held.pop(0)


class _Clock:
    """Adds up the seconds of each stage."""

    def __init__(self, seconds: dict[str, float]):
        self._seconds = seconds

    def timing(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """The same items; the time that making them takes counts for ``name``."""
        while True:
            with self.stage(name):
                item = next(items, None)
            if item is None:
                return
            yield item

    def stage(self, name: str) -> _Stage:
        return _Stage(self._seconds, name)


class _Stage:
    def __init__(self, seconds: dict[str, float], name: str):
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - self._begin
