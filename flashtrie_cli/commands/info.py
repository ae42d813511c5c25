"""`flashtrie info`: which engines work here, and what to do about those that don't."""

from __future__ import annotations

from flashtrie_cli.commands.common import Debug, Json


def command(json: Json = False, debug: Debug = False) -> None:
    """Say which engines work on this machine.

    For each that doesn't, the reason and the remedy.
    """
    import platform

    from flashtrie_cli import __version__
    from flashtrie_cli.engine.choose import engine_states, search_engine
    from flashtrie_cli.report import table
    from flashtrie_cli.streams import print_json

    states = engine_states()
    chosen = search_engine("auto")
    if json:
        print_json(
            {
                "schema": "flashtrie.info/1",
                "version": __version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "auto": chosen,
                "engines": {
                    name: {"works": reason is None, "reason": reason} for name, reason in states.items()
                },
            }
        )
        return
    rows = []
    for name, reason in states.items():
        remark = "answers by default" if name == chosen else ""
        rows.append([name, "works" if reason is None else "does not work", reason or remark])
    table(
        f"flashtrie {__version__}",
        [("engine", "left"), ("here", "left"), ("why, and what to do", "text")],
        rows,
    )
