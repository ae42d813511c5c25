"""The sample data is what its README says, and every reader takes its file."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from flashtrie_cli.inputs.source import read_whole
from flashtrie_cli.keys.reader import KeyReader
from flashtrie_cli.keys.tokenizers import open_tokenizer
from flashtrie_cli.keys.vocabulary import WordVocabulary
from flashtrie_cli.query.proposals import read_proposals

SAMPLES = Path(__file__).parents[2] / "sample_data"


def count(name: str, **options) -> tuple[int, list]:
    batches = list(KeyReader([str(SAMPLES / name)], **options))
    return sum(batch.num_keys for batch in batches), batches


def test_readme_lists_every_file() -> None:
    listed = set(re.findall(r"^\| `([^`]+)`", (SAMPLES / "README.md").read_text("utf-8"), re.M))
    present = {path.name for path in SAMPLES.iterdir()} - {"README.md", "make_sample_data.py", "__pycache__"}
    assert listed == present
    assert all((SAMPLES / name).stat().st_size < 1_200_000 for name in present)


def test_notice_names_what_is_not_ours() -> None:
    notice = (SAMPLES.parent / "NOTICE").read_text("utf-8")
    rows = (SAMPLES / "README.md").read_text("utf-8").splitlines()
    for row in rows:
        if row.startswith("| `") and "Apache-2.0" not in row:
            assert f"sample_data/{row.split('`')[1]}" in notice


def test_titles_hold_the_true_titles() -> None:
    titles = read_whole(str(SAMPLES / "titles.txt.zst"), 1 << 30).decode("utf-8").split("\n")[:-1]
    pairs = [line.split("\t") for line in (SAMPLES / "queries.tsv").read_text("utf-8").splitlines()]
    assert len(set(titles)) == len(titles) == 200_000
    assert len(pairs) == 64
    assert sum(title in set(titles) for _, title in pairs) == 55
    assert count("titles.txt.zst", kind="text", tokenizer=WordVocabulary())[0] == 200_000


def test_grids() -> None:
    path = str(SAMPLES / "grids.npz")
    (batch,) = read_proposals(path, batch_size=1000)
    assert batch.tokens.shape == (64, 9, 128)
    assert batch.ids == [line.split("\t")[0] for line in (SAMPLES / "queries.tsv").read_text().splitlines()]
    assert int(batch.tokens.max()) == 50_256
    assert (np.diff(batch.logprobs, axis=2) <= 0).all()


def test_keywords() -> None:
    num_keys, batches = count("keywords.tsv", kind="text", tokenizer=WordVocabulary(), values_column=2)
    assert num_keys == 8000
    assert all(batch.values is not None and batch.values.dtype == np.uint64 for batch in batches)


def test_semantic_ids() -> None:
    num_keys, (batch,) = count("semantic_ids.npz", kind="npz")
    assert num_keys == 20_000
    assert batch.offsets.tolist() == list(range(0, 80_001, 4))
    assert len(np.unique(batch.tokens.reshape(-1, 4), axis=0)) == num_keys


def test_tokenizer() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = open_tokenizer(str(SAMPLES / "tokenizer.json.zst"))
    assert len(tokenizer) == 50_257
    texts = ["army of the potomac", "são paulo", "a - 1"]
    tokens, offsets = tokenizer.encode_batch(texts)
    assert tokenizer.decode_batch(tokens, offsets) == texts
    assert tokenizer.encode_batch(["hello world"])[0].tolist() == [31373, 995]
