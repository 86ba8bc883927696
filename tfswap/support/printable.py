"""Text for people: names of nodes, functions and files can hold characters that a terminal obeys.

Invariant: what tfswap prints, logs, shows as progress, raises or writes into a page went through `printable`, where it
left: errors when they are made, tables and lines when they are shown, log records when they are handled.
"""

from __future__ import annotations

import logging
import re

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, and what turns the direction of text around."""


def printable(text: str) -> str:
    r"""`text` with control characters as Python writes them: "\x1b"."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Printable(logging.Filter):
    """Makes log messages printable, and lets all of them pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if CONTROLS.search(message):
            record.msg, record.args = printable(message), ()
        return True


def log_printable(log: logging.Logger) -> None:
    """Let what a logger is given be printable."""
    if not any(isinstance(known, _Printable) for known in log.filters):
        log.addFilter(_Printable())
