"""Options that several subcommands share, so that they are named and explained once."""

from __future__ import annotations

from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary; warnings and errors stay.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable JSON on stdout.")]
Threads = Annotated[
    int, typer.Option("--threads", "-j", min=0, help="CPU threads; 0 takes all that this process may use.")
]
