"""The tables of printed reports, by rich: fitted to the width of a terminal, and unbroken as text."""

from __future__ import annotations

import io
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from tfswap.support.printable import one_line, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

WIDE = 10_000
"""Columns of text output: no line is broken, so that programs can search it."""


def figures(rows: Iterable[tuple[str, str, str]]) -> Table:
    """A table of labels, amounts whose points stand below each other, and texts."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    return table


def listing(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[str] = ()) -> Table:
    """A table with heads, whose first column has figures, as those with the heads `numbers` have."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(one_line(heads[0]), justify="right", no_wrap=True)
    for head in heads[1:]:
        if head in numbers:
            table.add_column(one_line(head), justify="right", no_wrap=True)
        else:
            table.add_column(one_line(head), overflow="fold")
    for row in rows:
        table.add_row(*map(one_line, row))
    return table


def stacked(*parts: RenderableType) -> RenderableType:
    """Parts, one below the other: texts of one line, and tables."""
    from rich.console import Group

    return Group(*(one_line(part) if isinstance(part, str) else part for part in parts))


def as_text(shown: RenderableType) -> str:
    """The whole output as text, without colours."""
    text = io.StringIO()
    _console(text, width=WIDE, height=1, color_system=None, force_terminal=False).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(shown: RenderableType) -> None:
    """Print, on a terminal in its width."""
    if isinstance(shown, str):
        print(printable(shown))
    elif sys.stdout.isatty():
        _console(sys.stdout).print(shown)
    else:
        print(as_text(shown))


def _console(file: TextIO, **how: object) -> Console:
    from rich.console import Console

    # In a notebook, rich would display the text instead of writing it to the file.
    return Console(file=file, markup=False, emoji=False, highlight=False, force_jupyter=False, **how)  # type: ignore[arg-type]
