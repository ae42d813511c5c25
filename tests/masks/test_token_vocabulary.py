"""Vocabularies in every form they come in, with the oddities of the real ones."""

from __future__ import annotations

import base64
import contextlib
import json

import pytest
from masks_world import TOKENIZERS, data_directory, real_vocabulary, trap_vocabulary

from flashtrie_cli.errors import InputError
from flashtrie_cli.keys.token_vocabulary import open_vocabulary
from flashtrie_cli.trie.token_bytes import ADDED, BYTE_FALLBACK, HOLE, NORMAL, SPECIAL, TokenBytes


def listed(tokens: TokenBytes) -> list[tuple[int, bytes]]:
    return [(int(tokens.kinds[token]), tokens[token]) for token in range(len(tokens))]


def read(tmp_path, name: str, data: bytes | dict):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return open_vocabulary(str(path))


BYTE_LEVEL = {
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "Ġno": 1, "Ã¶": 2, "Ã": 3, "Ċ": 4, "": 5, "日": 6},
        "merges": [],
    },
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [
        {"id": 8, "content": "<|end|>", "special": True},
        {"id": 9, "content": "<think> é", "special": False},
        {"id": 0, "content": "a", "special": False},
    ],
}


def test_byte_level_bpe(tmp_path):
    found = read(tmp_path, "tokenizer.json", BYTE_LEVEL)
    assert listed(found.tokens) == [
        (ADDED, b"a"), (NORMAL, b" no"), (NORMAL, "ö".encode()), (NORMAL, b"\xc3"), (NORMAL, b"\n"), (NORMAL, b""),
        (NORMAL, "日".encode()), (HOLE, b""), (SPECIAL, b"<|end|>"), (ADDED, "<think> é".encode()),
    ]  # fmt: skip
    assert found.eos == ()


@pytest.mark.parametrize("decoder", [
    {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                      {"type": "ByteFallback"}, {"type": "Fuse"}]},
    {"type": "Metaspace", "replacement": "▁"},
])  # fmt: skip
def test_sentencepiece_families(tmp_path, decoder):
    document = {
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {"<0x0A>": 0, "▁no": 1, "<0xZZ>": 2, "a": 3, "<0x41>": 4},
        },
        "decoder": decoder,
        "added_tokens": [{"id": 5, "content": "▁▁", "special": False}],
    }
    assert listed(read(tmp_path, "tokenizer.json", document).tokens) == [
        (BYTE_FALLBACK, b"\n"), (NORMAL, b" no"), (NORMAL, b"<0xZZ>"), (NORMAL, b"a"), (BYTE_FALLBACK, b"A"),
        (ADDED, b"  "),
    ]  # fmt: skip


def test_unigram(tmp_path):
    document = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5]]}, "decoder": {"type": "Metaspace"},
                "added_tokens": [{"id": 0, "content": "<unk>", "special": True}]}  # fmt: skip
    assert listed(read(tmp_path, "tokenizer.json", document).tokens) == [(SPECIAL, b"<unk>"), (NORMAL, b" a")]


def test_end_ids_from_the_files_beside(tmp_path):
    def eos() -> tuple[int, ...]:
        return read(tmp_path, "tokenizer.json", BYTE_LEVEL).eos

    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert eos() == (8,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 4}')
    assert eos() == (4,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 4]}')
    assert eos() == (4, 8)
    (tmp_path / "generation_config.json").write_text("not JSON")
    assert eos() == (4,)


def test_tiktoken_ranks(tmp_path):
    lines = [(b"a", 0), (b"\xff", 1), (b" no", 4)]
    data = b"".join(base64.b64encode(text) + b" %d\n" % rank for text, rank in lines)
    assert listed(read(tmp_path, "ranks.tiktoken", data).tokens) == [
        (NORMAL, b"a"), (NORMAL, b"\xff"), (HOLE, b""), (HOLE, b""), (NORMAL, b" no"),
    ]  # fmt: skip


def test_tekken(tmp_path):
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode()} for rank in range(5)]
    config = {"default_vocab_size": 7, "default_num_special_tokens": 4}
    found = read(tmp_path, "tekken.json", {"config": config, "vocab": vocab})
    assert listed(found.tokens) == [(SPECIAL, b"")] * 4 + [(NORMAL, bytes([rank])) for rank in range(3)]
    assert found.eos == (2,)


def message(*fields: tuple[int, bytes | int]) -> bytes:
    made = b""
    for number, value in fields:
        made += varint(number << 3 | (2 if isinstance(value, bytes) else 0))
        made += varint(len(value)) + value if isinstance(value, bytes) else varint(value)
    return made


def varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def test_sentencepiece_model(tmp_path):
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<0x0A>", 6), ("▁no", 1), ("tool", 4), ("old", 5)]
    data = b"".join(message((1, message((1, text.encode()), (3, kind)))) for text, kind in pieces)
    # A piece without a type is a normal one; scores and unknown fields are passed over.
    data += message((1, message((1, b"x")) + b"\x15\0\0\0\0")) + message(
        (9, b"unknown"), (2, message((42, 1)))
    )
    found = read(tmp_path, "tokenizer.model", data)
    assert listed(found.tokens) == [
        (SPECIAL, b"<unk>"), (SPECIAL, b"<s>"), (SPECIAL, b"</s>"), (BYTE_FALLBACK, b"\n"), (NORMAL, b" no"),
        (ADDED, b"tool"), (HOLE, b"old"), (NORMAL, b"x"),
    ]  # fmt: skip
    assert found.eos == (1,)
    for end in range(3, len(data) - 1):
        with contextlib.suppress(
            InputError
        ):  # a cut between fields is a shorter model; nothing else may come
            read(tmp_path, "cut.model", data[:end])


@pytest.mark.parametrize(("data", "wrong"), [
    (b"", "no tokens"), (b"hello world\n", "no vocabulary that is understood"), (b"{}", "neither a tokenizer.json"),
    (b"{", "not a vocabulary"), (b"VOC1\x02\0\0\0\0\x01\0a", "not a vocabulary"), (b"VOC1\0\0\0\0x", "behind its last"),
    (b"YQ== 0\nYQ==\n", "2: is no vocabulary"),
    (b'{"model": {"type": "WordPiece", "vocab": {"##a": 0}}, "decoder": {"type": "WordPiece"}}', "WordPiece"),
    (json.dumps({"model": {"vocab": {"a": 1 << 25}}, "decoder": {"type": "ByteLevel"}}).encode(), "outside"),
])  # fmt: skip
def test_what_is_no_vocabulary(tmp_path, data, wrong):
    with pytest.raises(InputError, match=wrong):
        read(tmp_path, "file", data)


def test_select_and_digest():
    tokens = trap_vocabulary()
    kept = tokens.is_text(eos=[9])
    ids, begins, data = tokens.select(kept)
    spelled = [data[begins[at] : begins[at + 1]].tobytes() for at in range(len(ids))]
    assert spelled == [tokens[token] for token in ids.tolist()]
    assert all(spelled)
    assert 9 not in ids
    assert tokens.digest(kept) != tokens.digest(tokens.is_text())
    with pytest.raises(IndexError):
        tokens[len(tokens)]


@pytest.mark.data
@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "mistral_v3"])
def test_real_tokenizer_json(tmp_path, name):
    import io
    import tarfile

    import zstandard

    packed = (data_directory() / "tokenizers" / f"{name}.tar.zst").read_bytes()
    unpacked = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read()
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as archive:
        data = archive.extractfile(f"{name}/tokenizer.json").read()
    found, (want, _) = read(tmp_path, "tokenizer.json", data).tokens, real_vocabulary(name)
    assert (found.kinds == want.kinds).all()
    assert (found.begins == want.begins).all()
    assert (found.data == want.data).all()
