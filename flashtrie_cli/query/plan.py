"""What a beam search is asked: widths, thresholds, length normalisation, checked once here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, SupportsFloat, SupportsIndex

from flashtrie_cli.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_BEAM_WIDTH = 1 << 20
PADDING = 0xFFFF_FFFF
"""The token that marks an empty slot unless the plan names another (-1 in a signed grid)."""


@dataclass(frozen=True)
class SearchPlan:
    """One beam search, as every engine understands it.

    ``beam_width`` prefixes survive each step and ``num_results`` (default: the beam width) keys are returned.
    ``alpha`` is the exponent of the length normalisation (Wu et al. 2016; FlashTrie paper, equation 2). A (beam,
    proposal) pair is dropped unless ``logprob > token_threshold`` and ``score + logprob > sequence_threshold``.
    ``eos``: the token whose log-prob at the next step a finished key must add; None adds nothing. ``padding``: the
    token of an empty slot. Defaults differ from the paper's deployment (alpha 5.0, thresholds -20 and -200 when
    permissive): here nothing is dropped unless asked. Raises UsageError for what is out of range.
    """

    beam_width: int = 100
    num_results: int | None = None
    alpha: float = 1.0
    token_threshold: float = float("-inf")
    sequence_threshold: float = float("-inf")
    eos: int | None = None
    padding: int = PADDING

    def __post_init__(self) -> None:
        self._check_types()
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise UsageError(f"beam width {self.beam_width} is not between 1 and {MAX_BEAM_WIDTH}")
        if self.num_results is not None and not 1 <= self.num_results <= MAX_BEAM_WIDTH:
            raise UsageError(f"number of results {self.num_results} is not between 1 and {MAX_BEAM_WIDTH}")
        if not 0 <= self.alpha <= 1000:
            raise UsageError(f"alpha {self.alpha} is not between 0 and 1000")
        for name in ("token_threshold", "sequence_threshold"):
            value = getattr(self, name)
            if value != value:
                raise UsageError(f"{name.replace('_', ' ')} is not a number")
        if self.eos is not None and not 0 <= self.eos < 1 << 31:
            raise UsageError(f"end-of-sequence token {self.eos} is not between 0 and {(1 << 31) - 1}")

    def _check_types(self) -> None:
        for name in ("beam_width", "num_results", "eos", "padding"):
            value = getattr(self, name)
            if not (isinstance(value, SupportsIndex) or (value is None and name in ("num_results", "eos"))):
                raise UsageError(f"{name} is {value!r}, not an integer")
        for name in ("alpha", "token_threshold", "sequence_threshold"):
            value = getattr(self, name)
            if not isinstance(value, SupportsFloat):
                raise UsageError(f"{name} is {value!r}, not a number")

    @property
    def result_limit(self) -> int:
        """Most results a query can have."""
        return self.beam_width if self.num_results is None else self.num_results

    def length_factors(self, num_steps: int) -> npt.NDArray[np.float32]:
        """``(6 / (5 + d)) ** alpha`` for d = 0 .. num_steps, in float64, rounded once to float32; read-only.

        Raises UsageError where a factor would vanish in float32, since scores could no longer be told apart.
        """
        return _length_factors(self.alpha, num_steps)


@lru_cache(maxsize=16)
def _length_factors(alpha: float, num_steps: int) -> npt.NDArray[np.float32]:
    """One array for all calls that ask alike, so read-only: making it takes 10 us, a sixth of a small search."""
    import numpy as np

    exact = np.array([(6.0 / (5.0 + d)) ** alpha for d in range(num_steps + 1)])
    with np.errstate(over="ignore"):  # that of the empty sequence, which is no hit
        factors = exact.astype(np.float32)
    if factors.size and float(factors[1:].min(initial=1.0)) < float(np.finfo(np.float32).tiny):
        raise UsageError(f"alpha {alpha} is too large for {num_steps} steps: scores would vanish")
    factors.flags.writeable = False
    return factors
