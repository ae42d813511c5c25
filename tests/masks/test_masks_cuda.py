"""Masks and trie steps on a GPU: what is refused, and, with a GPU, every byte as the CPU has it."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
from emulated_tokens import Machine
from masks_world import EOS, EOT, random_states, trap_vocabulary

from flashtrie_cli.engine import cuda_launch
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.index import Index
from flashtrie_cli.query.token_masks import TokenMasks

VOCABULARY = trap_vocabulary()


class FakeArray:
    """A device array that points nowhere."""

    def __init__(self, typestr, shape, strides=None, pointer=4096):
        self.__cuda_array_interface__ = {
            "typestr": typestr, "shape": shape, "strides": strides, "data": (pointer, False), "version": 3,
        }  # fmt: skip


@pytest.fixture
def refusing(token_kernels, monkeypatch):
    machine = Machine(token_kernels, monkeypatch)
    device = machine.masks(TokenMasks.from_strings(["yes"], VOCABULARY, eos=[EOS]))
    launched = len(machine.driver.launches)
    yield device
    assert len(machine.driver.launches) == launched


BATCH = FakeArray("<f4", (2, 400))
STATES = FakeArray("<u4", (2,))


@pytest.mark.parametrize(("logits", "states", "options"), [
    (FakeArray("<f8", (2, 10)), STATES, {}),
    (FakeArray("<f4", (10,)), FakeArray("<u4", (10,)), {}),
    (FakeArray("<f4", (2, 10), (4, 8)), STATES, {}),
    (BATCH, FakeArray("<u4", (3,)), {}),
    (BATCH, FakeArray("<i8", (2,)), {}),
    (BATCH, STATES, {"rows": FakeArray("<u4", (3,))}),
    (BATCH, STATES, {"rows": FakeArray("<i8", (2,))}),
    (np.zeros((2, 10), np.float32), STATES, {}),
    (FakeArray("<f4", (1 << 20, 1 << 29)), FakeArray("<u4", (1 << 20,)), {}),
])  # fmt: skip
def test_wrong_logits_are_refused(refusing, logits, states, options):
    with pytest.raises(InputError):
        refusing.apply(logits, states, **options)


def test_wrong_batches_are_refused(refusing):
    for tokens in (FakeArray("<i2", (2,)), FakeArray("<i8", (2, 1)), FakeArray("<i8", (4,), (16,))):
        with pytest.raises(InputError):
            refusing.advance(STATES, tokens)
    with pytest.raises(InputError):
        refusing.advance(STATES, FakeArray("<i8", (2,)), FakeArray("|u1", (3,)))
    for words in (FakeArray("<i4", (2, 1)), FakeArray("<f4", (2, 99)), FakeArray("<i4", (1, 99))):
        with pytest.raises(InputError):
            refusing.fill(STATES, words)
    for rows in (FakeArray("<i8", (2,)), FakeArray("<f4", (2, 4)), FakeArray("<i8", (3, 4))):
        with pytest.raises(InputError):
            refusing.walk(rows, STATES)


def test_nothing_is_launched_for_nothing(refusing):
    empty = FakeArray("<u4", (0,))
    refusing.apply(FakeArray("<f4", (0, 100)), empty)
    refusing.apply(FakeArray("<f4", (0, 0)), empty)
    refusing.fill(empty, FakeArray("<i4", (0, 99)))
    refusing.advance(empty, FakeArray("<i8", (0,)))
    refusing.walk(FakeArray("<i8", (0, 4)), empty)


def has_gpu() -> bool:
    try:
        return cuda_launch.driver() is not None
    except EngineUnavailable:
        return False


def test_without_a_gpu_it_says_so():
    masks = TokenMasks.from_strings(["yes"], VOCABULARY, eos=[EOS])
    if has_gpu():
        pytest.skip("there is a GPU here")
    with pytest.raises(EngineUnavailable):
        masks.on_device()


def gpu_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch


@pytest.fixture(scope="module")
def masks() -> TokenMasks:
    members = [
        "".join(random.Random(seed).choices(["a", "ab", "yes", "under", "ö", " "], k=6))
        for seed in range(900)
    ]
    members += [bytes([first, second]) for first in range(256) for second in (7, 200)]
    return TokenMasks.from_strings(members, VOCABULARY, eos=[EOS, EOT], vocab_size=len(VOCABULARY) + 9)


@pytest.fixture(scope="module")
def index(flashtrie, tmp_path_factory) -> Index:
    rng = random.Random(2)
    keys = {
        tuple(rng.choice([1, 2, 3, 7_000, 70_123]) for _ in range(rng.randrange(1, 6))) for _ in range(300)
    }
    keys |= {(number,) for number in range(0, 9_000, 3)} | {
        (1, 1, number) for number in range(65_400, 66_100)
    }
    path = tmp_path_factory.mktemp("steps") / "keys.ft"
    lines = "".join(" ".join(map(str, key)) + "\n" for key in sorted(keys))
    done = flashtrie("build", "-", "-o", path, "--input", "ids", stdin=lines.encode())
    assert done.returncode == 0, done.stderr
    return Index.open(str(path))


@pytest.fixture(params=["masks", "trie"])
def answers(request, masks, index):
    return masks if request.param == "masks" else index.steps(eos=[5, 70_300], vocab_size=70_301)


def some_states(answers) -> np.ndarray:
    if isinstance(answers, TokenMasks):
        return np.array(
            [0, answers.ended, *(state for state, _ in random_states(answers, random.Random(1), 70))],
            np.uint32,
        )
    return np.array([0, answers.ended, *range(1, answers.ended, answers.ended // 70)], np.uint32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_logit(answers, dtype):
    torch = gpu_torch()
    device, states = answers.on_device(), some_states(answers)
    held = torch.from_numpy(states.astype(np.int32)).cuda()
    size = answers.vocab_size
    for repeats, width, offset, padding in [
        (1, size, 0, 0),
        (1, size + 70, 3, 5),
        (1, size - 40, 1, 0),
        (90, size, 0, 0),
    ]:
        if repeats * size > 4_000_000:
            continue
        given = states.repeat(repeats)
        raw = torch.randn(len(given) * (width + padding) + offset, device="cuda").to(getattr(torch, dtype))
        logits = torch.as_strided(raw, (len(given), width), (width + padding, 1), offset)
        want = logits.clone()
        kept = torch.zeros(want.shape, dtype=torch.bool)
        for row, state in enumerate(given.tolist()):
            ids = answers.allowed(state)
            kept[row, torch.from_numpy(ids[ids < width].astype(np.int64))] = True
        want[~kept.cuda()] = float("-inf")
        device.apply(logits, held.repeat_interleave(repeats), torch.cuda.current_stream())
        assert torch.equal(logits, want)


@pytest.mark.gpu
def test_every_word_and_state(answers):
    torch = gpu_torch()
    device, states = answers.on_device(), some_states(answers)
    stream = torch.cuda.current_stream()
    held = torch.from_numpy(states.astype(np.int32)).cuda()
    words = torch.full((len(states), answers.num_words), 77, dtype=torch.int32, device="cuda")
    device.fill(held, words, stream)
    want = answers.bitmask(len(states))
    answers.fill(states, want)
    assert np.array_equal(words.cpu().numpy(), want)
    tokens = np.array([int(ids[-1]) if len(ids) else 3 for ids in map(answers.allowed, states.tolist())])
    tokens[::5] = -1
    after, allowed = answers.advance(states, tokens)
    flags = torch.zeros(len(states), dtype=torch.bool, device="cuda")
    device.advance(held, torch.from_numpy(tokens).cuda(), flags, stream)
    assert held.cpu().numpy().astype(np.uint32).tolist() == after.tolist()
    assert flags.cpu().numpy().tolist() == allowed.tolist()
    rows = np.random.default_rng(0).choice(answers.allowed(0).astype(np.int64), (50, 4))
    device.walk(torch.from_numpy(rows).cuda(), held[:50], stream)
    assert np.array_equal(held[:50].cpu().numpy().view(np.uint32), answers.walk(rows))


@pytest.mark.gpu
def test_children_on_a_gpu(index):
    torch = gpu_torch()
    steps = index.steps(eos=(), vocab_size=70_301)
    states = some_states(steps)
    held = torch.from_numpy(states.astype(np.int32)).cuda()
    tokens, nodes = (torch.zeros((len(states), 3_100), dtype=torch.int32, device="cuda") for _ in range(2))
    counts = torch.zeros(len(states), dtype=torch.int32, device="cuda")
    steps.on_device().children(held, tokens, nodes, counts, torch.cuda.current_stream())
    want_tokens, want_nodes, offsets = steps.children(states)
    assert np.array_equal(counts.cpu().numpy(), np.diff(offsets))
    valid = np.arange(3_100) < counts.cpu().numpy()[:, None]
    assert np.array_equal(tokens.cpu().numpy()[valid], want_tokens)
    assert np.array_equal(nodes.cpu().numpy()[valid], want_nodes)


@pytest.mark.gpu
def test_launches_that_overlap_wait_for_one_another(masks):
    """Chains of advance and apply, each on what the one before wrote, as a graph and on a stream of their own."""
    torch = gpu_torch()
    device, states = masks.on_device(), np.zeros(64, np.uint32)
    rng = random.Random(3)
    steps = []
    for _ in range(40):
        tokens = np.array([rng.choice(masks.allowed(int(state)).tolist() or [0]) for state in states])
        states, _ = masks.advance(states, tokens)
        kept = np.zeros((64, masks.vocab_size), bool)
        for row, state in enumerate(states.tolist()):
            kept[row, masks.allowed(state)] = True
        states = np.where(states == masks.ended, 0, states).astype(np.uint32)
        steps.append((torch.from_numpy(tokens).cuda(), kept))
    held = torch.zeros(64, dtype=torch.int32, device="cuda")
    logits = [torch.zeros((64, masks.vocab_size), device="cuda") for _ in steps]

    def run() -> None:
        held.zero_()
        for (tokens, _), batch in zip(steps, logits, strict=True):
            stream = torch.cuda.current_stream()
            batch.zero_()
            device.advance(held, tokens, None, stream)
            device.apply(batch, held, stream)
            held.masked_fill_(held == masks.ended, 0)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        for (_, kept), batch in zip(steps, logits, strict=True):
            assert np.array_equal((batch == 0).cpu().numpy(), kept)


@pytest.mark.gpu
def test_scores_of_a_generation_are_masked_where_they_are(answers):
    """What the processor for transformers does on a GPU, against its lists on the CPU."""
    torch = gpu_torch()
    from flashtrie_cli.query.mask_scatter import allowed_pairs, device_answers, keep_only, masked_on_device

    rng, rows = random.Random(8), []
    for _ in range(40):
        row, state = [9, 9, 9], 0
        while len(row) < 9:
            ids = answers.allowed(state)
            row.append(
                int(rng.choice(ids)) if len(ids) and rng.random() > 0.1 else rng.randrange(answers.vocab_size)
            )
            state = int(answers.advance([state], [row[-1]])[0][0])
        rows.append(row)
    scores = torch.randn((40, answers.vocab_size), device="cuda")
    walked = torch.tensor(rows, device="cuda")[:, 3:]
    device = device_answers(answers, scores)
    assert device is answers.on_device()
    assert device_answers(answers, scores.cpu()) is None
    assert device_answers(answers, scores.double()) is None
    states = np.minimum(answers.walk(walked.cpu().numpy()), answers.ended)
    assert answers.ended in states
    want = keep_only(scores, *allowed_pairs(answers, states, eos_when_ended=True))
    kept = scores.clone()
    assert torch.equal(masked_on_device(device, walked, scores), want)
    assert torch.equal(scores, kept)


@pytest.mark.gpu
def test_vllm_requests_are_masked_on_the_gpu(masks, tmp_path, monkeypatch):
    torch = gpu_torch()
    from flashtrie_cli.query import vllm_masks

    path = tmp_path / "set.ftrie"
    masks.save(str(path))
    monkeypatch.setenv(vllm_masks.ENVIRONMENT, f"set={path}")
    processor = vllm_masks.MaskLogitsProcessor(None, torch.device("cuda"), True)
    first = int(masks.allowed(0)[5])
    outputs = {1: [], 4: [first], 2: [first, -1]}

    params = types.SimpleNamespace(extra_args={vllm_masks.ARGUMENT: "set"})
    added = [(index, params, None, output) for index, output in outputs.items()]
    processor.update_state(types.SimpleNamespace(removed=(), moved=(), added=added))
    logits = torch.randn((6, masks.vocab_size + 5), device="cuda")
    want = logits.clone()
    for index, output in outputs.items():
        ids = (
            masks.eos
            if -1 in output
            else masks.allowed(int(masks.walk([output])[0]) if output else 0).tolist()
        )
        want[index] = float("-inf")
        want[index, list(ids)] = logits[index, list(ids)]
    assert processor.apply(logits) is logits
    assert torch.equal(logits, want)


@pytest.mark.gpu
def test_a_model_on_the_gpu_says_keys_only(index):
    """A tiny recurrent model, sampled: model, masks and steps on the device, nothing copied until the end."""
    torch = gpu_torch()
    torch.manual_seed(0)
    vocab_size, eos, batch = 70_301, 70_300, 200
    steps = index.steps(eos=[eos], vocab_size=vocab_size)
    device = steps.on_device()
    embed = torch.nn.Embedding(vocab_size, 8, device="cuda")
    cell, head = torch.nn.GRUCell(8, 8, device="cuda"), torch.nn.Linear(8, vocab_size, device="cuda")
    states = torch.zeros(batch, dtype=torch.int32, device="cuda")
    tokens = torch.full((batch,), eos, device="cuda")
    hidden, said = torch.zeros((batch, 8), device="cuda"), []
    with torch.no_grad():
        for _ in range(7):
            hidden = cell(embed(tokens), hidden)
            logits = head(hidden)
            device.apply(logits, states, torch.cuda.current_stream(), eos_when_ended=True)
            tokens = torch.multinomial(torch.softmax(logits, -1), 1)[:, 0].contiguous()
            device.advance(states, tokens, None, torch.cuda.current_stream())
            said.append(tokens)
    rows = torch.stack(said, 1).cpu().numpy()
    assert (states == steps.ended).all()
    for row in rows.tolist():
        key = row[: row.index(eos)]
        assert set(row[len(key) :]) == {eos}
        assert steps.walk([[*key, eos]])[0] == steps.ended
    assert len({tuple(row) for row in rows.tolist()}) > 50
