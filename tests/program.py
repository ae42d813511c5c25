"""Running the program as its users do, and what its errors must look like."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import typer

import flashtrie_cli
from flashtrie_cli import commands

HERE = Path(__file__).resolve().parent
PACKAGE_HOME = Path(flashtrie_cli.__file__).resolve().parent.parent
"""Where the package under test lies: the checkout, or an environment that it is installed in."""
COMMAND = [sys.executable, "-m", "flashtrie_cli"]
SEARCH_PATH = [str(PACKAGE_HOME), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(SEARCH_PATH), "PYTHONDONTWRITEBYTECODE": "1"}

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


def run_flashtrie(
    *arguments: object, stdin: bytes = b"", **options: object
) -> subprocess.CompletedProcess[bytes]:
    """`flashtrie ARGUMENTS…` as a process; stdout and stderr captured unless ``options`` say otherwise."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, "cwd": HERE, **options}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        env=ENVIRONMENT,
        **options,  # type: ignore[call-overload]
    )


def whole_app() -> typer.Typer:
    """All commands at once, to be run within this process; the program itself registers the one that is named."""
    app = typer.Typer()
    for name in commands.ORDER:
        app.command(name)(importlib.import_module(f"flashtrie_cli.commands.{name}").command)
    return app


def assert_one_line(stderr: bytes, *parts: str) -> None:
    """An error is one line of the program's own, which says all of ``parts``."""
    text = stderr.decode()
    assert text.startswith("flashtrie: "), text
    assert text.count("\n") == 1, text
    assert text.endswith("\n")
    missing = [part for part in parts if part not in text]
    assert not missing, text


def leftovers(folder: Path, expected: Sequence[str] = ()) -> list[str]:
    """What lies in a folder beside what is expected."""
    return sorted(set(os.listdir(folder)) - set(expected))


def wait_for_files(folder: Path) -> None:
    """Until a build has its temporary files there, and so has begun."""
    for _ in range(1200):
        if os.listdir(folder):
            return
        time.sleep(0.05)
    raise AssertionError("the build did not begin")
