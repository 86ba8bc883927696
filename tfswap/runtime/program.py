"""A program: the functions that share host memory, and whose highest limit counts for all."""

from __future__ import annotations

import secrets
import sys
import threading
import weakref
from typing import Protocol


class Granted(Protocol):
    """A function under a limit."""

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
        with self._lock:
            functions = tuple(self._functions)
        return max((each.granted_bytes(device) for each in functions), default=0)

    def add(self, function: Granted) -> None:
        """Add a function, for as long as it exists."""
        with self._lock:
            self._functions.add(function)


def _forget(owner: int) -> None:
    if (ops := sys.modules.get("tfswap.ops")) is not None:
        ops.forget_owner(owner)
