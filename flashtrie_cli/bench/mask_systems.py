"""Token masks of flashtrie and of the libraries beside it, behind one small interface.

Each takes the same strings and vocabulary and is called from Python as its users call it. A peer that is not
installed is left out; one that fails on a set says so in its row.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from flashtrie_cli.engine.cpu_masks import open_automaton
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import TokenBytes


class MaskSystem(Protocol):
    """One library with one vocabulary made ready."""

    name: str
    most_members: int
    """Sets above this are not tried: it would fail, or take minutes."""

    def compile(self, members: Sequence[str]) -> Any:
        """From Python strings to what answers."""

    def start(self, compiled: Any) -> None:
        """A new generation."""

    def fill(self) -> None:
        """The mask of the present state, into a row that is there already."""

    def row(self) -> Any:
        """That row: int32 words."""

    def advance(self, token: int) -> bool: ...

    def memory(self, compiled: Any) -> int | None:
        """Bytes that the compiled set takes, where the library says so."""


class OurMasks:
    name = "flashtrie"
    most_members = 10_000_000

    def __init__(self, tokens: TokenBytes, eos: Sequence[int]):
        self._automaton = open_automaton(tokens, eos)
        self._row = np.zeros((1, -(-len(tokens) // 32)), np.int32)

    def compile(self, members: Sequence[str]) -> TokenMasks:
        return TokenMasks.from_strings(members, self._automaton)

    def start(self, compiled: TokenMasks) -> None:
        matcher = compiled.matcher()
        self._fill, self._advance = matcher.fill, matcher.advance

    def fill(self) -> None:
        self._fill(self._row)

    def row(self) -> Any:
        return self._row[0]

    def advance(self, token: int) -> bool:
        return self._advance(token)

    def memory(self, compiled: TokenMasks) -> int:
        return compiled.resident_bytes


class XGrammar:
    """Its EBNF, one alternative a member, special tokens without bytes; or the enum of a JSON schema."""

    def __init__(self, tokens: TokenBytes, eos: Sequence[int], form: str):
        import xgrammar

        self._library, self._form = xgrammar, form
        self.name, self.most_members = f"xgrammar {form}", 100_000
        is_text = tokens.is_text(eos=eos)
        raw = [tokens[token] if is_text[token] else b"" for token in range(len(tokens))]
        info = xgrammar.TokenizerInfo(
            raw, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(eos)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bitmask = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile(self, members: Sequence[str]) -> Any:
        if self._form == "json":
            return self._compiler.compile_json_schema(json.dumps({"enum": list(members)}))
        quoted = (member.replace("\\", "\\\\").replace('"', '\\"') for member in members)
        return self._compiler.compile_grammar("root ::= " + " | ".join(f'"{member}"' for member in quoted))

    def start(self, compiled: Any) -> None:
        self._matcher = self._library.GrammarMatcher(compiled)

    def fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self._bitmask)

    def row(self) -> Any:
        return self._bitmask[0].numpy()

    def advance(self, token: int) -> bool:
        return self._matcher.accept_token(token)

    def memory(self, compiled: Any) -> int | None:
        return int(compiled.memory_size_bytes)


class LLGuidance:
    """A regular expression of alternatives, or the enum of a JSON schema."""

    def __init__(self, tokens: TokenBytes, eos: Sequence[int], form: str):
        import llguidance
        import llguidance.numpy

        self._library, self._form = llguidance, form
        self.name, self.most_members = f"llguidance {form}", 100_000 if form == "regex" else 30_000
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Pieces(tokens, eos)))
        self._bitmask = llguidance.numpy.allocate_token_bitmask(1, len(tokens))

    def compile(self, members: Sequence[str]) -> Any:
        matcher = self._library.LLMatcher
        if self._form == "json":
            grammar = matcher.grammar_from_json_schema(json.dumps({"enum": list(members)}))
        else:
            grammar = matcher.grammar_from_regex("|".join(re.escape(member) for member in members))
        made = matcher(self._tokenizer, grammar)
        if made.is_error():
            raise RuntimeError(made.get_error())
        return made

    def start(self, compiled: Any) -> None:
        self._matcher = compiled.deep_copy()

    def fill(self) -> None:
        self._library.numpy.fill_next_token_bitmask(self._matcher, self._bitmask)

    def row(self) -> Any:
        return self._bitmask[0]

    def advance(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def memory(self, compiled: Any) -> int | None:
        return None


class _Pieces:
    """What llguidance asks of a tokenizer. It never encodes here: its grammars force no tokens."""

    def __init__(self, tokens: TokenBytes, eos: Sequence[int]):
        is_text = tokens.is_text(eos=eos)
        self.tokens = [tokens[at] if is_text[at] else b"" for at in range(len(tokens))]
        self.eos_token_id, self.bos_token_id = eos[0], None
        self.special_token_ids = np.flatnonzero(~is_text).tolist()
        self._by_bytes = {text: at for at, text in enumerate(self.tokens) if text}

    def __call__(self, text: bytes | str) -> list[int]:
        """Longest match first, which is as good as any for forced text."""
        data, found, at = text.encode() if isinstance(text, str) else text, [], 0
        while at < len(data):
            end = next(
                end for end in range(min(len(data), at + 64), at, -1) if data[at:end] in self._by_bytes
            )
            found.append(self._by_bytes[data[at:end]])
            at = end
        return found


class OutlinesCore:
    """A regular expression of alternatives."""

    name = "outlines-core"
    most_members = 100  # a thousand take ten seconds

    def __init__(self, tokens: TokenBytes, eos: Sequence[int]):
        import outlines_core

        self._library = outlines_core
        ids: dict[bytes, list[int]] = {}
        for token in np.flatnonzero(tokens.is_text(eos=eos)).tolist():
            ids.setdefault(tokens[token], []).append(token)
        self._vocabulary = outlines_core.Vocabulary(eos[0], ids)
        self._row = np.zeros(-(-len(tokens) // 32), np.int32)

    def compile(self, members: Sequence[str]) -> Any:
        pattern = "(" + "|".join(re.escape(member) for member in members) + ")"
        return self._library.Index(pattern, self._vocabulary)

    def start(self, compiled: Any) -> None:
        self._guide = self._library.Guide(compiled)

    def fill(self) -> None:
        self._guide.write_mask_into(self._row.ctypes.data, self._row.size, self._row.itemsize)

    def row(self) -> Any:
        return self._row

    def advance(self, token: int) -> bool:
        self._guide.advance(token, return_tokens=False)
        return True

    def memory(self, compiled: Any) -> int | None:
        return None


NAMES = ("flashtrie", "xgrammar", "xgrammar-json", "llguidance", "llguidance-json", "outlines-core")


def open_systems(names: Sequence[str] | None, tokens: TokenBytes, eos: Sequence[int]) -> list[Any]:
    """The systems asked for, or all that are installed; ours comes first."""
    installed = {name: importlib.util.find_spec(name) for name in ("xgrammar", "llguidance", "outlines_core")}
    makers: dict[str, Callable[[], Any]] = {"flashtrie": lambda: OurMasks(tokens, eos)}
    if installed["xgrammar"]:
        makers["xgrammar"] = lambda: XGrammar(tokens, eos, "ebnf")
        makers["xgrammar-json"] = lambda: XGrammar(tokens, eos, "json")
    if installed["llguidance"]:
        makers["llguidance"] = lambda: LLGuidance(tokens, eos, "regex")
        makers["llguidance-json"] = lambda: LLGuidance(tokens, eos, "json")
    if installed["outlines_core"]:
        makers["outlines-core"] = lambda: OutlinesCore(tokens, eos)
    wanted = makers if names is None else [name for name in NAMES if name in names and name in makers]
    return [makers[name]() for name in dict.fromkeys(["flashtrie", *wanted])]
