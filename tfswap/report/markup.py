"""HTML that all reports are made of."""

from __future__ import annotations

import html
from collections.abc import Iterable


def fields(rows: Iterable[tuple[str, str]]) -> str:
    """A table of labels and what they say."""
    cells = (f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>" for label, text in rows)
    return f"<table>{''.join(cells)}</table>"
