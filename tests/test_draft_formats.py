"""Draft trees in the consumers' layouts, read back by small reimplementations of the consumers' rules."""

from __future__ import annotations

import numpy as np
import pytest
from draft_cases import random_logits, vectors

from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.draft import DraftTrees, build_draft_trees
from flashtrie_cli.query.draft_formats import NONE, links, to_format

BASES = np.array([3, 10, 0])


def trees_of(num_nodes: int, seed: int = 0, top_k: int = 4) -> DraftTrees:
    logits = random_logits(np.random.default_rng(seed), 3, 5, 4)
    logits[2, 2:] = -np.inf  # the third tree ends early
    return build_draft_trees(logits, [7, 8, 9], BASES, num_nodes, top_k)


def parents_of(first_child: np.ndarray, next_sibling: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Parents and valid counts back from links; -1 for the root and for padding."""
    parents = np.full(first_child.shape, NONE, np.int32)
    valid_counts = np.ones(len(first_child), np.int32)
    for batch, (children, siblings) in enumerate(
        zip(first_child.tolist(), next_sibling.tolist(), strict=True)
    ):
        for node, child in enumerate(children):
            while child != NONE:
                parents[batch, child] = node
                valid_counts[batch] += 1
                child = siblings[child]
    return parents, valid_counts


def test_links_of_the_example() -> None:
    case = next(case for case in vectors() if case.name == "doc_shape_N6")
    trees = build_draft_trees(case.logits, **case.arguments)
    first_child, next_sibling = links(trees.parent_ids, trees.valid_counts)
    assert first_child.tolist() == [[1, 3, 4, 5, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, -1, -1, -1]]


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 33, 80])
@pytest.mark.parametrize("seed", range(5))
def test_links_and_back(num_nodes: int, seed: int) -> None:
    trees = trees_of(num_nodes, seed)
    parents, valid = parents_of(*links(trees.parent_ids, trees.valid_counts))
    assert np.array_equal(parents, trees.parent_ids)
    assert np.array_equal(valid, trees.valid_counts)


def sglang_accept(made: dict[str, np.ndarray], batch: int, target: np.ndarray) -> list[int]:
    """SGLang's greedy verification: from a node try its first child, then its siblings, by the target's token there."""
    num_nodes = made["retrieve_index"].shape[1]
    flat_tokens = made["draft_tokens"]
    path, node = [0], 0
    while True:
        wanted = target[node]
        child = int(made["retrieve_next_token"][batch, node])
        while child != -1 and flat_tokens[made["retrieve_index"][batch, child]] != wanted:
            child = int(made["retrieve_next_sibling"][batch, child])
        if child == -1:
            return path
        assert made["retrieve_index"][batch, child] == batch * num_nodes + child
        path.append(child)
        node = child


def plain_accept(trees: DraftTrees, batch: int, target: np.ndarray) -> list[int]:
    path, node = [0], 0
    while True:
        children = [
            i
            for i in range(1, int(trees.valid_counts[batch]))
            if trees.parent_ids[batch, i] == node and trees.node_token_ids[batch, i] == target[node]
        ]
        if not children:
            return path
        node = children[0]
        path.append(node)


@pytest.mark.parametrize("seed", range(10))
def test_sglang_verification_walks_the_tree(seed: int) -> None:
    trees = trees_of(40, seed)
    made = to_format(trees, BASES, "sglang")
    rng = np.random.default_rng(seed)
    for batch in range(3):
        target = rng.integers(0, 4, 40)
        path = sglang_accept(made, batch, target)
        assert path == plain_accept(trees, batch, target)
        # An accepted path ascends, so key-value entries can be moved to the front in place.
        assert all(node >= step for step, node in enumerate(path))
        assert path == sorted(path)


@pytest.mark.parametrize("num_nodes", [1, 8, 9, 16, 17, 32])
def test_sglang_masks(num_nodes: int) -> None:
    trees = trees_of(num_nodes)
    tree, full, packed = (
        to_format(trees, BASES, "sglang", tree_mask=mode)["tree_mask"] for mode in ("tree", "full", "packed")
    )
    assert tree.dtype == full.dtype == np.bool_
    begin = 0
    for batch, base in enumerate(BASES):
        end = begin + num_nodes * (base + num_nodes)
        rows = full[begin:end].reshape(num_nodes, base + num_nodes)
        assert rows[:, :base].all()
        assert np.array_equal(rows[:, base:], tree[batch])
        begin = end
    assert begin == len(full)
    assert packed.dtype.itemsize * 8 >= num_nodes
    assert packed.dtype.itemsize in (1, 2, 4)
    bits = packed[..., None] >> np.arange(num_nodes, dtype=packed.dtype) & 1
    assert np.array_equal(bits.astype(bool), tree)
    if num_nodes == 32:
        with pytest.raises(UsageError, match="33 nodes"):
            to_format(trees_of(33), BASES, "sglang", tree_mask="packed")


def test_sglang_positions() -> None:
    trees = trees_of(9)
    made = to_format(trees, BASES, "sglang")
    assert np.array_equal(made["positions"].reshape(3, 9), BASES[:, None] + trees.node_depths)
    assert all(made[name].dtype == np.int64 for name in made if name != "tree_mask")


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 65])
def test_tensorrt_llm(num_nodes: int) -> None:
    trees = trees_of(num_nodes)
    made = to_format(trees, BASES, "tensorrt-llm", tree_mask="packed")
    stride = int(made["mask_row_stride"])
    assert stride == (num_nodes + 31) // 32
    words = made["tree_mask"].reshape(-1)
    for batch in range(3):
        for query in range(num_nodes):
            for key in range(num_nodes):
                word = int(words[(batch * num_nodes + query) * stride + key // 32])
                assert (word >> (key % 32)) & 1 == trees.ancestor_mask[batch, query, key]
    assert (made["retrieve_index"] == np.arange(num_nodes)).all()
    assert made["retrieve_next_token"].dtype == made["positions"].dtype == np.int32
    parents, valid = parents_of(made["retrieve_next_token"], made["retrieve_next_sibling"])
    assert np.array_equal(parents, trees.parent_ids)
    assert np.array_equal(made["tree_valid"], valid > 1)
    with pytest.raises(UsageError, match="committed"):
        to_format(trees, BASES, "tensorrt-llm", tree_mask="full")


def test_flashinfer_example_bytes() -> None:
    case = next(case for case in vectors() if case.name == "doc_shape_N6")
    trees = build_draft_trees(case.logits, **{**case.arguments, "base_lengths": [3]})
    made = to_format(trees, [3], "flashinfer")
    assert made["packed_custom_mask"].tolist() == [15, 62, 188, 248, 242, 234, 43]
    assert made["mask_indptr"].tolist() == [0, 7]


@pytest.mark.parametrize("num_nodes", [1, 5, 33])
def test_flashinfer_bits(num_nodes: int) -> None:
    trees = trees_of(num_nodes)
    made = to_format(trees, BASES, "flashinfer")
    for batch, base in enumerate(BASES):
        kv_len = int(made["kv_lens"][batch])
        assert kv_len == base + num_nodes
        assert made["qo_indptr"][batch + 1] - made["qo_indptr"][batch] == num_nodes
        segment = made["packed_custom_mask"][made["mask_indptr"][batch] : made["mask_indptr"][batch + 1]]
        assert len(segment) == (num_nodes * kv_len + 7) // 8
        for query in range(num_nodes):
            for key in range(kv_len):
                offset = query * kv_len + key
                bit = segment[offset // 8] >> (offset % 8) & 1
                assert bit == (key < base or trees.ancestor_mask[batch, query, key - base])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match="format 'vllm'"):
        to_format(trees_of(3), BASES, "vllm")
    with pytest.raises(UsageError, match="tree mask"):
        to_format(trees_of(3), BASES, "sglang", tree_mask="half")
