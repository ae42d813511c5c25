"""Token masks for `transformers`: a logits processor that keeps no state, and a prefix function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import LogitsProcessor

from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.mask_scatter import allowed_pairs, device_answers, keep_only, masked_on_device
from flashtrie_cli.query.token_masks import REJECTED, TokenMasks
from flashtrie_cli.query.trie_steps import TrieSteps


class MaskLogitsProcessor(LogitsProcessor):
    """Leaves only the tokens that spell a member of the set; for ``generate(logits_processor=[...])``.

    Every call finds its place from the tokens after the prompt, so rows may be reordered between calls (beam
    search), batched in any way, and the object used for any number of generations of one prompt length.

    ``masks``: a `TokenMasks`, or the `TrieSteps` of a token trie, whose keys are then the only answers.
    ``prompt_length``: columns of ``input_ids`` that are not part of the answer: ``inputs.input_ids.shape[1]`` for
    a decoder (padding included), 1 for an encoder-decoder. Rows past their end keep their end-of-sequence ids.
    On a GPU the kernels find the places and mask the scores, and nothing waits for the device.
    """

    supports_continuous_batching = False  # rows of one call would have different prompt lengths

    def __init__(self, masks: TokenMasks | TrieSteps, prompt_length: int):
        if prompt_length < 0:
            raise UsageError(f"a prompt length of {prompt_length}")
        self.masks = masks
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """``input_ids`` int64 [rows, length], ``scores`` [rows, vocab] on any device; returns a new tensor."""
        if scores.shape[-1] < self.masks.vocab_size:
            raise UsageError(
                f"scores are {scores.shape[-1]} wide, the masks {self.masks.vocab_size}",
                hint="--vocab-size at the build",
            )
        answer = input_ids[:, self.prompt_length :]
        device = device_answers(self.masks, scores)
        if device is not None:
            return masked_on_device(device, answer, scores)
        states = _states_of(self.masks, answer)
        return keep_only(scores, *allowed_pairs(self.masks, states, eos_when_ended=True))


def prefix_allowed_tokens(
    masks: TokenMasks | TrieSteps, prompt_length: int
) -> Callable[[int, Any], list[int]]:
    """For ``generate(prefix_allowed_tokens_fn=...)``; `MaskLogitsProcessor` does the same for a whole batch at once."""

    def allowed(batch_id: int, input_ids: Any) -> list[int]:
        state = int(_states_of(masks, input_ids[None, prompt_length:])[0])
        return masks.allowed(state).tolist() or list(masks.eos)

    return allowed


def _states_of(masks: TokenMasks | TrieSteps, token_rows: Any) -> np.ndarray:
    """States of rows of generated tokens; a row that left the set (a beam of score -inf) counts as ended."""
    states = masks.walk(token_rows.cpu().numpy())
    states[states == REJECTED] = masks.ended
    return states
