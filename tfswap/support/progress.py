"""Shows the progress of long work: bars on a terminal, a line every ten seconds elsewhere.

`task` and `over` are called where the work is done. A context variable has the display of the outermost task, in which
each inner task has a line. The display appears after the outermost task has lasted for some time, and ends with it.

- On a terminal it is rich's bars, which disappear at the end.
- In a pipe, a file or a notebook it is a log: one line of text after LINE_S seconds and after each LINE_S more.

`announce` writes one line immediately, wherever standard error goes.

Invariant: a task that ends within QUIET_S (on a terminal) or LINE_S (elsewhere) writes nothing. Where standard error is
no terminal, rich is not imported.

Not handled: long work on several threads at the same time. The first thread has the display; the others show nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Protocol, TextIO, TypeVar

from tfswap.support.printable import one_line

T = TypeVar("T")

QUIET_S = 1.5
"""A task that ends sooner is not shown on a terminal."""
LINE_S = 10.0
"""The interval between two lines where there is no terminal."""
PER_SECOND = 5
"""The rate at which bars are drawn. Planning and drawing share Python's global lock."""


class Display(Protocol):
    """A display with a line for each task, such as rich's Progress."""

    def add_task(self, description: str, *, total: float | None) -> int: ...
    def advance(self, task_id: int) -> None: ...
    def remove_task(self, task_id: int) -> None: ...


_current: ContextVar[Display | None] = ContextVar("display", default=None)
_one_display = threading.Lock()


@contextlib.contextmanager
def task(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show `what` as work in progress. Gives a function to call after each of `total` parts."""
    what = one_line(what)
    display = _current.get()
    if display is not None:
        line = display.add_task(what, total=total)
        try:
            yield lambda: display.advance(line)
        finally:
            display.remove_task(line)
    elif _one_display.acquire(blocking=False):
        try:
            with _bars() if _on_terminal() else _lines() as opened:
                token = _current.set(opened)
                try:
                    with task(what, total) as advance:
                        yield advance
                finally:
                    _current.reset(token)
        finally:
            _one_display.release()
    else:
        yield lambda: None


def over(what: str, parts: Collection[T]) -> Iterator[T]:
    """`parts`, each of which is done when the next is requested."""
    with task(what, len(parts)) as advance:
        for part in parts:
            yield part
            advance()


def announce(text: str) -> None:
    """Write one line to standard error; on a terminal it appears above the bars."""
    text = one_line(text)
    with _opened_stderr() as stream:
        # The current line is erased first: it may show a bar.
        _write(stream, f"\r\x1b[2Ktfswap: {text}" if _on_terminal() else f"tfswap: {text}")


def _on_terminal() -> bool:
    """Whether standard error is a terminal. A notebook's has the file descriptor of its server's terminal."""
    try:
        return sys.stderr.isatty() and os.isatty(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # none, closed, or not a file
        return False


@contextlib.contextmanager
def _opened_stderr() -> Iterator[TextIO | None]:
    """Standard error, which keeps its file while file descriptor 2 is redirected for a library that writes to it.

    A stream without a file (a notebook's, a test's) stays as it is. None where there is no standard error.
    """
    try:
        own = sys.stderr is sys.__stderr__ or sys.stderr.isatty()
        copy = os.dup(sys.stderr.fileno()) if own else None
    except (AttributeError, OSError, ValueError):
        copy = None
    if copy is None:
        yield sys.stderr
        return
    with os.fdopen(copy, "w", encoding=sys.stderr.encoding, errors="replace") as stream:
        yield stream


def _write(stream: TextIO | None, line: str) -> None:
    """One line, if it can be written: progress never makes a step fail."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(f"{line}\n")
            stream.flush()


class _Tasks:
    """The tasks under way, outermost first, as one line of text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._tasks: dict[int, tuple[str, float | None, int]] = {}

    def add_task(self, description: str, *, total: float | None) -> int:
        with self._lock:
            self._next += 1
            self._tasks[self._next] = (description, total, 0)
            return self._next

    def advance(self, task_id: int) -> None:
        with self._lock:
            description, total, done = self._tasks[task_id]
            self._tasks[task_id] = (description, total, done + 1)

    def remove_task(self, task_id: int) -> None:
        with self._lock:
            del self._tasks[task_id]

    def __str__(self) -> str:
        with self._lock:
            tasks = list(self._tasks.values())
        return ": ".join(
            description if total is None else f"{description} ({done} of {total:.0f})"
            for description, total, done in tasks
        )


@contextlib.contextmanager
def _lines() -> Iterator[Display]:
    tasks, ended, began = _Tasks(), threading.Event(), time.monotonic()

    def log() -> None:
        while not ended.wait(LINE_S):
            _write(stream, f"tfswap: {time.monotonic() - began:.0f} s: {tasks}")

    with _opened_stderr() as stream:
        # The thread does not wake in a short task.
        writer = threading.Thread(target=log, name="tfswap-progress", daemon=True)
        writer.start()
        try:
            yield tasks
        finally:
            ended.set()
            writer.join()


@contextlib.contextmanager
def _bars() -> Iterator[Display]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with _opened_stderr() as stream:
        console = Console(file=stream)
        bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=PER_SECOND,
            redirect_stdout=_shows_stdout(),  # on a terminal, printed text appears above the bars
            disable=not console.is_interactive,
        )

        def begin() -> None:
            bars.start()
            console.show_cursor()  # a process that is killed could not show it again

        start = threading.Timer(QUIET_S, begin)
        start.daemon = True
        start.start()
        try:
            yield bars  # pyright: ignore[reportReturnType] - rich's own number type for tasks is an int
        finally:
            start.cancel()
            start.join()
            bars.stop()


def _shows_stdout() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
