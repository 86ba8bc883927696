"""What all reports are made of: an HTML document and its style, round numbers for axes, figures for people."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from tfswap.support.printable import printable

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Nothing is fetched, whatever a page has in it."""
STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def escaped(text: str) -> str:
    """`text` as a page shows it."""
    return html.escape(printable(text))


def document(title: str, body: str, scripts: str = "") -> str:
    """A whole page, which needs no network.

    Args:
        title: as text; it is the page's heading too.
        body: what follows the heading, as HTML.
        scripts: the page's script elements, as HTML.
    """
    title = escaped(title)
    head = (
        "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f'<meta http-equiv=Content-Security-Policy content="{POLICY}"><title>{title}</title><style>{STYLE}</style>'
    )
    return (
        f"<!doctype html><html lang=en><head>{head}</head><body class=tfswap><main><h1>{title}</h1>{body}</main>"
        f"{scripts}</body></html>\n"
    )


def fragment(body: str) -> str:
    """The same in a notebook's cell."""
    return f"<style>{STYLE}</style><div class=tfswap>{body}</div>"


def fields(rows: Iterable[tuple[str, str]]) -> str:
    """A list of labels and what they say."""
    pairs = (f"<div><dt>{escaped(label)}</dt><dd>{escaped(text)}</dd></div>" for label, text in rows)
    return f"<dl class=facts>{''.join(pairs)}</dl>"


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
