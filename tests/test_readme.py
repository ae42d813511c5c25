"""The README's commands do what it shows, and its Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from program import ENVIRONMENT

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block with the output shown under it."""
    parts = re.split(r"^\$ ", block, flags=re.M)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder to work in, and an environment in which `flashtrie` is the package under test."""
    folder = tmp_path_factory.mktemp("tour")
    program = folder / "bin" / "flashtrie"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashtrie_cli "$@"\n')
    program.chmod(0o755)
    work = folder / "work"
    work.mkdir()
    return work, {**ENVIRONMENT, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


TOUR = [step for block in blocks("console") for step in commands(block)]


@pytest.mark.parametrize("number", range(len(TOUR)))
def test_tour(shell: tuple[Path, dict[str, str]], number: int) -> None:
    folder, environment = shell
    command, shown = TOUR[number]
    done = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, shown), f"{command}\n{done.stderr}"


def test_tour_is_there() -> None:
    assert len(TOUR) >= 10


def test_set_up_commands_open_the_readme() -> None:
    first = re.search(r"^```\n(.*?)^```", README, re.M | re.S)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]


def test_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    index, results = names["index"], names["results"]
    assert index.lookup([5, 7]).tolist() == [1]  # type: ignore[attr-defined]
    hits = results.hits(0)  # type: ignore[attr-defined]
    assert [hit.tokens for hit in hits] == [(5, 7), (6,)]
    assert hits[1].score == float(np.float32(np.log(np.float32(0.4))))
