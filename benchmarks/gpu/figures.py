"""The file of figures: measurements by name ("part:net:how"), from one kind of machine, written after each."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

Found = dict[str, Any]
ENVIRONMENT = "environment"
COMMITS = "tfswap"
ABOUT = ("tensorflow", "tensorflow-cpu", "small nets", "emulated")
"""With the GPU's name, what figures on one page have in common."""


class FiguresError(Exception):
    """Why a file can't be used, in one line."""


def read(path: Path) -> dict[str, Found]:
    """Raises FiguresError: there is none, or it is damaged."""
    try:
        results = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise FiguresError(f"{path} is not a file of figures: {error}. Delete it, or name another.") from error
    except OSError as error:
        raise FiguresError(f"{path} can't be read: {error.strerror}.") from error
    if not isinstance(results, dict) or not all(isinstance(found, dict) for found in results.values()):
        raise FiguresError(f"{path} is not a file of figures. Delete it, or name another.")
    return results


class Figures:
    """Figures of this run, and those that the file had already.

    Raises:
        FiguresError: the file is damaged, or can't be written.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.results: dict[str, Found] = read(path) if path and path.exists() else {}
        self._lock = threading.Lock()
        if path and path.exists() and not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            raise FiguresError(f"{path} is read-only. Name another.")
        if path:
            try:
                partial = self._partial()
                partial.touch()
                partial.unlink()
            except OSError as error:
                raise FiguresError(f"{path} can't be written: {error.strerror}.") from error

    def add(self, name: str, found: Found) -> None:
        """A measurement; one that was not run leaves an earlier one as it is."""
        with self._lock:
            if name == ENVIRONMENT and "failed" not in found:
                found = self._of_the_same(found)
            if "not_run" not in found or name not in self.results:
                self.results[name] = found
            self._write()

    def has(self, name: str) -> bool:
        """Whether it was measured."""
        return name in self.results and not {"failed", "not_run"} & self.results[name].keys()

    def _of_the_same(self, environment: Found) -> Found:
        """The environment, with the commits of earlier figures."""
        earlier = self.results.get(ENVIRONMENT, environment)
        if "failed" in earlier:
            return environment
        then, now = _kind(earlier), _kind(environment)
        if then != now:
            raise FiguresError(f"{self.path} has figures of {then}, and this is {now}. Name another file.")
        commits = dict.fromkeys([*earlier[COMMITS].split(", "), environment[COMMITS]])
        return environment | {COMMITS: ", ".join(commits)}

    def _partial(self) -> Path:
        assert self.path
        return self.path.with_name(f"{self.path.name}.{os.getpid()}")

    def _write(self) -> None:
        """Whole, or as it was."""
        if self.path is None:
            return
        partial = self._partial()
        try:
            partial.write_text(json.dumps(self.results, indent=1) + "\n")
            partial.replace(self.path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise FiguresError(f"{self.path} can't be written: {error.strerror}.") from error


def _kind(environment: Found) -> str:
    gpu = environment.get("gpu", {}).get("name") or environment.get("details", {}).get("device_name", "no GPU")
    versions = [f"{name} {environment[name]}" for name in ABOUT if environment.get(name)]
    return ", ".join([gpu, *versions])
