"""What takes long, as bars on a terminal while it lasts.

`task` and `over` are said where something is done, and know by a context variable what they are a part of: of tasks
within tasks the outermost has the display, in which each has a line. It comes up once the outermost has lasted a
moment, and goes with it.

Invariant: where stderr is no terminal (a pipe, a file, a notebook) nothing is written, started or imported.

Not handled: several threads that take long at once. The first has the display, and the others show nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

QUIET_S = 1.5
"""What is done sooner is not shown."""
PER_SECOND = 5
"""So often the display is drawn: planning is Python, and shares its lock with who draws."""

_bars: ContextVar[Progress | None] = ContextVar("bars", default=None)
_one_display = threading.Lock()


@contextlib.contextmanager
def task(what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show that `what` is being done. Gives what is to be called for each of `total` parts that is done."""
    bars = _bars.get()
    if bars is not None:
        line = bars.add_task(what, total=total)
        try:
            yield lambda: bars.advance(line)
        finally:
            bars.remove_task(line)
    elif _on_terminal() and _one_display.acquire(blocking=False):
        try:
            with _display(), task(what, total) as advance:
                yield advance
        finally:
            _one_display.release()
    else:
        yield lambda: None


def over(what: str, parts: Collection[T]) -> Iterator[T]:
    """`parts`, each of which is done when the next is asked for."""
    with task(what, len(parts)) as advance:
        for part in parts:
            yield part
            advance()


def _on_terminal() -> bool:
    try:
        return os.isatty(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # none, closed, or not a file: a test's, or a notebook's
        return False


@contextlib.contextmanager
def _display() -> Iterator[None]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Of stderr itself, which may be set aside while a noisy library loads.
    stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace")
    console = Console(file=stream)
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=PER_SECOND,
        redirect_stdout=_shows_stdout(),  # what is printed meanwhile comes above; redirected, it stays where it goes
        disable=not console.is_interactive,
    )

    def begin() -> None:
        bars.start()
        console.show_cursor()  # a process that is killed can't bring it back

    start = threading.Timer(QUIET_S, begin)
    start.daemon = True
    start.start()
    token = _bars.set(bars)
    try:
        yield
    finally:
        _bars.reset(token)
        start.cancel()
        start.join()
        bars.stop()
        stream.close()


def _shows_stdout() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
