"""The whole cuda engine without a GPU: PyCUDA and the kernels on the emulated machine; the same bytes as cpu."""

from __future__ import annotations

import ctypes
import gc
import shutil
import types
import weakref
from typing import Any

import numpy as np
import pytest
from oracle import built
from test_search_kernels import many_keys, random_grids

from flashtrie_cli import Index, SearchPlan
from flashtrie_cli.engine import cuda_arrays, cuda_pipeline, cuda_single, cuda_trie
from flashtrie_cli.errors import EngineUnavailable, InputError

from emulated_pycuda import EmulatedDriver  # isort: skip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the kernels with")


def both(keys: list[tuple[int, ...]], **options: Any) -> tuple[Index, Index]:
    path = built(keys, **options)
    return Index.open(path, engine="cpu"), Index.open(path, engine="cuda")


def test_one_query_after_another(driver: EmulatedDriver) -> None:
    cpu, cuda = both(many_keys(800, 40, 1))
    tokens, logprobs = random_grids((4, 3, 30), 40, 2, 1000)
    plan = SearchPlan(beam_width=20, eos=7)
    for query in (0, 1, 2, 3, 0):
        one = tokens[query : query + 1], logprobs[query : query + 1]
        assert cuda.search(*one, plan).identical(cpu.search(*one, plan))
    assert driver.launched == ["search_alone"] * 5  # no packing, where there is but one


def test_shapes_that_take_turns(driver: EmulatedDriver) -> None:
    """Both launch the same kernel, with other amounts of shared memory."""
    cpu, cuda = both(many_keys(300, 40, 1))
    for slots in (30, 9, 30, 9):
        grid = random_grids((1, 3, slots), 40, 2, 1000)
        plan = SearchPlan(beam_width=slots)
        assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))


def test_answers_outlive_the_next_call(driver: EmulatedDriver) -> None:
    """Their memory is used again only when nobody holds a part of them."""
    cpu, cuda = both(many_keys(300, 20, 1))
    plan = SearchPlan(beam_width=9)
    grids = [random_grids((3, 3, 12), 20, seed, 1000) for seed in range(4)]
    first = cuda.search(*grids[0], plan)
    tokens = cuda.search(*grids[1], plan).tokens  # only a part of this one is kept
    third, expected = cuda.search(*grids[2], plan), [cpu.search(*grid, plan) for grid in grids]
    assert first.identical(expected[0])
    assert third.identical(expected[2])
    np.testing.assert_array_equal(tokens, expected[1].tokens)
    address = third.scores.__array_interface__["data"][0]
    del third
    assert cuda.search(*grids[3], plan).scores.__array_interface__["data"][0] == address


def test_an_engine_goes_with_its_last_owner(driver: EmulatedDriver) -> None:
    """Not when cycles are collected: that may be on a thread where the driver has no context."""
    _, cuda = both(many_keys(100, 20, 1))
    grid = random_grids((3, 3, 12), 20, 1, 1000)
    cuda.search(*grid, SearchPlan(beam_width=9))
    cuda.search(grid[0][:1], grid[1][:1], SearchPlan(beam_width=9))
    engine: Any = cuda.engine
    parts = [weakref.ref(part) for part in (engine, engine.device_trie, *engine._pipelines.values())]
    tokens = weakref.ref(grid[0])
    gc.disable()
    try:
        del grid
        assert tokens() is None
        del engine, cuda
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


def test_no_hits_at_all(driver: EmulatedDriver) -> None:
    cpu, cuda = both([(1, 2)])
    grid = np.full((1, 2, 3), 9, np.uint32), np.full((1, 2, 3), -1, np.float32)
    assert cuda.search(*grid, SearchPlan(beam_width=4)).identical(cpu.search(*grid, SearchPlan(beam_width=4)))


def test_batches_in_chunks_on_two_lanes(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pipeline, "_CHUNK_BYTES", 3 * 192)
    monkeypatch.setattr(cuda_single, "MAPPED_BYTES", 0)
    cpu, cuda = both(many_keys(300, 20, 3))
    tokens, logprobs = random_grids((11, 3, 8), 20, 4, 50)
    plan = SearchPlan(beam_width=5)
    for queries in (11, 2, 7, 3):
        grid = tokens[:queries], logprobs[:queries]
        assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))
    assert driver.launched.count("pack_hits") == 4 + 1 + 3 + 1


def test_pinned_grids_and_narrow_types(driver: EmulatedDriver) -> None:
    cpu, cuda = both(many_keys(300, 20, 5))
    tokens, logprobs = random_grids((3, 3, 8), 20, 6, 50)
    plan, engine = SearchPlan(beam_width=5), cuda.engine
    expected = cpu.search(tokens, logprobs, plan)
    assert engine.search(tokens.astype(np.uint16), logprobs.astype(np.float16), plan).identical(expected)
    pinned = engine.pinned_grids(3, 3, 8)  # type: ignore[attr-defined]
    pinned[0][:], pinned[1][:] = tokens, logprobs
    assert engine.search(*pinned, plan).identical(expected)


def test_a_root_with_a_table(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_trie, "_MIN_ROOT_FAN_OUT", 4)
    keys = [(token, 3) for token in range(0, 900_000, 3000)]
    for places in (1 << 21, 64):  # one label a place, and several
        monkeypatch.setattr(cuda_trie, "_MAX_ROOT_PLACES", places)
        cpu, cuda = both(keys)
        tokens = np.arange(0, 900_000, 1500, dtype=np.uint32).reshape(1, 1, 600).repeat(2, axis=1)
        grid = tokens, np.linspace(-9, -1, tokens.size, dtype=np.float32).reshape(tokens.shape)
        plan = SearchPlan(beam_width=200)
        assert cuda.search(*grid, plan).identical(cpu.search(*grid, plan))
    assert "build_root_table" in driver.launched


@pytest.mark.parametrize("queries", [1, 4])
def test_a_bad_logprob_is_named(driver: EmulatedDriver, queries: int) -> None:
    _, cuda = both(many_keys(50, 9, 7))
    tokens, logprobs = random_grids((queries, 4, 5), 9, 8, 50)
    logprobs[queries - 1, 3, 2] = np.nan
    with pytest.raises(InputError, match=f"query {queries - 1}, step 3, slot 2"):
        cuda.search(tokens, logprobs, SearchPlan(beam_width=3))


def test_little_shared_memory_and_an_old_gpu(driver: EmulatedDriver) -> None:
    driver.shared_bytes, driver.arch = 64 << 10, (7, 5)
    cpu, cuda = both(many_keys(2000, 90, 9))
    tokens, logprobs = random_grids((2, 3, 90), 90, 10, 1000)
    plan = SearchPlan(beam_width=700)
    assert cuda.search(tokens, logprobs, plan).identical(cpu.search(tokens, logprobs, plan))
    assert driver.launched[0] == "search_spill"


def test_no_room_for_the_index(driver: EmulatedDriver) -> None:
    driver.free_bytes = 1 << 10
    with pytest.raises(EngineUnavailable, match=r"MiB are free.*--engine cpu"):
        both(many_keys(5000, 90, 11))


class DeviceGrid:
    """Somebody's device array."""

    def __init__(self, array: np.ndarray, **changes: Any):
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, **changes}


def test_device_arrays(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Launch:
        def __init__(self, name: str, grid: tuple[int, ...], threads: int, shared: int, record: Any):
            self.arguments = name, grid[0], threads, shared, (record.raw[: len(record)],)

        def __call__(self, stream: int) -> None:
            driver.launch(*self.arguments)

    kernels = types.SimpleNamespace(kernel=lambda name, shared: name)
    monkeypatch.setattr(cuda_arrays, "KernelModule", lambda image: kernels)
    monkeypatch.setattr(cuda_arrays, "kernel_images", lambda part, device: iter([(b"", "emulated")]))
    monkeypatch.setattr(cuda_arrays, "_modules", {})
    monkeypatch.setattr(cuda_arrays, "PreparedLaunch", Launch)
    monkeypatch.setattr(cuda_arrays, "device_of", lambda address: 0)
    cpu, cuda = both(many_keys(300, 20, 12))
    tokens, logprobs = random_grids((3, 3, 8), 20, 13, 50)
    plan, engine = SearchPlan(beam_width=5), cuda.engine
    expected = cpu.search(tokens, logprobs, plan)
    found = engine.search_arrays(DeviceGrid(tokens), DeviceGrid(logprobs), plan)  # type: ignore[attr-defined]

    def fetch(array: Any) -> np.ndarray:
        interface = array.__cuda_array_interface__
        count = int(np.prod(interface["shape"]))
        flat = (ctypes.c_uint32 * count).from_address(interface["data"][0])
        return np.array(flat, np.uint32).reshape(interface["shape"])

    for query in range(3):
        hits = expected.hits(query)
        assert fetch(found.num_hits)[query] == len(hits)
        assert fetch(found.key_ids)[query, : len(hits)].tolist() == [hit.key_id for hit in hits]
    for wrong, what in (
        (DeviceGrid(tokens, typestr="<f8"), "of type"),
        (DeviceGrid(tokens, strides=(4, 8, 12)), "not contiguous"),
        (DeviceGrid(tokens[:2]), "tokens are"),
        (tokens, "no device array"),
    ):
        with pytest.raises(InputError, match=what):
            engine.search_arrays(wrong, DeviceGrid(logprobs), plan)  # type: ignore[attr-defined]


def test_tails_and_the_time_of_the_kernels(driver: EmulatedDriver) -> None:
    keys = [(*key, 1, 2, 3, 4) if number % 3 else key for number, key in enumerate(many_keys(300, 20, 9))]
    whole = Index.open(built(keys), engine="cpu")
    _, cuda = both(keys, tail="on")
    assert cuda.meta["num_links"] > 50
    tokens, logprobs = random_grids((3, 7, 16), 20, 2, 100)
    plan = SearchPlan(beam_width=20)
    assert cuda.search(tokens, logprobs, plan).identical(whole.search(tokens, logprobs, plan))
    assert cuda.engine.last_kernel_ns is None
    cuda.engine.times_kernels = True
    assert cuda.search(tokens, logprobs, plan).identical(whole.search(tokens, logprobs, plan))
    assert cuda.engine.last_kernel_ns == 125_000  # what the emulated clock says of any time
