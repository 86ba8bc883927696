"""Shows a watch while the program runs: on the terminal that standard error is, and as a page that loads itself again.

What the program prints on the same terminal appears above the table, line by line: a progress bar that rewrites its
line is shown once the line ends.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfswap.device import arena
from tfswap.errors import TfswapError
from tfswap.report.peak_owners import HEADS, NUMBERS, Watched, headline_of, rows_of
from tfswap.report.tables import listing, stacked
from tfswap.report.watch_page import watch_page
from tfswap.support.files import write_whole
from tfswap.support.sizes import Unit

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

log = logging.getLogger("tfswap")

REFRESH_S, PAGE_S = 0.5, 2
"""The time between two states of the terminal, and of the page."""
ROWS, OTHER_LINES = 15, 8
"""The most rows of a device on the terminal, and the lines that are no rows."""
BARS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}\N{LOWER HALF BLOCK}"
    "\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
HISTORY = 40
"""The latest states whose bytes in use are drawn."""


class LiveView:
    """Shows what a watch has seen until now, from `start` to `stop`.

    Args:
        seen: gives that; it is called in a thread.
        terminal: whether to use the terminal. Where standard error is none, it is not used.
        page: the path of the page; None for none.
    """

    def __init__(self, seen: Callable[[], Watched], terminal: bool, page: str | None):
        self._seen = seen
        self._page = None if page is None else Path(page).absolute()  # the program may change its folder
        self._live = _live() if terminal and sys.stderr is not None and sys.stderr.isatty() else None
        self._history: dict[str, deque[int]] = {}
        self._written: tuple[int, ...] = ()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfswap watch view", daemon=True)

    def start(self) -> None:
        if self._live is None and self._page is None:
            return
        if self._live is not None:
            self._live.start()
            self._live.console.show_cursor()  # a program that is killed leaves the terminal as it was
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def save(self, seen: Watched) -> None:
        """Write the page for the last time."""
        if self._page is not None:
            self._write(watch_page(seen))

    def _run(self) -> None:
        next_page_s = 0.0
        while not self._ended.wait(REFRESH_S):
            seen = self._seen()
            if self._live is not None:
                self._live.update(self._drawn(seen), refresh=True)
            moments = tuple(each.nbytes for each in seen.devices.values())
            if self._page is not None and time.monotonic() >= next_page_s and moments != self._written:
                next_page_s, self._written = time.monotonic() + PAGE_S, moments
                self._write(watch_page(seen, PAGE_S))

    def _write(self, text: str) -> None:
        assert self._page is not None
        try:
            write_whole(self._page, text)
        except TfswapError as error:
            log.warning("tfswap: the page of the watch is not written: %s", error)
            self._page = None

    def _drawn(self, seen: Watched) -> RenderableType:
        """For each device its bytes in use now and of late, and what held its memory at its highest moment."""
        assert self._live is not None
        rows = max(3, min(ROWS, self._live.console.height // max(1, len(seen.devices)) - OTHER_LINES))
        parts: list[Any] = []
        for name, each in seen.devices.items():
            info, size = arena.memory_info(name), Unit.of(max(each.nbytes, each.peak_bytes)).text
            now = 0 if info is None else info.current_bytes
            history = self._history.setdefault(name, deque(maxlen=HISTORY))
            history.append(now)
            parts += ["", f"tfswap: {headline_of(each)}"]
            parts.append(f"now {size(now)}  {drawn_history(history, max(each.nbytes, each.peak_bytes))}")
            parts.append(listing(HEADS, rows_of(each, rows), NUMBERS))
        return stacked(*parts) if parts else "tfswap: nothing has been recorded yet"


def drawn_history(history: deque[int], most: int) -> str:
    """Bytes as bars, of which the highest stands for `most`."""
    return "".join(BARS[min(len(BARS) - 1, len(BARS) * nbytes // max(1, most))] for nbytes in history)


def _live() -> Live:
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, markup=False, emoji=False, highlight=False, force_jupyter=False)
    is_shared = sys.stdout is not None and sys.stdout.isatty()
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=is_shared)
