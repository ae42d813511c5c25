"""The command line: wiring and exit codes only. Imports no numpy and no engine, so `--help` is instant."""

from __future__ import annotations

import codecs
import importlib
import io
import os
import pkgutil
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flashtrie_cli import __version__, commands
from flashtrie_cli.commands.arguments import convert_plainly
from flashtrie_cli.errors import FlashtrieError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_SIGNALLED = 128
"""Added to the number of the signal that ended the program, as shells do: 143 for SIGTERM."""

app = typer.Typer(
    name="flashtrie",
    help="Tries over token sequences: build an index, question it, search it, mask and draft with it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help costs 100 ms at every start
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flashtrie {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def _register_commands(arguments: list[str]) -> None:
    """Every module of `commands` with a `command` function is a subcommand of the module's name.

    A command that is named is the only one to be registered. Else what is asked for is help, or a command that does not
    exist, for which names and first lines will do: to work out the options of all takes 60 ms.
    """
    names = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    wanted = names.intersection(arguments[:1]) or names
    order = {name: at for at, name in enumerate(commands.ORDER)}
    for name in sorted(wanted, key=lambda name: (order.get(name, len(order)), name)):
        module = importlib.import_module(f"flashtrie_cli.commands.{name}")
        function = getattr(module, "command", None)
        if function is not None:
            app.command(name)(function if wanted != names else _listed(function))


def _listed(function: Callable[..., None]) -> Callable[[], None]:
    """A command that can be listed, but not run."""

    def command() -> None:
        raise AssertionError("listed only")

    command.__doc__ = function.__doc__
    return command


def _fail(message: str, code: int) -> NoReturn:
    line = " ".join(message.split("\n"))
    try:
        sys.stderr.write(f"flashtrie: {line}\n")
        sys.stderr.flush()
    except OSError:
        pass
    _close_and_exit(code)


def _close_and_exit(code: int) -> NoReturn:
    """Leave without a second complaint from the interpreter when stdout is a closed pipe."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


class _Terminated(BaseException):
    """SIGTERM, or the terminal's end, raised where the program stands: half-made files go as they do after Ctrl-C."""


def _terminate(number: int, _: object) -> NoReturn:
    raise _Terminated(number)


def _catch_signals() -> None:
    """What ends the program from outside ends it cleanly; what it was started to ignore (nohup) stays ignored."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


_PLAIN = {"µ": "u", "…": "...", "─": "-", "│": "|", "├": "|", "└": "`"}
"""What our own output says it with where an encoding is too narrow."""


def _encode_anyhow(error: UnicodeError) -> tuple[str | bytes, int]:
    """Bytes of names that are no UTF-8 as they came in; what a narrow encoding lacks in plain form, or as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), error.start + 1
    escaped = character.encode("ascii", "backslashreplace").decode("ascii")
    return _PLAIN.get(character, escaped), error.start + 1


def _prepare_streams() -> None:
    """Any text can be written to both streams. One that was closed is one that cannot be written to, rather than none,
    and no file takes its number."""
    codecs.register_error("flashtrie", _encode_anyhow)
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="flashtrie")


def _run(arguments: list[str]) -> int:
    """One subcommand, without click's own ``main``, which swallows closed pipes and interrupts; its exit code."""
    _register_commands(arguments)
    command = typer.main.get_command(app)
    for each in (command, *getattr(command, "commands", {}).values()):
        convert_plainly(each)
    try:
        with command.make_context("flashtrie", arguments or ["--help"]) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return 0


def main() -> None:
    """Entry point: run one subcommand and map what happened to an exit code (one place for all of them)."""
    from flashtrie_cli.files import writing_to_stdout

    _prepare_streams()
    _catch_signals()
    # Numpy's linear algebra, which no command uses, would start a thread a processor when numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = _run(sys.argv[1:])
        with writing_to_stdout():
            sys.stdout.flush()  # results may fail here only, and must not as a success
        _close_and_exit(code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    except _Terminated as ended:
        _fail("terminated", EXIT_SIGNALLED + ended.args[0])
    except BrokenPipeError:
        _close_and_exit(0)
    except Exception as error:
        if "--debug" in sys.argv[1:]:
            traceback.print_exc()
        _fail(*_explained(error))


def _explained(error: Exception) -> tuple[str, int]:
    """The one line that an error becomes, and its exit code."""
    if isinstance(error, FlashtrieError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError):
        return "out of memory (hint: see --memory, or a smaller batch)", 2
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}", 2
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's own usage errors
        context = getattr(error, "ctx", None)
        hint = f" (hint: {context.command_path} --help)" if context is not None else ""
        return error.format_message() + hint, 2
    kind = type(error).__name__
    return f"internal error: {kind}: {error} (hint: --debug shows where; please report it)", EXIT_BUG
