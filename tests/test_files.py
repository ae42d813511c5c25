"""Outputs appear whole or not at all, and nothing else is touched on the way."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from flashtrie_cli import files
from flashtrie_cli.errors import OutputError
from flashtrie_cli.files import atomic_output


def test_a_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with atomic_output(str(path)) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert os.listdir(tmp_path) == ["out"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def half() -> None:
        with atomic_output(str(path)) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    with atomic_output(str(link)) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "real") == ["target"]


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    before = os.stat(os.devnull)
    with atomic_output(os.devnull, force=False) as file:
        file.write(b"gone")
    assert os.stat(os.devnull).st_rdev == before.st_rdev
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with atomic_output(str(pipe), force=False) as file:
        file.write(b"through")
    reader.join()
    assert read == [b"through"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["out" * 80, "näme", "with space", "-"])
def test_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with atomic_output(str(path)) as file:
        file.write(b"x")
    assert os.listdir(tmp_path) == [name]


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"")
    for path, says in (
        (tmp_path, "directory"),
        (tmp_path / "no" / "x", "directory"),
        (tmp_path / "old", "exists"),
    ):
        with pytest.raises(OutputError, match=says), atomic_output(str(path), force=False):
            pass


@pytest.mark.parametrize("made_by", ["mkdir", "open"])
def test_a_signal_as_soon_as_there_is_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    """It raises where the program stands, which may be right behind the call that made a file or a directory."""
    real = os.mkdir if made_by == "mkdir" else open

    def make_and_be_interrupted(*arguments: Any, **names: Any) -> None:
        real(*arguments, **names)
        raise KeyboardInterrupt

    output = str(tmp_path / "x")
    if made_by == "mkdir":
        monkeypatch.setattr(files.os, "mkdir", make_and_be_interrupted)
    else:
        monkeypatch.setattr(files, "open", make_and_be_interrupted, raising=False)
    block = files.scratch_directory(output) if made_by == "mkdir" else files.atomic_output(output)
    with pytest.raises(KeyboardInterrupt), block:
        pass
    assert os.listdir(tmp_path) == []
