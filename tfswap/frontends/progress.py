"""What a command is doing, on stderr, when it takes longer than a person likes to wait in the dark.

Silent for two seconds. Then a line that is rewritten in place on a terminal, and plain lines elsewhere.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

QUIET_S = 2.0
TERMINAL_EVERY_S = 0.2
PLAIN_EVERY_S = 10.0
FRAMES = "|/-\\"


def _own_stderr() -> TextIO:
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding=sys.stderr.encoding, errors="replace")
    except (OSError, ValueError):  # not a file: a test's, or a notebook's
        return sys.stderr


class Progress:
    """A context manager; `stage` names what is going on now."""

    def __init__(self, stream: TextIO | None = None):
        # A copy of stderr: the real one may be set aside while a noisy library loads.
        self._stream = stream or _own_stderr()
        self._terminal = self._stream.isatty()
        self._stage = ""
        self._since = time.monotonic()
        self._done = threading.Event()
        self._shown = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        if self._terminal and self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()

    def stage(self, text: str) -> None:
        """Say what comes next; shown only if it lasts."""
        self._stage, self._since = text, time.monotonic()

    def _watch(self) -> None:
        every = TERMINAL_EVERY_S if self._terminal else PLAIN_EVERY_S
        last, said = "", 0.0
        tick = 0
        while not self._done.wait(TERMINAL_EVERY_S):
            now = time.monotonic()
            stage, passed = self._stage, now - self._since
            if not stage or passed < QUIET_S or (stage == last and now - said < every):
                continue
            last, said = stage, now
            tick += 1
            self._say(f"{stage} ({passed:.0f} s)", tick)

    def _say(self, text: str, tick: int) -> None:
        self._shown = True
        if self._terminal:
            self._stream.write(f"\r\033[K{FRAMES[tick % len(FRAMES)]} {text}")
        else:
            self._stream.write(f"tfswap: {text}\n")
        self._stream.flush()
