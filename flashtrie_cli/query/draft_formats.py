"""Draft trees as those who verify them want them: links and masks in the layouts of SGLang, TensorRT-LLM, FlashInfer.

All of it follows from the parents and the valid counts. Because nodes stand in order of score, a node's first child is
the smallest index whose parent it is, and its siblings follow in ascending index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flashtrie_cli.engine.draft_plan import DraftTrees
from flashtrie_cli.errors import UsageError

FORMATS = ("arrays", "sglang", "flashinfer", "tensorrt-llm")
MASKED_FORMATS = ("sglang", "tensorrt-llm")
"""Those whose mask has more than one layout."""
MASK_MODES = ("full", "tree", "packed")
"""SGLang's FULL_MASK (committed tokens and tree), QLEN_ONLY (tree alone), QLEN_ONLY_BITPACKING (tree, one word a
node)."""
NONE = -1

Arrays = dict[str, npt.NDArray[Any]]


def to_format(
    trees: DraftTrees, base_lengths: npt.ArrayLike, name: str, *, tree_mask: str = "tree"
) -> Arrays:
    """The arrays of one of FORMATS by name; ``tree_mask`` (MASK_MODES) counts for MASKED_FORMATS."""
    if name not in FORMATS:
        raise UsageError(f"format {name!r} is not one of {', '.join(FORMATS)}")
    if tree_mask not in MASK_MODES:
        raise UsageError(f"tree mask {tree_mask!r} is not one of {', '.join(MASK_MODES)}")
    bases = np.asarray(base_lengths, np.int64)
    if name == "sglang":
        return sglang(trees, bases, tree_mask)
    if name == "tensorrt-llm":
        return tensorrt_llm(trees, bases, tree_mask)
    if name == "flashinfer":
        return flashinfer(trees, bases)
    return trees.arrays()


def links(
    parents: npt.NDArray[np.int32], valid_counts: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first child, next sibling) of every node, -1 where there is none; int64 [B, N] each."""
    first_child = np.full(parents.shape, NONE, np.int64)
    next_sibling = np.full(parents.shape, NONE, np.int64)
    for batch, valid in enumerate(valid_counts.tolist()):
        newest: dict[int, int] = {}
        for node, parent in enumerate(parents[batch, 1:valid].tolist(), start=1):
            elder = newest.get(parent)
            if elder is None:
                first_child[batch, parent] = node
            else:
                next_sibling[batch, elder] = node
            newest[parent] = node
    return first_child, next_sibling


def sglang(trees: DraftTrees, base_lengths: npt.NDArray[np.int64], tree_mask: str = "tree") -> Arrays:
    """What SGLang's ``build_tree_kernel_efficient`` leaves for its verify step.

    ``draft_tokens`` and ``positions`` int64 [B N] (padding stands at the base length); ``retrieve_index`` int64 [B, N],
    a node's place in the flat batch; ``retrieve_next_token`` and ``retrieve_next_sibling`` int64 [B, N], -1 for none.
    ``tree_mask``: "full" bool, for each request N rows of base length + N flags, one request behind the other;
    "tree" bool [B, N, N]; "packed" uint8, uint16 or uint32 [B, N], lowest bit first, for at most 32 nodes.
    """
    num_nodes = trees.parent_ids.shape[1]
    first_child, next_sibling = links(trees.parent_ids, trees.valid_counts)
    return {
        "draft_tokens": trees.node_token_ids.astype(np.int64).reshape(-1),
        "positions": (base_lengths[:, None] + trees.node_depths).reshape(-1),
        "retrieve_index": np.arange(trees.parent_ids.size, dtype=np.int64).reshape(-1, num_nodes),
        "retrieve_next_token": first_child,
        "retrieve_next_sibling": next_sibling,
        "tree_mask": _sglang_mask(trees, base_lengths, tree_mask),
    }


def _sglang_mask(trees: DraftTrees, base_lengths: npt.NDArray[np.int64], mode: str) -> npt.NDArray[Any]:
    if mode == "tree":
        return trees.ancestor_mask.astype(np.bool_)
    if mode == "full":
        pieces = [
            _with_prefix(mask, int(base))
            for mask, base in zip(trees.ancestor_mask, base_lengths, strict=True)
        ]
        return np.concatenate([piece.reshape(-1) for piece in pieces] or [np.zeros(0, np.bool_)])
    num_nodes = trees.parent_ids.shape[1]
    if num_nodes > 32:
        raise UsageError(
            f"{num_nodes} nodes do not fit into SGLang's packed mask of 32", hint="--tree-mask tree"
        )
    word = np.uint8 if num_nodes <= 8 else np.uint16 if num_nodes <= 16 else np.uint32
    return trees.packed_ancestor_mask[:, :, 0].view(np.uint32).astype(word)


def _with_prefix(mask: npt.NDArray[np.int8], base_length: int) -> npt.NDArray[np.bool_]:
    """A tree's mask with every committed token visible in front; bool [N, base length + N]."""
    return np.concatenate([np.ones((len(mask), base_length), np.bool_), mask.astype(np.bool_)], axis=1)


def tensorrt_llm(trees: DraftTrees, base_lengths: npt.NDArray[np.int64], tree_mask: str = "packed") -> Arrays:
    """What TensorRT-LLM's dynamic trees want: SGLang's links as int32 and counted within the request.

    ``retrieve_index`` int32 [B, N] is 0 to N - 1. ``tree_mask``: "tree" bool [B, N, N] or "packed" int32
    [B, N, ceil(N / 32)], lowest bit first, its rows as wide as ``mask_row_stride`` says. ``tree_valid`` bool [B]: the
    tree has more than its root.
    """
    if tree_mask == "full":
        raise UsageError("TensorRT-LLM takes no mask with the committed tokens", hint="--tree-mask packed")
    batch_size, num_nodes = trees.parent_ids.shape
    first_child, next_sibling = links(trees.parent_ids, trees.valid_counts)
    packed = trees.packed_ancestor_mask
    return {
        "draft_tokens": trees.node_token_ids,
        "positions": (base_lengths[:, None] + trees.node_depths).astype(np.int32),
        "retrieve_index": np.tile(np.arange(num_nodes, dtype=np.int32), (batch_size, 1)),
        "retrieve_next_token": first_child.astype(np.int32),
        "retrieve_next_sibling": next_sibling.astype(np.int32),
        "tree_mask": packed if tree_mask == "packed" else trees.ancestor_mask.astype(np.bool_),
        "mask_row_stride": np.array(packed.shape[2], np.int32),
        "tree_valid": trees.valid_counts > 1,
    }


def flashinfer(trees: DraftTrees, base_lengths: npt.NDArray[np.int64]) -> Arrays:
    """FlashInfer's packed custom mask for one prefill of all N nodes of each request.

    ``packed_custom_mask`` uint8: bit ``q * kv_len + k`` of a request's segment, lowest bit of a byte first, with kv_len
    = base length + N; every committed token is visible. ``mask_indptr`` int32 [B + 1]: where each request's bytes
    begin. ``qo_indptr`` int32 [B + 1] and ``kv_lens`` int32 [B] belong to the same call.
    """
    num_nodes = trees.parent_ids.shape[1]
    segments = [
        np.packbits(_with_prefix(mask, int(base)).reshape(-1), bitorder="little")
        for mask, base in zip(trees.ancestor_mask, base_lengths, strict=True)
    ]
    ends = np.cumsum([0, *(len(segment) for segment in segments)], dtype=np.int64)
    if ends[-1] > np.iinfo(np.int32).max:
        raise UsageError(f"{int(ends[-1])} bytes of mask are more than FlashInfer's offsets can say")
    return {
        "packed_custom_mask": np.concatenate(segments or [np.zeros(0, np.uint8)]),
        "mask_indptr": ends.astype(np.int32),
        "qo_indptr": (np.arange(len(segments) + 1) * num_nodes).astype(np.int32),
        "kv_lens": (base_lengths + num_nodes).astype(np.int32),
        "draft_tokens": trees.node_token_ids,
        "positions": (base_lengths[:, None] + trees.node_depths).astype(np.int32),
    }
