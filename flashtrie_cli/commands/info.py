"""`flashtrie info`: which engines work here, and what to do about those that don't."""

from __future__ import annotations

from flashtrie_cli.commands.common import Debug, Json


def command(json: Json = False, debug: Debug = False) -> None:
    """Say which engines work on this machine, and for each that doesn't the reason and the remedy."""
