"""docs/bench.md: its CI example is a workflow, its commands are ones that `flashtrie` takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click import Context
from program import whole_app
from typer.main import get_command

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text("utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", TEXT, re.M | re.S)
    assert found is not None
    return found[1]


def workflow() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(block("yaml"))


def flashtrie_commands() -> list[str]:
    shown = re.findall(r"^\$ flashtrie (.*)$", TEXT, re.M)
    in_ci = re.findall(r"(?:^|/)flashtrie (.*)$", re.sub(r"^\s+", "", block("yaml"), flags=re.M), re.M)
    assert len(shown) > 6
    assert len(in_ci) == 2
    return [command.split("  #")[0] for command in shown + in_ci]


@pytest.mark.parametrize("command", flashtrie_commands())
def test_commands_parse(command: str) -> None:
    main: Any = get_command(whole_app())
    name, *arguments = shlex.split(command)
    # As the command line would be read, up to where the command would begin to work.
    context = main.commands[name].make_context(name, arguments, parent=Context(main))
    assert not context.args


def test_the_workflow_is_one() -> None:
    read = workflow()
    assert read["name"] == "bench"
    assert read[True] == "pull_request"  # `on`, to YAML 1.1
    (job,) = read["jobs"].values()
    assert job["runs-on"].startswith("ubuntu-")
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    scripts = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    assert sum("flashtrie bench" in line for line in scripts) == 2
    exported, compared = (line for line in scripts if "flashtrie bench" in line)
    assert exported.split("--export ")[1] == compared.split("--against ")[1].split()[0]
    # A gate that fails must still show what it found.
    assert (
        next(step for step in job["steps"] if "gate.md" in step.get("run", "") and "if" in step)["if"]
        == "always()"
    )
