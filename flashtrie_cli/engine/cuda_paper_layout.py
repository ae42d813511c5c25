"""What the paper's kernels are given, and what it takes: the Python twin of ``cuda/flashtrie/paper_batch.cuh``.

Knows no GPU; a test compiles the header and holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.cuda_layout import SEARCH, TRIE
from flashtrie_cli.errors import UsageError

THREADS = 512
MAX_WIDTH = 2048
MAX_SLOTS = 4096
MAX_STEPS = 255
PHASES = ("expansion", "validation", "pruning", "waiting")
BARRIER_BYTES = 128
PROBE_BYTES = 4 * 2048

_POINTERS = ("valid_tokens", "valid_flags", "valid_offsets", "hash_keys", "hash_children", "barriers", "phases",
             "num_hits", "num_tokens", "key_ids", "scores", "normalised_scores", "depths", "hit_tokens")  # fmt: skip

PAPER = np.dtype(
    [
        ("trie", TRIE), ("search", SEARCH), ("tokens", "u8"), ("logprobs", "u8"), ("workspace", "u8"),
        ("workspace_bytes", "u8"), ("candidate_capacity", "u8"), ("result_capacity", "u8"),
        *((name, "u8") for name in _POINTERS),
        ("num_queries", "u4"), ("num_steps", "u4"), ("num_slots", "u4"), ("num_groups", "u4"),
        ("blocks_per_group", "u4"), ("log2_hash", "i4"),
    ],
    align=True,
)  # fmt: skip

ANSWERS = (("num_hits", "u4"), ("num_tokens", "u4"), ("key_ids", "u4"), ("scores", "f4"), ("normalised_scores", "f4"),
           ("depths", "u4"), ("hit_tokens", "u4"))  # fmt: skip


@dataclass(frozen=True)
class PaperShape:
    """Sizes of a batch."""

    beam_width: int
    num_results: int
    num_steps: int
    num_slots: int

    def check(self) -> None:
        """UsageError for what the kernels cannot hold."""
        widest = max(self.beam_width, self.num_results)
        for name, value, most in (
            ("beam width or number of results", widest, MAX_WIDTH),
            ("proposals a step", self.num_slots, MAX_SLOTS),
            ("steps", self.num_steps, MAX_STEPS),
        ):
            if value > most:
                raise UsageError(f"{name} {value}: the paper's kernels hold {most} at most")

    @property
    def candidate_capacity(self) -> int:
        return self.beam_width * self.num_slots

    @property
    def result_capacity(self) -> int:
        return self.candidate_capacity * self.num_steps

    @property
    def workspace_bytes(self) -> int:
        """Of a group, as ``paper_layout`` lays it out."""
        beams, steps, slots = self.beam_width, self.num_steps, self.num_slots
        candidates, results = self.candidate_capacity, self.result_capacity
        runs = max(
            (candidates // chunk(beams) + 1) * beams,
            (results // chunk(self.num_results) + 1) * self.num_results,
        )
        sizes = (
            8 * candidates, 4 * candidates, 8 * results, 4 * results, 4 * results, results, 8 * runs, 4 * runs,
            4 * beams, 4 * beams, 4 * beams * steps, 4 * steps * slots, 4 * steps * slots, steps * slots, 4 * steps,
            8 * steps, 16,
        )  # fmt: skip
        return sum(-(-size // 256) * 256 for size in sizes)

    @property
    def shared_bytes(self) -> int:
        """Of a block: a row of proposals, and what a sort, a merge or a probe needs."""
        widest = max(self.beam_width, self.num_results)
        row_items = 512 if self.num_slots <= 512 else 1024 if self.num_slots <= 1024 else 4096
        sort = 8 * (max(chunk(widest), row_items) + 1)
        return -(-8 * self.num_slots // 16) * 16 + -(-max(sort, 24 * widest, PROBE_BYTES) // 16) * 16

    def answer_sizes(self, num_queries: int) -> dict[str, int]:
        """Elements of each answer array."""
        hits = num_queries * self.num_results
        sizes = {name: hits for name, _ in ANSWERS}
        return {
            **sizes,
            "num_hits": num_queries,
            "num_tokens": num_queries,
            "hit_tokens": hits * self.num_steps,
        }


def chunk(width: int) -> int:
    """Candidates of a sorted chunk of which ``width`` stay."""
    size = THREADS
    while size < 2 * width:
        size *= 2
    return size


def position_lists(trie: Any, num_steps: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """PPT's lists (appendix I) of the native trie: sorted tokens of each depth, flags, offsets [num_steps + 1].

    Bit 0 of a flag: some key ends with the token there; bit 1: some key goes on behind it.
    """
    labels = node_labels(trie)
    lines = np.asarray(trie.lines).view(np.uint64).reshape(-1, 4)
    terminal = np.unpackbits(lines[:, 0].copy().view(np.uint8), bitorder="little")
    leaf = np.unpackbits(lines[:, 1].copy().view(np.uint8), bitorder="little")
    starts = np.asarray(trie.level_starts).tolist()
    seen = np.zeros(int(labels.max(initial=0)) + 1, np.uint8)
    tokens, flags, offsets = [], [], [0]
    for depth in range(num_steps):
        seen[:] = 0
        if depth + 2 < len(starts):
            level = slice(starts[depth + 1], starts[depth + 2])
            own = labels[level]
            seen[own[terminal[level] == 1]] |= 1
            seen[own[leaf[level] == 0]] |= 2
        found = np.flatnonzero(seen)
        tokens.append(found.astype(np.uint32))
        flags.append(seen[found])
        offsets.append(offsets[-1] + len(found))
    return np.concatenate(tokens), np.concatenate(flags), np.array(offsets, np.uint32)


def node_labels(trie: Any) -> npt.NDArray[np.uint32]:
    """The whole label of every node of the native trie."""
    labels = np.asarray(trie.label_low)[: trie.num_nodes].astype(np.uint32)
    width = int(trie.high_width)
    if width == 0:
        return labels
    flagged = np.flatnonzero(np.unpackbits(np.asarray(trie.high_flags).view(np.uint8), bitorder="little"))
    flagged = flagged[flagged < trie.num_nodes]
    words = np.asarray(trie.label_high)
    bits = np.arange(len(flagged), dtype=np.uint64) * np.uint64(width)
    word, shift = (bits >> np.uint64(6)).astype(np.int64), bits & np.uint64(63)
    high = words[word] >> shift
    crosses = shift + np.uint64(width) > 64
    high[crosses] |= words[word[crosses] + 1] << (np.uint64(64) - shift[crosses])
    labels[flagged] |= (high & np.uint64((1 << width) - 1)).astype(np.uint32) << np.uint32(16)
    return labels


def join_answers(
    answers: dict[str, npt.NDArray[Any]], num_queries: int, num_results: int, num_steps: int
) -> Any:
    """`SearchResults` of the answer arrays; everything is copied."""
    from flashtrie_cli.query.results import SearchResults

    counts = answers["num_hits"][:num_queries].astype(np.int64)
    hit_offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    if num_queries == 1:
        hits: Any = slice(0, int(counts[0]))
        tokens = answers["hit_tokens"][: int(answers["num_tokens"][0])].copy()
    else:
        places = np.arange(num_queries * num_results)
        hits = places[(places % num_results) < np.repeat(counts, num_results)]
        stride = num_results * num_steps
        tokens = np.concatenate(
            [
                answers["hit_tokens"][q * stride :][: int(n)]
                for q, n in enumerate(answers["num_tokens"][:num_queries])
            ]
        )
    depths = answers["depths"][hits]
    token_offsets = np.zeros(len(depths) + 1, np.int64)
    np.cumsum(depths, out=token_offsets[1:])
    key_ids, scores, normalised = (
        answers[name][hits].copy() for name in ("key_ids", "scores", "normalised_scores")
    )
    return SearchResults(hit_offsets, key_ids, scores, normalised, token_offsets, tokens)
