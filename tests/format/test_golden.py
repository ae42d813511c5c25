"""Index files of every released format version: read forever, with the answers they gave when made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden import FOLDER, plain
from samples import CODECS, SMALL, build_sample, everything, version_of

from flashtrie_cli import Index
from flashtrie_cli.inspect import verify

FILES = sorted(FOLDER.glob("*.ft"))


def test_the_version_at_hand_has_its_files() -> None:
    names = {path.name for path in FILES}
    assert {f"v{version_of(name)}-{name}-{codec}.ft" for name in SMALL for codec in CODECS} <= names


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_read_as_ever(path: Path, engine: str) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    index = Index.open(str(path), engine=engine)
    assert index.file.digest == expected["digest"]
    assert index.meta == expected["meta"]
    assert plain(everything(index)) == expected["answers"]
    assert verify(index)


@pytest.mark.parametrize("name", SMALL)
def test_raw_files_are_built_as_ever(name: str, tmp_path: Path) -> None:
    """The same keys give the same bytes; compressed ones depend on the release of zstd besides."""
    path = tmp_path / "again.ft"
    assert build_sample(name, "raw", path) == (FOLDER / f"v{version_of(name)}-{name}-raw.ft").read_bytes()
