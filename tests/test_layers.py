"""The floors of docs/design.md: who may import whom, who may speak, where native and GPU parts come in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flashtrie_cli"

# From the ground up. Rooms of one floor do not import one another; the longest name that fits counts.
FLOORS = (
    ("errors",),
    ("files", "inputs"),
    ("format",),
    ("trie", "query.plan", "query.results"),
    ("engine",),
    ("keys", "report", "streams"),
    ("query",),
    ("library",),
    ("bench",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
# Other top-level modules make one room, the library: the Python API, on which the commands are thin.

LONGEST_FILE = dict.fromkeys((".py", ".cpp", ".hpp", ".cu", ".cuh"), 500)
"""Lines past which a file wants to be two."""

SPEAKERS = ("report", "streams", "cli", "__main__")
WORKERS = ("bench.builds",)
"""Run as processes of their own too, whose streams a benchmark reads."""


@dataclass(frozen=True)
class Import:
    target: str
    line: int
    in_function: bool


def modules() -> dict[str, Path]:
    """Dotted names below the package, with their files."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[Import]:
    """Every import of a file but those for type checkers only."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, in_function) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: relative import"
                for alias in child.names:
                    yield Import(f"{child.module}.{alias.name}", child.lineno, in_function)
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            else:
                inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, inside)

    yield from walk(ast.parse(path.read_text()), False)


def place(module: str) -> tuple[int, str]:
    """Floor and room of a module; the longest entry that names it wins."""
    rooms = {room.split(".")[0] for floor in FLOORS for room in floor}
    is_library = (
        "." not in module and module not in rooms and MODULES.get(module, ROOT).parent.name == PACKAGE
    )
    name = "library" if is_library and MODULES[module].name in ("__init__.py", f"{module}.py") else module
    fitting = [
        (len(room), floor, room)
        for floor, rooms in enumerate(FLOORS)
        for room in rooms
        if name == room or name.startswith(room + ".")
    ]
    assert fitting, f"{module} stands on no floor: add it to FLOORS and docs/design.md"
    _, floor, room = max(fitting)
    return floor, room


def own_module(target: str) -> str | None:
    """The module of this package that an import names, None for others."""
    if target != PACKAGE and not target.startswith(PACKAGE + "."):
        return None
    name = target.removeprefix(PACKAGE).removeprefix(".")
    while name and name not in MODULES:
        if name == "_native":
            return None
        name = name.rpartition(".")[0]
    return name or "__init__"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_downward(module: str) -> None:
    floor, room = place(module)
    for found in imports(MODULES[module]):
        target = own_module(found.target)
        if target is None or (target == "__init__" and found.target.endswith((".__version__", ".commands"))):
            continue
        target_floor, target_room = place(target)
        assert target_floor < floor or target_room == room, (
            f"{MODULES[module]}:{found.line}: {module} on floor {floor} imports {target} on {target_floor}"
        )


@pytest.mark.parametrize("module", MODULES)
def test_only_a_few_speak(module: str) -> None:
    if module in (*SPEAKERS, *WORKERS):
        return
    tree = ast.parse(MODULES[module].read_text())
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if __name__ == '__main__':")]
    for node in ast.walk(tree):
        spoken = (
            isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("sys.stdout", "sys.stderr"))
        ) or (isinstance(node, ast.Call) and ast.unparse(node.func) == "print")
        assert not spoken, (
            f"{MODULES[module]}:{node.lineno}: only {', '.join(SPEAKERS)} touch stdout and stderr"
        )


@pytest.mark.parametrize("module", MODULES)
def test_native_and_gpu_parts_come_in_at_one_place_each(module: str) -> None:
    for found in imports(MODULES[module]):
        where = f"{MODULES[module]}:{found.line}"
        if found.target.split(".")[0] == "pycuda":
            assert module.startswith("engine.cuda"), f"{where}: pycuda"
            assert found.in_function, f"{where}: pycuda at the top of a module"
        if found.target == f"{PACKAGE}._native":
            assert module.startswith("engine.cpu") or module == "inputs.native", f"{where}: _native"
            assert found.in_function, f"{where}: _native at the top of a module"


@pytest.mark.parametrize(
    "module", [name for name in MODULES if place(name)[1] in ("commands", "cli", "errors")]
)
def test_the_front_is_light(module: str) -> None:
    """What `flashtrie --help` loads imports nothing heavy at its top."""
    light = {
        "__future__",
        "codecs",
        "importlib",
        "io",
        "os",
        "pkgutil",
        "re",
        "signal",
        "sys",
        "traceback",
        "typing",
        "collections",
        "typer",
        PACKAGE,
    }
    for found in imports(MODULES[module]):
        if found.in_function:
            continue
        assert found.target.split(".")[0] in light, f"{MODULES[module]}:{found.line}: {found.target}"
        target = own_module(found.target)
        assert target is None or target == "__init__" or place(target)[1] in ("commands", "cli", "errors")


def test_the_kernel_readme_names_every_header_and_kernel() -> None:
    files = {path.name for path in (ROOT / "cuda").rglob("*.cu*")}
    named = set(re.findall(r"\b(\w+\.cuh?)`", (ROOT / "cuda" / "README.md").read_text("utf-8")))
    assert named == files


def test_the_kernel_folder_is_no_package() -> None:
    """An ``__init__.py`` there would hide NVIDIA's namespace package ``cuda``."""
    assert not list((ROOT / "cuda").rglob("__init__.py"))


def test_files_stay_short() -> None:
    sources = [
        *MODULES.values(),
        *(p for p in (ROOT / "cuda").rglob("*") if p.suffix in (".cpp", ".hpp", ".cuh", ".cu")),
    ]
    too_long = {
        str(path): n
        for path in sources
        if (n := len(path.read_text().splitlines())) > LONGEST_FILE[path.suffix]
    }
    assert not too_long


def test_the_checks_see_what_they_should(tmp_path: Path) -> None:
    """The helpers above on a file with one of everything."""
    source = tmp_path / "module.py"
    source.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy\n"
        "def f():\n    from flashtrie_cli import _native\n    import flashtrie_cli.keys.batch\n"
    )
    found = {(i.target, i.in_function) for i in imports(source)}
    assert found == {
        ("typing.TYPE_CHECKING", False),
        ("flashtrie_cli._native", True),
        ("flashtrie_cli.keys.batch", True),
    }
    assert place("query.plan") == (3, "query.plan")
    assert place("query.output")[1] == "query"
    assert (
        place("index")
        > place("query.lookup")
        > place("keys.reader")
        > place("engine.cpu")
        > place("trie.stored")
    )
    assert own_module("flashtrie_cli.keys.batch.KeyBatch") == "keys.batch"
    assert own_module("numpy.typing") is None
