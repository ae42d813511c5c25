"""`flashtrie bench`: every system side by side on the same index and grids, and a gate for CI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, Json, Quiet, Threads

if TYPE_CHECKING:
    from flashtrie_cli.bench.request import Request

MAX_SLOWDOWN = 1.1


def command(
    workload: Annotated[
        str,
        typer.Option("--workload", "-w", help="auto, titles, nar, head-noise, index, build, masks or draft."),
    ] = "auto",
    systems: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Systems to measure; default: all that run here.")
    ] = None,
    beam_width: Annotated[
        str | None, typer.Option("--beam-width", "-b", metavar="LIST", help="As 100,300 or 100:1000:100.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", "-k", min=1, help="Slots a step; default: the beam width, as in the paper."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="LIST", help="Queries a call.")] = "1",
    queries: Annotated[int | None, typer.Option("--queries", min=1, help="At most so many queries.")] = None,
    index: Annotated[
        str | None, typer.Option(help="Index of --workload index; of nar: kept there, and used again.")
    ] = None,
    proposals: Annotated[
        str | None, typer.Option(help="Proposal grids for --index, as search reads them.")
    ] = None,
    targets: Annotated[
        str | None,
        typer.Option(metavar="TSV", help="A line a query; its last column is the key to be found."),
    ] = None,
    keys: Annotated[
        str | None, typer.Option(metavar="LIST", help="Synthetic keys (nar, build): as 10k,100k,1M,10M.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="What synthetic keys look like: titles or phrases.")
    ] = "titles",
    vocabulary: Annotated[
        int | None, typer.Option(help="Tokens of the synthetic keys; default the profile's.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of synthetic keys, grids and noise.")] = 0,
    head: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="head-noise: coherent slots kept; default the paper's sweep."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Exponent of the length normalisation.")] = 1.0,
    token_threshold: Annotated[
        float, typer.Option(help="Proposals must have a log-prob above this.")
    ] = float("-inf"),
    sequence_threshold: Annotated[float, typer.Option(help="Prefixes must score above this.")] = float(
        "-inf"
    ),
    eos: Annotated[
        bool, typer.Option("--eos", help="Keys of the titles must end with their end of sequence.")
    ] = False,
    threads: Threads = 1,
    passes: Annotated[int, typer.Option(min=1, help="Passes over the queries.")] = 10,
    seconds: Annotated[
        float, typer.Option(help="Time for each system and case; slow ones get fewer queries.")
    ] = 1.0,
    memory: Annotated[str, typer.Option(help="Memory of builds.")] = "1G",
    steady: Annotated[
        bool,
        typer.Option("--steady", help="For a base: cpu and marisa-opt, a hundred passes, one beam width."),
    ] = False,
    export: Annotated[
        str | None, typer.Option(metavar="JSON", help="Everything, samples too; after every case.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Exported base: measure its cases again; exit 1 if slower."),
    ] = None,
    max_slowdown: Annotated[
        float | None,
        typer.Option(help="With --against: slower than this, beyond noise, is exit 1; default 1.1."),
    ] = None,
    report: Annotated[str | None, typer.Option(metavar="MD", help="Write a Markdown report.")] = None,
    plots: Annotated[
        str | None, typer.Option(metavar="DIR", help="Draw SVG and PNG plots (needs matplotlib).")
    ] = None,
    sample_data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the sample data lies.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure every system side by side.

    On the same index, grids and scoring, and answers are checked before anything is timed. Calls are timed from host
    arrays to host results, systems interleaved. Ctrl-C keeps the finished cases.
    """
    from flashtrie_cli.bench.request import Request, parse_counts
    from flashtrie_cli.commands.common import parse_size, thread_count
    from flashtrie_cli.errors import UsageError

    if max_slowdown is not None and against is None:
        raise UsageError("--max-slowdown needs --against")

    def counts(text: str | None, option: str) -> tuple[int, ...] | None:
        return None if text is None else parse_counts(text, option)

    request = Request(
        workload=workload,
        systems=None if systems is None else tuple(name.strip() for name in systems.split(",")),
        beam_widths=counts(beam_width, "--beam-width"),
        top_k=top_k,
        batch_sizes=parse_counts(batch, "--batch"),
        num_queries=queries,
        index=index,
        proposals=proposals,
        targets=targets,
        sample_data=sample_data,
        num_keys=counts(keys, "--keys"),
        profile=profile,
        vocabulary=vocabulary,
        seed=seed,
        heads=counts(head, "--head"),
        alpha=alpha,
        token_threshold=token_threshold,
        sequence_threshold=sequence_threshold,
        use_eos=eos,
        threads=thread_count(threads),
        passes=passes,
        seconds=seconds,
        memory=parse_size(memory, "--memory"),
    ).checked()
    if steady:
        request = request.steady()
    _Run(
        request,
        export,
        against,
        MAX_SLOWDOWN if max_slowdown is None else max_slowdown,
        report,
        plots,
        json,
        quiet,
    ).go()


class _Run:
    """The request with what becomes of its results."""

    def __init__(
        self,
        request: Request,
        export: str | None,
        against: str | None,
        max_slowdown: float,
        report: str | None,
        plots: str | None,
        json: bool,
        quiet: bool,
    ):
        self.request, self.export, self.against, self.max_slowdown = request, export, against, max_slowdown
        self.report, self.plots, self.json, self.quiet = report, plots, json, quiet
        self.made: dict[str, Any] = {}
        self.verdicts: list[Any] = []

    def go(self) -> None:
        """Measure, show, write; exit 1 where the gate finds an engine slower."""
        from flashtrie_cli.report import progress

        base = self._base()
        self._check_outputs()
        try:
            with progress(100, "%", quiet=self.quiet) as show:

                def watch(what: str, share: float) -> None:
                    show(what, round(100 * share))

                self._measure(base, watch)
        finally:
            if any(self.made.get(name) for name in ("cases", "builds", "masks", "drafts")):
                self._show()
        if any(verdict.is_slower(self.max_slowdown) for verdict in self.verdicts):
            raise typer.Exit(1)

    def _base(self) -> dict[str, Any] | None:
        """The base, whose request becomes ours; UsageError where ours says otherwise."""
        from flashtrie_cli.bench import gate, record
        from flashtrie_cli.errors import UsageError

        if self.against is None:
            return None
        if not self.max_slowdown >= 1:
            raise UsageError("--max-slowdown is at least 1")
        base = record.load(self.against)
        wanted = gate.base_request(base, self.against)
        apart = self.request.conflicts(wanted)
        if apart:
            raise UsageError(
                f"--against measures what its base measured, but {', '.join(apart)} differ",
                hint="leave them out",
            )
        self.request = wanted
        return base

    def _check_outputs(self) -> None:
        from flashtrie_cli.files import check_output

        asked = self.request
        for path in (self.export, self.report):
            if path is not None:
                inputs = (self.against, asked.index, asked.proposals, asked.targets)
                check_output(path, force=True, inputs=inputs)
        if self.plots is not None:
            from flashtrie_cli.bench.plots import check_plots

            check_plots(self.plots)

    def _measure(self, base: dict[str, Any] | None, watch: Any) -> None:
        if self.request.workload == "build":
            from flashtrie_cli.bench.builds import run_builds

            run_builds(self.request, self.made, watch=watch, save=self._save)
            return
        if self.request.workload == "masks":
            from flashtrie_cli.bench.masks import run_masks

            run_masks(self.request, self.made, watch=watch, save=self._save)
            return
        if self.request.workload == "draft":
            from flashtrie_cli.bench.draft_workload import run_drafts

            run_drafts(self.request, self.made, watch=watch, save=self._save)
            return
        from flashtrie_cli.bench.session import Session

        session = Session(self.request, export=self.export, watch=watch, say=self._say)
        try:
            if base is None:
                session.run()
            else:
                self.verdicts = session.judge(base, self.max_slowdown)
        finally:
            self.made = session.made

    def _say(self, text: str) -> None:
        from flashtrie_cli.report import summary

        summary([("bench", text)], quiet=self.quiet)

    def _save(self) -> None:
        from flashtrie_cli.bench import record

        if self.export is not None:
            record.save(self.made, self.export)

    def _show(self) -> None:
        from flashtrie_cli.bench.record import finite
        from flashtrie_cli.bench.tables import all_tables, gate_table
        from flashtrie_cli.report import table
        from flashtrie_cli.streams import print_json, warn

        pictures: list[str] = []
        if self.plots is not None:
            from flashtrie_cli.bench.plots import draw

            pictures = draw(self.made, self.plots)
        if self.report is not None:
            from flashtrie_cli.bench.markdown import write_report

            write_report(
                self.made,
                self.report,
                pictures=pictures,
                verdicts=self.verdicts,
                max_slowdown=self.max_slowdown,
            )
        for verdict in self.verdicts:
            if verdict.reference_moved:
                warn(
                    f"{verdict.case}: by the yardstick, {verdict.reference} itself took"
                    f" {verdict.reference_slowdown:.2f} times as long as in the base: code that both share"
                    " may have changed, or the machine is busy"
                )
        if self.json:
            verdicts = [verdict.__dict__ for verdict in self.verdicts]
            print_json(finite({**self.made, "verdicts": verdicts}))
            return
        shown = all_tables(self.made)
        if self.verdicts:
            shown.append(gate_table(self.verdicts, self.max_slowdown))
        for one in shown:
            table(one.title, one.columns, one.rows)
