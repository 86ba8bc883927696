"""A program: the functions that share host memory, and whose highest limit counts for all."""

from __future__ import annotations

import secrets
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from tfswap.runtime import elastic_limit
from tfswap.support.limit_file import LimitFile
from tfswap.support.sizes import Limit

R = TypeVar("R")


class Granted(elastic_limit.Follower, Protocol):
    """A function under a limit."""

    @property
    def limit_file(self) -> LimitFile | None:
        """The file that has the limit."""
        ...

    def granted_bytes(self, device: str) -> int:
        """The highest limit of its plans on a device; 0 where there is none."""
        ...


class Program:
    """Shared by the functions of one program.

    Attributes:
        owner: the number that owns the host memory.
    """

    def __init__(self) -> None:
        self.owner = 1 + secrets.randbits(62)  # 0 means no owner
        self._functions: weakref.WeakSet[Granted] = weakref.WeakSet()
        self._lock = threading.Lock()  # several threads make and plan functions
        weakref.finalize(self, _forget, self.owner).atexit = False

    def granted_bytes(self, device: str) -> int:
        """The highest limit of all plans on a device; 0 where there is none."""
        return max((each.granted_bytes(device) for each in self._all()), default=0)

    def _all(self) -> tuple[Granted, ...]:
        with self._lock:
            return tuple(self._functions)

    @property
    def reported_floor_bytes(self) -> int:
        """The highest floor of its functions' latest steps; 0 where none is known."""
        return max((each.reported_floor_bytes for each in self._all()), default=0)

    def follow(self, limit: Limit) -> None:
        """Take the limit of a file."""
        for each in self._all():
            each.follow(limit)

    def call(self, run: Callable[[], R]) -> R:
        """Run a step that Python runs for another function, under the limit that the functions' file has then."""
        file = next((file for each in self._all() if (file := each.limit_file) is not None), None)
        return run() if file is None else elastic_limit.call(file, self, run)

    def add(self, function: Granted) -> None:
        """Add a function, for as long as it exists."""
        with self._lock:
            self._functions.add(function)


def _forget(owner: int) -> None:
    if (ops := sys.modules.get("tfswap.ops")) is not None:
        ops.forget_owner(owner)
