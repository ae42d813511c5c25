"""Masks on torch logits of any device, from lists of allowed ids: a few ids a row travel, no mask row does."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import EngineUnavailable
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.query.trie_steps import TrieSteps


def allowed_pairs(
    masks: TokenMasks | TrieSteps, states: npt.NDArray[np.uint32], *, eos_when_ended: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(row, token) of everything allowed in a batch of states, as two int64 arrays.

    With ``eos_when_ended``, rows past their end allow their end-of-sequence ids again: generation loops still
    draw from such rows and throw the draw away, and a draw from nothing is an error.
    """
    ids, offsets = masks.allowed_lists(states)
    rows = np.repeat(np.arange(len(states)), np.diff(offsets))
    tokens = ids.astype(np.int64)
    if eos_when_ended:
        ended = np.flatnonzero(states == masks.ended)
        rows = np.concatenate([rows, np.repeat(ended, len(masks.eos))])
        tokens = np.concatenate([tokens, np.tile(np.array(masks.eos, np.int64), len(ended))])
    return rows, tokens


def device_answers(masks: TokenMasks | TrieSteps, logits: Any) -> Any:
    """What masks these torch logits where they are, or None: they are on the CPU, of a type that the kernels do not
    take, or the GPU cannot be used from here (no PyCUDA, no nvcc), which a warning says once."""
    if not logits.is_cuda or str(logits.dtype) not in ("torch.float32", "torch.float16", "torch.bfloat16"):
        return None
    try:
        return masks.on_device(logits.device.index)
    except EngineUnavailable as error:
        warnings.warn(f"logits are masked through the CPU: {error}", stacklevel=3)
        return None


def masked_on_device(device: Any, token_rows: Any, scores: Any) -> Any:
    """A tensor like ``scores`` [batch, vocab], masked after the rows of tokens [batch, length]; all on the device.

    Rows past their end, and rows that left the set, keep their end-of-sequence ids.
    """
    import torch

    stream = torch.cuda.current_stream(scores.device)
    states = torch.empty(len(token_rows), dtype=torch.int32, device=scores.device)
    device.walk(token_rows, states, stream)
    masked = scores.clone(memory_format=torch.contiguous_format)
    device.apply(masked, states, stream, eos_when_ended=True)
    return masked


def keep_only(scores: Any, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> Any:
    """A tensor like ``scores`` [batch, vocab], minus infinity everywhere but at the pairs."""
    import torch

    kept = torch.full_like(scores, float("-inf"))
    at = (torch.from_numpy(rows).to(scores.device), torch.from_numpy(tokens).to(scores.device))
    kept[at] = scores[at]
    return kept
