"""Where output goes: full disks, names that are no files, files that are inputs, signals on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from program import COMMAND, ENVIRONMENT, HERE, Run, assert_one_line, leftovers, wait_for_files

from flashtrie_cli.errors import OutputError
from flashtrie_cli.files import atomic_output, check_output, scratch_directory

FULL = "/dev/full"
needs_full = pytest.mark.skipif(not os.path.exists(FULL), reason="no /dev/full here")
GRID = json.dumps({"tokens": [["new"], ["york"]], "logprobs": [[-1], [-0.5]]}) + "\n"


class TestFullDisks:
    @needs_full
    @pytest.mark.parametrize(
        "command",
        [
            ["info", "--json"],
            ["info"],
            ["inspect", "{words}", "--json"],
            ["inspect", "{words}"],
            ["dump", "{words}"],
            ["--version"],
            ["build", "-", "-o", "{tmp}/i.ft", "--json"],
        ],
    )
    def test_a_full_stdout_is_no_success(
        self, flashtrie: Run, words_index: Path, tmp_path: Path, command: list[str]
    ) -> None:
        """Also where the output is small, and nothing reaches the disk before the program ends."""
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}
        arguments = [part.format(words=words_index, tmp=tmp_path) for part in command]
        with open(FULL, "wb") as full:
            done = subprocess.run(
                [*COMMAND, *arguments],
                env=environment,
                cwd=HERE,
                stdin=subprocess.DEVNULL,
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert done.returncode == 2, done.stderr
        last = done.stderr.splitlines(keepends=True)[-1]  # a summary may stand before it
        assert_one_line(last, "stdout", "No space left")

    @needs_full
    def test_a_full_device_is_named(self, flashtrie: Run, words_index: Path) -> None:
        for command in (["dump", words_index, "-o", FULL], ["build", "-", "-o", FULL, "--quiet"]):
            done = flashtrie(*command, stdin=b"a\n")
            assert done.returncode == 2
            assert_one_line(done.stderr, FULL, "No space left")

    def test_a_stash_that_does_not_fit_says_why(self, tmp_path: Path) -> None:
        """Words are put aside in files until all are known."""
        keys = tmp_path / "keys.txt"
        keys.write_text("".join(f"word{i} word{i + 1}\n" for i in range(200_000)))
        code = (
            "import resource\nfrom flashtrie_cli import build, cli\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))\n"
            "real = build._Stash\nbuild._Stash = lambda folder, limit: real(folder, 1 << 20)\ncli.main()\n"
        )
        command = [sys.executable, "-c", code, "build", str(keys), "-o", str(tmp_path / "i.ft")]
        done = subprocess.run(command, env=ENVIRONMENT, cwd=HERE, capture_output=True, check=False)
        assert done.returncode == 2, done.stderr
        assert_one_line(done.stderr, "i.ft", "temporary", "File too large", "beside the output")
        assert leftovers(tmp_path, ["keys.txt"]) == []


class TestStandardStreams:
    def run(
        self, *arguments: object, close: tuple[int, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess:
        script = "import os, sys\nfor fd in map(int, sys.argv.pop(1)):\n    os.close(fd)\n"
        script += "os.execv(sys.executable, [sys.executable, '-m', 'flashtrie_cli', *sys.argv[1:]])"
        return subprocess.run(
            [sys.executable, "-c", script, "".join(map(str, close)), *map(os.fsencode, map(str, arguments))],
            env={**ENVIRONMENT, **environment},
            cwd=HERE,
            capture_output=True,
            check=False,
        )

    def test_a_closed_stdout(self, words_index: Path, tmp_path: Path) -> None:
        done = self.run("dump", words_index, close=(1,))
        assert done.returncode == 2
        assert_one_line(done.stderr, "stdout", "Bad file descriptor")
        done = self.run("dump", words_index, "-o", tmp_path / "dump", close=(1,))
        assert (done.returncode, done.stderr) == (0, b"")
        assert (tmp_path / "dump").read_bytes().startswith(b"new york\n")

    def test_a_closed_stderr(self, words_index: Path, tmp_path: Path) -> None:
        assert self.run("lookup", words_index, "/dev/null", close=(2,)).returncode == 0
        assert self.run("dump", tmp_path / "none", close=(2,)).returncode == 3

    @pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii", "latin-1"])
    def test_names_in_any_encoding(self, words_index: Path, tmp_path: Path, encoding: str) -> None:
        path = os.fsdecode(bytes(tmp_path) + b"/n\xff\xc3\xa9")
        try:
            os.link(words_index, path)
        except OSError:
            pytest.skip("file names are UTF-8 here")
        for flags in ([], ["--json"]):
            done = self.run("inspect", path, *flags, PYTHONIOENCODING=encoding)
            assert (done.returncode, done.stderr) == (0, b"")
            if flags:
                assert json.loads(os.fsdecode(done.stdout))["path"] == path
        if encoding == "utf-8:strict":
            assert os.fsencode(path) in self.run("inspect", path, PYTHONIOENCODING=encoding).stdout
        refused = self.run("inspect", path + "x", PYTHONIOENCODING=encoding)
        assert refused.stderr.startswith(b"flashtrie: " + bytes(tmp_path) + b"/n\xff")

    def test_a_narrow_encoding(self, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("a b\n")
        done = self.run("build", tmp_path / "keys", "-o", tmp_path / "i.ft", PYTHONIOENCODING="ascii")
        assert re.search(rb"\d us\n", done.stderr)
        assert b"\\" not in done.stderr


class TestNames:
    @pytest.mark.parametrize("name", ["", "-"])
    def test_no_file_is_meant(self, flashtrie: Run, name: str) -> None:
        done = flashtrie("build", "-", "-o", name, stdin=b"a\n")
        assert done.returncode == 2
        assert_one_line(done.stderr, repr(name), "no name", "hint")
        assert not (HERE / "-").exists()

    def test_an_output_that_is_an_input(self, flashtrie: Run, tmp_path: Path) -> None:
        """--force replaces an old output, and never what is being read."""
        keys, index, grid, link = (tmp_path / name for name in ("keys.txt", "i.ft", "grid.jsonl", "link"))
        keys.write_text("new york\n")
        grid.write_text(GRID)
        link.symlink_to(keys)
        assert flashtrie("build", keys, "-o", index).returncode == 0
        before = {path: path.read_bytes() for path in (keys, index, grid)}
        for command in (
            ["build", keys, "-o", keys, "--force"],
            ["build", keys, "-o", link, "--force"],
            ["build", keys, "--tokenizer", grid, "-o", grid, "--force"],
            ["build", keys, "--masks", "--tokenizer", grid, "-o", keys, "--force"],
            ["search", index, grid, "-o", index, "--force"],
            ["search", index, grid, "-o", grid, "--force"],
            ["dump", index, "-o", index, "--force"],
            ["mask", index, keys, "-o", keys, "--force"],
            ["draft", grid, "-o", grid, "--force"],
            ["bench", "-w", "index", "--index", index, "--proposals", grid, "--export", grid],
        ):
            done = flashtrie(*command)
            assert done.returncode == 2, command
            assert_one_line(done.stderr, "is also an input")
            assert {path: path.read_bytes() for path in before} == before

    def test_a_dump_replaces_nothing_unasked(self, flashtrie: Run, words_index: Path, tmp_path: Path) -> None:
        path = tmp_path / "dump.txt"
        path.write_bytes(b"precious")
        done = flashtrie("dump", words_index, "-o", path)
        assert done.returncode == 2
        assert_one_line(done.stderr, "exists already", "--force")
        assert path.read_bytes() == b"precious"
        assert flashtrie("dump", words_index, "-o", path, "--force").returncode == 0
        assert path.read_bytes().startswith(b"new york\n")

    def test_inputs_that_are_no_files(self, tmp_path: Path) -> None:
        check_output(str(tmp_path / "new"), force=False, inputs=("-", "", None, str(tmp_path / "absent")))
        check_output(os.devnull, force=False, inputs=(os.devnull,))

    def test_an_estimate_needs_no_output(self, flashtrie: Run, tmp_path: Path) -> None:
        keys = tmp_path / "keys.txt"
        keys.write_text("".join(f"key {i}\n" for i in range(1000)))
        done = flashtrie("build", keys, "--estimate", "--json")
        assert done.returncode == 0, done.stderr
        guess = json.loads(done.stdout)
        assert (guess["schema"], guess["num_keys"], guess["spills"]) == ("flashtrie.estimate/1", 1000, False)
        assert b"about 1,000" in flashtrie("build", keys, "--estimate").stderr
        assert flashtrie("build", keys, "-o", tmp_path / "i.ft", "--quiet").returncode == 0
        size = (tmp_path / "i.ft").stat().st_size
        assert guess["file_size"] == pytest.approx(size, rel=0.5)

    def test_what_goes_to_a_device_has_no_scratch_beside_it(self, tmp_path: Path) -> None:
        with scratch_directory(os.devnull) as scratch:
            assert os.path.dirname(scratch) != "/dev"
        with scratch_directory(str(tmp_path / "new")) as scratch:
            assert os.path.dirname(scratch) == str(tmp_path)
        assert os.listdir(tmp_path) == []

    def test_a_place_for_no_files(self, tmp_path: Path) -> None:
        if not os.path.isdir("/proc/self"):
            pytest.skip("no /proc here")
        with pytest.raises(OutputError, match="/proc/self/x"), scratch_directory("/proc/self/x"):
            pass

    def test_a_pipe_that_nobody_reads_any_more(self, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

        def write() -> None:
            with atomic_output(str(pipe)) as file:
                os.close(reader)
                file.write(bytes(1 << 20))

        with pytest.raises(OutputError, match=r"pipe: cannot be written: Broken pipe"):
            write()


class TestSignals:
    def build(self, target: Path, ignored: bool) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, "build", "-", "-o", str(target)],
            env=ENVIRONMENT,
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
        )

    def test_a_terminal_that_closes(self, tmp_path: Path) -> None:
        process = self.build(tmp_path / "i.ft", ignored=False)
        wait_for_files(tmp_path)
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGHUP
        assert_one_line(stderr, "terminated")
        assert leftovers(tmp_path) == []

    def test_nohup(self, tmp_path: Path) -> None:
        process = self.build(tmp_path / "i.ft", ignored=True)
        wait_for_files(tmp_path)
        process.send_signal(signal.SIGHUP)
        process.communicate(b"a\n", timeout=60)
        assert process.returncode == 0
        assert leftovers(tmp_path) == ["i.ft"]

    def test_an_interrupt_while_the_program_is_loaded(self) -> None:
        code = (
            "import sys\n"
            "class Finder:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'typer':\n            raise KeyboardInterrupt\n"
            "sys.meta_path.insert(0, Finder())\n"
            "from flashtrie_cli.__main__ import main\nmain()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=ENVIRONMENT, cwd=HERE, capture_output=True, check=False
        )
        assert done.returncode == 130
        assert_one_line(done.stderr, "interrupted")
