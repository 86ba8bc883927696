"""Finds and runs the machine's C++ compiler, and explains its failures."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfswap.errors import OpLibraryError
from tfswap.support.sizes import format_bytes

BUILD_MB = 50
"""The disk space of a build while it runs, in 10^6 bytes."""
_FULL_DISK = ("No space left on device", "Disk quota exceeded", "File size limit exceeded", "File too large")
"""Messages of compilers, assemblers and linkers on a full disk."""
_CAPTURED: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,  # CXX may name a program that reads from the terminal
    "capture_output": True,
    "text": True,
    "encoding": "utf-8",
    "errors": "backslashreplace",  # programs may print paths, which need not be valid text
}


@dataclasses.dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """The compiler in CXX, else the first of g++, c++ and clang++ on the PATH.

    Raises:
        OpLibraryError: there is none, or it does not run.
    """
    named = os.environ.get("CXX", "").strip()
    candidates = [_split(named)] if named else [("g++",), ("c++",), ("clang++",)]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        try:
            run = subprocess.run([*command, "--version"], **_CAPTURED, check=True, env=_environment())
        except (OSError, subprocess.CalledProcessError) as error:
            raise OpLibraryError(
                f"tfswap builds its ops with a C++ compiler, but `{shlex.join(command)} --version` failed "
                f"({error}). Repair it, or set CXX to one that works."
            ) from error
        return Compiler(command=command, version=run.stdout.strip())
    if named:
        raise OpLibraryError(
            f"tfswap builds its ops with the compiler that CXX names, and CXX={named!r} is not on the PATH. "
            "Set CXX to an installed C++17 compiler, or unset it to use g++."
        )
    raise OpLibraryError(
        "tfswap builds its ops at first use and found no C++ compiler (tried g++, c++ and clang++). "
        "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; conda: "
        "conda install -c conda-forge gxx), or set CXX to its path."
    )


def _split(command: str) -> tuple[str, ...]:
    """The words of CXX. Raises OpLibraryError where a quote in it has no end."""
    if shutil.which(command) is not None:  # a path that contains spaces or quotes
        words = [command]
    else:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise OpLibraryError(
                f"tfswap builds its ops with the compiler that CXX names, and CXX={command!r} can't be split into "
                f"words ({error}). Close the quote, put a backslash before one that is part of a path, or unset CXX to "
                "use g++."
            ) from error
    program = os.path.abspath(words[0]) if words and os.sep in words[0] else "".join(words[:1])
    return program, *words[1:]  # absolute, since the compiler runs in another folder


def run_compiler(work: Path, command: Sequence[str]) -> None:
    run = subprocess.run(command, cwd=work, **_CAPTURED, env=_environment())
    if run.returncode == 0 and os.path.exists(work / command[command.index("-o") + 1]):
        return
    output = (run.stderr + run.stdout).strip()
    full = [line.strip() for line in output.splitlines() if any(text in line for text in _FULL_DISK)]
    if full or run.returncode == -signal.SIGXFSZ:
        raise full_disk(work.parent, f"the compiler says: {full[0] if full else _tail(output, 3)}")
    if run.returncode < 0 or "Killed" in output:
        remedy = "The compiler was killed, most often for lack of memory: free 1 GiB per core."
    elif "No such file or directory" in output and "tensorflow/" in output:
        remedy = "TensorFlow's headers are missing: reinstall it with pip (some packagers leave them out)."
    else:
        remedy = (
            "Set CXX to a compiler with C++17 (g++ 9 or newer), and use a TensorFlow that tfswap "
            "supports (2.18 to 2.21). If both are so, please report this message."
        )
    raise OpLibraryError(
        f"tfswap could not build its ops (exit status {run.returncode}).\n{remedy}\n"
        f"The command, in a folder with the sources, was:\n{shlex.join(command)}\nIt printed:\n{_tail(output)}"
    )


def full_disk(folder: Path, message: str) -> OpLibraryError:
    """The error for a full disk. It names the cache and the folder for temporary files: the compiler uses both."""
    places = []
    # tempfile.gettempdir() skips a TMPDIR that is full.
    for place in (folder, Path(os.environ.get("TMPDIR") or tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            there = next(p for p in (place, *place.parents) if p.exists())
            places.append(f"{place} ({format_bytes(shutil.disk_usage(there).free)} free)")
    return OpLibraryError(
        f"tfswap could not build its ops: no more can be written to disk, {message}\n"
        f"It takes {BUILD_MB} MB. Free that in "
        f"{' and in '.join(places)}, raise the quota or the file size that is allowed (ulimit -f), or set "
        "TFSWAP_CACHE_DIR and TMPDIR to folders on a disk with room."
    )


def _environment() -> dict[str, str]:
    # Messages are searched for in English above.
    return {**os.environ, "LC_ALL": "C"}


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.splitlines()[-lines:])
