"""Draft trees by the C++ engine: threads over batch rows, the interpreter lock released."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from flashtrie_cli.engine.draft_plan import LOGIT_TYPES, DraftInputs, DraftPlan, DraftTrees, draft_ids


def is_available() -> bool:
    """Whether the extension is here."""
    try:
        from flashtrie_cli import _native  # noqa: F401
    except ImportError:
        return False
    return True


def native_trie(trie: Any) -> Any:
    """The native trie of an opened index, or of a native trie itself; the native set of token masks; None for
    anything else."""
    from flashtrie_cli import _native
    from flashtrie_cli.engine.cpu import CpuEngine

    if isinstance(getattr(trie, "set", None), _native.MaskSet):
        return trie.set
    stored = getattr(trie, "stored", None)
    if stored is not None:
        trie = getattr(trie.engine, "trie", None)
        trie = trie if isinstance(trie, _native.Trie) else CpuEngine(stored).trie
    return trie if isinstance(trie, _native.Trie | _native.MaskSet) else None


def build(plan: DraftPlan, inputs: DraftInputs, out: DraftTrees, threads: int) -> None:
    """Fill ``out`` from numpy inputs; ``threads`` 0 takes all that the process may use."""
    from flashtrie_cli import _native

    logits = inputs.logits.view(np.uint16 if inputs.logits.itemsize == 2 else np.uint32).reshape(-1)
    outputs = {name: array.reshape(-1) for name, array in out.arrays().items()}
    sizes = _native.DraftSizes(
        batch_size=plan.batch_size,
        block_size=plan.block_size,
        vocab_size=plan.vocab_size,
        num_nodes=plan.num_nodes,
        top_k=plan.top_k,
        first_row=plan.first_row,
        self_padding=plan.self_padding,
        logit_type=LOGIT_TYPES[plan.logit_type],
    )
    num_threads = threads or len(os.sched_getaffinity(0))
    roots, bases, constraint = inputs.roots, inputs.base_lengths, inputs.constraint
    if constraint is None:
        _native.build_draft_trees(
            sizes, logits, roots, bases, vocab_map=inputs.vocab_map, outputs=outputs, num_threads=num_threads
        )
        return
    held = constraint.trie
    is_masks = isinstance(held, _native.MaskSet)
    ids = None
    if inputs.vocab_map is not None:
        ids = draft_ids(inputs.vocab_map, 32 * held.num_words if is_masks else 1 << (16 + held.high_width))
    common = {
        "outputs": outputs,
        "start_states": constraint.start_states,
        "vocab_map": inputs.vocab_map,
        "draft_ids": ids,
        "renormalise": constraint.scoring == "renorm",
        "num_threads": num_threads,
    }
    if is_masks:
        _native.build_masked_draft_trees(sizes, logits, roots, bases, masks=held, **common)
        return
    end_token = -1 if constraint.end_token is None else constraint.end_token
    _native.build_legal_draft_trees(sizes, logits, roots, bases, trie=held, end_token=end_token, **common)
