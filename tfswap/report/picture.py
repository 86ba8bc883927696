"""Pictures as PNG. They need matplotlib (the extra "plot")."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfswap.errors import TfswapError
from tfswap.report.timeline import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    KINDS,
    MARGIN,
    OTHERS,
    VARIABLES,
    WORKSPACES,
    Run,
    Timeline,
)
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.report.report import Report

COLUMNS = 1600
COLOURS = {
    OTHERS: "#cdd3da",
    VARIABLES: "#37424f",
    INPUTS: "#87929f",
    ACTIVATIONS: "#0072b2",
    GRADIENTS: "#e69f00",
    WORKSPACES: "#14b88a",
    MARGIN: "#f7ecb0",
}
"""The colours of kinds of memory, from the bottom of the stack to its top: those of the page."""


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure; width and height in inches. Raises TfswapError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TfswapError(
            f"a PNG needs matplotlib, which can't be imported ({error}): pip install 'tfswap[plot]', or write "
            "HTML, which needs nothing"
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def png(figure: Any) -> bytes:
    """A figure as the content of a PNG file."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def picture(report: Report, timelines: Sequence[Timeline]) -> bytes:
    """Memory over the step by kind, before and planned, with the limit and the measured peak as lines.

    Args:
        timelines: of each of the report's devices.
    """
    runs: list[tuple[Report, str, Run, bool]] = []
    for (device, each), timeline in zip(report.devices.items(), timelines, strict=True):
        where = f" on {device}" if len(timelines) > 1 else ""
        runs.append((each, f"before{where}", timeline.before, timeline.after is None))
        if timeline.after is not None:
            runs.append((each, f"planned{where}", timeline.after, True))
    figure = new_figure(9, 1.2 + 2.6 * len(runs))
    width_s = max(run.total_s for _, _, run, _ in runs) or 1.0
    figure.suptitle(report.title, fontsize=11)
    panels = figure.subplots(len(runs), sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (each, title, run, is_measured) in zip(panels, runs, strict=True):
        _stack(axes, run, width_s)
        axes.set_title(f"{title}: peak {format_bytes(run.peak_bytes)}, predicted", fontsize=9, loc="left")
        lines = [("limit", each.memory_limit_bytes, "--")]
        if is_measured:
            lines.append(("measured peak", each.measured_peak_bytes, ":"))
        for label, nbytes, style in lines:
            if nbytes is not None:
                axes.axhline(nbytes / 2**20, color="black", linestyle=style, linewidth=1, label=label)
        axes.set(ylabel="MiB in use", xlim=(0, 1000 * width_s), ylim=(0, None))
        axes.grid(alpha=0.3)
    axes.set_xlabel("predicted time in the step, ms")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return png(figure)


def _stack(axes: Any, run: Run, width_s: float) -> None:
    columns = run.columns(COLUMNS, width_s)
    states = sorted({column.state for column in columns})
    kinds = dict(zip(states, run.at(states), strict=True))
    at_ms = [1000 * width_s * c.column / COLUMNS for c in columns] + [1000 * run.total_s]
    rows = [kinds[c.state] for c in columns]
    rows.append(rows[-1])
    heights = [[row[kind] / 2**20 for row in rows] for kind in COLOURS]
    axes.stackplot(at_ms, heights, labels=[KINDS[k] for k in COLOURS], colors=list(COLOURS.values()), step="post")
