"""Who uses the device's memory: any number of steps at once, or one thread that plans.

A plan starts from the arena at rest. While one is made, no optimized step starts; and it waits for those that run,
though not for ever: a step can itself be waiting for a plan (a `tf.py_function` that calls an optimized function).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

MAX_WAIT_S = 60.0


class Traffic:
    """Keeps planning apart from steps. One per process: all of a process's steps share the device."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[int] = Counter()  # by thread
        self._started = 0
        self._planner: int | None = None

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Alone, as far as optimized functions go. May be entered again by the thread that is in it."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._planner in (None, me))
            outermost = self._planner is None
            self._planner = me
            self._changed.wait_for(self._others_rest, timeout=MAX_WAIT_S)
        try:
            yield
        finally:
            if outermost:
                with self._changed:
                    self._planner = None
                    self._changed.notify_all()

    def step(self) -> Running:
        """While a step runs, as a context manager."""
        return Running(self)

    def _begin(self, me: int) -> tuple[int, bool]:
        """The step's number, and whether no other thread's was running."""
        with self._changed:
            while self._planner is not None and self._planner != me:
                self._changed.wait()
            self._running[me] += 1
            self._started += 1
            return self._started, self._others_rest()

    def _end(self, me: int) -> None:
        with self._changed:
            self._running[me] -= 1
            if not self._running[me]:
                del self._running[me]
            self._changed.notify_all()

    def at_rest(self) -> bool:
        """Whether no other thread's step runs now."""
        with self._changed:
            return self._others_rest()

    def _others_rest(self) -> bool:
        running = self._running
        return not running or (len(running) == 1 and threading.get_ident() in running)


class Running:
    """A step while it runs. Not made with contextlib: every call of every step is one."""

    __slots__ = ("_me", "_traffic", "_was_alone", "number")

    def __init__(self, traffic: Traffic):
        self._traffic = traffic
        self._me = threading.get_ident()

    def __enter__(self) -> Running:
        self.number, self._was_alone = self._traffic._begin(self._me)
        return self

    def __exit__(self, *_: object) -> None:
        self._traffic._end(self._me)

    def alone(self) -> bool:
        """Whether it has been the only one so far."""
        return self._was_alone and self._traffic._started == self.number


TRAFFIC = Traffic()
