"""Token masks for vLLM v1: a custom logits processor.

Name it with ``--logits-processors flashtrie_cli.query.vllm_masks:MaskLogitsProcessor`` (or in the entry-point group
``vllm.logits_processors``), and name the indexes that requests may use in the environment of the server:
``FLASHTRIE_MASKS="tools=/srv/tools.ftrie:icd=/srv/icd.ftrie"`` (parts joined by the path separator). A request
asks for one with ``SamplingParams(extra_args={"flashtrie_masks": "tools"})``; others are left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from flashtrie_cli.query.mask_scatter import allowed_pairs, device_answers
from flashtrie_cli.query.token_masks import TokenMasks

try:
    from vllm.v1.sample.logits_processor import LogitsProcessor as _Base
except ImportError:  # the interface is the same without vLLM, which the tests rely on
    _Base = object

ARGUMENT = "flashtrie_masks"
ENVIRONMENT = "FLASHTRIE_MASKS"


class _Request:
    """Where one request is within its set. ``output`` is vLLM's own growing list of its tokens."""

    def __init__(self, masks: TokenMasks, output: list[int]):
        self.masks = masks
        self.output = output
        self._matcher = masks.matcher()
        self._num_walked = 0
        self._has_left = False

    def catch_up(self) -> int:
        """The state after the tokens so far: the new ones are walked, or all where some were taken back."""
        if len(self.output) < self._num_walked:
            self._matcher.reset()
            self._num_walked, self._has_left = 0, False
        for token in self.output[self._num_walked :]:
            self._has_left = self._has_left or not self._matcher.advance(token)
        self._num_walked = len(self.output)
        return self.masks.ended if self._has_left else int(self._matcher.state)


class MaskLogitsProcessor(_Base):
    """See vllm/v1/sample/logits_processor/interface.py, whose five methods these are."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """ValueError for a request that names no index of this server."""
        name = (sampling_params.extra_args or {}).get(ARGUMENT)
        if name is None:
            return
        known = configured_indexes()
        if not isinstance(name, str) or name not in known:
            raise ValueError(
                f"{ARGUMENT} {name!r} is not one of {', '.join(sorted(known)) or 'none'} ({ENVIRONMENT})"
            )

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool):
        self._device = device
        self._pin = is_pin_memory
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow the persistent batch: removed, added, moved, in that order."""
        if batch_update is None:
            return
        requests = self._requests
        for index in batch_update.removed:
            requests.pop(index, None)
        for index, params, _, output in batch_update.added:
            name = (params.extra_args or {}).get(ARGUMENT)
            if name is None:
                requests.pop(index, None)
            else:
                requests[index] = _Request(_open(configured_indexes()[name]), output)
        for source, target, direction in batch_update.moved:
            moved, replaced = requests.pop(source, None), requests.pop(target, None)
            if moved is not None:
                requests[target] = moved
            if replaced is not None and direction.name == "SWAP":
                requests[source] = replaced

    def apply(self, logits: Any) -> Any:
        """Minus infinity, in place, wherever a request of ours may not go."""
        if not self._requests:
            return logits
        for masks, indices, states in self._by_masks(int(logits.shape[-1])):
            device = device_answers(masks, logits)
            if device is None:
                self._apply_lists(logits, masks, indices, states)
            else:
                self._apply_on_device(logits, device, indices, states)
        return logits

    def _by_masks(self, width: int) -> Iterator[tuple[TokenMasks, np.ndarray, np.ndarray]]:
        """The rows of each index's requests, and their states."""
        by_masks: dict[int, list[int]] = {}
        for index, request in self._requests.items():
            by_masks.setdefault(id(request.masks), []).append(index)
        for indices in by_masks.values():
            masks = self._requests[indices[0]].masks
            if width < masks.vocab_size:
                raise ValueError(f"logits are {width} wide, the masks {masks.vocab_size}")
            states = np.array([self._requests[index].catch_up() for index in indices], np.uint32)
            yield masks, np.array(indices, np.int64), states

    def _apply_lists(self, logits: Any, masks: TokenMasks, indices: np.ndarray, states: np.ndarray) -> None:
        import torch

        rows, tokens = allowed_pairs(masks, states, eos_when_ended=True)
        at = (self._to_device(torch.from_numpy(indices[rows])), self._to_device(torch.from_numpy(tokens)))
        kept = logits[at]
        logits[self._to_device(torch.from_numpy(indices))] = float("-inf")
        logits[at] = kept

    def _apply_on_device(self, logits: Any, device: Any, indices: np.ndarray, states: np.ndarray) -> None:
        """One small copy to the device and one kernel, on the stream that the logits are computed on."""
        import torch

        both = self._to_device(torch.from_numpy(np.stack([indices.astype(np.int32), states.view(np.int32)])))
        stream = torch.cuda.current_stream(logits.device)
        device.apply(logits, both[1], stream, rows=both[0], eos_when_ended=True)

    def _to_device(self, tensor: Any) -> Any:
        if self._pin:
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def configured_indexes() -> dict[str, str]:
    """Name and path of each index in the environment."""
    parts = [part for part in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if part]
    for part in parts:
        if "=" not in part:
            raise ValueError(f"{ENVIRONMENT} has a part {part!r} that is not NAME=PATH")
    return dict(part.split("=", 1) for part in parts)


@cache
def _open(path: str) -> TokenMasks:
    return TokenMasks.open(path)
