"""`flashtrie search`: trie-constrained beam search over a file of proposal grids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, Engine, Force, IndexPath, Json, Output, Quiet, Threads

if TYPE_CHECKING:
    from flashtrie_cli.index import Index

BATCH_SIZE = 512
MAX_DIGITS = 20
"""Of a token id; Python itself refuses to read thousands."""


def command(
    index: IndexPath,
    proposals: Annotated[
        str,
        typer.Argument(
            metavar="PROPOSALS", help=".npz (tokens, logprobs, ids) or JSONL; - is JSONL from stdin."
        ),
    ],
    beam_width: Annotated[
        int, typer.Option("--beam-width", "-b", min=1, help="Prefixes kept at each step.")
    ] = 100,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", "-k", min=1, help="Only the K best proposals of each step; default all."),
    ] = None,
    results: Annotated[
        int | None, typer.Option("--results", "-n", min=1, help="Most hits a query; default the beam width.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Only the first T steps; default all.")] = None,
    alpha: Annotated[float, typer.Option(help="Exponent of the length normalisation; 0 is none.")] = 1.0,
    token_threshold: Annotated[
        float, typer.Option(help="Proposals must have a log-prob above this.")
    ] = float("-inf"),
    sequence_threshold: Annotated[float, typer.Option(help="Prefixes must score above this.")] = float(
        "-inf"
    ),
    eos: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token that must be proposed after a key, and adds to it."),
    ] = None,
    engine: Engine = "auto",
    device: Annotated[int, typer.Option(min=0, help="GPU to use, with the cuda engine.")] = 0,
    threads: Threads = 1,
    output: Output = "-",
    output_format: Annotated[
        str, typer.Option("--format", help="tsv, jsonl, npz, or wire (the FlashTrie paper's layout).")
    ] = "tsv",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find, for each query, the best keys that its proposals can spell.

    Queries come out in input order. TSV columns: query, rank, key, key id, score, normalised score, value. --json is
    --format jsonl.
    """
    import os
    import time
    from contextlib import closing

    if engine in ("auto", "cuda"):
        from flashtrie_cli.engine.cuda_start import begin_start

        begin_start(device)
    from flashtrie_cli.commands.common import thread_count
    from flashtrie_cli.engine.choose import search_engine
    from flashtrie_cli.errors import UsageError
    from flashtrie_cli.index import Index
    from flashtrie_cli.inputs.ahead import read_ahead
    from flashtrie_cli.query.output import FORMATS, result_writer
    from flashtrie_cli.query.plan import SearchPlan
    from flashtrie_cli.query.proposals import read_proposals
    from flashtrie_cli.report import progress
    from flashtrie_cli.streams import check_results, open_results, warn

    chosen = "jsonl" if json else output_format
    if chosen not in FORMATS:
        raise UsageError(f"format {chosen!r} is not one of {', '.join(FORMATS)}")
    if device and engine in ("cpu", "reference"):
        raise UsageError(f"--device is for the cuda engine, not for {engine}")
    check_results(output, force=force, inputs=(index, proposals))
    began = time.perf_counter()
    opened = Index.open(
        index, engine=search_engine(engine, device), threads=thread_count(threads), device=device
    )
    if opened.text_missing:
        warn(f"token ids only: {opened.text_missing}")
    plan = SearchPlan(
        beam_width=beam_width,
        num_results=results,
        alpha=alpha,
        token_threshold=token_threshold,
        sequence_threshold=sequence_threshold,
        eos=None if eos is None else _token(opened, eos),
    )
    clock = _Clock(time.perf_counter() - began)
    batches = read_proposals(
        proposals, batch_size=BATCH_SIZE, top_k=top_k, steps=steps, vocabulary=opened.vocabulary
    )
    with (
        open_results(output, force=force) as out,
        progress(None, "queries", quiet=quiet) as show,
        # A pipe may keep a reader waiting for ever, and Ctrl-C with it.
        closing(read_ahead(batches) if os.path.isfile(proposals) else (b for b in batches)) as ahead,
    ):
        writer = result_writer(chosen, opened, out)
        for batch, found in clock.searching(opened, ahead, plan, proposals):
            began = time.perf_counter()
            writer.write(found, batch.ids, batch.first)
            clock.write += time.perf_counter() - began
            show("search", batch.first + found.num_queries)
        began = time.perf_counter()
        writer.finish()
        clock.write += time.perf_counter() - began
    clock.report(opened, quiet=quiet)


def _token(index: Index, text: str) -> int:
    """A token named by its id, or by its word in the index's vocabulary."""
    from flashtrie_cli.errors import UsageError

    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    found = index.vocabulary.id(text) if index.vocabulary is not None else None
    if found is None:
        raise UsageError(f"--eos {text!r} is neither a token id nor a token of the index")
    return found


class _Clock:
    """Where the time of a run goes, and how long single queries took."""

    def __init__(self, open_seconds: float):
        self.open = open_seconds
        self.read = self.search = self.write = 0.0
        self.num_queries = self.num_hits = 0
        self.query_ns: list[Any] = []

    def searching(self, index: Index, batches: Any, plan: Any, path: str) -> Any:
        """Each batch with its results; errors in a grid name the file and the query's number in it."""
        import time

        from flashtrie_cli.errors import InputError

        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            batch = next(iterator, None)
            read = time.perf_counter()
            self.read += read - began
            if batch is None:
                return
            try:
                found = index.engine.search(batch.tokens, batch.logprobs, plan)
            except InputError as error:
                where = f"(queries are counted from {batch.first} here) " if batch.first else ""
                raise InputError(f"{where}{error.message}", file=path) from error
            self.search += time.perf_counter() - read
            self.num_queries += found.num_queries
            self.num_hits += found.num_hits
            times = getattr(index.engine, "last_query_ns", None)
            if times is not None and len(times) == found.num_queries:
                self.query_ns.append(times)
            yield batch, found

    def report(self, index: Index, *, quiet: bool) -> None:
        from flashtrie_cli.report import duration_text, summary

        total = self.open + self.read + self.search + self.write
        threads = getattr(index.engine, "threads", None)
        rate = self.num_queries / self.search if self.search else 0.0
        rows = [
            ("engine", index.engine.name + (f", {threads} threads" if threads and threads > 1 else "")),
            ("queries", f"{self.num_queries:,}, {self.num_hits:,} hits"),
            (
                "time",
                f"{duration_text(total)}: "
                + ", ".join(
                    f"{part} {duration_text(getattr(self, part))}"
                    for part in ("open", "read", "search", "write")
                ),
            ),
            ("throughput", f"{rate:,.0f} queries/s in search"),
        ]
        if self.query_ns:
            import numpy as np

            times = np.sort(np.concatenate(self.query_ns)) / 1e9
            # As np.percentile, which imports numpy.ma for it: 16 ms, more than a small search takes altogether.
            cuts = np.interp([0.5, 0.9, 0.99], np.linspace(0, 1, len(times)), times)
            rows.append(
                (
                    "latency",
                    f"mean {duration_text(float(times.mean()))}, "
                    + ", ".join(
                        f"p{p} {duration_text(float(cut))}" for p, cut in zip((50, 90, 99), cuts, strict=True)
                    ),
                )
            )
        summary(rows, quiet=quiet)
