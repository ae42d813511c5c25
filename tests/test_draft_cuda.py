"""Draft trees on a GPU against the other engines; device arrays are torch's."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_cases import (
    Case,
    assert_invariants,
    assert_same_trees,
    random_logits,
    to_bfloat16,
    vectors,
)

from flashtrie_cli.build import build_index
from flashtrie_cli.engine import cuda_draft_layout as layout
from flashtrie_cli.engine.draft_plan import OUTPUTS, DraftPlan
from flashtrie_cli.errors import InputError, UsageError
from flashtrie_cli.index import Index
from flashtrie_cli.query.draft import (
    NO_STATE,
    STATUS_BAD_ROW,
    DraftTrees,
    build_draft_trees,
    draft_workspace_size,
    prepare_draft_trees,
)
from flashtrie_cli.query.token_masks import TokenMasks
from flashtrie_cli.trie.token_bytes import NORMAL, SPECIAL, TokenBytes

ROOT = Path(__file__).parent.parent
PREFIX = (np.array([5], np.uint32), np.array([0, 1], np.int64))


def constants(name: str) -> dict[str, str]:
    text = (ROOT / "cuda" / name).read_text()
    return dict(re.findall(r"constexpr int (k\w+) = ([^;]+);", text))


def test_constants_are_the_kernels() -> None:
    block, kernel = constants("flashtrie/draft_block.cuh"), constants("kernels/draft.cu")
    for header in ("pack", "mail", "merge"):
        kernel |= constants(f"flashtrie/draft_{header}.cuh")
    assert int(block["kDraftThreads"]) == layout.THREADS
    assert int(kernel["kThreadLogits"]) * layout.THREADS == layout.TILE_LOGITS
    assert int(kernel["kLeastKeys"]) == layout.LEAST_KEYS
    assert 32 * int(kernel["kRegisters"]) == layout.KEYS_AT_ONCE
    assert int(kernel["kBlocksAtOnce"]) == layout.BLOCKS_PER_MULTIPROCESSOR


@pytest.mark.parametrize(
    ("batch_size", "vocab_size", "num_nodes", "grid"),
    [
        (1, 151_936, 32, (19, 16, 1)),  # a block more than there are chunks finishes
        (64, 151_936, 32, (10, 15, 64)),  # blocks take turns: one of them finishes
        (3, 151_936, 1, (1, 1, 3)),  # nothing is read
    ],
)
def test_grids(batch_size: int, vocab_size: int, num_nodes: int, grid: tuple[int, int, int]) -> None:
    plan = DraftPlan(batch_size, 16, vocab_size, num_nodes, 8)
    assert layout.fill_params(plan, {"logits": 0}, 0, 132)[1] == grid


STRUCTURES = {
    "DraftSizes": ("flashtrie/draft.cuh", layout.Sizes),
    "DraftOutputs": ("flashtrie/draft.cuh", layout.Outputs),
    "TrieView": ("flashtrie/trie.cuh", layout.Trie),
    "TrieRules": ("flashtrie/draft_rules.cuh", layout.TrieRules),
    "ByteTokens": ("flashtrie/masks.cuh", layout.ByteTokens),
    "MaskView": ("flashtrie/masks.cuh", layout.Masks),
    "MaskRules": ("flashtrie/draft_rules.cuh", layout.MaskRules),
    "DraftIds": ("flashtrie/draft_rules.cuh", layout.DraftIds),
    "DraftConstraint": (
        "flashtrie/draft_rules.cuh",
        dict(layout.LEGAL_PARAMS[layout.TrieRules]._fields_)["constraint"],
    ),
    "DraftParams": ("kernels/draft.cu", layout.DraftParams),
    "LegalParams": ("kernels/draft_legal.cu", layout.LEGAL_PARAMS[layout.TrieRules]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_the_kernels(name: str) -> None:
    """Names and order of the fields that ctypes repeats."""
    file, twin = STRUCTURES[name]
    body = re.search(rf"struct {name} {{\n(.*?)\n(?:}};|\n)", (ROOT / "cuda" / file).read_text(), re.DOTALL)
    assert body
    fields = re.findall(r"^  (?:const )?[\w<>]+\*? (\w+);", body.group(1), re.MULTILINE)
    assert fields == [field[0] for field in twin._fields_]


@pytest.fixture(scope="module")
def torch() -> Any:
    """torch with a GPU, or a skip."""
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("no GPU")
    return module


def on_device(torch: Any, array: np.ndarray, logit_type: str | None = None) -> Any:
    """A torch tensor on the GPU; uint16 bits become bfloat16 where asked."""
    if array.dtype == np.uint16:
        tensor = torch.from_numpy(array.view(np.int16)).cuda()
        return tensor.view(torch.bfloat16) if logit_type == "bfloat16" else tensor
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def to_host(trees: DraftTrees) -> DraftTrees:
    return DraftTrees(**{name: array.cpu().numpy() for name, array in trees.arrays().items()})


def build(torch: Any, logits: np.ndarray, num_nodes: int, top_k: int, **options: Any) -> DraftTrees:
    batch = len(logits)
    roots = np.asarray(options.pop("roots", np.arange(batch) + 7), np.int32)
    bases = np.asarray(options.pop("base_lengths", np.arange(batch) * 3 + 10), np.int32)
    mapping = options.pop("vocab_map", None)
    if mapping is not None:
        options["vocab_map"] = on_device(torch, np.asarray(mapping, np.int32))
    device_logits = on_device(torch, logits, options.get("logit_type"))
    trees = to_host(
        build_draft_trees(
            device_logits, on_device(torch, roots), on_device(torch, bases), num_nodes, top_k, **options
        )
    )
    assert_invariants(trees, num_nodes, bases, options.get("padding", "zero"))
    return trees


def build_on_host(logits: np.ndarray, num_nodes: int, top_k: int, **options: Any) -> DraftTrees:
    batch = len(logits)
    return build_draft_trees(
        logits, np.arange(batch) + 7, np.arange(batch) * 3 + 10, num_nodes, top_k, **options
    )


@pytest.mark.gpu
class TestOnDevice:
    @pytest.mark.parametrize("case", vectors(), ids=lambda case: case.name)
    def test_vectors(self, torch: Any, case: Case) -> None:
        arguments = dict(case.arguments)
        trees = build(torch, case.logits, arguments.pop("num_nodes"), arguments.pop("top_k"), **arguments)
        for batch, expected in enumerate(case.expected):
            assert trees.node_token_ids[batch].tolist() == expected["tokens"]
            assert trees.parent_ids[batch].tolist() == expected["parents"]
            scores = [-np.inf if score is None else score for score in expected["scores"]]
            np.testing.assert_allclose(trees.node_scores[batch], scores, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 63, 64, 65, 127, 128, 256])
    @pytest.mark.parametrize(
        ("batch", "vocab", "top_k"), [(1, 50_257, 8), (3, 1_001, 32), (64, 97, 4), (2, 5, 5)]
    )
    def test_random(self, torch: Any, num_nodes: int, batch: int, vocab: int, top_k: int) -> None:
        logits = random_logits(np.random.default_rng(num_nodes), batch, 9, vocab)
        found = build(torch, logits, num_nodes, top_k)
        assert_same_trees(found, build_on_host(logits, num_nodes, top_k))

    @pytest.mark.parametrize("logit_type", ["float16", "bfloat16"])
    @pytest.mark.parametrize("vocab", [1, 2, 17, 8191, 8192, 8193, 262_144])
    def test_half_precision(self, torch: Any, logit_type: str, vocab: int) -> None:
        full = random_logits(np.random.default_rng(vocab), 2, 5, vocab)
        halves = full.astype(np.float16) if logit_type == "float16" else to_bfloat16(full)
        top_k = min(vocab, 9)
        found = build(torch, halves, 40, top_k, logit_type=logit_type)
        assert_same_trees(found, build_on_host(halves, 40, top_k, logit_type=logit_type))

    @pytest.mark.parametrize(
        "shape", ["equal", "few_values", "sparse", "one_warp", "ascending", "descending"]
    )
    @pytest.mark.parametrize("top_k", [1, 8, 32])
    def test_hard_selections(self, torch: Any, shape: str, top_k: int) -> None:
        """Long ties and mostly masked rows, where the bound lets too many values through."""
        rng = np.random.default_rng(top_k)
        logits = random_logits(rng, 2, 4, 20_000)
        if shape == "equal":
            logits[...] = 2.5
        elif shape == "few_values":
            logits = np.round(logits / 3)
        elif shape == "sparse":
            logits[rng.random(logits.shape) < 0.999] = -np.inf
        elif shape == "one_warp":
            logits[...] = -np.inf
            logits[:, :, 9_000:9_100] = 1
        else:
            logits = np.broadcast_to(np.linspace(-5, 5, 20_000, dtype=np.float32), logits.shape).copy()
            if shape == "descending":
                logits = np.ascontiguousarray(logits[..., ::-1])
        found = build(torch, logits, 50, top_k)
        assert_same_trees(found, build_on_host(logits, 50, top_k))

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_bad_rows(self, torch: Any, poison: float) -> None:
        logits = random_logits(np.random.default_rng(5), 3, 5, 9_000)
        logits[:, 0] = poison  # never read
        logits[1, 2, 8_999] = poison
        logits[2, 1, :] = -np.inf
        trees = build(torch, logits, 12, 4)
        assert (trees.status & STATUS_BAD_ROW).tolist() == [0, STATUS_BAD_ROW, 0]
        assert trees.valid_counts.tolist() == [12, 5, 1]

    def test_vocabulary_map_and_self_padding(self, torch: Any) -> None:
        rng = np.random.default_rng(6)
        logits, mapping = random_logits(rng, 2, 3, 5), rng.integers(0, 1 << 30, 5)
        found = build(torch, logits, 40, 2, vocab_map=mapping, padding="self")
        assert_same_trees(found, build_on_host(logits, 40, 2, vocab_map=mapping, padding="self"))

    def test_same_bytes_every_time(self, torch: Any) -> None:
        logits = np.round(random_logits(np.random.default_rng(7), 4, 16, 32_000) * 4) / 4
        first = build(torch, logits, 64, 8)
        for _ in range(20):
            again = build(torch, logits, 64, 8)
            for name, array in first.arrays().items():
                assert np.array_equal(getattr(again, name), array), name

    def test_unaligned_logits(self, torch: Any) -> None:
        logits = random_logits(np.random.default_rng(8), 2, 4, 8_192)
        for shift in range(1, 4):
            flat = torch.empty(logits.size + shift, device="cuda")
            view = flat[shift:].view(logits.shape)
            view.copy_(torch.from_numpy(logits))
            arguments = [on_device(torch, np.array(x, np.int32)) for x in ([7, 8], [10, 13])]
            found = to_host(build_draft_trees(view, *arguments, 40, 8))
            assert_same_trees(found, build_on_host(logits, 40, 8))

    def test_guard_bytes_and_stale_outputs(self, torch: Any) -> None:
        logits = random_logits(np.random.default_rng(9), 3, 4, 3)
        plan = DraftPlan(3, 4, 3, 70, 2)
        guarded, arrays = {}, {}
        for name, (dtype, _) in OUTPUTS.items():
            if name == "node_states":
                continue
            shape = plan.shape(name)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            guarded[name] = torch.full((size + 512,), 0xA5, dtype=torch.uint8, device="cuda")
            arrays[name] = guarded[name][256 : 256 + size].view(getattr(torch, dtype)).view(shape)
        build(torch, logits, 70, 2, out=DraftTrees(**arrays))
        wanted = build_on_host(logits, 70, 2)
        for name, whole in guarded.items():
            assert np.array_equal(arrays[name].cpu().numpy(), getattr(wanted, name)) or name == "node_scores"
            assert bool((whole[:256] == 0xA5).all()), name
            assert bool((whole[-256:] == 0xA5).all()), name

    def test_graph_replay_with_changed_inputs(self, torch: Any) -> None:
        rng = np.random.default_rng(10)
        logits = torch.empty((2, 16, 4_001), device="cuda")
        roots = torch.zeros(2, dtype=torch.int32, device="cuda")
        bases = torch.zeros(2, dtype=torch.int32, device="cuda")
        size = draft_workspace_size(2, 16, 64, 4_001, 8)
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        draft = prepare_draft_trees(logits, roots, bases, 64, 8, workspace=workspace)
        draft(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft(torch.cuda.current_stream())
        for _ in range(3):
            values = random_logits(rng, 2, 16, 4_001)
            logits.copy_(torch.from_numpy(values))
            roots.copy_(torch.tensor([7, 8]))
            bases.copy_(torch.tensor([10, 13]))
            graph.replay()
            assert_same_trees(to_host(draft.trees), build_on_host(values, 64, 8))

    def test_sizes_take_turns_with_one_workspace(self, torch: Any) -> None:
        """Words that blocks send one another are their own flags: nothing of another build may lie there."""
        rng = np.random.default_rng(14)
        shapes = [(3, 16, 32_000, 64, 8), (1, 5, 900, 7, 32), (2, 9, 70_001, 256, 5), (3, 16, 32_000, 64, 8)]
        size = max(
            draft_workspace_size(batch, block, nodes, vocab, top_k)
            for batch, block, vocab, nodes, top_k in shapes
        )
        workspace = torch.zeros(size, dtype=torch.uint8, device="cuda")
        for batch, block, vocab, num_nodes, top_k in shapes * 2:
            logits = random_logits(rng, batch, block, vocab)
            found = build(torch, logits, num_nodes, top_k, workspace=workspace)
            assert_same_trees(found, build_on_host(logits, num_nodes, top_k))
            assert not bool(workspace.any())

    def test_more_than_2_to_31_logits(self, torch: Any) -> None:
        if torch.cuda.mem_get_info()[0] < 8 << 30:
            pytest.skip("too little memory")
        vocab = (1 << 28) + 5
        logits = torch.zeros((1, 9, vocab), dtype=torch.bfloat16, device="cuda")
        logits[0, 8, vocab - 1] = 50
        logits[0, 1:8, 12_345] = 50
        arguments = [torch.tensor([x], dtype=torch.int32, device="cuda") for x in (1, 100)]
        trees = to_host(build_draft_trees(logits, *arguments, 9, 2))
        assert trees.node_token_ids[0].tolist() == [1, *[12_345] * 7, vocab - 1]

    def test_from_numpy(self, torch: Any) -> None:
        logits = random_logits(np.random.default_rng(11), 3, 5, 1_000)
        assert_same_trees(build_on_host(logits, 33, 5, engine="cuda"), build_on_host(logits, 33, 5))

    @pytest.mark.parametrize("scoring", ["global", "renorm"])
    @pytest.mark.parametrize("logit_type", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("num_nodes", [33, 256])
    def test_held_to_a_trie(
        self, torch: Any, tmp_path: Path, scoring: str, logit_type: str, num_nodes: int
    ) -> None:
        """Wide and narrow nodes, labels above 16 bits, start states, an end token; against the cpu engine."""
        rng = np.random.default_rng(num_nodes)
        keys = {tuple(map(int, rng.integers(0, 71_000, rng.integers(1, 5)))) for _ in range(4_000)}
        keys |= {(5, *map(int, rng.integers(0, 9, 4))) for _ in range(500)}
        path = tmp_path / "keys.ft"
        build_index([list(key) for key in sorted(keys)], str(path))
        index = Index.open(str(path), engine="cuda")
        logits = random_logits(rng, 6, 6, 70_000)
        logits[:, :, 0:9] += 5
        logits[3, 1, 7] = np.nan
        given = {
            "float32": logits,
            "float16": logits.astype(np.float16),
            "bfloat16": to_bfloat16(logits),
        }[logit_type]
        starts = np.array([0, index.engine.find_nodes(*PREFIX)[0], 0, 0, 1, NO_STATE])
        held = {"trie": index, "scoring": scoring, "end_token": 60_000, "logit_type": logit_type}
        wanted = build_on_host(given, num_nodes, 8, engine="cpu", start_states=starts, **held)
        device_starts = torch.from_numpy(starts.astype(np.uint32).view(np.int32)).cuda()
        for _ in range(2):
            found = build(torch, given, num_nodes, 8, start_states=device_starts, **held)
            assert_same_trees(found, wanted)
        copied = build_on_host(given, num_nodes, 8, engine="cuda", start_states=starts, **held)
        for name, array in found.arrays().items():
            assert np.array_equal(getattr(copied, name).view(array.dtype), array), name

    @pytest.mark.parametrize("scoring", ["global", "renorm"])
    @pytest.mark.parametrize("logit_type", ["float32", "bfloat16"])
    @pytest.mark.parametrize("mapped", [False, True])
    def test_held_to_masks(self, torch: Any, scoring: str, logit_type: str, mapped: bool) -> None:
        """A dense root, two end-of-sequence ids, a drafter's own vocabulary; uploaded at once or before."""
        rng = np.random.default_rng(12)
        letters = list("abcdefghijklmno")
        words = ["".join(word) for size in (1, 2, 3) for word in itertools.product(letters, repeat=size)]
        pieces = [(SPECIAL, b"</s>"), *((NORMAL, word.encode()) for word in words), (SPECIAL, b"<eot>")]
        members = ["".join(rng.choice(letters, rng.integers(0, 9))) for _ in range(3_000)]
        masks = TokenMasks.from_strings(members, TokenBytes.from_tokens(pieces), eos=[0, len(words) + 1])
        vocab = len(words) - 7
        logits = random_logits(rng, 4, 7, vocab)
        given = to_bfloat16(logits) if logit_type == "bfloat16" else logits
        starts = np.array([0, rng.integers(masks.num_nodes), masks.ended, NO_STATE])
        held: dict[str, Any] = {"scoring": scoring, "logit_type": logit_type}
        if mapped:
            held["vocab_map"] = rng.permutation(len(pieces))[:vocab]
        wanted = build_on_host(given, 70, 8, trie=masks, engine="cpu", start_states=starts, **held)
        device_starts = torch.from_numpy(starts.astype(np.uint32).view(np.int32)).cuda()
        for trie in (masks, masks, masks.on_device()):
            found = build(torch, given, 70, 8, trie=trie, start_states=device_starts, **held)
            assert_same_trees(found, wanted)
        copied = build_on_host(given, 70, 8, trie=masks, engine="cuda", start_states=starts, **held)
        for name, array in found.arrays().items():
            assert np.array_equal(getattr(copied, name).view(array.dtype), array), name

    @pytest.mark.parametrize("scoring", ["global", "renorm"])
    def test_a_vocabulary_of_its_own_with_a_trie(self, torch: Any, tmp_path: Path, scoring: str) -> None:
        rng = np.random.default_rng(13)
        keys = {tuple(map(int, rng.integers(0, 70_000, rng.integers(1, 5)))) for _ in range(4_000)}
        build_index([list(key) for key in sorted(keys)], str(tmp_path / "keys.ft"))
        index = Index.open(str(tmp_path / "keys.ft"), engine="cuda")
        mapping = rng.permutation(80_000)[:32_000]
        logits = random_logits(rng, 3, 6, len(mapping))
        held = {"trie": index, "scoring": scoring, "end_token": 7, "vocab_map": mapping}
        found = build(torch, logits, 64, 8, **held)
        assert_same_trees(found, build_on_host(logits, 64, 8, engine="cpu", **held))
        mapping[5] = mapping[6]
        with pytest.raises(InputError, match="to two of the drafter's ids"):
            build(torch, logits, 64, 8, **held)

    @pytest.mark.parametrize("num_nodes", [16, 32, 33, 64, 128, 256])
    @pytest.mark.parametrize("lead", [12.0, 6.0, 3.0])
    def test_deep_trees(self, torch: Any, num_nodes: int, lead: float) -> None:
        """A drafter that is sure of itself, on a longer block than is merged at once."""
        rng = np.random.default_rng(num_nodes)
        logits = random_logits(rng, 3, 24, 5_000, scale=1.0)
        logits[:, :, 17] += lead
        logits[:, 1::2, 23] += lead - 0.5
        found = build(torch, logits, num_nodes, 8)
        assert_same_trees(found, build_on_host(logits, num_nodes, 8))

    def test_refusals(self, torch: Any) -> None:
        logits, integers = (
            torch.zeros((2, 4, 50), device="cuda"),
            torch.zeros(2, dtype=torch.int32, device="cuda"),
        )
        with pytest.raises(InputError, match="roots are not on the device"):
            build_draft_trees(logits, [1, 2], integers, 5, 2)
        with pytest.raises(InputError, match="not contiguous"):
            build_draft_trees(logits.transpose(0, 1), integers.new_zeros(4), integers.new_zeros(4), 5, 2)
        with pytest.raises(UsageError, match="top-k 40"):
            build_draft_trees(logits, integers, integers, 5, 40)
        with pytest.raises(InputError, match="workspace"):
            build_draft_trees(logits, integers, integers, 5, 2, workspace=logits)
        with pytest.raises(UsageError, match="cannot be read by the cpu"):
            build_draft_trees(logits, integers, integers, 5, 2, engine="cpu")
