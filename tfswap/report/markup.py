"""What all reports are made of: HTML, round numbers for axes, figures for people."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence


def fields(rows: Iterable[tuple[str, str]]) -> str:
    """A table of labels and what they say."""
    cells = (f"<tr><th>{html.escape(label)}</th><td>{html.escape(text)}</td></tr>" for label, text in rows)
    return f"<table>{''.join(cells)}</table>"


def ticks(low: float, high: float, about: int = 5) -> Sequence[float]:
    """About so many round numbers between two."""
    raw = (high - low) / about
    if raw <= 0:
        return [low]
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def format_seconds(seconds: float) -> str:
    """A time for people: "1.20 s", "12.5 ms", "310 \N{MICRO SIGN}s"."""
    if seconds >= 1 or not seconds:
        return f"{seconds:.2f} s" if seconds else "0"
    unit, name = (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "\N{MICRO SIGN}s")
    return f"{seconds / unit:.3g} {name}"
