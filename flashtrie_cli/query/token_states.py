"""States asked one token at a time: what masks of strings and steps of a token trie answer alike.

A state is a number: 0 the beginning, ``ended`` the state behind an end-of-sequence token, in which nothing is allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.errors import InputError

REJECTED = 0xFFFF_FFFF
"""What ``walk`` answers for tokens that lead nowhere."""


class TokenStates:
    """``native``: the object that answers; ``eos`` ascending; ``vocab_size``: the width of the model's logits."""

    eos: tuple[int, ...]
    vocab_size: int
    ended: int
    """The state after an end-of-sequence token, in which nothing is allowed."""

    def __init__(self, native: Any, ended: int):
        self._native, self.ended = native, ended
        self._on_device: dict[int, Any] = {}

    @property
    def num_words(self) -> int:
        """int32 words of a mask row."""
        return int(self._native.num_words)

    def allowed(self, state: int) -> npt.NDArray[np.uint32]:
        """Allowed ids of a state, ascending, end-of-sequence ids included."""
        return self.allowed_lists([state])[0]

    def allowed_lists(self, states: npt.ArrayLike) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Allowed ids of each state, one list after the other: ids uint32, offsets int64 [len(states) + 1]."""
        return self._native.allowed_lists(state_array(states))

    def fill(self, states: npt.ArrayLike, bitmask: Any) -> None:
        """Write the mask of each state into the rows of an int32 array [>= len(states), >= num_words]."""
        self._native.fill(state_array(states), bitmask)

    def advance(
        self, states: npt.ArrayLike, tokens: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Each state after its token, and whether the token was allowed; where it was not the state stays."""
        after = state_array(states).copy()
        return after, self._native.advance(after, _token_array(tokens))

    def walk(self, token_rows: npt.ArrayLike) -> npt.NDArray[np.uint32]:
        """The state after each row of tokens [rows, length] from the beginning, uint32.

        REJECTED where a token was not allowed; tokens behind an end-of-sequence token are not looked at.
        """
        rows = _token_array(token_rows)
        if rows.ndim != 2:
            raise ValueError(f"token rows have two dimensions, not {rows.ndim}")
        return self._native.walk(rows)

    def bitmask(self, num_rows: int = 1) -> npt.NDArray[np.int32]:
        """Zeros of the right shape for `fill`."""
        return np.zeros((num_rows, self.num_words), np.int32)

    def on_device(self, device: int = 0) -> Any:
        """The same answers on a GPU, for device arrays: see `CudaTokens`. Made once a device, and kept.

        Raises EngineUnavailable where there is no GPU.
        """
        if device not in self._on_device:
            self._on_device[device] = self._open_device(device)
        return self._on_device[device]

    def _open_device(self, device: int) -> Any:
        raise NotImplementedError


def state_array(states: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """States as contiguous uint32. Raises InputError for what is no number of one."""
    array = np.asarray(states)
    if array.dtype == np.uint32:  # as all answers have them: nothing to look at in the loop of a generation
        return np.ascontiguousarray(array)
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"states are {array.dtype}, not integers")
    if array.size and not (int(array.min()) >= 0 and int(array.max()) <= REJECTED):
        raise InputError(f"states are from 0 to {REJECTED - 1}, not {int(array.min())} to {int(array.max())}")
    return np.ascontiguousarray(array, np.uint32)


def _token_array(tokens: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Tokens as contiguous int64; those that no vocabulary has are not allowed, and no error. Raises InputError."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise InputError("token rows differ in length", hint="walk rows of one length at a time") from None
    if array.size and array.dtype.kind not in "iu":
        raise InputError(f"tokens are {array.dtype}, not integers")
    return np.ascontiguousarray(array, np.int64)
