"""The GPU figures of docs/benchmarks/masks.md: every logit checked against the CPU, then timed as CUDA graphs.

usage: FLASHTRIE_DATA=DATA gpu_masks.py [--titles TITLES.npz] [--json OUT]   (from the checkout, with PyCUDA and torch)

DATA holds tokenizers/{llama3_1,gemma3}.tar.zst and sets/cities500.txt.zst; TITLES.npz `tokens` and `offsets` of keys.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flashtrie_cli import BuildOptions, Index, build_index
from flashtrie_cli.keys.batch import KeyBatch
from flashtrie_cli.query.token_masks import TokenMasks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests/masks"))
from masks_world import random_states, real_set, real_vocabulary

POOL_BYTES = 400_000_000
"""Logits that launches rotate through, eight times the second-level cache."""
DTYPES = (torch.float32, torch.bfloat16)
BATCHES = (1, 32, 256)
NUM_REPLAYS = 15
WARM_SECONDS = 0.03
"""Of replays before those that count: what comes after an idle time is slower."""


def microseconds(calls: list[Callable[[], Any]], replays: int = NUM_REPLAYS) -> float:
    """Of one call: the median replay of a graph of all, over their number."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    warm = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def stream() -> Any:
    return torch.cuda.current_stream()


def on_gpu(states: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(states, np.uint32).astype(np.int32)).cuda()


def batches_of(rows: int, width: int, pool: torch.Tensor) -> list[torch.Tensor]:
    """As many launches' logits as the pool holds, 40 at least, 768 at most."""
    count = max(1, min(pool.numel() // (rows * width), 768))
    held = [pool[at * rows * width : (at + 1) * rows * width].view(rows, width) for at in range(count)]
    return [held[at % count] for at in range(max(40, count))]


def check(answers: Any, states: np.ndarray, dtype: torch.dtype) -> None:
    for width, offset, padding in ((answers.vocab_size, 0, 0), (answers.vocab_size + 70, 3, 5)):
        raw = torch.randn(len(states) * (width + padding) + offset, device="cuda").to(dtype)
        logits = torch.as_strided(raw, (len(states), width), (width + padding, 1), offset)
        kept = torch.zeros(logits.shape, dtype=torch.bool)
        ids, offsets = answers.allowed_lists(states)
        rows = np.repeat(np.arange(len(states)), np.diff(offsets))
        kept[torch.from_numpy(rows), torch.from_numpy(ids.astype(np.int64))] = True
        want = torch.where(kept.cuda(), logits, float("-inf"))
        answers.on_device().apply(logits, on_gpu(states), stream())
        assert torch.equal(logits, want)


def time_apply(
    answers: Any, states: np.ndarray, dtype: torch.dtype, pool: torch.Tensor
) -> list[dict[str, Any]]:
    device, rows_found = answers.on_device(), []
    for rows in BATCHES:
        launches = batches_of(rows, answers.vocab_size, pool)
        # A batch of one takes each of the states in turn.
        walks = [on_gpu(states[at : at + 1]) for at in range(256)] if rows == 1 else [on_gpu(states[:rows])]
        turns = [walks[at % len(walks)] for at in range(len(launches))]
        root = torch.zeros(rows, dtype=torch.int32, device="cuda")
        times = {
            "fill": microseconds([lambda t=t: t.fill_(float("-inf")) for t in launches]),
            "apply": microseconds(
                [lambda t=t, s=s: device.apply(t, s, stream()) for t, s in zip(launches, turns, strict=True)]
            ),
            "root": microseconds([lambda t=t, s=root: device.apply(t, s, stream()) for t in launches]),
        }
        found = {"ids": answers.vocab_size, "dtype": str(dtype)[6:], "batch": rows, **times}
        rows_found.append(found)
        print(
            f"| {answers.vocab_size:,} | {found['dtype']} | {rows} | {times['apply']:.2f} | {times['fill']:.2f} "
            f"| {times['apply'] / times['fill']:.2f} | {times['root']:.2f} |",
            flush=True,
        )
    return rows_found


def time_rest(name: str, answers: Any, states: np.ndarray) -> dict[str, Any]:
    """Rows of mask words, and steps, of a batch."""
    device, found = answers.on_device(), {"of": name, "batch": len(states)}
    held, words = (
        on_gpu(states),
        torch.zeros((len(states), answers.num_words), dtype=torch.int32, device="cuda"),
    )
    ids, offsets = answers.allowed_lists(states)
    tokens = torch.from_numpy(ids[offsets[:-1].clip(max=len(ids) - 1)].astype(np.int64)).cuda()
    scratch = held.clone()
    # Every step begins from the same states, so the copy that restores them is timed alone and taken off.
    restore = microseconds([lambda: scratch.copy_(held)] * 200)
    both = [lambda: scratch.copy_(held), lambda: device.advance(scratch, tokens, None, stream())] * 200
    found["advance"] = 2 * microseconds(both) - restore
    found["mask words"] = microseconds([lambda: device.fill(held, words, stream())] * 200)
    found["words zeroed"] = microseconds([lambda: words.zero_()] * 200)
    print(
        {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()},
        flush=True,
    )
    return found


def city_masks(tokenizer: str, width: int) -> TokenMasks:
    tokens, eos = real_vocabulary(tokenizer)
    members = random.Random(1).sample(real_set("cities500"), 100_000)
    return TokenMasks.from_strings(members, tokens, eos=eos, vocab_size=width)


def walked_states(answers: Any, count: int) -> np.ndarray:
    """States of random walks from the root to an end."""
    rng, found, state = random.Random(5), [], 0
    while len(found) < count:
        found.append(state)
        ids = answers.allowed(state)
        state = int(answers.advance([state], [int(rng.choice(ids))])[0][0])
        state = 0 if state == answers.ended else state
    return np.array(found, np.uint32)


def title_steps(path: str, folder: str) -> Any:
    """A token trie of the keys, for logits as wide as GPT-2's."""
    with np.load(path) as arrays:
        keys = KeyBatch(
            arrays["tokens"].astype(np.uint32), arrays["offsets"].astype(np.int64), None, None, path
        )
    index = f"{folder}/titles.ft"
    build_index([keys], index, options=BuildOptions())
    opened = Index.open(index)
    print(f"titles: {opened.num_keys:,} keys, {opened.num_nodes:,} nodes")
    return opened.steps(eos=[50_256], vocab_size=50_257)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--titles")
    arguments.add_argument("--json")
    options = arguments.parse_args()
    rows, rest = [], []
    print("| ids | logits | batch | apply | fill | ratio | all at the root |")
    with tempfile.TemporaryDirectory() as folder:
        todo = [("llama3_1", city_masks("llama3_1", 128_256)), ("gemma3", city_masks("gemma3", 262_208))]
        if options.titles:
            todo.append(("titles", title_steps(options.titles, folder)))
        for name, answers in todo:
            masks = isinstance(answers, TokenMasks)
            states = (
                np.array([state for state, _ in random_states(answers, random.Random(5), 256)], np.uint32)
                if masks
                else walked_states(answers, 256)
            )
            for dtype in DTYPES:
                check(answers, states, dtype)
                pool = torch.randn(POOL_BYTES // dtype.itemsize // 4, device="cuda").repeat(4).to(dtype)
                rows += time_apply(answers, states, dtype, pool)
            rest.append(time_rest(name, answers, states))
    if options.json:
        Path(options.json).write_text(json.dumps({"apply": rows, "rest": rest}, indent=1))


if __name__ == "__main__":
    main()
