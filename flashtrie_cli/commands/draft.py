"""`flashtrie draft`: draft trees for speculative decoding from a block drafter's logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, Engine, Force, Json, Quiet, Threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashtrie_cli.index import Index
    from flashtrie_cli.query.draft import DraftTrees
    from flashtrie_cli.query.token_masks import TokenMasks

Npy = "NPY"


def command(
    logits: Annotated[
        str | None,
        typer.Argument(
            metavar="LOGITS", help=".npy [batch, block, vocabulary] or [block, vocabulary]; - is stdin."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="NPZ", help="Where the trees go; - is stdout.")
    ] = None,
    nodes: Annotated[
        int, typer.Option("--nodes", "-n", min=1, help="Nodes of a tree, the root included.")
    ] = 64,
    top_k: Annotated[int, typer.Option("--top-k", "-k", min=1, help="Most children of a node.")] = 8,
    roots: Annotated[
        str | None, typer.Option(metavar=Npy, help="Last accepted token of each row; default 0.")
    ] = None,
    base_lengths: Annotated[
        str | None, typer.Option(metavar=Npy, help="Committed tokens of each row; default 0.")
    ] = None,
    vocab_map: Annotated[
        str | None, typer.Option(metavar=Npy, help="Full token id of each of the drafter's ids.")
    ] = None,
    first_row: Annotated[
        int, typer.Option(min=0, max=1, help="Row of the block that scores depth 1; row 0 is the root's own.")
    ] = 1,
    logit_type: Annotated[
        str | None, typer.Option(metavar="TYPE", help="bfloat16: LOGITS are uint16 and hold its bits.")
    ] = None,
    padding: Annotated[
        str, typer.Option(help="What padding nodes attend to: zero (nothing) or self.")
    ] = "zero",
    index: Annotated[
        str | None, typer.Option(help="Hold the trees to this index's keys, or to its token masks.")
    ] = None,
    constraint: Annotated[
        str | None,
        typer.Option(help="Scores under --index: renorm (over the legal tokens, the default) or global."),
    ] = None,
    start_states: Annotated[
        str | None,
        typer.Option(metavar=Npy, help="State behind each root: a node of the index; default its root."),
    ] = None,
    eos: Annotated[int | None, typer.Option(min=0, help="Token that is legal where a key ends.")] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="arrays, sglang, flashinfer or tensorrt-llm.")
    ] = "arrays",
    tree_mask: Annotated[
        str | None, typer.Option(help="Mask of sglang and tensorrt-llm: full, tree or packed.")
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(metavar="NPZ", help="Draw the trees of a file (- is stdin); with text, given --index."),
    ] = None,
    engine: Engine = "auto",
    threads: Threads = 0,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Build draft trees, or draw trees built before.

    The best tree of each row of logits, held to an index where one is given.

    Node 0 is the root; nodes stand in order of score. The file has the arrays of docs/draft_trees.md by name.
    """
    from flashtrie_cli.errors import UsageError

    if (logits is None) == (show is None):
        raise UsageError("give either LOGITS or --show", hint="flashtrie draft LOGITS.npy -o TREE.npz")
    if show is not None:
        if output is not None:
            raise UsageError("--show draws on stdout, not into --output")
        _show(show, index, engine, json)
        return
    if output is None:
        raise UsageError("the trees need a name", hint="--output TREE.npz, or - for stdout")
    _build(
        str(logits),
        output,
        paths={
            "roots": roots,
            "base_lengths": base_lengths,
            "vocab_map": vocab_map,
            "start_states": start_states,
        },
        options={
            "num_nodes": nodes,
            "top_k": top_k,
            "first_row": first_row,
            "logit_type": logit_type,
            "padding": padding,
            "engine": engine,
            "threads": threads,
        },
        held={"index": index, "scoring": constraint, "end_token": eos},
        format_name=output_format,
        tree_mask=tree_mask,
        force=force,
        json=json,
        quiet=quiet,
    )


def _build(
    path: str,
    output: str,
    *,
    paths: dict[str, str | None],
    options: dict[str, Any],
    held: dict[str, Any],
    format_name: str,
    tree_mask: str | None,
    force: bool,
    json: bool,
    quiet: bool,
) -> None:
    import time

    from flashtrie_cli.errors import InputError, UsageError
    from flashtrie_cli.query.draft import SCORINGS, build_draft_trees
    from flashtrie_cli.query.draft_files import read_array, read_integers, read_logits, write_trees
    from flashtrie_cli.query.draft_formats import FORMATS, MASK_MODES, MASKED_FORMATS, to_format
    from flashtrie_cli.streams import check_results, open_results

    if format_name not in FORMATS:
        raise UsageError(f"format {format_name!r} is not one of {', '.join(FORMATS)}")
    if json and output == "-":
        raise UsageError("--json and -o - both write to stdout")
    if tree_mask is not None and format_name not in MASKED_FORMATS:
        raise UsageError(f"--tree-mask goes with --format {' or '.join(MASKED_FORMATS)}, not {format_name}")
    if tree_mask not in (None, *MASK_MODES):
        raise UsageError(f"tree mask {tree_mask!r} is not one of {', '.join(MASK_MODES)}")
    if held["index"] is None and (held["scoring"], held["end_token"], paths["start_states"]) != (
        None,
        None,
        None,
    ):
        raise UsageError("--constraint, --eos and --start-states need --index")
    if held["scoring"] not in (None, *SCORINGS):
        raise UsageError(f"constraint {held['scoring']!r} is not one of {', '.join(SCORINGS)}")
    if options["logit_type"] not in (None, "bfloat16"):
        raise UsageError(f"logit type {options['logit_type']!r} is not bfloat16; others say what they are")
    check_results(output, force=force, inputs=(path, held["index"], *paths.values()))
    began = time.perf_counter()
    logits = read_logits(path)
    batch_size = len(logits) if logits.ndim == 3 else 0
    roots = read_integers(paths["roots"], batch_size, 0)
    bases = read_integers(paths["base_lengths"], batch_size, 0)
    if paths["vocab_map"] is not None:
        options["vocab_map"] = read_array(paths["vocab_map"])
    if held["index"] is not None:
        options |= {"trie": _open(held["index"], options["engine"]), "scoring": held["scoring"] or "renorm"}
        options["end_token"] = held["end_token"]
        if paths["start_states"] is not None:
            options["start_states"] = read_integers(paths["start_states"], batch_size, 0)
    read = time.perf_counter()
    try:
        trees = build_draft_trees(logits, roots, bases, **options)
    except InputError as error:  # of the argument that it names, else of the logits
        file = paths.get(error.file or "") or path
        raise InputError(error.message, file=file, hint=error.hint) from error
    built = time.perf_counter()
    mask = tree_mask or ("packed" if format_name == "tensorrt-llm" else "tree")
    with open_results(output, force=force) as out:
        write_trees(out, to_format(trees, bases, format_name, tree_mask=mask))
    _report(trees, read - began, built - read, json=json, quiet=quiet)


def _report(trees: DraftTrees, read: float, built: float, *, json: bool, quiet: bool) -> None:
    import numpy as np

    from flashtrie_cli.query.draft import STATUS_BAD_ROW, STATUS_TRUNCATED
    from flashtrie_cli.report import duration_text, summary
    from flashtrie_cli.streams import print_json, warn

    valid = trees.valid_counts
    inside = np.arange(trees.node_scores.shape[1])[None, :] < valid[:, None]
    accepted = np.where(inside, np.exp(trees.node_scores, dtype=np.float64), 0.0).sum(axis=1) - 1
    bad = int(np.count_nonzero(trees.status & STATUS_BAD_ROW))
    truncated = int(np.count_nonzero(trees.status & STATUS_TRUNCATED))
    if bad:
        warn(f"{bad} of {len(valid)} rows hold NaN or +inf where they were read; nothing grows there")
    mean = float(accepted.mean()) if len(valid) else 0.0
    if json:
        print_json(
            {
                "schema": "flashtrie.draft/1",
                "num_trees": len(valid),
                "num_nodes": int(valid.sum()),
                "expected_accepted": mean,
                "num_bad_rows": bad,
                "num_truncated": truncated,
                "read_s": read,
                "build_s": built,
            }
        )
        return
    rows = [
        ("trees", f"{len(valid):,}, {int(valid.sum()):,} nodes"),
        ("expected accepted", f"{mean:.3f} tokens beside the root, by the drafter's own probabilities"),
        ("time", f"read {duration_text(read)}, build {duration_text(built)}"),
    ]
    if truncated:
        rows.append(("top-k", f"bound {truncated:,} trees: a larger --top-k may serve them better"))
    summary(rows, quiet=quiet)


def _open(path: str, engine: str) -> Index | TokenMasks:
    """An index of either kind."""
    from flashtrie_cli.format import layout
    from flashtrie_cli.format.reader import IndexFile
    from flashtrie_cli.index import Index
    from flashtrie_cli.query.token_masks import TokenMasks

    file = IndexFile.open(path)
    if file.kind == layout.KIND_TOKEN_MASKS:
        return TokenMasks.open(path)
    return Index(file, engine="reference" if engine == "reference" else "auto")


def _show(path: str, index: str | None, engine: str, json: bool) -> None:
    from flashtrie_cli.errors import InputError
    from flashtrie_cli.query.draft_files import read_trees
    from flashtrie_cli.query.draft_show import describe, is_tree, lines, missing
    from flashtrie_cli.report import write_line
    from flashtrie_cli.streams import print_json

    arrays = read_trees(path)
    absent = missing(arrays)
    if absent:
        raise InputError(f"lacks {absent[0]}", file=path, hint="only --format arrays can be shown")
    if not is_tree(arrays):
        raise InputError("its arrays make no trees", file=path)
    text_of = None if index is None else _texts(_open(index, engine))
    trees = [describe(arrays, batch) for batch in range(len(arrays["valid_counts"]))]
    if json:
        if text_of is not None:
            for tree in trees:
                for node in tree["nodes"]:
                    node["text"] = text_of(node["token"])
        print_json({"schema": "flashtrie.draft-tree/1", "trees": trees})
        return
    for tree in trees:
        for line in lines(tree, text_of):
            write_line(line)


def _texts(index: Index | TokenMasks) -> Callable[[int], str] | None:
    """The text of one token by the index's vocabulary; None where it has none."""
    import numpy as np

    from flashtrie_cli.query.token_masks import TokenMasks

    def text_of(token: int) -> str:
        try:
            if isinstance(index, TokenMasks):
                return index.tokens[token].decode(errors="replace")
            return index.decode(np.array([token], np.uint32), np.array([0, 1], np.int64))[0]
        except (IndexError, ValueError, OverflowError):
            return "?"

    return text_of if isinstance(index, TokenMasks) or index.vocabulary is not None else None
