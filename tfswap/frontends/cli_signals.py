"""A command that a signal ends first removes its unfinished output, and then dies of that signal.

So a shell sees the status 128 + the signal's number, and a script that runs the command ends too, which it would not
after a plain exit with that status.

Not handled: SIGKILL, which no process can.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """A signal that ends the process. Not an Exception, so that no handler of errors catches it."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn signals that end the process into Ended, raised in the main thread, and die of the signal afterwards."""
    caught: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for other in ENDING:  # a second Ctrl-C must not interrupt the cleaning up
            signal.signal(other, signal.SIG_IGN)
        raise Ended

    before = {number: signal.getsignal(number) for number in ENDING}
    # Not those that are ignored, as under nohup, or that belong to a program that embeds Python.
    heard = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
    try:
        for number in heard:
            signal.signal(number, end)
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
        if caught:  # also where a library made another error of it
            signal.signal(caught[0], signal.SIG_DFL)
            os.kill(os.getpid(), caught[0])
