"""`flashtrie dump`: every key of an index, in order."""

from __future__ import annotations

from typing import Annotated

import typer

from flashtrie_cli.commands.common import Debug, Engine, Force, IndexPath, Json, Output, Quiet


def command(
    index: IndexPath,
    output: Output = "-",
    ids: Annotated[bool, typer.Option("--ids", help="Token ids, also where the index holds text.")] = False,
    engine: Engine = "auto",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write every key of an index, in order.

    A line a key, in ascending order of its tokens; with values, a TAB and the value.

    Building from a dump gives the same index (with --ids and the same tokenizer.json for Hugging Face vocabularies).
    Only keys with several values (--duplicates all) cannot be read back: their values stand between blanks.
    JSON lines hold key_id, tokens, text and value.
    """
    from flashtrie_cli.index import Index
    from flashtrie_cli.query.lookup import key_texts, value_text
    from flashtrie_cli.streams import TsvWatch, check_results, json_line, open_results, text_bytes, warn

    check_results(output, force=force, inputs=(index,))
    opened = Index.open(index, engine=engine)
    if opened.text_missing and not ids:
        warn(f"token ids only: {opened.text_missing}")
    has_text = opened.vocabulary is not None
    watch = TsvWatch()
    with open_results(output, force=force) as out:
        for keys in opened.keys():
            key_ids = keys.key_ids.tolist()
            texts = key_texts(opened, keys, as_ids=ids)
            values = [opened.value_of(key_id) for key_id in key_ids] if opened.values is not None else None
            if json:
                for i, key_id in enumerate(key_ids):
                    row = {
                        "schema": "flashtrie.dump/1",
                        "key_id": key_id,
                        "tokens": keys.tokens[keys.offsets[i] : keys.offsets[i + 1]].tolist(),
                    }
                    if has_text and not ids:
                        row["text"] = texts[i]
                    if values is not None:
                        row["value"] = values[i]
                    out.write(json_line(row))
                continue
            watch.check(texts)
            if keys.offsets[1] == 0 and len(keys):
                warn("the empty key is an empty line, which a build skips (hint: --json keeps it)")
            if values is not None:
                texts = [f"{text}\t{value_text(value)}" for text, value in zip(texts, values, strict=True)]
            out.write(text_bytes("\n".join(texts) + "\n"))
