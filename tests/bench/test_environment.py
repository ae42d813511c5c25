"""What a measurement says of the program it was made with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from flashtrie_cli.bench import environment


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the installed package."""
    folder = tmp_path / "flashtrie_cli"
    (folder / "bench").mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(folder / "bench" / "environment.py"))
    return folder


def test_an_installed_package_says_what_it_was_built_from(package: Path) -> None:
    assert environment.commit() is None
    (package / "_commit.txt").write_text("\n")  # built where there was no git
    assert environment.commit() is None
    (package / "_commit.txt").write_text("0123456789ab-dirty\n")
    assert environment.commit() == "0123456789ab-dirty"


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_checkout_asks_git(package: Path) -> None:
    def git(*arguments: str) -> str:
        own = ("-c", "user.name=a", "-c", "user.email=a@b", "-C", str(package.parent))
        return subprocess.run(
            ["git", *own, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    (package / "_commit.txt").write_text("0123456789ab\n")
    assert environment.commit() == "0123456789ab"
    git("init", "-q")
    (package.parent / "pyproject.toml").write_text("")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    head = git("rev-parse", "HEAD")[:12]
    assert environment.commit() == head
    (package.parent / "pyproject.toml").write_text("changed")
    assert environment.commit() == f"{head}-dirty"
