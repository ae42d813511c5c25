"""Searches of grids that are on the device already, on the caller's stream, with answers that stay there."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from flashtrie_cli.engine.cuda_launch import KernelModule, PreparedLaunch, device_of
from flashtrie_cli.engine.cuda_loader import Device, kernel_images
from flashtrie_cli.engine.cuda_session import GridType, SearchSession
from flashtrie_cli.engine.cuda_trie import DeviceTrie
from flashtrie_cli.errors import EngineUnavailable, InputError
from flashtrie_cli.query.plan import SearchPlan

_TOKEN_TYPES = {"<u2": 2, "<u4": 4, "<i4": 4, "<i8": 8}
_LOGPROB_TYPES = {"<f2": 2, "<f4": 4}


class DeviceGrids:
    """Tokens and log-probs through ``__cuda_array_interface__``, checked. InputError for what is no pair of grids."""

    def __init__(self, tokens: Any, logprobs: Any, device: Device):
        token_interface = self._interface(tokens, "tokens", _TOKEN_TYPES)
        logprob_interface = self._interface(logprobs, "log-probs", _LOGPROB_TYPES)
        self.shape: tuple[int, int, int] = tuple(token_interface["shape"])
        if self.shape != tuple(logprob_interface["shape"]) or len(self.shape) != 3:
            raise InputError(f"tokens are {self.shape} and log-probs {tuple(logprob_interface['shape'])}")
        self.token_bytes = _TOKEN_TYPES[token_interface["typestr"]]
        self.logprob_bytes = _LOGPROB_TYPES[logprob_interface["typestr"]]
        self.tokens, self.logprobs = int(token_interface["data"][0]), int(logprob_interface["data"][0])
        for address in (self.tokens, self.logprobs):
            if address and device_of(address) != device.ordinal:
                raise InputError(
                    f"the grids are on device {device_of(address)}, the index is on {device.ordinal}"
                )

    @staticmethod
    def _interface(array: Any, name: str, types: dict[str, int]) -> dict[str, Any]:
        try:
            interface: dict[str, Any] = array.__cuda_array_interface__
        except AttributeError:
            raise InputError(f"{name} are no device array (no __cuda_array_interface__)") from None
        if interface["typestr"] not in types:
            raise InputError(f"{name} are of type {interface['typestr']}, not {', '.join(types)}")
        item, strides = int(interface["typestr"][2:]), interface.get("strides")
        packed, step = [], item
        for length in reversed(interface["shape"]):
            packed.append(step)
            step *= length
        if strides is not None and tuple(strides) != tuple(reversed(packed)):
            raise InputError(f"{name} are not contiguous")
        return interface


@dataclass(frozen=True)
class DeviceArray:
    """Device memory of the search's, for ``torch.as_tensor``, ``cupy.asarray`` and others."""

    address: int
    shape: tuple[int, ...]
    typestr: str
    owner: Any

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.typestr, "data": (self.address, True), "version": 3}


@dataclass(frozen=True)
class DeviceResults:
    """The answer to Q queries at fixed strides, R results at most and D tokens a result at most.

    Query q has ``num_hits[q]`` hits, best first: ``key_ids[q, :n]``, ``scores``, ``normalised_scores``, and the tokens
    of hit h are ``tokens[q, token_ends[q, h - 1] : token_ends[q, h]]`` (from 0 for h = 0). ``bad_slots[q]``: step times
    slots plus slot of the first log-prob that is NaN or +inf, 0xFFFFFFFF where there is none.
    """

    num_hits: DeviceArray
    key_ids: DeviceArray
    scores: DeviceArray
    normalised_scores: DeviceArray
    token_ends: DeviceArray
    tokens: DeviceArray
    bad_slots: DeviceArray


class DeviceSearch:
    """The searches of one shape and plan; callable."""

    def __init__(self, trie: DeviceTrie, grids: DeviceGrids, plan: SearchPlan):
        self._session = SearchSession(
            trie, *grids.shape, plan, GridType(grids.token_bytes, grids.logprob_bytes)
        )
        self._device = trie.device
        self._launches: dict[tuple[int, int], PreparedLaunch] = {}
        count, hits, session = grids.shape[0], self._session.result_capacity, self._session

        def array(name: str, typestr: str, *shape: int) -> DeviceArray:
            return DeviceArray(session.address(name), shape, typestr, session)

        self._results = DeviceResults(
            array("num_hits", "<u4", count), array("key_ids", "<u4", count, hits), array("scores", "<f4", count, hits),
            array("normalised_scores", "<f4", count, hits), array("token_ends", "<u4", count, hits),
            array("hit_tokens", "<u4", count, hits * session.depth), array("bad_slots", "<u4", count),
        )  # fmt: skip

    def __call__(self, grids: DeviceGrids, stream: Any) -> DeviceResults:
        if 0 not in grids.shape:
            key = (grids.tokens, grids.logprobs)
            launch = self._launches.get(key)
            if launch is None:
                if len(self._launches) >= 64:
                    self._launches.clear()
                launch = self._launches[key] = self._prepare(grids)
            launch(_stream_handle(stream))
        return self._results

    def _prepare(self, grids: DeviceGrids) -> PreparedLaunch:
        launch, record = self._session.prepare(grids.tokens, grids.logprobs, grids.shape[0])
        part = "search_pairs" if launch.kernel.startswith("pairs_") else "search"
        function = _module(self._device, part).kernel(launch.kernel, launch.shared_bytes)
        blocks = launch.num_groups * launch.blocks_per_group
        parameter: Any = ctypes.create_string_buffer(record, len(record))
        return PreparedLaunch(function, (blocks, 1, 1), launch.num_threads, launch.shared_bytes, parameter)


_modules: dict[tuple[int, str], KernelModule] = {}


def _module(device: Device, part: str) -> KernelModule:
    module = _modules.get((device.ordinal, part))
    if module is None:
        failed: EngineUnavailable | None = None
        for image, _ in kernel_images(part, device):
            try:
                module = _modules[device.ordinal, part] = KernelModule(image)
                break
            except EngineUnavailable as error:
                failed = error
        if module is None:
            raise failed or EngineUnavailable("there are no search kernels for this device")
    return module


def _stream_handle(stream: Any) -> int:
    """The driver's handle of a stream of torch, cupy or PyCUDA; 0, the default stream, for None."""
    if stream is None:
        return 0
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(handle)
    return int(stream)
