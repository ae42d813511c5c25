"""What people read: progress and summaries on stderr, tables on stdout. Nothing here decides anything."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flashtrie_cli.files import writing_to_stdout

PIPE_WIDTH = 1000
"""Columns of what is no terminal: more than any table has."""


def size_text(num_bytes: float) -> str:
    """12.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def duration_text(seconds: float) -> str:
    """840 µs, 12.3 ms, 4.5 s, 3 min 20 s."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def peak_memory() -> int:
    """Most bytes that this process has had resident, since its program began."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Elsewhere than on Linux, where this would count what the parent had when it forked.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def summary(rows: Sequence[tuple[str, str]], *, quiet: bool) -> None:
    """Aligned lines of name and figure on stderr."""
    if quiet:
        return
    width = max((len(name) for name, _ in rows), default=0)
    sys.stderr.write("".join(f"{name:<{width}}  {figure}\n" for name, figure in rows))


def write_line(text: str) -> None:
    """A line on stdout."""
    with writing_to_stdout():
        sys.stdout.write(text + "\n")


def table(title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on stdout; ``columns`` are (heading, "left", "right", or "text", which folds before the others do).

    Without a heading there is no row of them. Into a pipe or a file a table keeps its width; in a terminal that is too
    narrow its cells fold, and nothing is cut off.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    made = Table(header_style="bold", show_header=any(heading for heading, _ in columns))
    for heading, side in columns:
        made.add_column(heading, justify="right" if side == "right" else "left", no_wrap=side != "text")
    for row in rows:
        made.add_row(*row)
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    if Measurement.get(console, console.options.update_width(PIPE_WIDTH), made).minimum > console.width:
        for column in made.columns:
            column.no_wrap, column.overflow = False, "fold"
    with writing_to_stdout():
        console.print(title, style="bold", soft_wrap=True)  # a table's own title folds at the table's width
        console.print(made)


@contextlib.contextmanager
def progress(total: int | None, unit: str, *, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """A callback (stage, done so far) that draws a bar on stderr while that is a terminal, and nothing else."""
    if quiet or not sys.stderr.isatty():
        yield lambda stage, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        TextColumn("{task.fields[count]:>12} {task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as bar:
        task = bar.add_task("", total=total, count="0", unit=unit)

        def show(stage: str, done: int) -> None:
            bar.update(
                task, description=stage, completed=min(done, total) if total else done, count=f"{done:,}"
            )

        yield show
