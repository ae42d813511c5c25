"""Runs a script's checks under compute-sanitizer's memcheck, then racecheck."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def under_tools(script: str, arguments: Sequence[str] = (), *, keep: str) -> int:
    """Runs ``script --worker ARGUMENTS`` under each tool; prints the tools' lines and those that hold ``keep``,
    and where it fails the end of what went to stderr. 1 where a tool reports an error or the script fails, else 0."""
    failed = False
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", "--print-limit", "5"]
        command += [sys.executable, str(Path(script).resolve()), "--worker", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if keep in line or line.startswith("=====")]
        print(f"{tool}: exit {done.returncode}", *lines[:40], sep="\n  ", flush=True)
        if done.returncode != 0:
            failed = True
            print(*done.stderr.splitlines()[-5:], sep="\n  ", flush=True)
    return int(failed)
