"""Hugging Face tokenizers: the ids of the library, text back, and clear lines where there is no tokenizer."""

from __future__ import annotations

import builtins
import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard

from flashtrie_cli.errors import IndexFileError, InputError, UsageError
from flashtrie_cli.keys import tokenizers as module
from flashtrie_cli.keys.reader import KeyReader
from flashtrie_cli.keys.tokenizers import HuggingFaceTokenizer, open_tokenizer
from flashtrie_cli.keys.vocabulary import WordVocabulary

library = pytest.importorskip("tokenizers")


def make_tokenizer() -> bytes:
    """Byte-level BPE as GPT-2's, that adds specials, cuts and pads: all of which must stay away."""
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["new york", "new jersey", "york", "jersey city"] * 5, trainer)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return tokenizer.to_str().encode()


PAYLOAD = make_tokenizer()


@pytest.fixture
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(PAYLOAD, "tokenizer.json")


def reference(text: str) -> list[int]:
    plain = library.Tokenizer.from_str(PAYLOAD.decode())
    plain.no_truncation()
    plain.no_padding()
    return plain.encode(text, add_special_tokens=False).ids


def test_tokens_and_text(tokenizer: HuggingFaceTokenizer) -> None:
    texts = ["new york", "", "jersey city and a long tail of words", "é\u20ac\U0001f600", " two  spaces "]
    tokens, offsets = tokenizer.encode_batch(texts)
    assert (tokens.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert [tokens[a:b].tolist() for a, b in pairwise(offsets)] == [reference(text) for text in texts]
    assert tokenizer.decode_batch(tokens, offsets) == texts
    assert tokenizer.decode_batch(tokens, offsets[2:]) == texts[2:]
    assert tokenizer.decode_batch(np.array([0, 1], np.uint32), np.array([0, 2])) == ["<s></s>"]
    assert tokenizer.decode_batch(np.array([1 << 31], np.uint32), np.array([0, 1])) == [""]


def test_many_texts_come_in_several_calls(tokenizer: HuggingFaceTokenizer, monkeypatch) -> None:
    texts = [f"york {n}" * (n % 3) for n in range(25)]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(module, "_TEXTS_PER_CALL", 4)
    parts = tokenizer.encode_batch(texts)
    assert [a.tolist() for a in whole] == [a.tolist() for a in parts]
    assert tokenizer.decode_batch(*parts) == texts
    assert [len(a) for a in tokenizer.encode_batch([])] == [0, 1]


@pytest.mark.parametrize("squeeze", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_open(tmp_path: Path, squeeze) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(squeeze(PAYLOAD))
    tokenizer = open_tokenizer(str(path))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.payload == PAYLOAD
    assert tokenizer.digest == HuggingFaceTokenizer.from_index(PAYLOAD, "x.ft").digest
    assert len(tokenizer) == len(json.loads(PAYLOAD)["model"]["vocab"])
    assert tokenizer.id("york") is not None
    assert tokenizer.id("no such token") is None


def test_open_words() -> None:
    assert isinstance(open_tokenizer("words"), WordVocabulary)


@pytest.mark.parametrize("payload", [b"", b"{}", b"not json\nat all", b"\xff"])
def test_no_tokenizer(tmp_path: Path, payload: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(payload)
    with pytest.raises(InputError) as caught:
        open_tokenizer(str(path))
    assert str(caught.value).startswith(f"{path}: is not a tokenizer.json: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(IndexFileError, match=r"x\.ft: is not a tokenizer.json"):
        HuggingFaceTokenizer.from_index(payload, "x.ft")
    with pytest.raises(InputError, match="No such file"):
        open_tokenizer(str(tmp_path / "none.json"))


def test_too_large(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENIZER_SIZE", 2 << 20)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(zstandard.ZstdCompressor().compress(b" " * (4 << 20)))
    with pytest.raises(InputError, match="larger than 2 MiB"):
        open_tokenizer(str(path))


def test_without_the_library(monkeypatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments, **named):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(PAYLOAD)
    with pytest.raises(UsageError, match=r"pip install 'flashtrie\[tokenizers\]'"):
        open_tokenizer(str(path))


class TestReading:
    def read(self, path: Path, tokenizer: HuggingFaceTokenizer, **options):
        reader = KeyReader([str(path)], kind="text", tokenizer=tokenizer, **options)
        keys, lines, values = [], [], []
        for batch in reader:
            keys += [batch.tokens[a:b].tolist() for a, b in pairwise(batch.offsets)]
            lines += batch.lines.tolist()
            values += batch.values.tolist() if batch.values is not None else []
        return keys, lines, values, reader.stats

    @pytest.mark.parametrize("block_size", [1, 1 << 20])
    def test_lines(self, tmp_path: Path, tokenizer: HuggingFaceTokenizer, block_size: int) -> None:
        path = tmp_path / "keys"
        path.write_text(
            "New York\t3\r\n\n \u3000\t4\nnew  jersey \t0.5\nlast\t1", encoding="utf-8", newline=""
        )
        keys, lines, values, stats = self.read(
            path, tokenizer, lowercase=True, values_column=2, block_size=block_size
        )
        assert keys == [reference(text) for text in ("new york", "new  jersey ", "last")]
        assert (lines, values) == ([1, 4, 5], [3, 0.5, 1])
        assert stats.num_empty_lines_skipped == 2

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"ok\ncaf\xe9\n", ":2: not valid UTF-8 (byte 0xe9)"),
            (b"ok\n" + b"xq" * 40_000 + b"\nz\xff\n", ":2: a key of more than 65535 tokens"),
        ],
    )
    def test_faults(self, tmp_path: Path, tokenizer: HuggingFaceTokenizer, text: bytes, message: str) -> None:
        path = tmp_path / "keys"
        path.write_bytes(text)
        with pytest.raises(InputError) as caught:
            self.read(path, tokenizer)
        assert f"{path}{message}" in str(caught.value)

    def test_jsonl(self, tmp_path: Path, tokenizer: HuggingFaceTokenizer) -> None:
        path = tmp_path / "keys"
        path.write_text('"new york"\n["new", "york"]\n[5, 6]\n{"text": "city"}\n[]\n')
        reader = KeyReader([str(path)], kind="jsonl", tokenizer=tokenizer)
        (batch,) = reader
        keys = [batch.tokens[a:b].tolist() for a, b in pairwise(batch.offsets)]
        assert keys == [
            reference("new york"),
            reference("new") + reference("york"),
            [5, 6],
            reference("city"),
            [],
        ]
        path.write_text('["no such token"]\n')
        with pytest.raises(InputError, match=":1: 'no such token' is not a token"):
            list(KeyReader([str(path)], kind="jsonl", tokenizer=tokenizer))

    def test_a_normaliser_that_leaves_nothing(self, tmp_path: Path) -> None:
        dropping = library.Tokenizer.from_str(PAYLOAD.decode())
        dropping.normalizer = library.normalizers.Replace("drop", "")
        path = tmp_path / "keys"
        path.write_text("york\t1\ndrop\t2\nnew\t3\n")
        keys, lines, values, stats = self.read(
            path, HuggingFaceTokenizer(dropping.to_str().encode(), "x"), values_column=2
        )
        assert keys == [reference("york"), reference("new")]
        assert (lines, values, stats.num_empty_lines_skipped) == ([1, 3], [1, 3], 1)
