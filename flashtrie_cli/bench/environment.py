"""What a measurement was made on: processor, GPU, versions, commit. Without it, a number is a rumour."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from flashtrie_cli import __version__


def environment() -> dict[str, Any]:
    """A record of this machine and program; what cannot be found out is None."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "flashtrie": __version__,
        "commit": commit(),
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "memory_bytes": _memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "gpu": gpu_name(),
    }


def cpu_name() -> str | None:
    """The processor's model."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or None


def gpu_name() -> dict[str, str] | None:
    """Name, driver and power limit of the first GPU, as the driver says; None without one."""
    line = _output(
        "nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader", "--id=0"
    )
    if not line or line.count(",") < 2:
        return None
    name, driver, power = (part.strip() for part in line.splitlines()[0].split(",")[:3])
    return {"name": name, "driver": driver, "power_limit": power}


def commit() -> str | None:
    """The checkout's commit, else the one that the package was built from; ``-dirty`` where files were changed since.

    None where neither is known, as in a package built from an sdist.
    """
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if (root / ".git").exists() and (root / "pyproject.toml").exists():
        return _output(
            "git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"
        )
    try:
        return (package / "_commit.txt").read_text("utf-8").strip() or None
    except OSError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
