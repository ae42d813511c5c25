"""Values of options: converted without pydantic, to what typer would have made of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from program import ENVIRONMENT, HERE, Run

from flashtrie_cli.commands import arguments

coercion = pytest.importorskip("typer._coercion", reason="a typer without pydantic")

OPTIONS = typer.Typer(callback=lambda: None)


@OPTIONS.command()
def command(
    text: Annotated[str, typer.Option()] = "",
    count: Annotated[int, typer.Option(min=1, max=500)] = 1,
    any_count: Annotated[int | None, typer.Option()] = None,
    share: Annotated[float, typer.Option(min=-1.5)] = 0.5,
    flag: Annotated[bool, typer.Option("--flag")] = False,
    several: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    pass


PARAMETERS = {
    parameter.name: parameter for parameter in typer.main.get_command(OPTIONS).commands["command"].params
}  # type: ignore[attr-defined]
TEXTS = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.from_regex(r"\A[ +-]?[0-9_]{1,4}[.]?[0-9]{0,3}(e[0-9])?\Z"),
)
VALUES = st.one_of(
    st.none(), TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(TEXTS)
)


def outcome(convert: Any, value: Any, parameter: Any) -> Any:
    try:
        found = convert.coerce(value, param=parameter, ctx=None)
    except Exception as error:  # click's BadParameter is typer's own
        return type(error), str(error)
    return type(found), repr(found)


@pytest.mark.parametrize("name", PARAMETERS)
@given(VALUES)
def test_values_are_what_typer_makes_of_them(name: str, value: Any) -> None:
    parameter = PARAMETERS[name]
    typers = coercion.build_runtime_param(parameter.type_descriptor)
    ours = arguments._PlainParameter(parameter.type_descriptor)
    assert outcome(ours, value, parameter) == outcome(typers, value, parameter)


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("text", "x", "x"),
        ("count", "100", 100),
        ("share", "-0.25", -0.25),
        ("several", ("a", "b"), ["a", "b"]),
    ],
)
def test_plain_ones_do_without_pydantic(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, converted: Any
) -> None:
    monkeypatch.setattr(coercion, "build_runtime_param", None)
    parameter = PARAMETERS[name]
    found = arguments._PlainParameter(parameter.type_descriptor).coerce(value, param=parameter, ctx=None)
    assert found == converted


def test_a_command_does_without_pydantic() -> None:
    code = (
        "import sys\nfrom flashtrie_cli import cli\n"
        "try:\n    cli.main()\nexcept SystemExit as done:\n    print(done.code)\n"
        "print([name for name in sys.modules if name.startswith('pydantic')])\n"
    )
    line = [
        "search",
        "none",
        "none",
        "-b",
        "100",
        "-k",
        "7",
        "--alpha",
        "0.5",
        "--eos",
        "3",
        "-o",
        "x",
        "--force",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *line], env=ENVIRONMENT, cwd=HERE, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:2] == ["3", "[]"], done.stderr


def test_only_the_command_that_is_named_is_imported() -> None:
    code = (
        "import sys\nfrom flashtrie_cli import cli\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(' '.join(m for m in sys.modules if m.startswith('flashtrie_cli.commands.')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "lookup", "--help"],
        env=ENVIRONMENT, cwd=HERE, capture_output=True, text=True,
    )  # fmt: skip
    assert sorted(done.stderr.split()) == [
        f"flashtrie_cli.commands.{name}" for name in ("arguments", "common", "lookup")
    ]


def test_commands_that_are_not_named_are_listed(flashtrie: Run) -> None:
    listed = flashtrie("--help").stdout.decode()
    assert [name for name in ("build", "search", "lookup", "bench") if f"\n  {name} " not in listed] == []
    assert "Find, for each query" in listed
    assert b"Did you mean 'search'" in flashtrie("serach").stderr
    assert flashtrie("common").returncode == 2
