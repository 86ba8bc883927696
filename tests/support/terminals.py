"""A terminal that a test reads."""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import threading
from collections.abc import Iterator
from unittest import mock


class Screen:
    """What has been written to a terminal, controls and all; whole once the terminal is closed."""

    text = ""


@contextlib.contextmanager
def on_terminal(stream: str = "stderr") -> Iterator[Screen]:
    """`sys.stderr` or `sys.stdout` is a terminal."""
    screen = Screen()
    own, device = pty.openpty()

    def read() -> None:
        with contextlib.suppress(OSError):  # as its last writer closes it
            while got := os.read(own, 1 << 16):
                screen.text += got.decode()

    reader = threading.Thread(target=read)
    reader.start()
    with (
        open(device, "w") as opened,
        mock.patch.object(sys, stream, opened),
        mock.patch.dict(os.environ, TERM="xterm"),
    ):
        yield screen
    reader.join()
    os.close(own)
