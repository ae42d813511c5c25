"""What a beam search answers: flat arrays for a whole batch, the same from every engine to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Hit:
    """One returned key of one query."""

    key_id: int
    tokens: tuple[int, ...]
    score: float
    normalised_score: float


@dataclass(frozen=True)
class SearchResults:
    """Hits of Q queries, in query order, each query's best first.

    ``hit_offsets`` int64 [Q + 1]: query q owns hits ``hit_offsets[q]:hit_offsets[q + 1]``. Per hit: ``key_ids``
    uint32 [H], ``scores`` and ``normalised_scores`` float32 [H], and ``tokens[token_offsets[h]:token_offsets[h + 1]]``
    (uint32, int64 [H + 1]).
    """

    hit_offsets: npt.NDArray[np.int64]
    key_ids: npt.NDArray[np.uint32]
    scores: npt.NDArray[np.float32]
    normalised_scores: npt.NDArray[np.float32]
    token_offsets: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint32]

    @property
    def num_queries(self) -> int:
        return len(self.hit_offsets) - 1

    @property
    def num_hits(self) -> int:
        return len(self.key_ids)

    def hits(self, query: int) -> list[Hit]:
        """The hits of one query as objects; for a look, not for a loop over millions. Raises IndexError."""
        if not 0 <= query < self.num_queries:
            raise IndexError(f"query {query} is not one of {self.num_queries}")
        begin, end = int(self.hit_offsets[query]), int(self.hit_offsets[query + 1])
        offsets = self.token_offsets
        return [
            Hit(
                int(self.key_ids[h]),
                tuple(self.tokens[offsets[h] : offsets[h + 1]].tolist()),
                float(self.scores[h]),
                float(self.normalised_scores[h]),
            )
            for h in range(begin, end)
        ]

    def __iter__(self) -> Iterator[list[Hit]]:
        return (self.hits(query) for query in range(self.num_queries))

    def identical(self, other: SearchResults) -> bool:
        """Whether both hold the same bytes."""
        names = ("hit_offsets", "key_ids", "scores", "normalised_scores", "token_offsets", "tokens")
        return all(getattr(self, name).tobytes() == getattr(other, name).tobytes() for name in names)
