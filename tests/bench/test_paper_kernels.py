"""The paper's kernels, without a GPU: their structs, and their answers under emulation, block by block."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flashtrie_cli.engine.cuda_paper_layout import (
    ANSWERS,
    PAPER,
    PaperShape,
    chunk,
    join_answers,
    node_labels,
    position_lists,
)
from flashtrie_cli.engine.reference import ReferenceEngine
from flashtrie_cli.errors import UsageError
from flashtrie_cli.query.plan import SearchPlan

from .conftest import make_index, random_grids, random_keys

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++") or shutil.which("c++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
EXACT = ("flashtrie_paper", "linear_probe", "two_pointer", "per_child", "hash_transitions")


def compiled(tmp_path_factory, name, source, *options):
    binary = tmp_path_factory.mktemp("bin") / name
    command = [
        COMPILER,
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        *options,
        f"-I{ROOT / 'cuda'}",
        "-o",
        binary,
        source,
    ]
    subprocess.run([str(part) for part in command], check=True)
    return binary


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    folder = ROOT / "tests/bench/emulation"
    return compiled(
        tmp_path_factory, "paper", folder / "emulate_paper.cpp", "-DFT_EMULATION", "-pthread", f"-I{folder}"
    )


@needs_compiler
def test_both_sides_lay_out_alike(tmp_path_factory):
    shapes = [
        (1, 1, 1, 1),
        (100, 100, 8, 100),
        (256, 2048, 16, 4096),
        (1000, 1000, 8, 1000),
        (2048, 7, 3, 33),
    ]
    source = tmp_path_factory.mktemp("src") / "layout.cpp"
    offsets = "".join(f'std::printf("%zu ", offsetof(PaperBatch, {name}));\n' for name in PAPER.names)
    sizes = "".join(
        f'std::printf("%llu ", (unsigned long long)paper_layout({b}, {n}, {t}, {k}, {b * k}ull, {b * k * t}ull).end);\n'
        for b, n, t, k in shapes
    )
    source.write_text(
        '#include <cstddef>\n#include <cstdio>\n#include "flashtrie/paper_batch.cuh"\nusing namespace flashtrie;\n'
        f'int main() {{ std::printf("%zu ", sizeof(PaperBatch));\n{offsets}{sizes}'
        'std::printf("%llu", (unsigned long long)paper_chunk(1000)); }\n'
    )
    binary = compiled(tmp_path_factory, "layout", source)
    numbers = [
        int(n) for n in subprocess.run([binary], capture_output=True, check=True, text=True).stdout.split()
    ]
    assert numbers[0] == PAPER.itemsize
    assert numbers[1 : 1 + len(PAPER.names)] == [PAPER.fields[name][1] for name in PAPER.names]
    assert numbers[1 + len(PAPER.names) : -1] == [PaperShape(*shape).workspace_bytes for shape in shapes]
    assert numbers[-1] == chunk(1000) == 2048


def test_limits():
    PaperShape(2048, 2048, 255, 4096).check()
    for shape in (PaperShape(2049, 1, 1, 1), PaperShape(1, 1, 256, 1), PaperShape(1, 1, 1, 4097)):
        with pytest.raises(UsageError):
            shape.check()


@pytest.mark.parametrize("vocabulary", [200, 100_000])
def test_labels_and_position_lists(tmp_path, vocabulary):
    index = make_index(tmp_path / "x.ft", random_keys(2, 500, vocabulary))
    keys = [k.tokens[k.offsets[i] : k.offsets[i + 1]].tolist() for k in index.keys() for i in range(len(k))]
    tokens, flags, offsets = position_lists(index.engine.trie, 8)
    assert len(node_labels(index.engine.trie)) == index.num_nodes
    for depth in range(8):
        own = dict(
            zip(
                tokens[offsets[depth] : offsets[depth + 1]].tolist(),
                flags[offsets[depth] :].tolist(),
                strict=False,
            )
        )
        assert set(own) == {key[depth] for key in keys if len(key) > depth}
        for token, flag in own.items():
            assert bool(flag & 1) == any(len(key) == depth + 1 and key[depth] == token for key in keys)
            assert bool(flag & 2) == any(len(key) > depth + 1 and key[depth] == token for key in keys)


class Emulation:
    """Runs a kernel over an index: arrays laid out one after the other, pointers as offsets."""

    def __init__(self, binary, folder):
        self.binary, self.folder = binary, folder

    def search(self, kernel, index, tokens, logprobs, plan, *, blocks=2, groups=1):
        trie, shape = index.engine.trie, PaperShape(plan.beam_width, plan.result_limit, *tokens.shape[1:])
        log2_hash = max(4, int(2 * index.num_nodes).bit_length())
        arrays = {
            "trie.louds": trie.louds, "trie.lines": trie.lines, "trie.wide": trie.wide,
            "trie.label_low": trie.label_low, "trie.high_flags": trie.high_flags, "trie.high_bits": trie.label_high,
            "search.length_factors": plan.length_factors(tokens.shape[1]), "tokens": tokens, "logprobs": logprobs,
            "workspace": np.full(shape.workspace_bytes * groups, 0xA5, np.uint8),
            "hash_keys": np.full(1 << log2_hash, 2**64 - 1, np.uint64),
            "hash_children": np.zeros(1 << log2_hash, np.uint32),
            "barriers": np.zeros(32 * groups, np.uint32), "phases": np.zeros(4, np.uint64),
        }  # fmt: skip
        names = ("valid_tokens", "valid_flags", "valid_offsets")
        arrays.update(zip(names, position_lists(trie, tokens.shape[1]), strict=True))
        sizes = shape.answer_sizes(len(tokens))
        arrays.update({name: np.full(sizes[name], 7, dtype) for name, dtype in ANSWERS})
        batch, at, parts = np.zeros((), PAPER), 0, []
        for name, array in arrays.items():
            raw = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
            record, _, field = name.rpartition(".")
            (batch[record] if record else batch)[field] = at
            arrays[name] = (at, raw.nbytes)
            padded = raw.nbytes + 64 + -raw.nbytes % 256
            parts.append(np.concatenate((raw, np.full(padded - raw.nbytes, 0xFF, np.uint8))))
            at += padded
        for name in ("num_nodes", "num_keys", "high_width"):
            batch["trie"][name] = getattr(trie, name)
        search = batch["search"]
        search["token_threshold"], search["sequence_threshold"] = (
            plan.token_threshold,
            plan.sequence_threshold,
        )
        search["beam_width"], search["num_results"] = plan.beam_width, plan.result_limit
        search["padding"], search["eos"] = plan.padding, 0xFFFF_FFFF if plan.eos is None else plan.eos
        batch["workspace_bytes"] = shape.workspace_bytes
        batch["candidate_capacity"], batch["result_capacity"] = (
            shape.candidate_capacity,
            shape.result_capacity,
        )
        batch["num_queries"], batch["num_steps"], batch["num_slots"] = tokens.shape
        batch["num_groups"], batch["blocks_per_group"], batch["log2_hash"] = groups, blocks, log2_hash
        given, taken = self.folder / "in", self.folder / "out"
        given.write_bytes(batch.tobytes() + b"".join(part.tobytes() for part in parts))
        subprocess.run(
            [self.binary, kernel, str(blocks * groups), str(groups), given, taken], check=True, timeout=120
        )
        memory = np.frombuffer(taken.read_bytes(), np.uint8)
        answers = {name: memory[arrays[name][0] :][: arrays[name][1]].view(dtype) for name, dtype in ANSWERS}
        return join_answers(answers, len(tokens), plan.result_limit, tokens.shape[1])


@pytest.fixture
def emulation(emulator, tmp_path):
    return Emulation(emulator, tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "vocabulary"), [("flashtrie_paper", 60), *((name, 100_000) for name in EXACT)]
)
def test_exact_kernels_give_the_reference_bytes(emulation, tmp_path, kernel, vocabulary):
    index = make_index(tmp_path / "x.ft", random_keys(2, 3000, vocabulary))
    tokens, logprobs = random_grids(3, 2, 5, 40, vocabulary)
    plan = SearchPlan(beam_width=30, num_results=50)
    expected = ReferenceEngine(index.stored).search(tokens, logprobs, plan)
    assert expected.num_hits > 20
    found = emulation.search(kernel, index, tokens, logprobs, plan)
    assert found.identical(expected)


@needs_compiler
@pytest.mark.parametrize(
    "plan",
    [
        SearchPlan(beam_width=1, num_results=1),
        SearchPlan(beam_width=20, eos=3),
        SearchPlan(beam_width=300, alpha=5.0),
        SearchPlan(beam_width=20, token_threshold=-1.0, sequence_threshold=-2.5),
    ],
)
def test_plans(emulation, tmp_path, plan):
    index = make_index(tmp_path / "x.ft", random_keys(4, 4000, 60))
    tokens, logprobs = random_grids(5, 3, 5, 60, 60)
    expected = ReferenceEngine(index.stored).search(tokens, logprobs, plan)
    found = emulation.search("flashtrie_paper", index, tokens, logprobs, plan, blocks=2, groups=2)
    assert found.identical(expected)


@needs_compiler
def test_a_tournament_of_many_runs(emulation, tmp_path):
    """More candidates than three chunks hold, over three blocks; wide rows; fan-outs past one louds word and line."""
    keys = [[a, b] for a in range(50) for b in range(700)] + random_keys(4, 100, 700)
    index = make_index(tmp_path / "x.ft", keys)
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(700)[:600] for _ in range(3)]).astype(np.uint32)[None]
    logprobs = -rng.random((1, 3, 600)).astype(np.float32)
    plan = SearchPlan(beam_width=100)
    expected = ReferenceEngine(index.stored).search(tokens, logprobs, plan)
    assert emulation.search("flashtrie_paper", index, tokens, logprobs, plan, blocks=3).identical(expected)


@needs_compiler
def test_ppt_is_a_superset(emulation, tmp_path):
    """Without pruning, PPT returns every sequence that the trie allows, and more."""
    index = make_index(tmp_path / "x.ft", random_keys(6, 60, 12, max_depth=3))
    tokens, logprobs = random_grids(7, 1, 3, 8, 12)
    plan = SearchPlan(beam_width=600, num_results=1000)
    expected = ReferenceEngine(index.stored).search(tokens, logprobs, plan)
    found = emulation.search("ppt", index, tokens, logprobs, plan, blocks=1)
    sequences = {hit.tokens for hit in found.hits(0)}
    assert {hit.tokens for hit in expected.hits(0)} < sequences
    assert all(s == tuple(s) and len(s) <= 3 for s in sequences)
