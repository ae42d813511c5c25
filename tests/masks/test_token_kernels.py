"""The kernels of token masks and of token-trie steps, on the emulated machine: every byte as the CPU has it."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from emulated_tokens import MINUS_INFINITY, TYPESTRS, DeviceNumpy, Machine
from masks_world import EOS, EOT, FIRST_BYTE, random_states, trap_vocabulary

from flashtrie_cli.engine import cuda_masks, cuda_tokens, cuda_trie_steps
from flashtrie_cli.index import Index
from flashtrie_cli.query.token_masks import TokenMasks

VOCABULARY = trap_vocabulary()
MEMBERS = [
    "".join(random.Random(seed).choices(["a", "ab", "yes", "under", "ö", " "], k=6)) for seed in range(900)
]
MANY_EOS = [EOS, EOT, *range(330, 366)]


@pytest.fixture(params=[90, 80])
def machine(request, token_kernels, monkeypatch) -> Machine:
    return Machine(token_kernels, monkeypatch, arch=request.param)


@pytest.fixture(scope="module", params=[[EOS, EOT], MANY_EOS], ids=["2 ends", "38 ends"])
def masks(request) -> TokenMasks:
    """Lists of all lengths: the root allows every byte and more, some nodes 40 tokens, most a few."""
    members = MEMBERS + [bytes([first, second]) for first in range(256) for second in (7, 200)]
    members += [b"q" + bytes([byte]) for byte in range(10, 50)]
    masks = TokenMasks.from_strings(members, VOCABULARY, eos=request.param, vocab_size=len(VOCABULARY) + 59)
    assert masks.set.dense_nodes.tolist() == [0, *masks.walk([[FIRST_BYTE + ord("q")]])]
    return masks


@pytest.fixture(scope="module")
def index(flashtrie, tmp_path_factory) -> Index:
    """Tokens of more than 16 bits, and fan-outs of 1, some 20, 700 and 3,000."""
    rng = random.Random(2)
    keys = {
        tuple(rng.choice([1, 2, 3, 7_000, 70_123]) for _ in range(rng.randrange(1, 6))) for _ in range(300)
    }
    keys |= {(number,) for number in range(0, 9_000, 3)} | {
        (1, 1, number) for number in range(65_400, 66_100)
    }
    keys |= {(2, number) for number in range(0, 100, 2)}
    path = tmp_path_factory.mktemp("steps") / "keys.ft"
    lines = "".join(" ".join(map(str, key)) + "\n" for key in sorted(keys))
    done = flashtrie("build", "-", "-o", path, "--input", "ids", stdin=lines.encode())
    assert done.returncode == 0, done.stderr
    return Index.open(str(path))


def some_states(answers, extra: int) -> np.ndarray:
    """The root, the end, one past it, and others."""
    rng = np.random.default_rng(3)
    others = rng.integers(0, answers.ended, extra)
    if not isinstance(answers, TokenMasks):
        others = [*others, *answers.walk([[1, 1]]), *answers.walk([[2]])]  # fan-outs of 700 and 50
    return np.array([0, answers.ended, answers.ended + 5, 0xFFFF_FFFF, *others, 0], np.uint32)


def lists_of(answers, states, *, eos_when_ended: bool = False) -> list[np.ndarray]:
    known = np.minimum(states, answers.ended)
    ended = np.array(answers.eos if eos_when_ended else [], np.uint32)
    return [answers.allowed(int(state)) if state < answers.ended else ended for state in known]


def check_apply(machine, device, answers, states, dtype, width, offset, padding, **options):
    kind = np.uint32 if dtype == "float32" else np.uint16
    size = kind().itemsize
    room = (
        np.random.default_rng(1)
        .integers(1, 60_000, len(states) * (width + padding) + offset + 64)
        .astype(kind)
    )
    room = room[-room.ctypes.data % 128 // size :]  # begins with a line of memory
    before = room.copy()
    logits = np.lib.stride_tricks.as_strided(
        room[offset:], (len(states), width), ((width + padding) * size, size)
    )
    device.apply(DeviceNumpy(logits, TYPESTRS[dtype]), DeviceNumpy(states), 77, **options)
    want = before.copy()
    for row, ids in enumerate(lists_of(answers, states, **options)):
        begin = offset + row * (width + padding)
        ids = begin + ids[ids < width].astype(np.int64)
        kept = before[ids]
        want[begin : begin + width] = MINUS_INFINITY[dtype]
        want[ids] = kept
    assert np.array_equal(room, want)
    return machine.driver.launches[-1]


def machine_for(form: str, token_kernels, monkeypatch) -> Machine:
    """One whose batches, small as they are, take this form."""
    for kind in (cuda_masks.CudaMasks, cuda_trie_steps.CudaTrieSteps):
        monkeypatch.setattr(kind, "pair_bytes", dict.fromkeys((2, 4), 1 << 30 if form == "v2" else 0))
    monkeypatch.setattr(cuda_masks.CudaMasks, "long_first_bytes", 0 if form == "long4" else 1 << 30)
    return Machine(token_kernels, monkeypatch, num_multiprocessors=10_000 if form == "v1" else 0)


@pytest.mark.parametrize("num_blocks", [1, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_lists_come_first_in_a_large_batch(token_kernels, monkeypatch, masks, dtype, num_blocks):
    machine_for("long4", token_kernels, monkeypatch)
    monkeypatch.setattr(cuda_tokens, "LONG_BLOCKS_PER_MULTIPROCESSOR", ((1 << 62, num_blocks),))
    monkeypatch.setattr(cuda_tokens, "_RESIDENT_WARPS", 0)
    machine = Machine(token_kernels, monkeypatch)
    states = np.concatenate([[1], some_states(masks, 8), np.zeros(5), some_states(masks, 250), [2]]).astype(
        np.uint32
    )
    launched = check_apply(machine, machine.masks(masks), masks, states, dtype, masks.vocab_size, 3, 1)
    assert launched[:2] == (f"mask_apply_{dtype}_long4", num_blocks + -(-len(states) // 8))


def test_the_form_follows_the_size_of_the_batch(machine, masks, index):
    device = machine.masks(masks)
    device._num_multiprocessors = 100
    sizes = (1_600 << 10, (1_600 << 10) + 1, 10 << 20, 20 << 20, 160 << 20, 1 << 40)
    forms = [("v1", 1, 0), ("v2", 2, 0), ("v2", 2, 0), ("v4", 4, 0), ("long4", 4, 400), ("long4", 4, 600)]
    assert [device._form(size, 4) for size in sizes] == forms
    steps = machine.trie_steps(index.steps(eos=[], vocab_size=70_301))
    assert [steps._form(8 << 20, size) for size in (2, 4)] == [("v2", 2, 0), ("v4", 4, 0)]
    assert steps._form(1 << 40, 2) == ("v4", 4, 0)


def test_masked_logits_of_some_rows(machine, masks, monkeypatch):
    device = machine.masks(masks)
    logits = np.random.default_rng(5).random((9, masks.vocab_size), np.float32)
    rows, states = np.array([7, 0, 3], np.int32), np.array([0, 1, masks.ended], np.uint32)
    want = logits.copy()
    for row, ids in zip(rows, lists_of(masks, states), strict=True):
        want[row] = -np.inf
        want[row, ids] = logits[row, ids]
    for vectors, long_blocks in ((1, 0), (4, 0), (4, 6)):
        form = (f"long{vectors}" if long_blocks else f"v{vectors}", vectors, long_blocks)
        monkeypatch.setattr(device, "_form", lambda *sizes, form=form: form)
        given = logits.copy()
        device.apply(DeviceNumpy(given), DeviceNumpy(states), rows=DeviceNumpy(rows))
        assert np.array_equal(given, want)
    held = states[::-1].copy()
    mask = device.prepare(DeviceNumpy(given), DeviceNumpy(held), rows=DeviceNumpy(rows))
    held[:] = states
    for _ in range(2):
        given[:] = logits
        mask(5)
        assert np.array_equal(given, want)


SHAPES = [(0, 0, 0), (70, 3, 5), (-40, 1, 0), (-300, 5, 2)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", ["v1", "v2", "v4"])
def test_masked_logits(token_kernels, monkeypatch, masks, dtype, form):
    machine = machine_for(form, token_kernels, monkeypatch)
    device = machine.masks(masks)
    states = np.concatenate(
        [some_states(masks, 6), [state for state, _ in random_states(masks, random.Random(1), 8)]]
    ).astype(np.uint32)
    for change, offset, padding in SHAPES:
        kernel, _, stream = check_apply(
            machine, device, masks, states, dtype, masks.vocab_size + change, offset, padding
        )
        assert kernel == f"mask_apply_{dtype}_{form}"
        assert stream == 77
    check_apply(machine, device, masks, states, dtype, masks.vocab_size, 0, 0, eos_when_ended=True)
    of_whole_lines = masks.vocab_size + -masks.vocab_size % 64
    check_apply(machine, device, masks, states, dtype, of_whole_lines, 0, 0)
    check_apply(machine, device, masks, states[:1], dtype, 3, 1, 0)
    listed = np.array([0, *masks.walk([[FIRST_BYTE + ord("q")]]), 0], np.uint32)
    monkeypatch.setattr(cuda_masks, "MAX_DENSE_BYTES", 0)
    check_apply(machine, machine.masks(masks), masks, listed, dtype, masks.vocab_size, 0, 0)


@pytest.mark.parametrize(("dtype", "form"), [("float32", "v2"), ("float32", "v4"), ("bfloat16", "v4")])
def test_logits_held_to_a_trie(token_kernels, monkeypatch, index, dtype, form):
    steps = index.steps(eos=[5, 70_300], vocab_size=70_301)
    machine = machine_for(form, token_kernels, monkeypatch)
    device = machine.trie_steps(steps)
    for change, offset, padding in SHAPES[:2]:
        check_apply(
            machine, device, steps, some_states(steps, 4), dtype, steps.vocab_size + change, offset, padding
        )
    check_apply(machine, device, steps, some_states(steps, 1), dtype, 70_301, 0, 0, eos_when_ended=True)


def check_words(device, answers, states):
    want = answers.bitmask(len(states))
    answers.fill(np.minimum(states, answers.ended), want)
    for extra in (0, 3):
        words = np.full((len(states) + 1, answers.num_words + extra), 0x5A5A5A5A, np.int32)
        device.fill(DeviceNumpy(states), DeviceNumpy(words))
        assert np.array_equal(words[:-1, : answers.num_words], want)
        assert np.all(words[-1] == 0x5A5A5A5A)
        assert np.all(words[:, answers.num_words :] == 0x5A5A5A5A)


def test_mask_words(machine, masks, index):
    check_words(machine.masks(masks), masks, some_states(masks, 20))
    steps = index.steps(eos=[5, 70_300], vocab_size=70_301)
    check_words(machine.trie_steps(steps), steps, some_states(steps, 6))


def check_advance(device, answers, states, rng):
    """Allowed tokens, tokens that are not, and numbers that are none."""
    tokens = []
    for at, ids in enumerate(lists_of(answers, states)):
        choices = [-1, 1 << 40, answers.vocab_size, answers.vocab_size - 1, rng.randrange(answers.vocab_size)]
        tokens.append(int(rng.choice(ids)) if len(ids) and at % 3 else rng.choice(choices))
    want, allowed = answers.advance(np.minimum(states, answers.ended), tokens)
    want = np.where(allowed, want, states)
    for kind in (np.int64, np.int32):
        held, flags = states.copy(), np.full(len(states), 9, np.uint8)
        given = np.array(tokens)
        if kind == np.int32:
            given[given > 1 << 31] = -7
        device.advance(DeviceNumpy(held), DeviceNumpy(given.astype(kind)), DeviceNumpy(flags))
        assert np.array_equal(held, want)
        assert np.array_equal(flags, allowed)
    held = states.copy()
    device.advance(DeviceNumpy(held), DeviceNumpy(np.array(tokens)))
    assert np.array_equal(held, want)


def check_walk(device, answers, rows):
    want = answers.walk(rows)
    padded = np.full((len(rows), rows.shape[1] + 4), -5, np.int64)
    padded[:, 2:-2] = rows
    for given in (rows, rows.astype(np.int32), padded[:, 2:-2]):
        states = np.full(len(rows), 99, np.int32)
        device.walk(DeviceNumpy(given), DeviceNumpy(states))
        assert np.array_equal(states.view(np.uint32), want)
    assert {0xFFFF_FFFF, answers.ended} <= set(want.tolist())
    states = np.full(3, 99, np.uint32)
    device.walk(DeviceNumpy(np.zeros((3, 0), np.int64)), DeviceNumpy(states))
    assert not states.any()


def random_walks(answers, rng, count: int, length: int) -> np.ndarray:
    rows = np.full((count, length), -1, np.int64)
    for row in rows:
        state = 0
        for at in range(length):
            ids = answers.allowed(state)
            row[at] = (
                rng.choice(ids) if len(ids) and rng.random() > 0.05 else rng.randrange(answers.vocab_size)
            )
            after, allowed = answers.advance([state], [row[at]])
            state = int(after[0])
            if not allowed[0]:
                break
    return rows


def test_masks_advance_and_walk(machine, masks):
    device, rng = machine.masks(masks), random.Random(4)
    check_advance(device, masks, some_states(masks, 300), rng)
    check_walk(device, masks, random_walks(masks, rng, 60, 9))


def test_far_ways_are_walked(machine):
    """Members so many that a token leads further than an entry's distance can say."""
    members = [f"{number:07d}" for number in range(40_000)] + ["yes" * 100, "z"]
    vocabulary = VOCABULARY
    masks = TokenMasks.from_strings(members, vocabulary, eos=[EOS], vocab_size=1 << 18)
    assert len(masks.arrays.far_entries) > 0
    device, rng = machine.masks(masks), random.Random(4)
    states = np.zeros(64, np.uint32)
    check_advance(device, masks, states, rng)
    check_walk(device, masks, random_walks(masks, rng, 20, 9))


def test_trie_steps_advance_and_walk(machine, index):
    steps = index.steps(eos=[5, 70_300], vocab_size=70_301)
    device, rng = machine.trie_steps(steps), random.Random(4)
    check_advance(device, steps, some_states(steps, 150), rng)
    check_walk(device, steps, random_walks(steps, rng, 30, 6))
    ended_by_label = index.steps(eos=[2], vocab_size=70_301)
    check_advance(machine.trie_steps(ended_by_label), ended_by_label, some_states(ended_by_label, 150), rng)


@pytest.mark.parametrize("capacity", [0, 1, 50, 3_100])
def test_children_as_lists(machine, index, capacity):
    steps = index.steps(eos=[], vocab_size=70_301)
    device = machine.trie_steps(steps)
    states = some_states(steps, 30)
    tokens, nodes = (np.full((len(states), capacity), 7, np.uint32) for _ in range(2))
    counts = np.full(len(states), 7, np.uint32)
    device.children(*(DeviceNumpy(array) for array in (states, tokens, nodes, counts)))
    want_tokens, want_nodes, offsets = steps.children(np.minimum(states, steps.ended))
    assert np.array_equal(counts, np.diff(offsets))
    for row in range(len(states)):
        count = min(int(counts[row]), capacity)
        part = slice(int(offsets[row]), int(offsets[row]) + count)
        assert np.array_equal(tokens[row, :count], want_tokens[part])
        assert np.array_equal(nodes[row, :count], want_nodes[part])
        assert np.all(tokens[row, count:] == 7)
        assert np.all(nodes[row, count:] == 7)


def test_the_longest_lists_have_dense_rows(masks):
    rows = masks.set.plain()[0]
    q = int(masks.walk([[FIRST_BYTE + ord("q")]])[0])
    assert cuda_masks.long_lists(rows, 100).tolist() == [0, q]
    assert cuda_masks.long_lists(rows, 1).tolist() == [0]
    assert cuda_masks.long_lists(rows, 0).tolist() == []


def test_the_widest_nodes_have_dense_rows(index):
    steps = index.steps(eos=[], vocab_size=70_301)
    widest = cuda_trie_steps.widest_nodes(steps._trie, 100)
    tokens, _, offsets = steps.children(np.arange(steps.ended, dtype=np.uint32))
    assert widest.tolist() == np.flatnonzero(np.diff(offsets) > cuda_trie_steps.DENSE_FAN_OUT).tolist()
    assert len(widest) == 2
    assert cuda_trie_steps.widest_nodes(steps._trie, 1).tolist() == [0]
    assert len(tokens) == steps.ended - 1


def test_parameters_are_as_large_as_the_kernels_say(token_kernels, machine, masks, index):
    sizes = (ctypes.c_uint64 * 10)()
    token_kernels.token_param_sizes(sizes)
    kinds = []
    for device in (machine.masks(masks), machine.trie_steps(index.steps(eos=[], vocab_size=70_301))):
        kinds += [device._apply_params, device._fill_params, device._advance_params, device._walk_params]
        kinds.append(getattr(device, "_children_params", cuda_masks.RecordParams))
    assert [ctypes.sizeof(kind) for kind in kinds] == list(sizes)
