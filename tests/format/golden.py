"""Writes the golden files of the current format versions that are missing; others are never touched.

PYTHONPATH=. python tests/format/golden.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samples import CODECS, SMALL, build_sample, everything, version_of

from flashtrie_cli import Index

FOLDER = Path(__file__).resolve().parents[1] / "data" / "golden"


def plain(answers: list[Any]) -> Any:
    """Answers as JSON has them: no tuples."""
    return json.loads(json.dumps(answers))


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in SMALL:
        for codec in CODECS:
            path = FOLDER / f"v{version_of(name)}-{name}-{codec}.ft"
            if path.exists():
                continue
            build_sample(name, codec, path)
            index = Index.open(str(path))
            expected = {"digest": index.file.digest, "meta": index.meta, "answers": plain(everything(index))}
            path.with_suffix(".json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
