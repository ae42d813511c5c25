"""The command line as a contract: start-up, flags, exit codes, streams, interruption, full disks."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import COMMAND, ENVIRONMENT, HERE, Run, assert_one_line, leftovers, wait_for_files, whole_app
from typer.main import get_command

from flashtrie_cli import cli

HELP_SECONDS = 0.150
CI_FACTOR = 4
"""Continuous-integration machines are slow and shared; numpy alone would take longer than this allows."""

FLAGS = {
    "build": (
        "--output -o --input --tokenizer --lowercase --values --value-type --duplicates --sorted --memory "
        "--threads -j --codec --level --force -f --estimate --json --quiet -q --debug"
    ),
    "inspect": "--verify --levels --threads -j --json --debug",
    "lookup": "--mode --limit --ids --all --engine --threads -j --json --quiet -q --debug",
    "dump": "--output -o --ids --engine --force -f --json --quiet -q --debug",
    "search": (
        "--beam-width -b --top-k -k --results -n --steps --alpha --token-threshold --sequence-threshold "
        "--eos --engine --threads -j --output -o --format --force -f --json --quiet -q --debug"
    ),
    "mask": "--ids --output -o --format --force -f --threads -j --json --quiet -q --debug",
    "draft": (
        "--output -o --nodes -n --top-k -k --roots --base-lengths --vocab-map --first-row --logit-type --padding "
        "--index --constraint --start-states --eos --format --tree-mask --show --engine --threads -j --force -f "
        "--json --quiet -q --debug"
    ),
}

GRID = json.dumps(
    {"id": "q", "tokens": [["new", "old"], ["york"], ["city"]], "logprobs": [[-1, -2], [-0.5], [-0.1]]}
)


def test_no_option_has_two_meanings() -> None:
    """The last of two options of one name would take what is meant for the first, and help lists both."""
    for name, command in get_command(whole_app()).commands.items():  # type: ignore[attr-defined]
        names = [one for option in command.params if hasattr(option, "opts") for one in option.opts]
        assert len(names) == len(set(names)), (name, sorted(names))


class TestStart:
    def test_help_is_instant(self) -> None:
        seconds = []
        for _ in range(7):
            began = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*COMMAND, "--help"], env=ENVIRONMENT, cwd=HERE, check=True, capture_output=True)
            ended = resource.getrusage(resource.RUSAGE_CHILDREN)
            # Of the processor: the clock would also count whom this machine serves meanwhile.
            seconds.append(ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime)
        assert statistics.median(seconds) < HELP_SECONDS * CI_FACTOR, seconds

    @pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["search", "--help"]])
    def test_nothing_heavy_is_imported(self, arguments: list[str]) -> None:
        code = (
            "import sys\nfrom flashtrie_cli import cli\nsys.argv[1:] = sys.argv[1:]\n"
            "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
            "heavy = [m for m in sys.modules if m.split('.')[0] in ('numpy', 'rich', 'zstandard', 'pycuda')"
            " or m.startswith(('flashtrie_cli.engine', 'flashtrie_cli._native'))]\n"
            "sys.stderr.write(' '.join(heavy))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=ENVIRONMENT,
            cwd=HERE,
            capture_output=True,
            check=True,
        )
        assert done.stderr == b""
        assert done.stdout

    @pytest.mark.parametrize("command", FLAGS)
    def test_flags(self, flashtrie: Run, command: str) -> None:
        """Every flag of the contract is in the command's help, and the commands' own common ones."""
        done = flashtrie(command, "--help")
        assert done.returncode == 0
        words = set(done.stdout.decode().replace(",", " ").split())
        missing = [flag for flag in FLAGS[command].split() if flag not in words]
        assert not missing

    def test_the_list_of_commands_is_whole(self, flashtrie: Run) -> None:
        """No sentence is cut, at the width of a small terminal."""
        shown = flashtrie("--help").stdout.decode().partition("Commands:")[2]
        assert "..." not in shown
        assert all(f"  {command} " in shown for command in FLAGS)

    @pytest.mark.parametrize("command", ["build", "lookup", "mask", "draft"])
    def test_optional_arguments_have_one_pair_of_brackets(self, flashtrie: Run, command: str) -> None:
        assert "[[" not in flashtrie(command, "--help").stdout.decode()

    def test_version(self, flashtrie: Run) -> None:
        from flashtrie_cli import __version__

        assert flashtrie("--version").stdout.decode() == f"flashtrie {__version__}\n"


class TestExitCodes:
    def test_0_with_results_on_stdout_only(self, flashtrie: Run, words_index: Path) -> None:
        done = flashtrie("lookup", words_index, stdin=b"new york\nyork\n")
        assert done.returncode == 0
        assert done.stdout == b"new york\t0\nyork\t-\n"
        assert b"found" in done.stderr
        assert flashtrie("lookup", words_index, "--quiet", stdin=b"york\n").stderr == b""

    def test_0_for_a_search_without_hits(self, flashtrie: Run, words_index: Path) -> None:
        grid = b'{"tokens": [["nowhere"]], "logprobs": [[-1]]}\n'
        done = flashtrie("search", words_index, "-", "--quiet", stdin=grid)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    def test_1_is_no(self, flashtrie: Run, words_index: Path) -> None:
        assert flashtrie("lookup", words_index, "--all", stdin=b"new york\n").returncode == 0
        assert flashtrie("lookup", words_index, "--all", stdin=b"new york\nyork\n").returncode == 1

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (["build", "-", "-o", "{tmp}/i", "--codec", "lzma"], ["lzma", "raw"]),
            (["build", "-", "-o", "{tmp}/i", "--duplicates", "some"], ["some", "first"]),
            (["build", "-", "-o", "{tmp}/i", "--memory", "1x"], ["--memory", "hint"]),
            (["build", "-", "-o", "{tmp}/i", "--memory", "1M"], ["too little"]),
            (["build", "-", "-o", "{tmp}/i", "--level", "23"], ["between 1 and 22"]),
            (["build", "-", "-o", "{tmp}/i", "--input", "csv"], ["csv"]),
            (["build", "-", "-o", "{tmp}/none/i"], ["directory does not exist", "mkdir"]),
            (["build", "-", "-o", "{tmp}"], ["is a directory"]),
            (["build", "{tmp}/none", "-o", "{tmp}/i"], ["{tmp}/none", "No such file"]),
            (["build", "-o", "{tmp}/i"], ["nothing to build from"]),
            (["build", "-"], ["--output"]),
            (["lookup", "{words}", "--mode", "fuzzy"], ["fuzzy"]),
            (["lookup", "{words}", "--engine", "magic"], ["magic"]),
            (["lookup", "{words}", "--limit", "3"], ["--mode prefix"]),
            (["search", "{words}", "-", "--engine", "cpu", "--device", "1"], ["--device", "cpu"]),
            (["lookup", "{words}", "{tmp}/none"], ["{tmp}/none"]),
            (["search", "{words}", "-", "--beam-width", "0"], ["beam-width"]),
            (["search", "{words}", "-", "--alpha", "nan"], ["alpha"]),
            (["search", "{words}", "-", "--alpha", "-1"], ["alpha"]),
            (["search", "{words}", "-", "--eos", "nowhere"], ["--eos"]),
            (["search", "{words}", "-", "--format", "xml"], ["xml"]),
            (["search", "{words}", "-", "--token-threshold", "nan"], ["threshold"]),
            (["nonsense"], ["nonsense"]),
        ],
    )
    def test_2_is_bad_usage(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capfdbinary: pytest.CaptureFixture[bytes],
        words_index: Path,
        tmp_path: Path,
        arguments: list[str],
        parts: list[str],
    ) -> None:
        names = {"tmp": tmp_path, "words": words_index}
        monkeypatch.setattr(sys, "argv", ["flashtrie", *(a.format(**names) for a in arguments)])
        with pytest.raises(SystemExit) as done:
            cli.main()
        stdout, stderr = capfdbinary.readouterr()
        assert done.value.code == 2, stderr
        assert_one_line(stderr, *(part.format(**names) for part in parts))
        assert stdout == b""
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize(
        ("flags", "keys", "parts"),
        [
            (["--input", "ids"], b"1 2\n3 x\n", ["<stdin>:2", "x"]),
            (["--input", "ids"], b"1\n2147483648\n", [":2", "2147483648"]),
            (["--input", "ids", "--sorted"], b"1\n3\n2\n", [":3", "line 2", "--sorted"]),
            (["--input", "ids", "--duplicates", "error"], b"7\n8\n7\n", [":3", "line 1", "twice"]),
            (["--input", "ids", "--values", "2"], b"7\t1\n8\n", [":2"]),
            (["--duplicates", "error"], b"a b\nc\na b\n", [":3", "line 1", "key 'a b'"]),
            ([], b"ok\n\xff\xfe\n", [":2", "UTF-8"]),
        ],
    )
    def test_2_is_bad_input_with_its_line(
        self, flashtrie: Run, tmp_path: Path, flags: list[str], keys: bytes, parts: list[str]
    ) -> None:
        done = flashtrie("build", "-", "-o", tmp_path / "i", *flags, stdin=keys)
        assert done.returncode == 2, done.stderr
        assert_one_line(done.stderr, *(part.replace("<stdin>", "-") for part in parts))
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("command", [["inspect"], ["lookup"], ["dump"], ["search"]])
    @pytest.mark.parametrize("content", [None, b"", b"not an index", b"\x89FTRIE\r\n"])
    def test_3_is_an_unusable_index(
        self, flashtrie: Run, tmp_path: Path, command: list[str], content: bytes | None
    ) -> None:
        path = tmp_path / "bad.ft"
        if content is not None:
            path.write_bytes(content)
        done = flashtrie(*command, path, *(["-"] if command == ["search"] else []))
        assert done.returncode == 3, done.stderr
        assert_one_line(done.stderr, str(path))
        assert done.stdout == b""

    def test_4_is_an_engine_that_cannot_run(self, flashtrie: Run, words_index: Path) -> None:
        code = (
            "import sys\nsys.modules['flashtrie_cli._native'] = None\n"
            "from flashtrie_cli import cli\ncli.main()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "dump", words_index, "--engine", "cpu"],
            env=ENVIRONMENT,
            cwd=HERE,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 4, done.stderr
        assert_one_line(done.stderr, "native engine", "hint")

    def test_70_is_our_bug(self, words_index: Path) -> None:
        code = (
            "from flashtrie_cli import cli, index\n"
            "def broken(*_, **__):\n    raise AssertionError('two\\nlines')\n"
            "index.Index.open = broken\ncli.main()\n"
        )
        command = [sys.executable, "-c", code, "dump", str(words_index)]
        done = subprocess.run(command, env=ENVIRONMENT, cwd=HERE, capture_output=True, check=False)
        assert done.returncode == 70
        assert_one_line(done.stderr, "internal error: AssertionError: two lines", "--debug")

    def test_debug_shows_the_traceback(self, flashtrie: Run, tmp_path: Path) -> None:
        quiet = flashtrie("dump", tmp_path / "none")
        loud = flashtrie("dump", tmp_path / "none", "--debug")
        assert b"Traceback" not in quiet.stderr
        assert b"Traceback" in loud.stderr
        assert b"IndexFileError" in loud.stderr
        assert loud.returncode == quiet.returncode == 3

    def test_existing_output_needs_force(self, flashtrie: Run, tmp_path: Path) -> None:
        path = tmp_path / "i.ft"
        path.write_bytes(b"precious")
        done = flashtrie("build", "-", "-o", path, stdin=b"a\n")
        assert done.returncode == 2
        assert_one_line(done.stderr, "exists already", "--force")
        assert path.read_bytes() == b"precious"
        assert flashtrie("build", "-", "-o", path, "--force", stdin=b"a\n").returncode == 0
        assert path.read_bytes() != b"precious"
        assert leftovers(tmp_path, ["i.ft"]) == []


class TestStreams:
    def test_json_stands_alone_on_stdout(self, flashtrie: Run, words_index: Path, tmp_path: Path) -> None:
        built = flashtrie("build", "-", "-o", tmp_path / "i", "--json", stdin=b"a b\n")
        assert json.loads(built.stdout)["schema"] == "flashtrie.build/1"
        assert (
            json.loads(flashtrie("inspect", words_index, "--json").stdout)["schema"] == "flashtrie.inspect/1"
        )
        for command, stdin in (("dump", b""), ("lookup", b"new york\n"), ("search", GRID.encode())):
            target = ["-"] if command == "search" else []
            lines = flashtrie(command, words_index, *target, "--json", stdin=stdin).stdout.splitlines()
            assert {json.loads(line)["schema"] for line in lines} == {f"flashtrie.{command}/1"}

    def test_search_line(self, flashtrie: Run, words_index: Path) -> None:
        done = flashtrie("search", words_index, "-", stdin=GRID.encode() + b"\n")
        assert done.returncode == 0, done.stderr
        names = [line.split(b"\t")[:4] for line in done.stdout.splitlines()]
        assert names == [
            [b"q", b"1", b"new york city", b"2"],
            [b"q", b"2", b"new york", b"0"],
            [b"q", b"3", b"old york", b"1"],
        ]

    @pytest.mark.parametrize("command", ["dump", "lookup", "search"])
    def test_a_closed_pipe_is_quiet(self, ids_index: Path, tmp_path: Path, command: str) -> None:
        questions = tmp_path / "questions"
        if command == "lookup":
            questions.write_text("".join(f"{i % 400} {i % 400}\n" for i in range(60_000)))
        if command == "search":
            row = json.dumps({"tokens": [list(range(50)), list(range(50))], "logprobs": [[-1.0] * 50] * 2})
            questions.write_text((row + "\n") * 2000)
        arguments = [] if command == "dump" else [str(questions)]
        process = subprocess.Popen(
            [*COMMAND, command, str(ids_index), *arguments],
            env=ENVIRONMENT,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        assert process.wait(60) == 0
        assert b"pipe" not in errors.lower()
        assert b"Traceback" not in errors
        assert b"Exception" not in errors

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
    def test_a_full_stdout_is_an_error(self, flashtrie: Run, ids_index: Path) -> None:
        with open("/dev/full", "wb") as full:
            done = flashtrie("dump", ids_index, stdout=full)
        assert done.returncode == 2
        assert_one_line(done.stderr, "No space left")

    def test_marks_and_carriage_returns_go(self, flashtrie: Run, ids_index: Path) -> None:
        done = flashtrie(
            "lookup", ids_index, "--mode", "prefix", "--limit", "2", "--quiet", stdin=b"\xef\xbb\xbf5\r\n"
        )
        assert [line.split(b"\t")[:2] for line in done.stdout.splitlines()] == [
            [b"5", b"5 5"],
            [b"5", b"5 6"],
        ]

    def test_dump_and_build_give_the_same_index(
        self, flashtrie: Run, ids_index: Path, tmp_path: Path
    ) -> None:
        dumped = flashtrie("dump", ids_index).stdout
        again = tmp_path / "again.ft"
        assert flashtrie("build", "-", "-o", again, "--input", "ids", stdin=dumped).returncode == 0
        assert again.read_bytes() == ids_index.read_bytes()


def many_keys(path: Path, count: int = 250_000) -> Path:
    import numpy as np

    tokens = np.random.default_rng(1).integers(0, 1 << 31, (count, 4))
    with open(path, "wb") as file:
        np.savetxt(file, tokens, fmt="%d")
    return path


@pytest.fixture(scope="module")
def big_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys enough for a build of a second or two."""
    return many_keys(tmp_path_factory.mktemp("big") / "keys.txt")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system that fills soon; skips where one may not be mounted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


class TestTrouble:
    def test_interrupted_while_a_pipe_keeps_it_waiting(self, words_index: Path) -> None:
        process = subprocess.Popen(
            [*COMMAND, "search", str(words_index), "-", "--quiet"],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr is not None
        assert_one_line(process.stderr.read(), "interrupted")

    @pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("seconds", [0, 0.4])
    def test_interrupted_while_building(
        self, big_input: Path, tmp_path: Path, stop: signal.Signals, seconds: float
    ) -> None:
        target = tmp_path / "i.ft"
        command = [*COMMAND, "build", str(big_input), "--input", "ids", "-o", str(target), "--level", "22"]
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            cwd=HERE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A shell without job control has its background jobs ignore SIGINT, and so their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        wait_for_files(tmp_path)
        time.sleep(seconds)
        assert process.poll() is None, "the build was over before it could be interrupted"
        process.send_signal(stop)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == (130 if stop == signal.SIGINT else 143), stderr
        assert stdout == b""
        assert_one_line(stderr, "interrupted" if stop == signal.SIGINT else "terminated")
        assert leftovers(tmp_path) == []

    @pytest.mark.parametrize("old", [None, b"precious"])
    def test_files_may_not_grow(self, big_input: Path, tmp_path: Path, old: bytes | None) -> None:
        """A limit on the size of files strikes while the index is written."""
        target = tmp_path / "i.ft"
        if old is not None:
            target.write_bytes(old)
        done = subprocess.run(
            [*COMMAND, "build", str(big_input), "--input", "ids", "-o", str(target), "--force"],
            env=ENVIRONMENT,
            cwd=HERE,
            capture_output=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18)),
        )
        assert done.returncode == 2, done.stderr
        assert_one_line(done.stderr, str(target), "File too large")
        assert leftovers(tmp_path, ["i.ft"]) == []
        assert (target.read_bytes() if target.exists() else None) == old

    def test_temporary_space_may_not_grow(self, tmp_path: Path) -> None:
        """The same limit, struck by the sorter's temporary file."""
        keys = many_keys(tmp_path / "keys.txt", 100_000)
        code = (
            "from flashtrie_cli import build, cli\nreal = build.make_builder\n"
            "build.make_builder = lambda **o: real(**{**o, 'memory': 1 << 21})\ncli.main()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, "build", str(keys), "--input", "ids", "-o", str(tmp_path / "i.ft")],
            env=ENVIRONMENT,
            cwd=HERE,
            capture_output=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18)),
        )
        assert done.returncode == 2, done.stderr
        assert_one_line(done.stderr, "i.ft", "temporary", "File too large")
        assert leftovers(tmp_path, ["keys.txt"]) == []

    def test_the_disk_is_full(self, flashtrie: Run, big_input: Path, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk", "1m") as disk:
            done = flashtrie("build", big_input, "--input", "ids", "-o", disk / "i.ft")
            assert done.returncode == 2, done.stderr
            assert_one_line(done.stderr, "i.ft", "No space left")
            assert leftovers(disk) == []

    def test_the_folder_may_not_be_written(self, flashtrie: Run, tmp_path: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        tmp_path.chmod(0o500)
        done = flashtrie("build", "-", "-o", tmp_path / "i.ft", stdin=b"a\n")
        tmp_path.chmod(0o700)
        assert done.returncode == 2
        assert_one_line(done.stderr, "cannot be written")
