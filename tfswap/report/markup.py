"""Templates of pages, round numbers for axes and formatted times, for all reports."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfswap.support.printable import printable
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """A page from a template in `templates/`. Text in `values` is escaped, control characters too.

    Args:
        values: the template's variables. `style` is added.
    """
    return _environment().get_template(template).render(style=trusted("page.css"), **values)


def trusted(name: str) -> Any:
    """The content of a file of this folder, to be inserted into a page without escaping."""
    from markupsafe import Markup

    return Markup((FOLDER / name).read_text(encoding="utf-8"))


def trusted_text(text: str) -> Any:
    """Text that has nothing to escape."""
    from markupsafe import Markup

    return Markup(text)


@functools.cache
def _environment() -> Environment:
    """Jinja2's environment, created on first use."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    return made


def ticks(low: float, high: float, about: int = 5) -> Sequence[float]:
    """About `about` round numbers from `low` to `high`."""
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
