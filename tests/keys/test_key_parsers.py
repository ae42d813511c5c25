"""The native parsers against their Python twins, and the twins against what the words say."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashtrie_cli.inputs.native import native
from flashtrie_cli.keys import parse_python, vocabulary
from flashtrie_cli.keys.batch import MAX_DEPTH, MAX_TOKEN
from flashtrie_cli.keys.parsing import LineFault, LineFormat, ParsedLines, as_bytes_array, parse_ids
from flashtrie_cli.keys.vocabulary import WordVocabulary

needs_native = pytest.mark.skipif(native() is None, reason="the extension is not built")


def plain(parsed: ParsedLines) -> tuple:
    """Everything of an answer up to the fault; keys behind a fault mean nothing."""
    values = parsed.values
    return (
        np.diff(parsed.offsets).tolist(),
        parsed.tokens[: parsed.offsets[-1]].tolist(),
        parsed.lines.tolist(),
        None if values is None else (values.dtype.kind, values[: len(parsed.lines)].tolist()),
        parsed.num_lines,
        parsed.num_empty,
        parsed.fault,
        parsed.fault_line,
        parsed.fault_begin,
        parsed.fault_end,
    )


def bad_byte(text: bytes) -> int:
    """Where Python stops decoding; 0 where it does not."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.start
    return 0


def python_words() -> vocabulary._PythonTable:
    return vocabulary._PythonTable()


# Pieces that meet every branch: digits of all lengths around 8, limits, blanks, line ends, strange bytes.
ID_PIECES = [
    b"0",
    b"7",
    b"12345678",
    b"123456789",
    b"99999999",
    b"2147483647",
    b"2147483648",
    b"0000000000000000012",
]
ID_PIECES += [
    b"9" * 25,
    b" ",
    b"  ",
    b"\t",
    b"\n",
    b"\r\n",
    b"\r",
    b"a",
    b"-1",
    b"+1",
    b"1.5",
    b"\xff",
    b"\x00",
    b"/",
    b":",
]
WORD_PIECES = [
    b"a",
    b"bc",
    b"longer-than-eight",
    b"exactly8",
    b"\x00",
    b"\xc3\xa9",
    b"\xe2\x82\xac",
    b"\xf0\x9f\x98\x80",
]
WORD_PIECES += [
    b" ",
    b"\t",
    b"\n",
    b"\r\n",
    b"\xc2\xa0",
    b"\xe3\x80\x80",
    b"\xe2\x80\x8b",
    b"\x1c",
    b"\xc2\x85",
    b"\x0b",
]
WORD_FAULTS = [
    b"\xff",
    b"\xc3",
    b"\xe2\x82",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe0\x80\x80",
    b"\x80",
]
VALUE_PIECES = [
    b"5",
    b"18446744073709551615",
    b"18446744073709551616",
    b"1.5",
    b"-3",
    b"1e400",
    b"1e-400",
    b".5",
    b"5.",
]
VALUE_PIECES += [
    b"nan",
    b"inf",
    b"1_0",
    b"+7",
    b"1e",
    b"",
    b" 8 ",
    b"4.9e-324",
    b"0.1",
    b"2.2250738585072011e-308",
]


def joined(pieces: list[bytes], size: int = 30) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(pieces), max_size=size).map(b"".join)


FORMATS = st.builds(LineFormat, st.integers(1, 1 << 40), st.sampled_from([0, 0, 1, 2, 3]), st.booleans())


@needs_native
@given(joined(ID_PIECES) | st.binary(max_size=60), FORMATS)
@settings(max_examples=600, deadline=None)
@example(b"1 2 3\n4\n", LineFormat())
@example(b"12345678 12345678 12345678\n", LineFormat())
def test_ids_native_equals_python(block: bytes, form: LineFormat) -> None:
    assert plain(parse_ids(native(), block, form)) == plain(parse_ids(None, block, form))


@needs_native
@given(joined(WORD_PIECES) | joined(WORD_PIECES + WORD_FAULTS) | st.binary(max_size=60), FORMATS)
@settings(max_examples=600, deadline=None)
def test_words_native_equals_python(block: bytes, form: LineFormat) -> None:
    answers = []
    for table in (native().WordTable(), python_words()):
        arguments = (as_bytes_array(block), form.first_line, form.value_column, form.float_values)
        first = plain(ParsedLines(*table.parse(*arguments, True)))
        again = plain(ParsedLines(*table.parse(*arguments, False)))
        assert first == again  # every word is known by now
        answers.append((first, len(table)))
    # After a fault the native table may know words of the bad line; the build stops there anyway.
    if answers[0][0][6] == LineFault.NONE:
        assert answers[0] == answers[1]
    else:
        assert answers[0][0] == answers[1][0]


@needs_native
@given(
    st.lists(
        st.tuples(st.sampled_from([b"1", b"1 2", b"", b" ", b"x"]), st.sampled_from(VALUE_PIECES)), max_size=8
    ),
    st.sampled_from([1, 2]),
    st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_values_native_equals_python(rows: list[tuple[bytes, bytes]], column: int, floats: bool) -> None:
    ordered = [(key, value) if column == 2 else (value, key) for key, value in rows]
    block = b"\n".join(b"\t".join(row) for row in ordered)
    form = LineFormat(1, column, floats)
    assert plain(parse_ids(native(), block, form)) == plain(parse_ids(None, block, form))


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=300, deadline=None)
def test_values_round_as_python_does(value: float) -> None:
    parsed = parse_ids(native(), b"1\t" + repr(value).encode(), LineFormat(1, 2, True))
    assert parsed.values is not None
    assert parsed.values.tolist() == [value]


@pytest.mark.parametrize("module", ["native", "python"])
class TestIds:
    """What the answer is, for both twins."""

    @pytest.fixture
    def parse(self, module: str):
        if module == "native" and native() is None:
            pytest.skip("the extension is not built")
        return lambda block, form=None: parse_ids(
            native() if module == "native" else None, block, form or LineFormat()
        )

    def test_lines(self, parse) -> None:
        parsed = parse(b"1 2\t3\r\n\n  \n0007\n2147483647")
        assert parsed.tokens.tolist() == [1, 2, 3, 7, MAX_TOKEN]
        assert parsed.tokens.dtype == np.uint32
        assert parsed.offsets.tolist() == [0, 3, 4, 5]
        assert parsed.lines.tolist() == [1, 4, 5]
        assert (parsed.num_lines, parsed.num_empty, parsed.values) == (5, 2, None)

    @pytest.mark.parametrize(
        ("block", "fault", "text"),
        [
            (b"1\n2 x3 4\n", LineFault.BAD_TOKEN, b"x3"),
            (b"1\n-1\n", LineFault.BAD_TOKEN, b"-1"),
            (b"1\n2.0 x\n", LineFault.BAD_TOKEN, b"2.0"),
            (b"1\n2\x0b3\n", LineFault.BAD_TOKEN, b"2\x0b3"),
            (b"1\n5 2147483648 x\n", LineFault.TOKEN_TOO_LARGE, b"2147483648"),
            (b"1\n" + b"1" * 5000 + b"\n", LineFault.TOKEN_TOO_LARGE, b"1" * 5000),
        ],
    )
    def test_fault_names_the_text(self, parse, block: bytes, fault: LineFault, text: bytes) -> None:
        parsed = parse(block)
        assert (parsed.fault, parsed.fault_line) == (fault, 2)
        assert block[parsed.fault_begin : parsed.fault_end] == text

    def test_deepest_key(self, parse) -> None:
        assert len(parse(b"1 " * MAX_DEPTH + b"\n").tokens) == MAX_DEPTH
        assert len(parse(b"1 " * (MAX_DEPTH - 1) + b"1\n").tokens) == MAX_DEPTH
        for block in (b"1 " * (MAX_DEPTH + 1) + b"\n", b"1 " * MAX_DEPTH + b"1\n" + b"5\n" * 9):
            parsed = parse(b"7\n" + block)
            assert (parsed.fault, parsed.fault_line) == (LineFault.TOO_DEEP, 2)

    def test_values(self, parse) -> None:
        parsed = parse(b"1 2\t18446744073709551615\textra\n3\t0\n", LineFormat(1, 2))
        assert parsed.values.dtype == np.uint64
        assert parsed.values.tolist() == [(1 << 64) - 1, 0]
        assert parsed.tokens.tolist() == [1, 2, 3]

    def test_value_first(self, parse) -> None:
        parsed = parse(b"9\t1 2\n\n0.5\t3\n", LineFormat(1, 1))
        assert parsed.values.dtype == np.float64
        assert parsed.values.tolist() == [9.0, 0.5]
        assert (parsed.tokens.tolist(), parsed.num_empty) == ([1, 2, 3], 1)

    def test_value_of_no_key_is_passed_over(self, parse) -> None:
        parsed = parse(b"\tjunk\n1\t2\n", LineFormat(1, 2))
        assert (parsed.values.tolist(), parsed.num_empty) == ([2], 1)

    @pytest.mark.parametrize(
        ("line", "column", "fault"),
        [
            (b"1 2", 2, LineFault.MISSING_COLUMN),
            (b"1", 1, LineFault.MISSING_COLUMN),
            (b"1\tx", 2, LineFault.BAD_VALUE),
            (b"1\t", 2, LineFault.BAD_VALUE),
            (b"1\tnan", 2, LineFault.BAD_VALUE),
            (b"1\t1e999", 2, LineFault.BAD_VALUE),
            (b"1\t18446744073709551616", 2, LineFault.VALUE_TOO_LARGE),
            (b"1 2\t3\t4", 4, LineFault.MISSING_COLUMN),
        ],
    )
    def test_bad_values(self, parse, line: bytes, column: int, fault: LineFault) -> None:
        assert parse(line, LineFormat(1, column)).fault == fault


@pytest.mark.parametrize("module", ["native", "python"])
class TestWords:
    @pytest.fixture
    def table(self, module: str):
        if module == "python":
            return python_words()
        if native() is None:
            pytest.skip("the extension is not built")
        return native().WordTable()

    def parse(self, table, block: bytes) -> ParsedLines:
        return ParsedLines(*table.parse(as_bytes_array(block), 1, 0, False, True))

    def test_splits_like_str_split_at_every_code_point(self, table) -> None:
        lines, expected = [], []
        for code in range(sys.maxunicode + 1):
            if 0xD800 <= code <= 0xDFFF or code == 0x0A:
                continue
            text = f"a{chr(code)}b"
            lines.append(text)
            expected.append(len(text.split()))
        parsed = self.parse(table, "\n".join(lines).encode())
        assert parsed.fault == LineFault.NONE
        assert np.diff(parsed.offsets).tolist() == expected

    def test_every_short_byte_string_is_judged_as_by_python(self, table) -> None:
        """All pairs of bytes, and all leads with all second bytes before ordinary continuations."""
        for lead in range(0x80, 0x100):
            for second in range(0x100):
                for rest in (b"", b"\x80", b"\xbf\x80"):
                    word = bytes([lead, second]) + rest
                    if 0x0A in word:
                        continue
                    parsed = self.parse(table, b"x" + word)
                    assert parsed.fault_begin == bad_byte(b"x" + word), word

    def test_nul_is_an_ordinary_character(self, table) -> None:
        parsed = self.parse(table, b"a\0b a\0 a \0 a\0b\n")
        assert parsed.tokens.tolist() == [0, 1, 2, 3, 0]

    def test_words_that_share_heads_and_lengths(self, table) -> None:
        words = [
            b"abcdefgh" * n + tail for n in range(4) for tail in (b"", b"i", b"j", b"ij", b"i\0", b"\0")
        ][1:]
        parsed = self.parse(table, b" ".join(words * 2))
        assert parsed.tokens.tolist() == [*range(len(words)), *range(len(words))]

    def test_many_words(self, table) -> None:
        words = [f"{n:x}" * (1 + n % 5) for n in range(20_000)]
        expected = {word: at for at, word in enumerate(dict.fromkeys(words))}
        parsed = self.parse(table, "\n".join(words).encode())
        assert parsed.tokens.tolist() == [expected[word] for word in words]
        assert table.find(b"not there") == 0xFFFF_FFFF


def test_a_long_line() -> None:
    vocabulary_ = WordVocabulary()
    word = b"y" * (1 << 21)
    parsed = vocabulary_.parse_block(b"a " + word + b" a\n" + word + b"\n", LineFormat())
    assert parsed.tokens.tolist() == [0, 1, 0, 1]


def test_fault_numbers_match_the_header() -> None:
    import re
    from pathlib import Path

    header = (Path(__file__).parents[2] / "cuda/host/parse.hpp").read_text()
    body = re.search(r"enum class LineFault[^{]*{(.*?)};", header, re.S)
    assert body is not None
    found = {name.upper(): int(number) for name, number in re.findall(r"(\w+) = (\d+)", body.group(1))}
    assert found == {fault.name: fault.value for fault in LineFault}
    assert f"kMaxKeyTokens = {MAX_DEPTH};" in header
    assert parse_python.MAX_TOKEN == 0x7FFF_FFFF
