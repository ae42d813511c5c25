"""Rows of a batch that follow its states: what they show, and what stays."""

from __future__ import annotations

import mmap
import random

import numpy as np
import pytest
from masks_world import EOS, trap_vocabulary

from flashtrie_cli.query.token_masks import TokenMasks

VOCABULARY = trap_vocabulary()


def test_states_with_long_lists_share_a_row():
    """Every byte may come first, so the root has a row of its own behind the batch's."""
    members = [bytes([byte, other]) for byte in range(256) for other in (7, 200)]
    masks = TokenMasks.from_strings([*members, "yes"], VOCABULARY, eos=[EOS])
    rows = masks.rows(3)
    want = masks.bitmask(3)
    inner = int(masks.walk_bytes(b"ye"))
    for states, at in [
        ([0, inner, 0], [3, 1, 3]),
        ([inner, 0, masks.ended], [0, 3, 2]),
        ([0, 0, inner], [3, 3, 2]),
    ]:
        assert rows.share(np.array(states, np.uint32)).tolist() == at
        masks.fill(states, want)
        assert np.array_equal(rows.table[at], want)
        rows.fill(np.array(states, np.uint32))
        assert np.array_equal(rows.words, want)
    assert rows.table.shape == (4, masks.num_words)


def test_rows_behind_a_smaller_batch_stay_as_they_are():
    members = [bytes([byte, other]) for byte in range(256) for other in (7, 200)] + [b"q" * 9]
    masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS])
    rows, want, rng = masks.rows(20), masks.bitmask(20), random.Random(1)
    want[:] = 0
    for step in range(400):
        states = np.array([rng.choice([0, 0, rng.randrange(masks.ended)]) for _ in range(rng.randrange(21))])
        states = states.astype(np.uint32)
        masks.fill(states, want)
        if step % 3:
            rows.fill(states)
            assert np.array_equal(rows.words, want)
        else:
            at = rows.share(states)
            assert np.array_equal(rows.table[at], want[: len(states)])
            assert np.array_equal(rows.words[len(states) :], want[len(states) :])
            rows.fill(states)  # the rows of those that share one show nothing in particular


def test_long_lists_without_a_dense_row():
    """A wide vocabulary leaves dense rows to a few of the many long lists; the others go to spare rows, four for a
    batch of 64, while there are any. Every step is compared with rows built anew."""
    members = [bytes([first, second]) for first in range(60) for second in range(first, first + 40)]
    members += [bytes([first, second]) for first in range(40, 60) for second in range(256)]  # 255: "or more"
    masks = TokenMasks.from_strings(
        [*members, *members[::3], b"q" * 9], VOCABULARY, eos=[EOS], vocab_size=200_000
    )
    long = [int(masks.walk_bytes(bytes([first]))) for first in range(60)]
    assert len(masks.set.dense_nodes) < 10
    rows, want, shown, rng = masks.rows(64), masks.bitmask(64), masks.bitmask(64), random.Random(3)
    num_dense = len(masks.set.dense_nodes)
    assert rows.table.shape == (64 + num_dense + 4, masks.num_words)
    known, at_spare = np.ones(64, bool), set()
    for step in range(400):
        weight = rng.choice([0.02, 0.1, 0.7])
        size = rng.choice([64, 64, rng.randrange(65)])
        chosen = [
            rng.choice(long) if rng.random() < weight else rng.randrange(masks.ended + 1) for _ in range(size)
        ]
        states = np.array(chosen, np.uint32)
        masks.fill(states, want)
        shown[:size] = want[:size]
        if step % 50 == 49:
            rows.table[:] = rng.choice([0, -1])  # behind their back, so they are told
            rows.forget()
            shown[size:], known[:] = 0, True
        if rng.random() < 0.3:
            rows.fill(states)
            known[:size] = True
        else:
            at = rows.share(states)
            assert np.array_equal(rows.table[at], want[:size])
            known[:size] = at == np.arange(
                size
            )  # a row whose state is shown elsewhere shows nothing in particular
            spare = np.unique(at[at >= 64 + num_dense])
            assert spare.tolist() == list(range(64 + num_dense, 64 + num_dense + len(spare)))
            at_spare.add(len(spare))
        assert np.array_equal(rows.words[known], shown[known])
    assert {0, 1, 4} <= at_spare <= set(range(5))


def test_equal_states_with_longer_lists_share_a_row():
    """More states than are looked up together, most of them equal: the first shows the others, and states with short
    lists, equal or not, keep their rows. Then smaller batches, whose equal states lie elsewhere."""
    members = [bytes([first, second]) for first in range(40) for second in range(first, first + 10 + first)]
    masks = TokenMasks.from_strings([*members, b"q" * 9], VOCABULARY, eos=[EOS], vocab_size=200_000)
    nodes = [int(masks.walk_bytes(bytes([first]))) for first in range(40)]
    num_rows, num_dense = 600, len(masks.set.dense_nodes)
    rows, want, rng = masks.rows(num_rows), masks.bitmask(num_rows), random.Random(5)
    shared_lengths, spare_rows = set(), set()
    for step in range(120):
        size = num_rows if step % 2 else rng.randrange(num_rows)
        few = rng.sample(nodes, rng.choice([2, 12, 40]))
        chosen = [rng.choice([*few, rng.randrange(masks.ended + 1)]) for _ in range(size)]
        states = np.array(chosen, np.uint32)
        masks.fill(states, want)
        at = rows.share(states)
        assert np.array_equal(rows.table[at], want[:size])
        for i in np.flatnonzero(at != np.arange(size)).tolist():
            shared_lengths.add(len(masks.allowed(int(states[i]))))
            if at[i] < num_rows:
                assert at[i] < i
                assert states[at[i]] == states[i]
        spare_rows |= set(at[at >= num_rows + num_dense].tolist())
        if step % 10 == 0:
            rows.fill(states)
            assert np.array_equal(rows.words[:size], want[:size])
    assert min(shared_lengths) == 17
    assert len([n for n in shared_lengths if n <= 32]) > 10
    assert len(spare_rows) > 16  # more than one group of states has


def test_lists_at_the_end_of_all():
    """Behind the last entries nothing may be read: sets with few entries in all, or a longer list last."""
    sets = [[b"\xfe"], [b"\xfe", b"\xff"], [b"a", *(b"\xfe" + bytes([i]) for i in range(2))]]
    sets += [[b"a", *(b"\xfe" + bytes([i]) for i in range(count))] for count in (3, 4, 5, 7, 18, 31, 33, 90)]
    for members in sets:
        masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS])
        states = np.arange(masks.ended + 1, dtype=np.uint32)[::-1].copy()
        rows, want = masks.rows(len(states)), masks.bitmask(len(states))
        masks.fill(states, want)
        for _ in range(2):
            assert np.array_equal(rows.table[rows.share(states)], want)
            rows.fill(states)
            assert np.array_equal(rows.words, want)


def large_page_kib(begin: int, size: int) -> int:
    """How much of the mappings that overlap [begin, begin + size) lies in large pages, as the system says."""
    found, is_within = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            head = line.split()[0]
            if not head.endswith(":"):
                first, last = (int(part, 16) for part in head.split("-"))
                is_within = first < begin + size and begin < last
            elif head == "AnonHugePages:" and is_within:
                found += int(line.split()[1])
    return found


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages")
def test_rows_lie_in_large_pages():
    """Whatever the heap had in use before: a list's words lie anywhere in the rows."""
    with mmap.mmap(-1, 2**23, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        fresh.madvise(mmap.MADV_HUGEPAGE)
        fresh[:] = bytes(2**23)
        view = np.frombuffer(fresh, np.uint8)
        has_large = large_page_kib(view.ctypes.data, view.nbytes) > 0
        del view
    if not has_large:
        pytest.skip("the system gives no large pages now")
    for _ in range(2):  # the first raises the size from which memory is mapped apart
        used = b"x" * 16_000_000
        del used
    rows = TokenMasks.from_strings(["yes"], VOCABULARY, eos=[EOS], vocab_size=128_256).rows(512)
    assert large_page_kib(rows.table.ctypes.data, rows.table.nbytes) >= rows.table.nbytes // 2048


def test_more_rows_than_numbers_tell_apart():
    masks = TokenMasks.from_strings(["yes"], VOCABULARY, eos=[EOS])
    for num_rows in (2**31 // masks.num_words + 1, 2**40, 2**64 - 1):
        with pytest.raises(ValueError, match="mask rows of more than"):
            masks.rows(num_rows)
    assert masks.rows(0).words.shape == (0, masks.num_words)
