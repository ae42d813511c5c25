"""JSON lines: every form of a key, values, and a file and line for everything else."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrie_cli.errors import InputError
from flashtrie_cli.inputs.native import native
from flashtrie_cli.keys.jsonl_keys import JsonlParser
from flashtrie_cli.keys.reader import KeyReader
from flashtrie_cli.keys.vocabulary import FrozenVocabulary, WordVocabulary


def keys_of(parsed) -> list[list[int]]:
    return [parsed.tokens[a:b].tolist() for a, b in pairwise(parsed.offsets)]


def parse(*lines: object, tokenizer=None, **options):
    block = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    return JsonlParser(tokenizer, **options).parse(block, "keys.jsonl", 1)


def frozen(*words: str) -> FrozenVocabulary:
    vocabulary = WordVocabulary()
    vocabulary.encode_batch(list(words))
    _, text, offsets = vocabulary.sorted()
    return FrozenVocabulary(text, offsets)


def test_ids() -> None:
    parsed = parse([1, 2], b"\n", [], {"tokens": [3], "id": "x"}, b" [4]\r\n", {"tokens": []}, b"[5]")
    assert keys_of(parsed) == [[1, 2], [], [3], [4], [], [5]]
    assert parsed.lines.tolist() == [1, 3, 4, 5, 6, 7]
    assert (parsed.num_lines, parsed.num_empty, parsed.values) == (7, 1, None)


def test_words() -> None:
    parsed = parse(
        "a b", ["b", "c"], {"text": "c\na"}, {"tokens": ["a"]}, "", "  ", [], tokenizer=WordVocabulary()
    )
    names = keys_of(parsed)
    assert [len(key) for key in names] == [2, 2, 2, 1, 0]
    assert names[0][1] == names[1][0]
    assert names[1][1] == names[2][0]
    assert names[2][1] == names[3][0] == names[0][0]
    assert parsed.lines.tolist() == [1, 2, 3, 4, 7]
    assert parsed.num_empty == 2


def test_lowercase() -> None:
    parsed = parse("ÀB", ["àb"], tokenizer=WordVocabulary(), lowercase=True)
    assert keys_of(parsed) == [[0], [0]]


def test_a_frozen_vocabulary_takes_ids_and_unknown_words() -> None:
    vocabulary = frozen("b a")
    parsed = parse("a z b", ["b", "zz"], [1, 0], tokenizer=vocabulary)
    assert keys_of(parsed) == [[0, 0xFFFFFFFF, 1], [1, 0xFFFFFFFF], [1, 0]]


def test_what_dump_gives_can_be_built_again() -> None:
    line = {"schema": "flashtrie.dump/1", "key_id": 3, "tokens": [9, 4], "text": "b a"}
    assert keys_of(parse(line)) == [[9, 4]]
    assert keys_of(parse("b", line, tokenizer=WordVocabulary())) == [[0], [0, 1]]


def test_values() -> None:
    parsed = parse({"tokens": [1], "value": 5}, {"tokens": [2], "value": (1 << 64) - 1})
    assert parsed.values.dtype == np.uint64
    assert parsed.values.tolist() == [5, (1 << 64) - 1]
    parsed = parse({"tokens": [1], "value": 5}, {"tokens": [2], "value": -2}, {"tokens": [], "value": 0.5})
    assert parsed.values.dtype == np.float64
    assert parsed.values.tolist() == [5.0, -2.0, 0.5]


def test_floats_stay_over_blocks(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "".join(json.dumps({"tokens": [n], "value": value}) + "\n" for n, value in enumerate([1, 0.5, 2]))
    )
    batches = list(KeyReader([str(path)], kind="jsonl", block_size=1))
    assert [batch.values.dtype.kind for batch in batches] == ["u", "f", "f"]


BAD = [
    (b"{", "not JSON: Expecting property name"),
    (b"[1,]", "not JSON"),
    (b"[1] [2]", "not JSON: Extra data at column 5"),
    (b"\xff", "not valid UTF-8 (byte 0xff)"),
    (b"3", "a key must be an array of tokens, a string or an object"),
    (b"null", "a key must be an array"),
    (b"[1, 2.5]", "must all be integers"),
    (b"[true]", "must all be integers"),
    (b"[[1]]", "must all be integers"),
    (b'[1, "a"]', "must all be integers, or all strings"),
    (b"[-1]", "token id -1 is outside 0 to 2147483647"),
    (b"[2147483648]", "token id 2147483648 is outside"),
    (b"[1e3]", "must all be integers"),
    (b"[" + b"9" * 5000 + b"]", "digits"),
    (b"[" * 100_000, "nested too deeply"),
    (b'"some text"', "there is no tokenizer"),
    (b'["a"]', "there is no vocabulary"),
    (b"{}", "neither `tokens` nor `text`"),
    (b'{"tokens": 5}', "a key must be an array"),
    (b'{"text": ["a"]}', "there is no vocabulary"),
    (b'{"tokens": [1], "value": "5"}', "value '5' is not a finite number".replace("'", '"')),
    (b'{"tokens": [1], "value": true}', "value true is not a finite number"),
    (b'{"tokens": [1], "value": null}', "value null is not a finite number"),
    (b'{"tokens": [1], "value": 1e999}', "value Infinity is not a finite number"),
    (b'{"tokens": [1], "value": NaN}', "NaN is not JSON"),
    (b'{"tokens": [1], "value": -1' + b"0" * 400 + b"}", "is not a finite number"),
    (b'{"tokens": [1], "value": 18446744073709551616}', "is above 18446744073709551615"),
    (b"[" + b"1," * 65535 + b"1]", "a key of more than 65535 tokens"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
def test_bad_lines(line: bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        JsonlParser(None).parse(b"\n" + line + b"\n[1]\n", "keys.jsonl", 41)
    text = str(caught.value)
    assert text.startswith("keys.jsonl:42: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 300


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], "makes its own ids"),
        (["new york"], "'new york' is not one word"),
        ([""], "'' is not one word"),
        ("\ud800", "surrogate"),
        (["\udfff"], "surrogate"),
        ("a " * 65536, "a key of more than 65535 tokens"),
    ],
)
def test_bad_words(line: object, message: str) -> None:
    with pytest.raises(InputError, match=r"keys\.jsonl:2: ") as caught:
        parse("fine", line, tokenizer=WordVocabulary())
    assert message in str(caught.value)


def test_values_for_all_or_none() -> None:
    with pytest.raises(InputError, match=r":2: no `value`, but"):
        parse({"tokens": [1], "value": 5}, [2])
    with pytest.raises(InputError, match=r":2: a `value`, but"):
        parse([2], {"tokens": [1], "value": 5})


def test_the_first_fault_is_told_wherever_blocks_end(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(json.dumps("a " * 65536) + "\n{oops\n")
    for block_size in (1, 1 << 20):
        with pytest.raises(InputError, match=":1: a key of more than"):
            list(KeyReader([str(path)], kind="jsonl", tokenizer=WordVocabulary(), block_size=block_size))


@given(
    st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=4) | st.text("ab \n", max_size=6), max_size=10)
)
@settings(max_examples=200, deadline=None)
def test_any_mix(keys: list) -> None:
    vocabulary = frozen("a b aa")
    expected = [key if isinstance(key, list) else vocabulary.ids(key.split()).tolist() for key in keys]
    kept = [key for key, given_ in zip(expected, keys, strict=True) if key or isinstance(given_, list)]
    parsed = parse(*keys, tokenizer=vocabulary)
    assert keys_of(parsed) == kept
    assert parsed.num_empty == len(keys) - len(kept)


PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"tokens"',
    '"value"',
    '"x"',
    "1",
    "-1",
    "-0",
    "01",
    "1.5",
    "1e2",
    "1e999",
]
PIECES += [
    "2147483647",
    "2147483648",
    str(2**64 - 1),
    str(2**64),
    "9" * 19,
    "-" + "9" * 400,
    "null",
    "true",
    "NaN",
]
PIECES += ['"é"', '"\\u00e9"', '"\\x"', '"\\', "\t", " ", "\x0b", '"\ud800"', "-", "1.", "[]", "[[]]"]
MEMBERS = {
    "tokens": st.lists(st.integers(0, 2**31 - 1), max_size=3),
    "value": st.sampled_from([0, 7, 2**64 - 1, -3, 0.5, -1e-7, 1e300]),
    "text": st.sampled_from(["a b", "é", "", 'say "x"', "\n"]),
    "key_id": st.integers(0, 9),
    "other": st.sampled_from([None, True, False, [1], {}, 10**30]),
}


@st.composite
def json_lines(draw) -> bytes:
    """Lines of the usual forms, some with other members, some then spoilt."""
    if draw(st.booleans()):
        line = json.dumps(draw(MEMBERS["tokens"]))
    else:
        names = draw(st.lists(st.sampled_from(["tokens", "tokens", "value", *MEMBERS]), unique=True))
        line = json.dumps({name: draw(MEMBERS[name]) for name in names}, ensure_ascii=draw(st.booleans()))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.sampled_from(PIECES)) + line[at + draw(st.integers(0, 3)) :]
    return line.encode("utf-8", "surrogatepass")


def outcome(blocks: list[bytes]) -> list | str:
    parser, number, found = JsonlParser(None), 1, []
    try:
        for block in blocks:
            parsed = parser.parse(block, "x", number)
            number += parsed.num_lines
            values = None if parsed.values is None else (parsed.values.dtype.kind, parsed.values.tolist())
            found.append([keys_of(parsed), parsed.lines.tolist(), values, parsed.num_lines, parsed.num_empty])
    except InputError as error:
        return str(error)
    return found


@pytest.mark.skipif(native() is None, reason="the extension is not built")
@given(
    st.lists(st.lists(json_lines() | st.sampled_from([b"", b" \r"]), max_size=4).map(b"\n".join), max_size=3)
)
@settings(max_examples=600, deadline=None)
def test_native_equals_python(blocks: list[bytes]) -> None:
    expected = outcome(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashtrie_cli.keys.jsonl_keys.native", lambda: None)
        assert outcome(blocks) == expected


@pytest.mark.skipif(native() is None, reason="the extension is not built")
@pytest.mark.parametrize(
    "line",
    [
        b"[1, 2]",
        b" [ ] \r",
        b'{"tokens": [3], "value": 5}',
        '{"schema": "s/1", "key_id": 3, "tokens": [4], "text": "é \\n", "value": -1.5e3, "x": 0}'.encode(),
    ],
)
def test_the_usual_lines_are_native(line: bytes) -> None:
    assert native().parse_jsonl_keys(np.frombuffer(line, np.uint8), 1, 0, False)[2] == len(line)
