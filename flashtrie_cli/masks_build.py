"""`flashtrie build --masks`: a set of strings in, an index of token masks out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.engine.cpu_masks import open_automaton
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.files import check_output
from flashtrie_cli.format.writer import check_codec
from flashtrie_cli.keys.string_sets import read_schema_enum, read_string_sets
from flashtrie_cli.keys.token_vocabulary import open_vocabulary
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import MAX_VOCAB_SIZE


@dataclass(frozen=True)
class MaskBuildReport:
    """What was built; ``seconds`` by stage (read, vocabulary, compile, write)."""

    path: str
    file_size: int
    counts: dict[str, Any]
    seconds: dict[str, float]


def build_masks(
    inputs: Sequence[str],
    output: str,
    *,
    tokenizer: str | None,
    form: str = "text",
    json_schema: str | None = None,
    pointer: str = "",
    vocab_size: int | None = None,
    eos: str | None = None,
    json_quoted: bool = False,
    prefix_space: bool = False,
    added_is_text: bool = True,
    codec: str = "zstd",
    level: int = 3,
    threads: int = 1,
    force: bool = False,
) -> MaskBuildReport:
    """Read a set and a vocabulary, compile, write. Options as on the command line.

    ``eos``: ids separated by commas; where it is None, what lies beside the tokenizer says. Raises UsageError,
    InputError and OutputError.
    """
    if tokenizer is None:
        raise UsageError("masks need the model's vocabulary", hint="--tokenizer tokenizer.json")
    if tokenizer == "words":
        raise UsageError(
            "masks are of a model's tokens, not of words", hint="--tokenizer tokenizer.json of the model"
        )
    if bool(inputs) == bool(json_schema):
        raise UsageError("give either files of strings or --json-schema")
    if pointer and not json_schema:
        raise UsageError("--pointer goes with --json-schema")
    check_codec(codec, level)
    check_output(output, force=force, inputs=(*inputs, tokenizer, json_schema))
    clock = _Clock()
    found = read_schema_enum(json_schema, pointer) if json_schema else read_string_sets(inputs, form)
    clock.stage("read")
    vocabulary = open_vocabulary(tokenizer)
    ids = vocabulary.eos if eos is None else parse_ids(eos, "--eos")
    if not ids:
        raise InputError("does not say which token ends an answer", file=tokenizer, hint="--eos ID,…")
    if max(ids) >= MAX_VOCAB_SIZE:
        raise UsageError(f"end-of-sequence id {max(ids)} is above {MAX_VOCAB_SIZE - 1}")
    width = vocab_size or max(len(vocabulary.tokens), max(ids) + 1)
    automaton = open_automaton(vocabulary.tokens, ids, added_is_text=added_is_text)
    clock.stage("vocabulary")
    masks = TokenMasks.from_strings(
        found.members, automaton, vocab_size=width, json_quoted=json_quoted, prefix_space=prefix_space
    )
    clock.stage("compile")
    masks.save(output, codec=codec, level=level, threads=threads, force=force)
    clock.stage("write")
    counts = {
        "num_members_read": len(found.members),
        "num_empty_lines_skipped": found.num_empty_lines_skipped,
        "num_members": masks.num_members,
        "num_nodes": masks.num_nodes,
        "num_allowed": masks.num_allowed,
        "resident_bytes": masks.resident_bytes,
        "vocab_size": masks.vocab_size,
        "vocabulary_form": vocabulary.form,
        "eos": list(masks.eos),
        "automaton_from_cache": automaton.from_cache,
    }
    return MaskBuildReport(output, os.path.getsize(output), counts, clock.seconds)


def parse_ids(text: str, option: str) -> tuple[int, ...]:
    """Ascending ids out of ``1,2,3``."""
    try:
        ids = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        ids = ()
    if not ids or ids[0] < 0:
        raise UsageError(f"{option} {text!r} is not a list of token ids", hint=f"{option} 128001,128009")
    return ids


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._began
        self._began = now
