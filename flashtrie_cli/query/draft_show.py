"""A draft tree as people read it, from the arrays of a file that `flashtrie draft` wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
NEEDED = (
    "node_token_ids",
    "node_depths",
    "parent_ids",
    "node_scores",
    "valid_counts",
    "context_lengths",
    "status",
)


def describe(arrays: Arrays, batch: int) -> dict[str, Any]:
    """One tree as plain values: its nodes in order, with token, parent, depth, score and probability."""
    valid, num_nodes = int(arrays["valid_counts"][batch]), arrays["node_token_ids"].shape[1]
    nodes = []
    for node in range(valid):
        score = float(arrays["node_scores"][batch, node])
        nodes.append(
            {
                "node": node,
                "token": int(arrays["node_token_ids"][batch, node]),
                "parent": int(arrays["parent_ids"][batch, node]),
                "depth": int(arrays["node_depths"][batch, node]),
                "score": score if math.isfinite(score) else None,
                "probability": math.exp(score),
            }
        )
    return {
        "row": batch,
        "base_length": int(arrays["context_lengths"][batch]) - num_nodes,
        "num_nodes": num_nodes,
        "valid_count": valid,
        "status": int(arrays["status"][batch]),
        "expected_accepted": sum(node["probability"] for node in nodes[1:]),
        "nodes": nodes,
    }


def lines(tree: dict[str, Any], text_of: Callable[[int], str] | None) -> Iterator[str]:
    """The tree drawn with branches, a node a line: token, text, probability of its prefix, place in the order."""
    children: dict[int, list[int]] = {}
    for node in tree["nodes"][1:]:
        children.setdefault(node["parent"], []).append(node["node"])
    yield (
        f"row {tree['row']}: {tree['valid_count']} of {tree['num_nodes']} nodes, base length {tree['base_length']}, "
        f"expected accepted {tree['expected_accepted']:.3f}"
    )
    stack = [(0, "", "")]
    while stack:
        at, lead, below = stack.pop()
        node = tree["nodes"][at]
        text = f" {text_of(node['token'])!r}" if text_of is not None else ""
        yield f"{lead}{node['token']}{text}  p {node['probability']:.4g}  [{at}]"
        offspring = children.get(at, [])
        for child in reversed(offspring):
            is_last = child == offspring[-1]
            stack.append(
                (child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))
            )


def missing(arrays: Arrays) -> list[str]:
    """Names of the arrays that a tree's drawing needs and the file lacks, or has in another shape or type."""
    kinds = {name: "f" if name == "node_scores" else "iu" for name in NEEDED}
    absent = [
        name for name, kind in kinds.items() if name not in arrays or arrays[name].dtype.kind not in kind
    ]
    if absent:
        return absent
    shape = arrays["node_token_ids"].shape
    per_node = ("node_depths", "parent_ids", "node_scores")
    if len(shape) != 2 or any(arrays[name].shape != shape for name in per_node):
        return ["node_token_ids"]
    return [name for name in ("valid_counts", "context_lengths", "status") if arrays[name].shape != shape[:1]]


def is_tree(tree_arrays: Arrays) -> bool:
    """Whether the parents make trees: each before its children, valid counts within the shape, scores log-probs."""
    parents, valid = tree_arrays["parent_ids"], tree_arrays["valid_counts"]
    num_nodes = parents.shape[1]
    if np.any((valid < 1) | (valid > num_nodes)):
        return False
    inside = np.arange(num_nodes)[None, :] < valid[:, None]
    if not np.all(tree_arrays["node_scores"][inside] <= 0):
        return False
    inside[:, :1] = False
    return bool(np.all(~inside | ((parents >= 0) & (parents < np.arange(num_nodes)[None, :]))))
