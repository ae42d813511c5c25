"""The benchmark's own parts, small."""

from __future__ import annotations

import importlib.util

import pytest
from masks_world import EOS, trap_vocabulary

from flashtrie_cli.bench.mask_systems import open_systems
from flashtrie_cli.bench.masks import MaskBench
from flashtrie_cli.bench.tables import MASK_COLUMNS, mask_table

MEMBERS = ["yes", "yes no", "account", "no", "abc", "under"]


def test_rows_and_table():
    bench = MaskBench(
        {"small": MEMBERS}, trap_vocabulary(), [EOS], sizes=(3, 6, 7), systems=["flashtrie"], seconds=0.01
    )
    rows = bench.run()
    assert [(row["num_members"], row["system"]) for row in rows] == [(3, "flashtrie"), (6, "flashtrie")]
    assert all(row["compile_us"] > 0 and row["times_ours"] == 1 for row in rows)
    assert rows[0]["fill_us"]["median"] <= rows[0]["fill_us"]["p99"] <= rows[0]["fill_us"]["max"]
    assert rows[0]["batch_us"]["num_states"] == 256
    table = mask_table(
        {"masks": [*rows, {"set": "small", "num_members": 9, "system": "other", "failed": "no"}]}
    )
    assert all(len(row) == len(MASK_COLUMNS) for row in table.rows)


@pytest.mark.parametrize(
    "name", ["xgrammar", "xgrammar-json", "llguidance", "llguidance-json", "outlines-core"]
)
def test_peers_that_are_installed(name):
    if importlib.util.find_spec(name.split("-")[0] if name != "outlines-core" else "outlines_core") is None:
        pytest.skip(f"{name} is not installed")
    tokens = trap_vocabulary()
    bench = MaskBench({"small": MEMBERS}, tokens, [EOS], sizes=(6,), systems=[name], seconds=0.01)
    _, peer = bench.run()
    assert "failed" not in peer
    assert peer["fill_us"]["median"] > 0
    assert len(open_systems([name], tokens, [EOS])) == 2
