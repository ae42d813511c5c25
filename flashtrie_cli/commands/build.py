"""`flashtrie build`: keys in, a compressed narrow-LOUDS index out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, Force, Json, Quiet, Threads

if TYPE_CHECKING:
    from flashtrie_cli.build import BuildReport
    from flashtrie_cli.keys.reader import KeyReader
    from flashtrie_cli.masks_build import MaskBuildReport


def command(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Files of keys, plain, .gz or .zst; - is stdin."),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="INDEX", help="The index file to write; --estimate needs none."
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--input",
            help="What the files hold: text, ids (numbers between blanks), jsonl or npz; masks: text, json or jsonl.",
        ),
    ] = "text",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="words (what white space separates; the default for text), or a Hugging Face tokenizer.json. "
            "Masks: any vocabulary file of the model."
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
        typer.Option("--sorted", help="Keys come in ascending order of their tokens, which is checked."),
    ] = False,
    memory: Annotated[
        str, typer.Option(help="Memory to stay within; what does not fit goes to disk.")
    ] = "1G",
    threads: Threads = 1,
    codec: Annotated[
        str, typer.Option(help="zstd (small), or raw (mapped as it is, opens at once).")
    ] = "zstd",
    level: Annotated[int, typer.Option(help="zstd level, 1 to 22.")] = 3,
    tail: Annotated[
        str,
        typer.Option(
            help="Keep unbranched ends of keys apart, equal ones once: off, on, or auto (where it pays)."
        ),
    ] = "off",
    force: Force = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Read a sample only, and say what a build would take.")
    ] = False,
    masks: Annotated[
        bool, typer.Option("--masks", help="A finite set of strings as token masks of the tokenizer's model.")
    ] = False,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="Masks: width of the model's logits; default the tokenizer's ids."),
    ] = None,
    eos: Annotated[
        str | None,
        typer.Option(metavar="ID,...", help="Masks: tokens that end an answer; default by the tokenizer."),
    ] = None,
    json_quoted: Annotated[
        bool, typer.Option("--json-quoted", help="Masks: members stand in quotes, escaped as JSON strings.")
    ] = False,
    prefix_space: Annotated[
        bool, typer.Option("--prefix-space", help="Masks: members follow a space.")
    ] = False,
    no_added_tokens: Annotated[
        bool,
        typer.Option(
            "--no-added-tokens", help="Masks: tokens added to the vocabulary do not count as their text."
        ),
    ] = False,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Masks: the set is an enum of this JSON schema.")
    ] = None,
    pointer: Annotated[
        str, typer.Option(help="Masks: JSON pointer to the enum, such as /properties/city.")
    ] = "",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Build an index from keys: sorted, made unique, compressed.

    One key a line. Keys may come unsorted and more than once. The index appears whole or not at all. With --masks
    the lines are a set of strings, and the index says which tokens of a model may come next.
    """
    from flashtrie_cli.errors import UsageError

    if output is None and not estimate:
        raise UsageError("the index needs a name", hint="--output INDEX")
    if masks:
        keys_alone = (
            lowercase,
            values,
            value_type != "auto",
            duplicates != "first",
            is_sorted,
            tail != "off",
            estimate,
            memory != "1G",
        )
        if any(keys_alone):
            raise UsageError(
                "--lowercase, --values, --value-type, --duplicates, --sorted, --tail, --memory and --estimate are for "
                "keys, not for --masks"
            )
        from flashtrie_cli.commands.common import thread_count
        from flashtrie_cli.masks_build import build_masks

        made = build_masks(
            inputs or [],
            str(output),
            tokenizer=tokenizer,
            form=kind,
            json_schema=json_schema,
            pointer=pointer,
            vocab_size=vocab_size,
            eos=eos,
            json_quoted=json_quoted,
            prefix_space=prefix_space,
            added_is_text=not no_added_tokens,
            codec=codec,
            level=level,
            threads=thread_count(threads),
            force=force,
        )
        _show_masks(made, json=json, quiet=quiet)
        return
    if vocab_size or eos or json_quoted or prefix_space or no_added_tokens or json_schema or pointer:
        raise UsageError(
            "--vocab-size, --eos, --json-quoted, --prefix-space, --no-added-tokens, --json-schema and --pointer "
            "go with --masks"
        )
    if not inputs:
        raise UsageError("nothing to build from", hint="name files of keys, or - for stdin")
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
        tail=tail,
    )
    if output is not None and not estimate:
        check_output(output, force=force, inputs=(*inputs, tokenizer))
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
            str(output),
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
        "has_tails": report.has_tails,
        "folding_ratio": report.folding_ratio,
        "num_empty_lines_skipped": source.stats.num_empty_lines_skipped,
        "source_digest": source.source_digest,
        "seconds": report.seconds,
        "peak_bytes": peak_memory(),
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
        *_tail_rows(report),
        ("time", f"{duration_text(seconds)}, {read / max(seconds, 1e-9):,.0f} keys/s"),
        *((f"  {stage}", duration_text(spent)) for stage, spent in report.seconds.items()),
        ("peak memory", size_text(peak_memory())),
    ]
    if counts["num_runs"]:
        rows.insert(
            -1, ("spilled", f"{counts['num_runs']} sorted runs, {size_text(counts['spilled_bytes'])}")
        )
    summary(rows, quiet=quiet)


def _tail_rows(report: BuildReport) -> list[tuple[str, str]]:
    counts = report.counts
    if not counts["num_links"]:
        return []
    length = counts["num_tail_nodes"] / counts["num_links"]
    share = counts["num_tail_labels"] / counts["num_tail_nodes"]
    verdict = "cut off" if report.has_tails else "left in the trie"
    return [
        (
            "tails",
            f"{counts['num_links']:,} of {length:.2f} labels, {share:.1%} of which are stored: "
            f"{report.folding_ratio:.2f} of the bits, {verdict}",
        )
    ]


def _show_masks(report: MaskBuildReport, *, json: bool, quiet: bool) -> None:
    from flashtrie_cli.report import duration_text, peak_memory, size_text, summary
    from flashtrie_cli.streams import print_json

    counts = report.counts
    if json:
        print_json(
            {
                "schema": "flashtrie.build/1",
                "index": report.path,
                "file_size": report.file_size,
                **counts,
                "seconds": report.seconds,
                "peak_bytes": peak_memory(),
            }
        )
        return
    rows = [
        ("strings read", f"{counts['num_members_read']:,}"),
        ("empty lines skipped", f"{counts['num_empty_lines_skipped']:,}"),
        ("members", f"{counts['num_members']:,}"),
        ("nodes", f"{counts['num_nodes']:,}, {counts['num_allowed']:,} allowed tokens"),
        ("vocabulary", f"{counts['vocab_size']:,} ids ({counts['vocabulary_form']}), ends {counts['eos']}"),
        (
            "index",
            f"{report.path}, {size_text(report.file_size)}; {size_text(counts['resident_bytes'])} in memory",
        ),
        *((f"  {stage}", duration_text(spent)) for stage, spent in report.seconds.items()),
    ]
    summary(rows, quiet=quiet)


def _show_estimate(guess: dict[str, Any]) -> None:
    from flashtrie_cli.report import duration_text, size_text, summary

    summary(
        [
            ("sample", f"{guess['num_sample_keys']:,} keys, {guess['sample_fraction']:.1%} of the input"),
            ("keys", f"about {guess['num_keys']:,}"),
            ("nodes", f"about {guess['num_nodes']:,}"),
            ("index size", f"about {size_text(guess['file_size'])}"),
            ("time", f"about {duration_text(guess['seconds'])}"),
            (
                "memory",
                f"about {size_text(guess['memory_bytes'])}" + (", some on disk" if guess["spills"] else ""),
            ),
        ],
        quiet=False,
    )
