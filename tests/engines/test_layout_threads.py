"""An index that several threads lay out is the index that one lays out, and is refused for the same reasons."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashtrie_cli import BuildOptions, Index, build_index
from flashtrie_cli.engine.cpu import native
from flashtrie_cli.keys.batch import KeyBatch


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Well over half a million nodes: some wide, labels above 16 bits, keys that are prefixes of others."""
    rng = np.random.default_rng(5)
    count = 420_000
    keys = np.stack(
        [rng.zipf(1.1, count) % 70_000, rng.integers(0, 9000, count), rng.integers(0, 90_000, count)]
    )
    lengths = rng.choice([1, 3], count, p=[0.05, 0.95])
    flat = np.concatenate([keys[:length, i] for i, length in enumerate(lengths)]).astype(np.uint32)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    target = str(tmp_path_factory.mktemp("layout") / "index.ft")
    build_index([KeyBatch(flat, offsets, None, None, "keys")], target, options=BuildOptions(codec="zstd"))
    return target


def parts(index: Index) -> dict[str, np.ndarray]:
    trie: Any = index.engine.trie  # type: ignore[attr-defined]
    names = ("lines", "wide", "label_low", "high_flags", "label_high", "level_starts")
    return {name: np.array(getattr(trie, name)) for name in names} | {"terminal": index.stored.terminal}  # type: ignore[dict-item]


def test_the_same_arrays(path: str) -> None:
    one, several = (Index.open(path, engine="cpu", threads=threads) for threads in (1, 4))
    assert one.num_nodes > 500_000
    assert len(parts(one)["wide"]) > 0
    for (name, expected), found in zip(parts(one).items(), parts(several).values(), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)


def compact(path: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    stored = Index.open(path, engine="reference").stored
    assert stored.label_delta is not None
    assert stored.inner_terminal is not None
    return (
        np.array(stored.louds),
        np.array(stored.label_delta),
        np.array(stored.inner_terminal),
        stored.num_nodes,
    )


@pytest.mark.parametrize("threads", [2, 5])
def test_restored_from_compact_sections(path: str, threads: int) -> None:
    louds, delta, inner, count = compact(path)
    module = native()
    for restore, section in ((module.restore_labels, delta), (module.restore_terminal, inner)):
        np.testing.assert_array_equal(
            restore(louds, count, section, threads), restore(louds, count, section, 1)
        )


@pytest.mark.parametrize("place", [0, 1, 300_000, 700_000])
def test_louds_with_a_bit_too_many_or_too_few(path: str, place: int) -> None:
    """Whatever one thread says of it, four say."""
    louds, delta, inner, count = compact(path)
    louds[place >> 6] ^= np.uint64(1 << (place & 63))
    module = native()

    def outcome(restore: Any, section: np.ndarray, threads: int) -> Any:
        try:
            return restore(louds, count, section, threads).tobytes()
        except ValueError as error:
            return str(error)

    for restore, section in ((module.restore_labels, delta), (module.restore_terminal, inner)):
        assert outcome(restore, section, 4) == outcome(restore, section, 1)


def test_louds_of_other_nodes_with_as_many_ones(path: str) -> None:
    """Ones and zeros as they should be, at the wrong places: refused, or another tree, but the same for all threads."""
    louds, _, _, count = compact(path)
    rng = np.random.default_rng(3)
    bits = np.unpackbits(louds.view(np.uint8), bitorder="little")
    middle = bits[1000 : 2 * count - 1000]
    rng.shuffle(middle)
    louds = np.packbits(bits, bitorder="little").view(np.uint64)
    terminal = np.full(-(-count // 64), ~np.uint64(0))
    terminal[-1] = (1 << (count - 64 * (len(terminal) - 1))) - 1

    def outcome(threads: int) -> Any:
        try:
            trie = native().Trie(
                louds=louds, terminal=terminal, label_low=np.zeros(count, np.uint16),
                high_flags=np.zeros(0, np.uint64), label_high=np.zeros(0, np.uint64), high_width=0, num_nodes=count,
                num_threads=threads,
            )  # fmt: skip
        except ValueError as error:
            return str(error)
        return trie.lines.tobytes()

    assert outcome(4) == outcome(1)
