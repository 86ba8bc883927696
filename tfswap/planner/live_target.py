"""A target of live bytes, and the range of targets for which a solver's choice is the same.

A planner runs a solver at many targets. In a small step most of them give the same choice, since the byte counts that a
solver compares with the target are few. So a target records these comparisons, and the planner runs the solver again
only for targets for which one of them may end otherwise.
"""

from __future__ import annotations

import math

import numpy as np


class LiveTarget:
    """The most bytes that may be live.

    Attributes:
        nbytes: the target in bytes.
        least, beyond: all comparisons so far have the same results for each target in [least, beyond).
    """

    __slots__ = ("beyond", "least", "nbytes")

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.least: int = 0
        self.beyond: float = math.inf

    def is_exceeded_by(self, live_bytes: int) -> bool:
        """Whether `live_bytes` exceeds the target."""
        if live_bytes > self.nbytes:
            if live_bytes < self.beyond:
                self.beyond = live_bytes
            return True
        if live_bytes > self.least:
            self.least = live_bytes
        return False

    def first_exceeded(self, live_bytes: np.ndarray, more_bytes: int) -> int:
        """The first position whose live bytes plus `more_bytes` exceed the target; the end where none do."""
        over = live_bytes > self.nbytes - more_bytes
        first = int(over.argmax()) if len(over) else 0
        if not len(over) or not over[first]:
            first = len(over)
        self._compare(live_bytes[: first + 1], more_bytes)
        return first

    def after_last_exceeded(self, live_bytes: np.ndarray, more_bytes: int) -> int:
        """The position after the last whose live bytes plus `more_bytes` exceed the target; 0 where none do."""
        return len(live_bytes) - self.first_exceeded(live_bytes[::-1], more_bytes)

    def _compare(self, live_bytes: np.ndarray, more_bytes: int) -> None:
        """Record the comparisons. All but the last do not exceed the target."""
        if len(live_bytes) > 1:
            self.is_exceeded_by(int(live_bytes[:-1].max()) + more_bytes)
        if len(live_bytes):
            self.is_exceeded_by(int(live_bytes[-1]) + more_bytes)

    def alone(self) -> int:
        """The target's bytes, for a solver that computes with them. Its choice then holds for this target alone."""
        self.least, self.beyond = self.nbytes, self.nbytes + 1
        return self.nbytes
