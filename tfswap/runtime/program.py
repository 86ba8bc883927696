"""What the functions of one program share: host memory, and the highest limit that one of them was granted."""

from __future__ import annotations

import secrets
import sys
import threading
import weakref
from typing import Protocol


class Granted(Protocol):
    """A function under a limit."""

    @property
    def granted_bytes(self) -> int:
        """The highest limit of its plans; 0 where there is none."""
        ...


class Program:
    """What functions share that are parts of one program.

    Attributes:
        owner: of the host memory, by number.
    """

    def __init__(self) -> None:
        self.owner = 1 + secrets.randbits(62)  # 0 is nobody
        self._functions: weakref.WeakSet[Granted] = weakref.WeakSet()
        self._lock = threading.Lock()  # functions are made, and planned, by several threads
        weakref.finalize(self, _forget, self.owner).atexit = False

    @property
    def granted_bytes(self) -> int:
        """The highest limit of all plans; 0 where there is none."""
        with self._lock:
            functions = tuple(self._functions)
        return max((each.granted_bytes for each in functions), default=0)

    def add(self, function: Granted) -> None:
        """Take note of one more, for as long as it is there."""
        with self._lock:
            self._functions.add(function)


def _forget(owner: int) -> None:
    if (ops := sys.modules.get("tfswap.ops")) is not None:
        ops.forget_owner(owner)
