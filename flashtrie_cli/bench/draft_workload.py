"""`flashtrie bench --workload draft`: how long draft trees take, and what a trie buys them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from flashtrie_cli.bench.draft import BLOCK_SIZE, TOP_K, DeviceInputs, DraftShape, time_host
from flashtrie_cli.bench.draft_constraint import Drafts, measure
from flashtrie_cli.bench.environment import environment
from flashtrie_cli.bench.request import Request
from flashtrie_cli.bench.run import SCHEMA
from flashtrie_cli.bench.statistics import summary
from flashtrie_cli.bench.workloads import GPT2_END, Workload, find_sample_data, own_index, sample_titles

NUM_NODES = (32, 64, 128)
CONSTRAINED_NODES = (16, 32, 64, 128)
VOCAB_SIZE = 151_936
GPT2_VOCAB = 50_257
ALL_QUERIES = 1 << 20


def run_drafts(
    request: Request, made: dict[str, Any], *, watch: Callable[[str, float], None], save: Callable[[], None]
) -> None:
    """Measure, adding rows to ``made``: ``drafts`` (times) and ``draft_constraint`` (titles' grids as a drafter)."""
    vocab, top_k = request.vocabulary or VOCAB_SIZE, request.top_k or TOP_K
    made.update(schema=SCHEMA, environment=environment(), request=request.as_json(), drafts=[])
    made["options"] = {"threads": request.threads, "block": BLOCK_SIZE, "top_k": top_k}
    made["is_complete"] = False
    for step, batch in enumerate(request.batch_sizes):
        watch(f"batch {batch}", step / (len(request.batch_sizes) + 1))
        shapes = [DraftShape(batch, vocab, nodes, block_size=BLOCK_SIZE, top_k=top_k) for nodes in NUM_NODES]
        made["drafts"] += _times(shapes, request)
        save()
    watch("titles under a trie", len(request.batch_sizes) / (len(request.batch_sizes) + 1))
    with tempfile.TemporaryDirectory(prefix="flashtrie-bench-") as scratch:
        workload = _workload(request, scratch)
        if workload is not None:
            made["draft_constraint"] = _constraint(workload, top_k)
    made["is_complete"] = True
    save()


def _times(shapes: list[DraftShape], request: Request) -> list[dict[str, Any]]:
    """A row for each size and way: the cpu engine; with a GPU and torch, the cuda engine and plain torch."""
    wanted = request.systems
    rows = []
    if wanted is None or "cpu" in wanted:
        for shape in shapes:
            samples = time_host(shape, "cpu", threads=request.threads, repeats=request.passes).samples_us
            rows.append(_row(shape, "cpu", samples))
    if (wanted is None or "cuda" in wanted) and _has_gpu():
        inputs = DeviceInputs(shapes[0])
        for shape in shapes:
            ways = {
                "cuda, graph": inputs.time_graph,
                "cuda, eager": inputs.time_eager,
                "plain torch": inputs.time_plain_torch,
            }
            rows += [_row(shape, name, measured(shape.num_nodes)) for name, measured in ways.items()]
        rows.append(_row(shapes[0], "torch.sum of the logits", inputs.time_read()))
    return rows


def _row(shape: DraftShape, system: str, samples: list[float]) -> dict[str, Any]:
    return {
        "system": system,
        "batch_size": shape.batch_size,
        "vocab_size": shape.vocab_size,
        "num_nodes": shape.num_nodes,
        "top_k": shape.top_k,
        "logit_type": shape.logit_type,
        "us": summary(np.array(samples)),
        "samples_us": samples,
    }


def _has_gpu() -> bool:
    """Whether torch is here and sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _workload(request: Request, scratch: str) -> Workload | None:
    """The user's index and grids, else the sample titles where they are."""
    if request.index and request.proposals and request.targets:
        made = own_index(
            request.index,
            request.proposals,
            num_queries=request.num_queries or ALL_QUERIES,
            engine="cpu",
            threads=request.threads,
            targets=request.targets,
        )
        made.eos = GPT2_END
        return made
    directory = find_sample_data(request.sample_data)
    if directory is None:
        return None
    return sample_titles(
        directory,
        scratch,
        num_queries=request.num_queries or ALL_QUERIES,
        engine="cpu",
        threads=request.threads,
        say=lambda text: None,
    )


def _constraint(workload: Workload, top_k: int) -> list[dict[str, Any]]:
    index, grids = workload.index, workload.grids
    key_ids = np.asarray(grids.targets)
    truths: list[list[int]] = []
    for key_id in key_ids.tolist():
        truths.append(index.key_tokens([key_id]).tokens.tolist() if key_id >= 0 else [])
    end = workload.eos if workload.eos is not None else GPT2_END
    drafts = Drafts(grids.tokens, grids.logprobs, truths, max(GPT2_VOCAB, end + 1), end)
    return [vars(outcome) for outcome in measure(index, drafts, CONSTRAINED_NODES, top_k=top_k)]
