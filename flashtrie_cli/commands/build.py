"""`flashtrie build`: keys in, a compressed narrow-LOUDS index out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, Force, Json, Quiet, Threads

if TYPE_CHECKING:
    from flashtrie_cli.build import BuildReport
    from flashtrie_cli.keys.reader import KeyReader


def command(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Files of keys, plain, .gz or .zst; - is stdin.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="INDEX", help="The index file to write.")],
    kind: Annotated[
        str,
        typer.Option(
            "--input", help="What the files hold: text, ids (numbers between blanks), jsonl or npz."
        ),
    ] = "text",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="words (what white space separates), or a Hugging Face tokenizer.json. Text needs one."
        ),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Lower-case text first.")] = False,
    values: Annotated[
        int | None, typer.Option(metavar="N", help="TAB-separated column (from 1) with each key's value.")
    ] = None,
    value_type: Annotated[
        str, typer.Option(help="auto (unsigned integers as long as they come), or float.")
    ] = "auto",
    duplicates: Annotated[
        str, typer.Option(help="What a key given twice gets: first, last, min, max, sum, all or error.")
    ] = "first",
    is_sorted: Annotated[
        bool,
        typer.Option(
            "--sorted", help="Trust that keys come in ascending order of their tokens, but check it."
        ),
    ] = False,
    memory: Annotated[
        str, typer.Option(help="Memory to stay within; what does not fit goes to disk.")
    ] = "1G",
    threads: Threads = 1,
    codec: Annotated[
        str, typer.Option(help="zstd (small), or raw (mapped as it is, opens at once).")
    ] = "zstd",
    level: Annotated[int, typer.Option(help="zstd level, 1 to 22.")] = 3,
    force: Force = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Read a sample only, and say what a build would take.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Build an index from keys: sorted, made unique, compressed.

    One key a line. Keys may come unsorted and more than once. The index appears whole or not at all.
    """
    from flashtrie_cli.build import BuildOptions, build_index
    from flashtrie_cli.commands.common import parse_size, thread_count
    from flashtrie_cli.estimate import estimate_build
    from flashtrie_cli.files import check_output
    from flashtrie_cli.keys.reader import KeyReader
    from flashtrie_cli.keys.tokenizers import open_tokenizer
    from flashtrie_cli.report import progress
    from flashtrie_cli.streams import print_json

    options = BuildOptions(
        duplicates=duplicates,
        is_sorted=is_sorted,
        memory=parse_size(memory, "--memory"),
        threads=thread_count(threads),
        codec=codec,
        level=level,
        force=force,
        lowercase=lowercase,
        value_type=value_type,
    )
    if not estimate:
        check_output(output, force=force)
    name = tokenizer or ("words" if kind == "text" else None)
    spoken: Any = open_tokenizer(name) if name else None

    def reader() -> KeyReader:
        return KeyReader(
            inputs,
            kind=kind,  # type: ignore[arg-type]
            tokenizer=spoken,
            lowercase=lowercase,
            values_column=values,
            threads=options.threads,
        )

    if estimate:
        guess = estimate_build(reader(), spoken, options)
        if json:
            print_json({"schema": "flashtrie.estimate/1", **guess})
        else:
            _show_estimate(guess)
        return
    source = reader()
    with progress(source.total_size, "keys", quiet=quiet) as show:
        report = build_index(
            source,
            output,
            tokenizer=spoken,
            options=options,
            progress=lambda stage, _: show(stage, source.stats.num_bytes_read),
        )
    if json:
        print_json(_as_json(report, source))
    else:
        _show_report(report, source, quiet=quiet)


def _as_json(report: BuildReport, source: KeyReader) -> dict[str, Any]:
    from flashtrie_cli.report import peak_memory

    return {
        "schema": "flashtrie.build/1",
        "index": report.path,
        "digest": report.digest,
        "file_size": report.file_size,
        "bits_per_key": report.bits_per_key,
        **report.counts,
        "num_empty_lines_skipped": source.stats.num_empty_lines_skipped,
        "source_digest": source.source_digest,
        "seconds": report.seconds,
        "peak_memory": peak_memory(),
    }


def _show_report(report: BuildReport, source: KeyReader, *, quiet: bool) -> None:
    from flashtrie_cli.report import duration_text, peak_memory, size_text, summary

    counts, seconds = report.counts, sum(report.seconds.values())
    read = counts["num_keys_read"]
    nodes_per_key = counts["num_nodes"] / max(counts["num_keys"], 1)
    rows = [
        ("keys read", f"{read:,}"),
        ("duplicates", f"{counts['num_duplicates']:,}"),
        ("empty lines skipped", f"{source.stats.num_empty_lines_skipped:,}"),
        ("keys in the index", f"{counts['num_keys']:,}, depth {counts['depth']}"),
        ("nodes", f"{counts['num_nodes']:,} ({nodes_per_key:.3f} a key)"),
        ("index", f"{report.path}, {size_text(report.file_size)}, {report.bits_per_key:.1f} bits a key"),
        ("label entropy", f"{counts['label_entropy']:.2f} bits a node"),
        ("time", f"{duration_text(seconds)}, {read / max(seconds, 1e-9):,.0f} keys/s"),
        *((f"  {stage}", duration_text(spent)) for stage, spent in report.seconds.items()),
        ("peak memory", size_text(peak_memory())),
    ]
    if counts["num_runs"]:
        rows.insert(
            -1, ("spilled", f"{counts['num_runs']} sorted runs, {size_text(counts['spilled_bytes'])}")
        )
    summary(rows, quiet=quiet)


def _show_estimate(guess: dict[str, Any]) -> None:
    from flashtrie_cli.report import duration_text, size_text, summary

    summary(
        [
            ("sample", f"{guess['sample_keys']:,} keys, {guess['sample_fraction']:.1%} of the input"),
            ("keys", f"about {guess['num_keys']:,}"),
            ("nodes", f"about {guess['num_nodes']:,}"),
            ("index size", f"about {size_text(guess['file_size'])}"),
            ("time", f"about {duration_text(guess['seconds'])}"),
            ("memory", f"about {size_text(guess['memory'])}" + (", some on disk" if guess["spills"] else "")),
        ],
        quiet=False,
    )
