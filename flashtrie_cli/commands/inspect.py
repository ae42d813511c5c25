"""`flashtrie inspect`: what is in an index file, and whether it is sound."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from flashtrie_cli.commands.common import Debug, IndexPath, Json, Threads


def command(
    index: IndexPath,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check every checksum, the digest and all counts; exit 3 on damage."),
    ] = False,
    levels: Annotated[
        bool, typer.Option("--levels", help="Nodes, keys and fan-outs of each level of a trie.")
    ] = False,
    threads: Threads = 1,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in an index, and check it.

    Header, sections, counts and bits a key by part; of token masks, nodes and allowed tokens. --json for CI.
    """
    from flashtrie_cli.commands.common import thread_count
    from flashtrie_cli.errors import UsageError
    from flashtrie_cli.format import layout
    from flashtrie_cli.format.reader import IndexFile
    from flashtrie_cli.index import Index
    from flashtrie_cli.inspect import describe, describe_mask_index
    from flashtrie_cli.inspect import verify as verify_index
    from flashtrie_cli.streams import print_json

    file = IndexFile.open(index)
    if file.kind == layout.KIND_TOKEN_MASKS:
        if levels:
            raise UsageError("--levels is for token tries; this holds token masks")
        described = describe_mask_index(file, verify=verify, threads=thread_count(threads))
        if json:
            print_json({"schema": "flashtrie.inspect/1", **described})
        else:
            _show_masks(described)
        return
    opened = Index(file, threads=thread_count(threads))
    described = describe(opened, levels=levels or json)
    if verify:
        described["verified"] = verify_index(opened)
    if json:
        print_json({"schema": "flashtrie.inspect/1", **described})
        return
    _show(described)


def _show_masks(d: dict[str, Any]) -> None:
    from flashtrie_cli.report import size_text, table

    allowed = d["allowed_per_node"]
    rows = [
        ("kind", f"{d['kind']}, format version {d['format_version']}"),
        ("digest", d["digest"]),
        ("members", f"{d['num_members']:,}"),
        ("nodes", f"{d['num_nodes']:,}, {d['num_terminals']:,} of them ends of members"),
        ("vocabulary", f"{d['vocab_size']:,} ids, ends {d['eos']}"),
        ("allowed tokens", f"{d['num_allowed']:,}; {allowed['mean']:.2f} a node, {allowed['max']:,} at most"),
        ("distinct masks", f"{d['num_distinct_masks']:,}"),
        ("file", size_text(d["file_size"])),
        ("resident", size_text(d["memory"]["resident"])),
    ]
    table(d["path"], [("", "left"), ("", "left")], [list(row) for row in rows])
    table(
        "nodes by allowed tokens",
        [("tokens", "left"), ("nodes", "right")],
        [[bound, f"{count:,}"] for bound, count in allowed["histogram"].items() if count],
    )
    table(
        "largest nodes",
        [("node", "right"), ("allowed tokens", "right")],
        [[f"{one['node']:,}", f"{one['num_allowed']:,}"] for one in d["largest"]],
    )
    _show_sections(d["sections"])
    _show_verified(d)


def _show_verified(d: dict[str, Any]) -> None:
    from flashtrie_cli.report import write_line

    for line in d.get("verified", ()):
        write_line(f"verified {line}")


def _show_sections(sections: list[dict[str, Any]]) -> None:
    from flashtrie_cli.report import size_text, table

    table(
        "sections",
        [("name", "left"), ("codec", "left"), ("raw", "right"), ("stored", "right"), ("ratio", "right")],
        [
            [
                s["name"],
                s["codec"],
                size_text(s["raw_size"]),
                size_text(s["stored_size"]),
                f"{s['ratio']:.2f}",
            ]
            for s in sections
        ],
    )


def _show(d: dict[str, Any]) -> None:
    from flashtrie_cli.report import size_text, table

    vocabulary = d["tokenizer"] + (f", {d['num_words']:,} entries" if d["num_words"] is not None else "")
    rows = [
        ("kind", f"{d['kind']}, format version {d['format_version']}"),
        ("digest", d["digest"]),
        ("digest of the keys", d["keys_digest"]),
        ("keys", f"{d['num_keys']:,}"),
        ("nodes", f"{d['num_nodes']:,} ({d['num_nodes'] / max(d['num_keys'], 1):.3f} a key)"),
        ("depth", f"{d['depth']:,}"),
        ("tokens", vocabulary + (", lower case" if d["lowercase"] else "")),
        ("labels above 16 bits", f"{d['num_highs']:,} ({d['high_width']} more bits)"),
        ("label entropy", f"{d['label_entropy']:.2f} bits a node"),
        *_tail_rows(d),
        ("values", d["value_kind"] + (", several a key" if d["has_value_counts"] else "")),
        ("file", size_text(d["file_size"])),
        ("resident", size_text(d["resident_size"])),
    ]
    table(d["path"], [("", "left"), ("", "left")], [list(row) for row in rows])
    _show_sections(d["sections"])
    table(
        "bits a key",
        [("part", "left"), ("bits", "right")],
        [[part.replace("_", " "), f"{bits:.2f}"] for part, bits in d["bits_per_key"].items()],
    )
    if "levels" in d:
        classes = list(d["levels"][0]["fan_outs"])
        headings = (
            "depth",
            "nodes",
            "keys",
            "leaves",
            "mean fan-out",
            "largest",
            *(f"% {c}" for c in classes),
        )
        table(
            "levels (fan-outs: share of the level's nodes)",
            [(heading, "right") for heading in headings],
            [_level_row(level) for level in d["levels"]],
        )
    _show_verified(d)


def _tail_rows(d: dict[str, Any]) -> list[tuple[str, str]]:
    if "num_links" not in d:
        return []
    return [
        (
            "tails",
            f"{d['num_links']:,} of {d['num_tail_nodes']:,} nodes, {d['num_tail_labels']:,} labels stored",
        )
    ]


def _level_row(level: dict[str, Any]) -> list[str]:
    return [
        str(level["depth"]),
        *(f"{level[name]:,}" for name in ("num_nodes", "num_keys", "num_leaves")),
        f"{level['mean_fan_out']:.2f}",
        f"{level['max_fan_out']:,}",
        *(f"{100 * count / level['num_nodes']:.1f}" if count else "" for count in level["fan_outs"].values()),
    ]
