"""Masks on a GPU: what is launched, seen through a driver that only takes notes; and, with a GPU, every byte."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest
from masks_world import EOS, EOT, random_states, trap_vocabulary

from flashtrie_cli.engine import cuda_launch, cuda_masks
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.token_masks import TokenMasks

VOCABULARY = trap_vocabulary()


class NotingDriver:
    """Stands for libcuda: every launch is kept with its grid, block, stream and a copy of its parameters."""

    def __init__(self):
        self.launches = []

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = 1
        self.kernel = name.decode()
        return 0

    def cuLaunchKernel(self, function, *arguments):
        *shape, stream, params, _ = arguments
        kind = cuda_masks._AdvanceParams if self.kernel == "mask_advance" else cuda_masks._ApplyParams
        copied = kind.from_buffer_copy(ctypes.string_at(params[0], ctypes.sizeof(kind)))
        self.launches.append((self.kernel, [size.value for size in shape], stream.value, copied))
        return 0


class FakeArray:
    """A device array that points nowhere."""

    def __init__(self, typestr, shape, strides=None, pointer=4096):
        self.__cuda_array_interface__ = {
            "typestr": typestr, "shape": shape, "strides": strides, "data": (pointer, False), "version": 3,
        }  # fmt: skip


@pytest.fixture
def noted(monkeypatch):
    driver = NotingDriver()
    monkeypatch.setattr(cuda_launch, "_driver", driver)
    masks = object.__new__(cuda_masks.CudaMasks)
    masks._module = object.__new__(cuda_launch.KernelModule)
    masks._module._handle, masks._module._kernels = ctypes.c_void_p(1), {}
    masks._num_multiprocessors = 132
    masks._view = cuda_masks._MaskView(num_nodes=10, vocab_size=128_256)
    masks._dense = {"dense_nodes": 64, "dense_words": 128, "num_dense": 0, "words_per_row": 4008}
    return driver, masks


def test_structures_are_as_large_as_the_kernels_say():
    sizes = [
        ctypes.sizeof(kind)
        for kind in (cuda_masks._MaskView, cuda_masks._ApplyParams, cuda_masks._AdvanceParams)
    ]
    assert sizes == [64, 128, 96]


@pytest.mark.parametrize(("typestr", "size"), [("<f4", 4), ("<f2", 2)])
@pytest.mark.parametrize("rows", [1, 32, 256])
@pytest.mark.parametrize("width", [1, 7, 128_256, 262_145])
def test_chunks_cover_a_row_wherever_it_starts(noted, typestr, size, rows, width):
    driver, masks = noted
    masks.apply(FakeArray(typestr, (rows, width)), FakeArray("<u4", (rows,)), 77)
    kernel, (grid, *shape), stream, params = driver.launches[-1]
    assert kernel == f"mask_apply_float{8 * size}"
    assert shape == [1, 1, 256, 1, 1, 0]
    assert stream == 77
    assert (params.num_rows, params.width, params.row_stride) == (rows, width, width)
    assert params.num_chunks * cuda_masks.CHUNK_BYTES >= width * size + 16 - size
    assert grid == min(rows * params.num_chunks, 5 * 132)


def test_rows_of_a_wider_buffer(noted):
    driver, masks = noted
    masks.apply(FakeArray("<f4", (4, 100), (4 * 128, 4)), FakeArray("<i4", (4,)))
    assert driver.launches[-1][3].row_stride == 128
    masks.apply(FakeArray("<f4", (0, 100)), FakeArray("<i4", (0,)))
    assert len(driver.launches) == 1


def test_advancing(noted):
    driver, masks = noted
    masks.advance(FakeArray("<u4", (300,)), FakeArray("<i8", (300,)), FakeArray("|u1", (300,), pointer=8192))
    kernel, (grid, *_), _, params = driver.launches[-1]
    assert (kernel, grid, params.token_bytes, params.allowed) == ("mask_advance", 2, 8, 8192)
    masks.advance(FakeArray("<u4", (3,)), FakeArray("<i4", (3,)))
    assert driver.launches[-1][3].token_bytes == 4
    assert driver.launches[-1][3].allowed is None


@pytest.mark.parametrize(("logits", "states"), [
    (FakeArray("<f8", (2, 10)), FakeArray("<u4", (2,))),
    (FakeArray("<f4", (10,)), FakeArray("<u4", (10,))),
    (FakeArray("<f4", (2, 10), (4, 8)), FakeArray("<u4", (2,))),
    (FakeArray("<f4", (2, 10)), FakeArray("<u4", (3,))),
    (FakeArray("<f4", (2, 10)), FakeArray("<i8", (2,))),
    (np.zeros((2, 10), np.float32), FakeArray("<u4", (2,))),
])  # fmt: skip
def test_wrong_arrays_are_refused(noted, logits, states):
    driver, masks = noted
    with pytest.raises(InputError):
        masks.apply(logits, states)
    with pytest.raises(InputError):
        masks.advance(FakeArray("<u4", (2,)), FakeArray("<i2", (2,)))
    assert not driver.launches


def test_without_a_gpu_it_says_so():
    masks = TokenMasks.from_strings(["yes"], VOCABULARY, eos=[EOS])
    if has_gpu():
        pytest.skip("there is a GPU here")
    with pytest.raises(EngineUnavailable):
        masks.on_device()


def has_gpu() -> bool:
    try:
        return cuda_launch.driver() is not None
    except EngineUnavailable:
        return False


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_logit_and_state(dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    members = [
        "".join(random.Random(seed).choices(["a", "ab", "yes", "under", "ö", " "], k=6))
        for seed in range(900)
    ]
    masks = TokenMasks.from_strings(members, VOCABULARY, eos=[EOS, EOT], vocab_size=len(VOCABULARY) + 9)
    device = masks.on_device()
    visited = random_states(masks, random.Random(1), 70)
    states = np.array([0, masks.ended, *(state for state, _ in visited)], np.uint32)
    held = torch.from_numpy(states.astype(np.int32)).cuda()
    size = masks.vocab_size
    for width, offset, padding in [(size, 0, 0), (size + 70, 3, 5), (size - 40, 1, 0)]:
        raw = torch.randn(len(states) * (width + padding) + offset, device="cuda").to(getattr(torch, dtype))
        logits = torch.as_strided(raw, (len(states), width), (width + padding, 1), offset)
        want = logits.clone()
        kept = torch.zeros(want.shape, dtype=torch.bool)
        for row, state in enumerate(states.tolist()):
            ids = masks.allowed(state)
            kept[row, torch.from_numpy(ids[ids < width].astype(np.int64))] = True
        want[~kept.cuda()] = float("-inf")
        device.apply(logits, held, torch.cuda.current_stream())
        assert torch.equal(logits, want)
    tokens = np.array(
        [int(masks.allowed(state)[0]) if state != masks.ended else 3 for state in states.tolist()]
    )
    tokens[::5] = -1
    after, allowed = masks.advance(states, tokens)
    flags = torch.zeros(len(states), dtype=torch.bool, device="cuda")
    device.advance(held, torch.from_numpy(tokens).cuda(), flags, torch.cuda.current_stream())
    assert held.cpu().numpy().astype(np.uint32).tolist() == after.tolist()
    assert flags.cpu().numpy().tolist() == allowed.tolist()
