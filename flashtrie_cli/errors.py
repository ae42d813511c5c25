"""The errors a user can meet, each with the exit code the command line returns for it."""

from __future__ import annotations


class FlashtrieError(Exception):
    """One clear line: what is wrong, where, and (``hint``) what to do about it."""

    exit_code = 70

    def __init__(
        self, message: str, *, file: str | None = None, line: int | None = None, hint: str | None = None
    ):
        super().__init__(message)
        self.message = message
        self.file = file
        self.line = line
        self.hint = hint

    def __str__(self) -> str:
        place = ""
        if self.file is not None:
            place = f"{self.file}:{self.line}: " if self.line is not None else f"{self.file}: "
        hint = f" (hint: {self.hint})" if self.hint else ""
        return f"{place}{self.message}{hint}"


class UsageError(FlashtrieError):
    """Options that contradict each other or lie outside their range."""

    exit_code = 2


class InputError(FlashtrieError):
    """Keys, proposals or other input that cannot be read as what it should be."""

    exit_code = 2


class OutputError(FlashtrieError):
    """The result could not be written (disk full, no permission, file exists)."""

    exit_code = 2


class IndexFileError(FlashtrieError):
    """The index is damaged, truncated, of another version or kind."""

    exit_code = 3


class EngineUnavailable(FlashtrieError):
    """The engine asked for cannot run here."""

    exit_code = 4
