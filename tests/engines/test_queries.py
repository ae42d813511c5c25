"""Look-ups, prefixes and walks: cpu = reference = a Python list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Key, Oracle, engines, flat
from strategies import LARGEST, key_lists, probes

from flashtrie_cli import Index


def keys_of(lists: object) -> list[tuple[int, Key]]:
    return [
        (int(key_id), tuple(keys.tokens[a:b].tolist()))
        for keys in lists  # type: ignore[attr-defined]
        for key_id, a, b in zip(keys.key_ids, keys.offsets[:-1], keys.offsets[1:], strict=True)
    ]


def check(keys: list[Key], questions: list[Key], indexes: tuple[Index, ...], batch_size: int = 7) -> None:
    oracle = Oracle(keys)
    expected = [(oracle.key_ids[key], key) for key in oracle.keys]
    for index in indexes:
        assert index.num_keys == len(oracle.keys)
        assert index.num_nodes == len(oracle.nodes)
        assert keys_of(index.keys(batch_size=batch_size)) == expected
        assert index.lookup(*flat(questions)).tolist() == [oracle.key_id(key) for key in questions]
        nodes = index.engine.find_nodes(
            *(a.astype(t) for a, t in zip(flat(narrow(questions)), (np.uint32, np.int64), strict=True))
        )
        assert nodes.tolist() == [oracle.nodes.get(key, 2**32 - 1) for key in narrow(questions)]
        for key in questions[:12]:
            found = keys_of(index.prefix(key, batch_size=batch_size))
            assert found == [(oracle.key_ids[k], k) for k in oracle.extensions(key)]
            lengths, key_ids = index.common_prefix(key)
            below = oracle.common_prefixes(key)
            assert lengths.tolist() == [len(k) for k in below]
            assert key_ids.tolist() == [oracle.key_ids[k] for k in below]
        ids = np.array([*range(len(oracle.by_id)), *range(len(oracle.by_id))][::-1], np.uint32)
        assert keys_of([index.key_tokens(ids)]) == [(int(i), oracle.by_id[i]) for i in ids]
        with pytest.raises(IndexError):
            index.key_tokens([len(oracle.by_id)])


def narrow(questions: list[Key]) -> list[Key]:
    return [key for key in questions if all(token < 2**32 for token in key)]


@given(key_lists(), st.data(), st.sampled_from(("raw", "zstd")), st.sampled_from((1, 2, 1000)))
def test_all_questions(keys: list[Key], data: st.DataObject, codec: str, batch_size: int) -> None:
    check(keys, data.draw(probes(keys)), engines(keys, codec=codec), batch_size)


@pytest.mark.parametrize("step", [1, 65_536])
@pytest.mark.parametrize("fan_out", [1, 2, 7, 8, 9, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_fan_outs(fan_out: int, step: int) -> None:
    """Alone, beside small siblings, and with children of their own."""
    wide = [(5, i * step % (LARGEST + 1)) for i in range(fan_out)]
    keys = [*wide, (4,), (6, 1), *((5, i * step, 3) for i in range(0, fan_out, 5)), (7, 7, 7)]
    questions = [*keys, (5,), (5, fan_out * step), (5, step + 1), (6,), (7, 7)]
    check(keys, questions, engines(keys), batch_size=100)


@pytest.mark.parametrize("fan_out", [65_535, 65_536])
def test_the_widest_fan_outs_of_16_bits(fan_out: int) -> None:
    keys = [(i,) for i in range(fan_out)]
    index, reference = engines(keys)
    found = index.lookup(*flat([*keys, (fan_out,), (fan_out + 65_536,)])).tolist()
    assert found == [*range(fan_out), -1, -1]
    assert reference.lookup(*flat(keys[-3:])).tolist() == found[fan_out - 3 : fan_out]
    assert [key_id for key_id, _ in keys_of(index.prefix([fan_out - 1]))] == [fan_out - 1]


def test_more_than_16_bits_of_siblings() -> None:
    keys = [(i * 3,) for i in range(70_000)]
    index, _ = engines(keys)
    assert index.lookup(*flat(keys)).tolist() == list(range(70_000))
    assert index.lookup(*flat([(i * 3 + 1,) for i in range(70_000)])).max() == -1


@pytest.mark.parametrize("count", [*range(60, 69), *range(124, 132), *range(508, 517), 575, 576, 577])
def test_node_counts_around_words_and_lines(count: int) -> None:
    """Stars, chains and combs of so many nodes: every end of a 64-bit word, a line, a wide row."""
    star = [(i,) for i in range(count - 1)]
    chain = [tuple(range(count - 1))]
    comb = [(1,) * depth + (0,) for depth in range(count // 2)]
    for keys in (star, chain, comb):
        tail = keys[-1]
        check(keys, [*keys[:3], *keys[-3:], tail[:-1], (*tail, 1), ()], engines(keys), batch_size=64)


def test_the_longest_key() -> None:
    key = tuple(i * 7919 % 65_536 for i in range(65_535))
    index, reference = engines([key])
    assert index.meta["depth"] == 65_535
    for opened in (index, reference):
        assert opened.lookup(*flat([key, key[:-1], (*key, 1)])).tolist() == [0, -1, -1]
        assert keys_of(opened.keys()) == [(0, key)]
        assert [a.tolist() for a in opened.common_prefix(key)] == [[65_535], [0]]
        assert tuple(opened.key_tokens([0]).tokens.tolist()) == key


def test_every_prefix_of_a_long_key_is_a_key() -> None:
    """The keys hold 18 million tokens, so batches must be cut by tokens, not by keys alone."""
    keys = [(1,) * size for size in range(6_000)]
    index, _ = engines(keys)
    sizes, largest = 0, 0
    for batch in index.keys():
        sizes += len(batch)
        largest = max(largest, len(batch.tokens))
    assert sizes == 6_000
    assert largest < 3_000_000
    assert index.common_prefix(keys[-1])[0].tolist() == list(range(6_000))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_no_keys_and_the_empty_key(codec: str) -> None:
    check([], [(), (0,), (LARGEST,)], engines([], codec=codec))
    check([()], [(), (0,)], engines([()], codec=codec))
    check([(), (0,)], [(), (0,), (0, 0)], engines([(), (0,)], codec=codec))


@pytest.mark.parametrize("threads", [1, 2, 3, 100])
def test_threads_do_not_show(threads: int) -> None:
    keys = [(i % 101, i % 103, i) for i in range(30_000)]
    _, _ = engines(keys)
    from oracle import scratch

    index = Index.open(scratch("oracle.ft"), threads=threads)
    oracle = Oracle(keys)
    assert index.lookup(*flat(keys)).tolist() == [oracle.key_ids[key] for key in keys]
