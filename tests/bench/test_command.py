"""`flashtrie bench` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from program import assert_one_line, whole_app
from typer.testing import CliRunner

from flashtrie_cli.build import build_index
from flashtrie_cli.engine.cpu import CpuEngine
from flashtrie_cli.errors import InputError, UsageError

SMALL = ["bench", "-w", "nar", "--keys", "3k", "--queries", "8", "-b", "20"]


def bench(*arguments):
    return CliRunner().invoke(whole_app(), [*SMALL, *arguments])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "base.json"
    result = bench("--steady", "--export", str(path))
    assert result.exit_code == 0, result.output
    return path


def test_everything_side_by_side(tmp_path):
    export, report = tmp_path / "x.json", tmp_path / "x.md"
    result = bench("--batch", "1,4", "--export", str(export), "--report", str(report))
    assert result.exit_code == 0, result.output
    made = json.loads(export.read_text())
    assert made["schema"] == "flashtrie.bench/1"
    assert made["is_complete"]
    assert [case["batch_size"] for case in made["cases"]] == [1, 4]
    for case in made["cases"]:
        assert {"cpu", "marisa-int", "marisa-opt", "yardstick"} <= set(case["systems"])
        for system in case["systems"].values():
            assert len(system["samples_ns"]) == system["num_passes"]
    assert set(made["quality"][0]["agreement"].values()) == {1.0}
    text = report.read_text()
    assert "marisa-opt" in text
    assert made["environment"]["python"] in text


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--systems", "nothing"], 2, "nothing"),
        (["--alpha", "nan"], 2, "alpha"),
        (["-b", "2000000000"], 2, "beam width"),
        (["--plots", "{file}"], 2, "--plots needs" if find_spec("matplotlib") is None else "cannot be made"),
        (["--export", "-"], 2, "no name"),
        (["--report", "{file}/x"], 2, "x"),
        (["--index", "{file}"], 2, "--index needs --proposals"),
        (["-w", "titles", "--index", "{file}"], 2, "--index needs --proposals"),
    ],
)
def test_nothing_is_measured_for_what_cannot_be(flashtrie, tmp_path, arguments, code, says):
    """Nor is anything said but the error: what a run would take is not spent before it."""
    (tmp_path / "file").write_text("")
    filled = [part.format(file=tmp_path / "file") for part in arguments]
    done = flashtrie("bench", *filled)
    assert done.returncode == code
    assert_one_line(done.stderr, says)
    assert done.stdout == b""


def test_json_on_stdout():
    result = bench("--systems", "cpu", "--json")
    assert json.loads(result.stdout)["cases"][0]["systems"]["cpu"]["latency_us"]["mean"] > 0


def test_the_same_again_passes(base):
    assert bench("--against", str(base), "--max-slowdown", "1.5").exit_code == 0


def test_a_slower_engine_fails(base, monkeypatch):
    quick = CpuEngine.search

    def slow(self, tokens, logprobs, plan):
        begin = time.perf_counter()
        found = quick(self, tokens, logprobs, plan)
        until = time.perf_counter() + 2 * (time.perf_counter() - begin)
        while time.perf_counter() < until:
            pass
        return found

    monkeypatch.setattr(CpuEngine, "search", slow)
    result = bench("--against", str(base), "--max-slowdown", "1.5")
    assert result.exit_code == 1, result.output
    assert "SLOWER" in result.output


def test_refuses_what_the_base_did_not_measure(base):
    result = CliRunner().invoke(whole_app(), ["bench", "--against", str(base), "-b", "50"])
    assert isinstance(result.exception, UsageError)
    assert "beam_widths" in str(result.exception)


def test_an_interrupted_base_is_refused(base, tmp_path):
    made = json.loads(base.read_text())
    made["is_complete"] = False
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(made))
    assert isinstance(bench("--against", str(cut)).exception, InputError)


def test_a_base_without_an_engine_of_ours_judges_nothing(base, tmp_path):
    """And so must not pass."""
    made = json.loads(base.read_text())
    for case in made["cases"]:
        del case["systems"]["cpu"]
    (tmp_path / "theirs.json").write_text(json.dumps(made))
    error = bench("--against", str(tmp_path / "theirs.json")).exception
    assert isinstance(error, InputError)
    assert "no engine that could be judged (cpu or cuda)" in str(error)


@pytest.mark.parametrize(
    "lost", ["environment", "options", "cases digest", "cases systems", "samples_ns", "request alpha"]
)
def test_a_base_in_pieces(base, tmp_path, lost):
    made = json.loads(base.read_text())
    name, _, inner = lost.partition(" ")
    if name == "cases":
        del made["cases"][0][inner]
    elif name == "request":
        made["request"][inner] = None
        made["request"]["seconds"] = "long"
    elif name == "samples_ns":
        del made["cases"][0]["systems"]["cpu"][name]
    else:
        del made[name]
    (tmp_path / "pieces.json").write_text(json.dumps(made))
    error = bench("--against", str(tmp_path / "pieces.json")).exception
    assert isinstance(error, InputError)
    assert "no whole export" in str(error)


def test_finished_cases_survive_an_interrupt(tmp_path, monkeypatch):
    export = tmp_path / "x.json"
    calls = []

    def stop_at_second(*arguments, **names):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments, **names)

    from flashtrie_cli.bench import run

    real = run.measure
    monkeypatch.setattr(run, "measure", stop_at_second)
    result = bench("--batch", "1,2", "--systems", "cpu", "--export", str(export))
    assert result.exit_code != 0
    made = json.loads(export.read_text())
    assert len(made["cases"]) == 1
    assert not made["is_complete"]
    assert "cpu" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["-w", "x"],
        ["--systems", "x"],
        ["-b", "0"],
        ["-w", "index"],
        ["--max-slowdown", "0.5", "--against", "x"],
        ["--max-slowdown", "1.2"],
    ],
)
def test_bad_usage(arguments):
    result = CliRunner().invoke(whole_app(), ["bench", *arguments])
    assert isinstance(result.exception, UsageError), result.output


def test_one_query_over_a_handful_of_keys(tmp_path):
    index, grid = tmp_path / "i.ft", tmp_path / "g.jsonl"
    build_index([[0, 1], [0, 2, 3]], str(index))
    grid.write_text('{"tokens": [[0, 1], [2, 1], [3]], "logprobs": [[-1, -2], [-1, -2], [-1]]}\n')
    arguments = [
        "-w",
        "index",
        "--index",
        str(index),
        "--proposals",
        str(grid),
        "--seconds",
        "0.05",
        "-b",
        "50",
    ]
    result = CliRunner().invoke(whole_app(), ["bench", *arguments])
    assert result.exit_code == 0, result.output


def test_builds_in_processes_of_their_own(tmp_path):
    export = tmp_path / "b.json"
    result = CliRunner().invoke(
        whole_app(), ["bench", "-w", "build", "--keys", "2k,5k", "--export", str(export)]
    )
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads(export.read_text())["builds"] if row["builder"] == "flashtrie"]
    assert [row["num_keys"] for row in rows] == pytest.approx([2000, 5000], rel=0.05)
    assert all(
        row["peak_bytes"] > 1 << 20 and row["seconds"] > 0 and row["index_bytes"] > 100 for row in rows
    )


def test_help_imports_no_numpy():
    code = "import sys, flashtrie_cli.commands.bench; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
