"""Escapes control characters, which names of nodes, functions and files can contain, in text for people.

Invariant: all text that tfswap prints, logs, shows as progress, raises or writes into a page is escaped by `printable`:
errors when they are created, tables and lines when they are shown, log records when they are handled.
"""

from __future__ import annotations

import logging
import re

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters other than tab and newline, and characters that change the direction of text."""


def printable(text: str) -> str:
    r"""`text` with control characters as Python writes them: "\x1b"."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Printable(logging.Filter):
    """Escapes log messages. Filters out none."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if CONTROLS.search(message):
            record.msg, record.args = printable(message), ()
        return True


def log_printable(log: logging.Logger) -> None:
    """Escape all messages of a logger."""
    if not any(isinstance(known, _Printable) for known in log.filters):
        log.addFilter(_Printable())
