"""The parser of the command's arguments. Errors are exceptions, for `cli.main`."""

from __future__ import annotations

from typing import Any

from absl.flags import argparse_flags

from tfswap.errors import TfswapError


class UnwrittenHelp(Exception):
    """Help can't be written, because of an OSError."""


class UsageError(TfswapError):
    """Wrong arguments.

    Attributes:
        command: the command whose --help describes them.
    """

    def __init__(self, message: str, command: str):
        super().__init__(message)
        self.command = command


class Parser(argparse_flags.ArgumentParser):
    """Raises UsageError and UnwrittenHelp instead of ending the process."""

    def error(self, message: str) -> Any:
        raise UsageError(message, self.prog)

    def print_help(self, file: Any = None) -> None:
        """As argparse's, which ignores an output that can't be written."""
        try:
            print(self.format_help(), end="", file=file)
        except OSError as error:
            raise UnwrittenHelp from error
