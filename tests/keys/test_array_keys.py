"""Keys out of .npz and .npy, in slices, and a clear line for arrays that are none."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.inputs.arrays import ArrayFile
from flashtrie_cli.keys.array_keys import array_batches
from flashtrie_cli.keys.reader import KeyReader


def flatten(keys: list[list[int]], dtype="uint32") -> dict[str, np.ndarray]:
    offsets = np.cumsum([0, *map(len, keys)])
    return {"tokens": np.array([t for key in keys for t in key], dtype=dtype), "offsets": offsets}


def padded(keys: list[list[int]], dtype="int64", padding: int = -1) -> np.ndarray:
    rows = np.full((len(keys), max(map(len, keys), default=0)), padding, dtype=dtype)
    for row, key in zip(rows, keys, strict=True):
        row[: len(key)] = key
    return rows


def read(path: Path, **options) -> tuple[list[list[int]], list | None]:
    keys, values, row = [], [], 1
    for batch in array_batches(str(path), **options):
        assert batch.tokens.dtype == np.uint32
        assert batch.offsets[0] == 0
        assert batch.lines.tolist() == list(range(row, row + batch.num_keys))
        keys += [
            batch.tokens[a:b].tolist() for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
        ]
        values += batch.values.tolist() if batch.values is not None else []
        row += batch.num_keys
    return keys, values or None


def error_of(path: Path, **options) -> str:
    with pytest.raises((InputError, UsageError)) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


KEYS = [[1, 2, 3], [], [70_000], [2**31 - 1, 0], [5], [], [1, 2]]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64", "uint64", ">i8"])
@pytest.mark.parametrize("limits", [{}, {"batch_tokens": 1}, {"batch_tokens": 3}, {"batch_keys": 2}])
def test_flat(tmp_path: Path, save, dtype: str, limits: dict) -> None:
    path = tmp_path / "keys.npz"
    save(path, **flatten(KEYS, dtype), values=np.arange(7))
    assert read(path, **limits) == (KEYS, list(range(7)))


@pytest.mark.parametrize(
    ("dtype", "padding"), [("int32", -1), ("int64", -1), ("uint32", 0xFFFFFFFF), ("uint64", 0xFFFFFFFF)]
)
@pytest.mark.parametrize("limits", [{}, {"batch_tokens": 1}, {"batch_keys": 2}])
@pytest.mark.parametrize("order", ["C", "F"])
def test_padded(tmp_path: Path, dtype: str, padding: int, limits: dict, order: str) -> None:
    rows = np.array(padded(KEYS, dtype, padding), order=order)
    np.savez(tmp_path / "keys.npz", tokens=rows)
    np.save(tmp_path / "keys.npy", rows)
    assert read(tmp_path / "keys.npz", **limits) == (KEYS, None)
    assert read(tmp_path / "keys.npy", **limits) == (KEYS, None)


def test_small_unsigned_codes_have_no_padding(tmp_path: Path) -> None:
    codes = np.array([[1, 255], [255, 0]], dtype=np.uint8)
    np.save(tmp_path / "codes.npy", codes)
    assert read(tmp_path / "codes.npy")[0] == codes.tolist()


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=12),
    st.integers(1, 9),
    st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_any_keys_in_any_slices(tmp_path_factory, keys: list, batch_tokens: int, batch_keys: int) -> None:
    path = tmp_path_factory.mktemp("any") / "keys.npz"
    for arrays in (flatten(keys), {"tokens": padded(keys)}):
        np.savez(path, **arrays)
        assert read(path, batch_tokens=batch_tokens, batch_keys=batch_keys)[0] == keys


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([3, 1 << 63], dtype=np.uint64), [3, 1 << 63]),
        (np.array([3, 4], dtype=np.int8), [3, 4]),
        (np.array([3, -4], dtype=np.int8), [3.0, -4.0]),
        (np.array([0.5, 2], dtype=np.float32), [0.5, 2.0]),
    ],
)
def test_values(tmp_path: Path, values: np.ndarray, expected: list) -> None:
    np.savez(tmp_path / "x.npz", **flatten([[1], [2]]), values=values)
    found = read(tmp_path / "x.npz")[1]
    assert found == expected
    assert list(map(type, found)) == list(map(type, expected))


def save(path: Path, **arrays: object) -> None:
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})


BAD_ARRAYS = [
    ({"offsets": [0]}, "has no array `tokens` (it has `offsets`)"),
    ({"tokens": [1.5], "offsets": [0, 1]}, "`tokens` is float64, not integers"),
    ({"tokens": ["a"], "offsets": [0, 1]}, "`tokens` is <U1, not integers"),
    ({"tokens": [True], "offsets": [0, 1]}, "`tokens` is bool, not integers"),
    ({"tokens": [1, 2]}, "`tokens` has shape [2]: needs two dimensions, or one and `offsets`"),
    ({"tokens": [[[1]]]}, "`tokens` has shape [1, 1, 1]"),
    ({"tokens": 3, "offsets": [0]}, "`tokens` has shape []"),
    ({"tokens": [[1]], "offsets": [0, 1]}, "one of them is too much"),
    ({"tokens": [1, 2], "offsets": [0.0, 2.0]}, "`offsets` is float64, not integers"),
    ({"tokens": [1, 2], "offsets": [[0, 2]]}, "`offsets` has shape [1, 2]"),
    ({"tokens": [1, 2], "offsets": np.empty(0, int)}, "`offsets` has shape [0]"),
    ({"tokens": [1, 2], "offsets": [1, 2]}, "`offsets` starts with 1, not 0"),
    ({"tokens": [1, 2], "offsets": [0, 2, 1, 2]}, "`offsets` goes back at row 2"),
    ({"tokens": [1, 2], "offsets": [0, 3]}, "`offsets` goes up to 3, but there are 2 tokens"),
    ({"tokens": [1, 2], "offsets": [0, 1]}, "`offsets` ends with 1, but there are 2 tokens"),
    ({"tokens": [1, 2], "offsets": [0]}, "`offsets` ends with 0, but there are 2 tokens"),
    (
        {"tokens": [1], "offsets": np.array([0, 1 << 63], np.uint64)},
        "at row 1 is 9223372036854775808: too large",
    ),
    ({"tokens": [1], "offsets": [0, -(1 << 63)]}, "`offsets` goes back at row 1"),
    ({"tokens": [1, 2, -1], "offsets": [0, 1, 1, 3]}, "`tokens` row 3 has token -1, outside 0 to 2147483647"),
    ({"tokens": [1, 1 << 31], "offsets": [0, 1, 2]}, "`tokens` row 2 has token 2147483648, outside"),
    ({"tokens": [[1, 2], [-2, 3]]}, "`tokens` row 2 has token -2, outside"),
    ({"tokens": [[1, 2], [3, -1], [-1, 3]]}, "`tokens` row 3 has a token behind its padding"),
    ({"tokens": [1] * 65537, "offsets": [0, 1, 65537]}, "`offsets` gives row 2 more than 65535 tokens"),
    ({"tokens": np.ones((2, 65536), int)}, "`tokens` row 1 has more than 65535 tokens"),
    ({"tokens": [[1]], "values": [1, 2]}, "`values` has shape [2], but there are 1 keys"),
    ({"tokens": [[1]], "values": ["a"]}, "`values` is <U1, not numbers"),
    ({"tokens": [[1], [2]], "values": [1.0, np.nan]}, "`values` row 2 is nan, not a finite number"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_ARRAYS, ids=range(len(BAD_ARRAYS)))
@pytest.mark.parametrize("limits", [{}, {"batch_tokens": 1, "batch_keys": 1}])
def test_bad_arrays(tmp_path: Path, arrays: dict, message: str, limits: dict) -> None:
    save(tmp_path / "x.npz", **arrays)
    assert message in error_of(tmp_path / "x.npz", **limits)


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    path.write_bytes(b"")
    assert error_of(path).startswith("is empty")
    path.write_bytes(b"1 2 3\n")
    assert error_of(path).startswith("is neither .npz nor .npy")
    for squeeze in (gzip.compress, zstandard.ZstdCompressor().compress):
        path.write_bytes(squeeze(b"PK"))
        assert error_of(path).startswith("is compressed")
    np.savez(path, tokens=np.array([object()]))
    assert "holds Python objects" in error_of(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tokens.npy", b"nothing of the kind")
    assert "is not a numpy array" in error_of(path)
    with pytest.raises(UsageError, match="stdin"):
        list(KeyReader(["-"], kind="npz"))


@pytest.mark.parametrize("save_with", [np.savez, np.savez_compressed, "npy"])
def test_every_cut_is_found(tmp_path: Path, save_with) -> None:
    path = tmp_path / "x"
    buffer = io.BytesIO()
    if save_with == "npy":
        np.save(buffer, padded(KEYS))
    else:
        save_with(buffer, **flatten(KEYS))
    whole = buffer.getvalue()
    for size in range(0, len(whole), 1 if len(whole) < 400 else 7):
        path.write_bytes(whole[:size])
        error_of(path)


@pytest.mark.parametrize("save_with", [np.savez, np.savez_compressed])
def test_flipped_bytes_never_give_other_keys(tmp_path: Path, save_with) -> None:
    path = tmp_path / "x"
    buffer = io.BytesIO()
    save_with(buffer, **flatten(KEYS))
    whole = buffer.getvalue()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 0x20
        path.write_bytes(flipped)
        try:
            keys = read(path)[0]
        except InputError:
            continue
        assert keys == KEYS


def test_reads_in_slices(tmp_path: Path) -> None:
    """The bytes in memory at a time are those of the slice, not of the file."""
    import tracemalloc

    path = tmp_path / "large.npz"
    np.savez(path, tokens=np.zeros((1 << 21, 4), dtype=np.int32))
    tracemalloc.start()
    count = sum(batch.num_keys for batch in array_batches(str(path), batch_tokens=1 << 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1 << 21
    assert peak < 8 << 20  # of 32 MiB


def test_reader_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **flatten(KEYS))
    reader = KeyReader([str(path), str(path)], kind="npz")
    assert sum(batch.num_keys for batch in reader) == reader.stats.num_keys_read == 14
    assert reader.stats.num_bytes_read == reader.total_size == 2 * path.stat().st_size
    assert reader.stats.num_empty_lines_skipped == 0
    assert len(reader.source_digest) == 64


def test_bytes_read_grow_with_the_batches(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, tokens=np.zeros((1 << 19, 4), dtype=np.uint8))
    reader = KeyReader([str(path)], kind="npz")
    seen = [reader.stats.num_bytes_read / path.stat().st_size for _ in reader]
    assert seen == [0.5, 1.0]


def header(shape: str) -> bytes:
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("(-3, 2)", "impossible shape"),
        ("(2, -1)", "impossible shape"),
        (f"(2, {2**40}, {2**40})", "needs two dimensions"),
        (f"({2**62}, {2**62})", "truncated"),
        (f"({2**40}, 1)", "truncated"),
        ("(1.5,)", "is not a numpy array"),
    ],
)
def test_lying_headers(tmp_path: Path, shape: str, message: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(header(shape) + bytes(64))
    assert message in error_of(path)


def test_array_file_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.arange(3), b=np.arange(4))
    with ArrayFile(str(tmp_path / "x.npz")) as file:
        assert file.names == ["a", "b"]
        assert file.stream("b").take(9).tolist() == [0, 1, 2, 3]
