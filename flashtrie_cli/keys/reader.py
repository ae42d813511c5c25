"""The one way keys come in: several files of one kind, streamed as bounded batches."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Literal

from flashtrie_cli.errors import UsageError
from flashtrie_cli.inputs.lines import BLOCK_SIZE, line_blocks
from flashtrie_cli.inputs.native import native
from flashtrie_cli.inputs.source import (
    RAW_BLOCK_SIZE,
    STDIN,
    RawReader,
    ReadStats,
    file_size,
    new_digest,
    open_raw,
    prefetched,
    read_chunks,
)
from flashtrie_cli.keys.array_keys import array_batches
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.keys.jsonl_keys import JsonlParser
from flashtrie_cli.keys.parsing import LineFormat, ParsedLines, parse_ids
from flashtrie_cli.keys.text_keys import parse_text
from flashtrie_cli.keys.tokenizers import Tokenizer
from flashtrie_cli.keys.vocabulary import WordVocabulary

InputKind = Literal["text", "ids", "jsonl", "npz"]
INPUT_KINDS: tuple[InputKind, ...] = ("text", "ids", "jsonl", "npz")


class KeyReader:
    """Keys of files, in order, one pass.

    ``kind``: ``text`` (one key a line, made into tokens by ``tokenizer``), ``ids`` (decimal token ids between
    blanks), ``jsonl`` (see `jsonl_keys`), ``npz`` (see `array_keys`). Files are plain, gzip or Zstandard by
    content; ``-`` is stdin. ``lowercase`` applies ``str.lower()`` to text first. ``values_column`` (1-based,
    TAB separated; text and ids only) holds each key's value, and the first other column the key. ``threads``
    above 1 reads and decompresses beside the parser. Lines without a token are skipped and counted; the empty
    key comes from jsonl and npz only.

    After (not during) the pass, `source_digest` tells whether the same bytes came in. Errors in what is read
    are InputError with file and line, options that do not go together UsageError.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        kind: InputKind,
        tokenizer: Tokenizer | None = None,
        lowercase: bool = False,
        values_column: int | None = None,
        threads: int = 1,
        digest: bool = True,
        block_size: int = BLOCK_SIZE,
    ):
        self.paths = [str(path) for path in paths]
        self.kind = kind
        self.tokenizer = tokenizer
        self.lowercase = lowercase
        self.values_column = values_column
        self.threads = threads
        self.stats = ReadStats(files=list(self.paths))
        sizes = [file_size(path) for path in self.paths]
        self.total_size: int | None = None if None in sizes else sum(size or 0 for size in sizes)
        self._digest = new_digest() if digest else None
        self._block_size = block_size
        self._float_values = False
        self._jsonl = JsonlParser(tokenizer, lowercase=lowercase)
        self._check_options()

    def _check_options(self) -> None:
        if self.kind not in INPUT_KINDS:
            raise UsageError(f"input kind {self.kind!r} is not one of {', '.join(INPUT_KINDS)}")
        if self.kind == "text" and self.tokenizer is None:
            raise UsageError("text input needs a tokenizer", hint="--tokenizer words, or a tokenizer.json")
        if self.kind in ("ids", "npz") and isinstance(self.tokenizer, WordVocabulary):
            raise UsageError(
                f"--tokenizer words makes its own ids of words, but {self.kind} input has ids already",
                hint="leave --tokenizer out",
            )
        if self.values_column is not None:
            if self.kind not in ("text", "ids"):
                raise UsageError(
                    f"--values names a column of text or ids; {self.kind} input says its values itself"
                )
            if self.values_column < 1:
                raise UsageError(f"--values {self.values_column}: columns are counted from 1")
        if self.lowercase and self.kind not in ("text", "jsonl"):
            raise UsageError(f"--lowercase is for text, not for {self.kind} input")
        if self.paths.count(STDIN) > 1:
            raise UsageError("stdin (-) can be read once only")

    @property
    def source_digest(self) -> str:
        """BLAKE2b-256 in hex over the raw bytes of all files in order; "" where ``digest`` was off."""
        return self._digest.hexdigest() if self._digest is not None else ""

    def __iter__(self) -> Iterator[KeyBatch]:
        for path in self.paths:
            batches = self._read_arrays(path) if self.kind == "npz" else self._read_lines(path)
            for batch in batches:
                self.stats.num_keys_read += batch.num_keys
                if batch.num_keys:
                    yield batch

    def _read_lines(self, path: str) -> Iterator[KeyBatch]:
        with open_raw(path) as file:
            raw = RawReader(path, file, self.stats, self._digest)
            chunk_size = min(self._block_size, RAW_BLOCK_SIZE) if self.threads > 1 else self._block_size

            def chunks() -> Generator[bytes, None, None]:
                yield from read_chunks(raw, chunk_size)

            source = prefetched(chunks, depth=8) if self.threads > 1 else chunks()
            with closing(source):  # or a fault, while it is told, would keep the reading thread
                yield from self._parsed_blocks(source, path)

    def _parsed_blocks(self, source: Iterator[bytes], path: str) -> Iterator[KeyBatch]:
        before = self.stats.num_lines
        first_line = 1
        blocks = line_blocks(source, path, self._block_size, num_lines=lambda: self.stats.num_lines - before)
        for block in blocks:
            parsed = self._parse(
                block, path, LineFormat(first_line, self.values_column or 0, self._float_values)
            )
            first_line += parsed.num_lines
            self.stats.num_text_bytes += len(block)
            self.stats.num_lines += parsed.num_lines
            self.stats.num_empty_lines_skipped += parsed.num_empty
            if parsed.values is not None:
                self._float_values = parsed.values.dtype.kind == "f"
            yield KeyBatch(parsed.tokens, parsed.offsets, parsed.values, parsed.lines, path)

    def _parse(self, block: bytes, path: str, form: LineFormat) -> ParsedLines:
        if self.kind == "ids":
            parsed = parse_ids(native(), block, form)
        elif self.kind == "text":
            assert self.tokenizer is not None
            block = lowered(block) if self.lowercase else block
            parsed = parse_text(self.tokenizer, block, form)
        else:
            return self._jsonl.parse(block, path, form.first_line)
        parsed.check(block, path, form.value_column)
        return parsed

    def _read_arrays(self, path: str) -> Iterator[KeyBatch]:
        size = file_size(path) or 0
        before = self.stats.num_bytes_read

        def note(fraction: float) -> None:
            self.stats.num_bytes_read = before + round(size * fraction)

        for batch in array_batches(path, on_fraction=note):
            self.stats.num_lines += batch.num_keys
            self.stats.num_text_bytes += batch.tokens.nbytes
            yield batch
        self.stats.num_bytes_read = before + size
        if self._digest is not None:
            with open_raw(path) as file:
                raw = RawReader(path, file, ReadStats(), self._digest)
                while raw.read(RAW_BLOCK_SIZE):
                    pass


def lowered(block: bytes) -> bytes:
    """``str.lower()`` of UTF-8 text; bytes that are no UTF-8 stay as they are, for the parser to name."""
    if block.isascii():
        return block.lower()
    return block.decode("utf-8", "surrogateescape").lower().encode("utf-8", "surrogateescape")
