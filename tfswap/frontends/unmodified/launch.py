"""`tfswap run` and `tfswap watch`: this process becomes that of the program, with the options in its environment.

It is replaced, so that exit status, signals, standard input, `__main__`, arguments, tracebacks and debuggers are those
of plain Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfswap.errors import TfswapError
from tfswap.frontends.cli_parser import UsageError
from tfswap.frontends.unmodified.settings import environment

COMMANDS = "run", "watch"
"""The commands that become a program."""
MODULE = "-m"
TRAINING_ONLY, LIVE = "--training_only", "--live"
"""The options without a value."""
COMPILED = (".pyz", ".zip", ".pyc")
"""Programs without source text."""


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of a command, and the program with its arguments: whatever comes from its name on.

    Args:
        arguments: the words after the command. Each option but these has a value, in the same word or in the next.
    """
    first = 0
    while first < len(arguments) and arguments[first].startswith("--"):
        is_one_word = "=" in arguments[first] or any(
            flag.startswith(arguments[first]) for flag in ("--help", TRAINING_ONLY, LIVE)
        )
        first += 1 if is_one_word else 2
    if arguments[first : first + 1] == ["-h"]:
        first += 1
    return list(arguments[:first]), list(arguments[first:])


def launch(command: str, program: Sequence[str], options: Mapping[str, Any]) -> NoReturn:
    """Replace this process by Python, which runs the program.

    Args:
        command: of COMMANDS, for messages.
        program: the path of a script, or "-m" and a module; and its arguments.
        options: those that were given, by name; they are well-formed.

    Raises:
        UsageError: there is no such program.
        TfswapError: it is not Python, or this Python ignores the environment.
    """
    _require_program(f"tfswap {command}", program)
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise TfswapError("Python was started with -E, -I or -S, so that it reads no options from its environment")
    flags = subprocess._args_from_interpreter_flags()  # pyright: ignore[reportAttributeAccessIssue] as multiprocessing
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *flags, *program], environment(options))


def _require_program(command: str, program: Sequence[str]) -> None:
    """Refuse what Python could not run. Python itself finds modules."""
    if not program:
        raise UsageError(f"no program is given: {command} train.py, or {command} -m package.module", command)
    if program[0] == MODULE:
        if len(program) == 1:
            raise UsageError("no module is given after -m", command)
        return
    if program[0] == "-":  # the program is on standard input
        return
    if program[0].startswith("-"):
        raise UsageError(f"{program[0]} is neither an option of {command} nor a program", command)
    path = Path(program[0])
    if not path.exists():
        raise UsageError(f"there is no program {program[0]!r}", command)
    if path.is_file() and path.suffix not in COMPILED:
        _require_python(path)


def _require_python(path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are shown when it runs
            compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise TfswapError(f"{str(path)!r} can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise TfswapError(f"{str(path)!r}{line} is not Python: {getattr(error, 'msg', error)}") from None
