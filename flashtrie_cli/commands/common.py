"""Options that several subcommands share, so that they are named and explained once."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from flashtrie_cli.errors import UsageError

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress, no summary; warnings and errors stay.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable JSON on stdout.")]
Threads = Annotated[
    int, typer.Option("--threads", "-j", min=0, help="CPU threads; 0 takes all that this process may use.")
]
IndexPath = Annotated[
    str, typer.Argument(metavar="INDEX", help="An index file, as written by flashtrie build.")
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine", help="What answers: auto, cpu, cuda or reference (plain Python, slow, the oracle)."
    ),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace the output where it exists.")]
Output = Annotated[str, typer.Option("--output", "-o", metavar="OUT", help="File to write; - is stdout.")]


def thread_count(threads: int) -> int:
    """The number asked for, or all that this process may run on."""
    if threads > 0:
        return threads
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse_size(text: str, option: str) -> int:
    """Bytes of "512M", "1G", "64k" or a plain number; UsageError otherwise."""
    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, unit = text.strip(), ""
    if number.upper().removesuffix("B")[-1:] in ("K", "M", "G", "T"):
        number = number.upper().removesuffix("IB").removesuffix("B")
        number, unit = number[:-1], number[-1]
    try:
        size = int(float(number) * units[unit])
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise UsageError(f"{option} {text!r} is not a size", hint="for example 512M or 2G")
    return size
