"""The draft kernels' own source on the emulated machine, called with numpy arrays."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli.engine import cuda_draft_layout
from flashtrie_cli.engine.cuda_layout import TRIE
from flashtrie_cli.engine.draft_plan import DraftConstraint, DraftPlan, DraftTrees, allocate, draft_ids

ROOT = Path(__file__).resolve().parent.parent
WORKSPACE_ALIGNMENT = 256


def compile_library(folder: Path) -> ctypes.CDLL:
    source = ROOT / "tests/emulation/draft"
    target = folder / "emulated_draft.so"
    command = [
        "g++",
        "-std=c++20",
        "-O2",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Werror",
    ]
    # Vector loads read other types than were written, which nvcc allows.
    command += [
        "-fno-strict-aliasing",
        "-fPIC",
        "-shared",
        f"-I{ROOT / 'cuda'}",
        f"-I{source}",
        "-o",
        str(target),
    ]
    subprocess.run([*command, str(source / "emulate_draft.cpp")], check=True)
    return ctypes.CDLL(str(target))


class Emulator:
    """Builds like the cuda engine; ``num_multiprocessors`` decides how many tiles a chunk has."""

    def __init__(self, library: ctypes.CDLL, num_multiprocessors: int = 132):
        self.library, self.num_multiprocessors, self.seed = library, num_multiprocessors, 1

    def build(
        self,
        plan: DraftPlan,
        logits: np.ndarray,
        roots: Any,
        base_lengths: Any,
        *,
        vocab_map: Any = None,
        constraint: DraftConstraint | None = None,
        shift: int = 0,
    ) -> DraftTrees:
        """Run the kernels; the logits lie ``shift`` elements past a 16-byte boundary, outputs start stale."""
        held = [_placed(logits, shift)]
        pointers = {"logits": held[0].ctypes.data}
        for name, values in (("roots", roots), ("base_lengths", base_lengths), ("vocab_map", vocab_map)):
            if values is not None:
                held.append(np.ascontiguousarray(values, np.int32))
                pointers[name] = held[-1].ctypes.data
        out = allocate(plan, constraint is not None)
        for name, array in out.arrays().items():
            array.reshape(-1).view(np.uint8)[:] = 0xA5
            pointers[name] = array.ctypes.data
        memory, workspace = _workspace(plan, constraint is not None)
        chunks = 0
        if constraint is None or (constraint.scoring == "global" and plan.num_depths):
            params, grid = cuda_draft_layout.fill_params(plan, pointers, workspace, self.num_multiprocessors)
            params.sums_only = int(constraint is not None)
            chunks = params.num_chunks
            self._run("emulate_draft", params, *grid, cuda_draft_layout.shared_bytes(plan))
        if constraint is not None:
            held.append(np.ascontiguousarray(constraint.start_states, np.uint32))
            pointers["start_states"] = held[-1].ctypes.data
            name, rules, num_tokens, arrays = _rules(constraint)
            held += arrays
            if vocab_map is not None:
                held.append(draft_ids(np.asarray(vocab_map, np.int32), num_tokens))
                pointers["draft_ids"] = held[-1].ctypes.data
            legal = cuda_draft_layout.fill_legal_params(
                plan, pointers, rules, workspace, renormalise=constraint.scoring == "renorm", num_chunks=chunks,
                num_mapped=num_tokens,
            )  # fmt: skip
            self._run(name, legal, plan.batch_size, cuda_draft_layout.legal_shared_bytes(plan))
        zeros = memory[: 4 * cuda_draft_layout.num_zeros(plan)]
        assert not zeros.any(), "the workspace is not zero for the next launch"
        return out

    def _run(self, name: str, params: ctypes.Structure, *sizes: int) -> None:
        self.seed += 1
        *grid, shared = sizes
        call = getattr(self.library, name)
        code = call(ctypes.byref(params), *grid, ctypes.c_size_t(shared), ctypes.c_uint32(self.seed))
        assert code == 0, f"{name}: the threads wait for each other for ever"


def _placed(array: np.ndarray, shift: int) -> np.ndarray:
    memory = np.zeros(array.nbytes + 64, np.uint8)
    offset = -memory.ctypes.data % 16 + shift * array.itemsize
    placed = memory[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def _workspace(plan: DraftPlan, constrained: bool) -> tuple[np.ndarray, int]:
    """Memory full of rubbish, but for what must be zero."""
    whole = np.full(cuda_draft_layout.workspace_size(plan, constrained) + WORKSPACE_ALIGNMENT, 0xA5, np.uint8)
    memory = whole[-whole.ctypes.data % WORKSPACE_ALIGNMENT :]
    memory[: 4 * cuda_draft_layout.num_zeros(plan)] = 0
    return memory, memory.ctypes.data


def _rules(constraint: DraftConstraint) -> tuple[str, ctypes.Structure, int, list[np.ndarray]]:
    """The emulated kernel, its rules, a bound of the token ids, and the arrays behind it all."""
    trie = constraint.trie
    if hasattr(trie, "vocab_size"):
        held, eos = list(trie.set.plain()), np.array(trie.eos, np.uint32)
        view = cuda_draft_layout.Masks(
            *(array.ctypes.data for array in (*held, eos)), cuda_draft_layout.ByteTokens(),
            trie.num_nodes, len(held[3]), len(eos), trie.vocab_size, trie.set.hop_bits,
        )  # fmt: skip
        return "emulate_masked", cuda_draft_layout.mask_rules(view), trie.vocab_size, [*held, eos]
    view, held = _view(trie)
    rules = cuda_draft_layout.trie_rules(view, constraint.end_token)
    return "emulate_legal", rules, 1 << (16 + trie.high_width), held


def _view(trie: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """The native trie's arrays, aligned as on a GPU, and the structure that points to them."""
    view, held = np.zeros((), TRIE), []
    arrays = {name: getattr(trie, name) for name in ("louds", "lines", "wide", "label_low", "high_flags")}
    arrays["high_bits"] = trie.label_high
    for name, array in arrays.items():
        raw = np.asarray(array).reshape(-1).view(np.uint8)
        memory = np.full(raw.nbytes + 128, 0xFF, np.uint8)
        offset = -memory.ctypes.data % 64
        memory[offset : offset + raw.nbytes] = raw
        held.append(memory)
        view[name] = memory.ctypes.data + offset if raw.nbytes else 0
    view["num_nodes"], view["num_keys"], view["high_width"] = trie.num_nodes, trie.num_keys, trie.high_width
    return view, held
