"""What every reader yields: a bounded batch of keys with the place each came from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_TOKEN = (1 << 31) - 1
MAX_DEPTH = 65_535
"""Most tokens of a key."""
UNKNOWN_TOKEN = 0xFFFF_FFFF
"""The id of a word that a frozen vocabulary does not have; it can match nothing."""


@dataclass
class KeyBatch:
    """N keys: key k is ``tokens[offsets[k]:offsets[k + 1]]``.

    ``tokens`` uint32, flat; ``offsets`` int64 [N + 1], from 0. ``values``: uint64 [N] or float64 [N]; None
    where the input has none. A batch has uint64 as long as every value so far was an unsigned integer; once
    another number was seen, this batch and all later ones have float64. ``lines`` int64 [N]: 1-based line
    (npz, npy: row) of each key in ``source``, the file's name as given, ``-`` for stdin.
    """

    tokens: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.int64]
    values: npt.NDArray[np.uint64] | npt.NDArray[np.float64] | None
    lines: npt.NDArray[np.int64] | None
    source: str

    @property
    def num_keys(self) -> int:
        return len(self.offsets) - 1
