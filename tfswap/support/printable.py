"""Escapes control characters, which names of nodes, functions and files can contain, in text for people.

Invariant: all text that tfswap prints, logs, shows as progress, raises or writes into a page is escaped: errors when
they are created, tables and lines when they are shown, log records when they are handled. A name can't begin a line of
its own, which could pass for one of tfswap's: lines that have names in them are escaped one by one, by `one_line`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters other than tab and newline, separators of lines, and what changes the direction of text."""


def printable(text: str) -> str:
    r"""`text` with control characters as Python writes them: "\x1b"."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""`printable`, with newlines too as Python writes them: "\n"."""
    return printable(text).replace("\n", r"\n")


def as_lines(lines: Iterable[str]) -> str:
    """Text with one line for each of `lines`."""
    return "\n".join(map(one_line, lines))


class _Printable(logging.Filter):
    """Escapes log messages. Filters out none."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = one_line(message.rstrip())  # TensorFlow's own messages, which some contain, end with a newline
        if shown != message:
            record.msg, record.args = shown, ()
        return True


def log_printable(log: logging.Logger) -> None:
    """Escape all messages of a logger."""
    if not any(isinstance(known, _Printable) for known in log.filters):
        log.addFilter(_Printable())
