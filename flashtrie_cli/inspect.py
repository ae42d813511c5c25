"""What an index holds, gathered for people and for CI."""

from __future__ import annotations

import hashlib
from typing import Any

from flashtrie_cli.build import TRIE_SECTIONS
from flashtrie_cli.errors import IndexFileError
from flashtrie_cli.format import layout
from flashtrie_cli.format.reader import IndexFile
from flashtrie_cli.index import Index
from flashtrie_cli.trie.statistics import FAN_OUT_BOUNDS, LevelStatistics, level_statistics

PARTS = {
    "topology": (layout.LOUDS,),
    "labels": (layout.LABEL_LOW, layout.LABEL_DELTA, layout.HIGH_FLAGS, layout.LABEL_HIGH),
    "terminals": (layout.TERMINAL, layout.INNER_TERMINAL),
    "tails": layout.TAIL_SECTIONS,
    "values": (layout.VALUES, layout.VALUE_COUNTS),
    "vocabulary": (layout.WORD_TEXT, layout.WORD_ENDS, layout.TOKENIZER),
}


def describe(index: Index, *, levels: bool = False) -> dict[str, Any]:
    """Header, sections, counts and bits a key of a token trie, as plain values; with ``levels``, each level."""
    file, meta = index.file, index.meta
    keys = max(index.num_keys, 1)
    stored = {
        part: sum(file.sections[name].stored_size for name in names if file.has(name)) * 8 / keys
        for part, names in PARTS.items()
    }
    # A node costs its label's entropy and, in the tree's shape, 2 bits at most.
    entropy_bound = (meta["label_entropy"] + 2) * (index.num_nodes - 1) / keys
    described = {
        "path": file.path,
        "format_version": file.version,
        "kind": layout.KIND_NAMES[file.kind],
        "digest": file.digest,
        "file_size": file.file_size,
        "resident_size": index.engine.resident_size,
        "num_words": len(index.vocabulary) if index.vocabulary is not None else None,
        "sections": sections_of(file),
        "bits_per_key": {
            "file": file.file_size * 8 / keys,
            "resident": index.engine.resident_size * 8 / keys,
            **stored,
            "entropy_bound": entropy_bound,
        },
        **meta,
    }
    if levels:
        described["levels"] = [level_row(level) for level in level_statistics(index.stored)]
    return described


def describe_mask_index(file: IndexFile, *, verify: bool = False, threads: int = 1) -> dict[str, Any]:
    """The same for an index of token masks; with ``verify``, every checksum is checked (opening checks the rest), and
    ``verified`` says so. Raises IndexFileError."""
    from flashtrie_cli.query.mask_statistics import describe_masks
    from flashtrie_cli.query.token_masks import TokenMasks

    if verify:
        file.verify_checksums()
    masks = TokenMasks.open(file.path, threads=threads)
    described = {
        "path": file.path,
        "format_version": file.version,
        "kind": layout.KIND_NAMES[file.kind],
        "digest": file.digest,
        "file_size": file.file_size,
        "sections": sections_of(file),
        **describe_masks(masks),
    }
    if verify:
        described["verified"] = [
            f"checksums of {len(file.sections)} sections",
            f"structure: {masks.num_nodes:,} nodes, allowed tokens ascending, each leading to a node below",
        ]
    return described


def sections_of(file: IndexFile) -> list[dict[str, Any]]:
    """The section table as plain values."""
    return [
        {
            "name": section.name,
            "codec": layout.CODEC_NAMES[section.codec],
            "offset": section.offset,
            "stored_size": section.stored_size,
            "raw_size": section.raw_size,
            "ratio": section.raw_size / section.stored_size if section.stored_size else 1.0,
            "checksum": f"{section.checksum:08x}",
        }
        for section in file.sections.values()
    ]


def level_row(level: LevelStatistics) -> dict[str, Any]:
    """One level as plain values."""
    bounds = [*(f"<={bound}" for bound in FAN_OUT_BOUNDS), f">{FAN_OUT_BOUNDS[-1]}"]
    return {
        "depth": level.depth,
        "num_nodes": level.num_nodes,
        "num_keys": level.num_keys,
        "num_leaves": level.num_leaves,
        "mean_fan_out": level.mean_fan_out,
        "max_fan_out": level.max_fan_out,
        "fan_outs": dict(zip(bounds, level.fan_out_classes, strict=True)),
    }


def verify(index: Index) -> list[str]:
    """Check what opening did not: every checksum, the digest of the contents, and the counts against the levels.

    Opening has checked that the bits are a tree, siblings strictly ascend and leaves are terminal. Returns what was
    checked, a line each; raises IndexFileError.
    """
    file, meta = index.file, index.meta

    def refuse(why: str) -> None:
        raise IndexFileError(why, file=file.path, hint="rebuild the index")

    file.verify_checksums()
    digest = hashlib.blake2b(digest_size=16)
    for name in (*TRIE_SECTIONS, layout.WORD_TEXT, layout.WORD_ENDS, layout.TOKENIZER):
        if file.has(name):
            digest.update(file.bytes(name))
    if digest.hexdigest() != meta.get("keys_digest"):
        refuse("its contents have another digest than it says")
    levels = level_statistics(index.stored)
    if sum(level.num_nodes for level in levels) != index.num_nodes:
        refuse("its levels hold another number of nodes than it says")
    if sum(level.num_keys for level in levels) != index.num_keys:
        refuse("its levels hold another number of keys than it says")
    if len(levels) - 1 != meta.get("depth"):
        refuse("it is of another depth than it says")
    if sum(level.depth * level.num_keys for level in levels) != meta.get("num_tokens"):
        refuse("its keys hold another number of tokens than it says")
    return [
        f"checksums of {len(file.sections)} sections",
        "digest of the contents",
        f"structure: {index.num_nodes:,} nodes on {len(levels)} levels, siblings ascending, leaves terminal",
        f"counts: {index.num_keys:,} keys, {meta['num_tokens']:,} tokens",
    ]
