"""A report as one page that needs no network: memory over the step, the lanes of kernels and copies, and every tensor
with its reason.

The markup is in `templates/`, its values are computed here, and `page.js` shows details under the pointer. A page stays
below MOST_BYTES for graphs of any size, on any number of devices: time is divided into columns, each of which shows its
maximum, and tensors and kernels that are too small to be seen are summed up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.report.markup import render, ticks, trusted
from tfswap.report.printed import FIGURES, device_rows, merged_rows, notes_of
from tfswap.report.timeline import (
    COMPUTE,
    COPIES_BETWEEN,
    COPIES_IN,
    COPIES_OUT,
    KINDS,
    MARGIN,
    OTHERS,
    Block,
    Run,
    Timeline,
)
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.report.report import Report
    from tfswap.report.rows import TensorRow

    Drawn = tuple[Report, Timeline | None]

MOST_BYTES = 6 << 20
COLUMNS = 3000
"""Columns of a chart, enough for zooming in on a third of it."""
LEAST_COLUMNS = 500
"""Columns of a chart of a step on many devices."""
HEIGHT = 1000
HOLDS = 4000
"""The number of a run's tensors and workspaces, the largest, that the page lists one by one."""
ROWS = 10_000
"""The most rows of the table of tensors: those with a tactic first, then the largest."""
NAME_LENGTH, REASON_LENGTH = 160, 400
BLOCK_COLUMNS = 0.7
"""Narrower blocks of a lane are merged with their neighbours."""
LIMIT_SHOWN = 1.6
"""A limit above this multiple of the highest peak is not drawn."""
STACK = (OTHERS, *range(OTHERS), MARGIN)
"""Kinds of memory from the bottom to the top: persistent bytes first."""
ON_CARDS = ("memory limit", "peak before, predicted", "peak planned", "peak measured", "predicted time")
LANES = (COMPUTE, COPIES_OUT, COPIES_IN, COPIES_BETWEEN)
COLOURS = {"run": "activations", "again": "again", "wait": "wait", "copy": "accent"}
BLOCKS = {"run": "kernels", "again": "recomputed kernels", "wait": "waiting for a copy", "copy": "copies"}
"""The legend of the lanes' blocks, by kind."""


class Axes(NamedTuple):
    """What all charts of a page share.

    Attributes:
        width_s: the seconds that the width of a chart stands for.
        columns: the columns of a chart.
        holds: the most buffers of a run that the page lists.
    """

    width_s: float
    columns: int
    holds: int

    @classmethod
    def of(cls, drawn: Sequence[Drawn]) -> Axes:
        """For these devices. The more there are, the fewer details each has, so that the page stays small."""
        width_s = max((run.total_s for _, timeline in drawn for _, run in _runs(timeline)), default=0.0) or 1.0
        return cls(width_s, max(LEAST_COLUMNS, COLUMNS // len(drawn)), HOLDS // len(drawn))

    def states(self, run: Run) -> list[int]:
        """The states of a run that are drawn."""
        return sorted({column.state for column in run.columns(self.columns, self.width_s)})


def page(report: Report, drawn: Sequence[Drawn]) -> str:
    """The whole page.

    Args:
        drawn: the report on each device, with its timeline. None: the device has no charts.
    """
    tensors = merged_rows(report.devices, rest=True)
    axes, names = Axes.of(drawn), _Names()
    data = {
        "kinds": KINDS,
        "margin": MARGIN,
        "columns": axes.columns,
        "width": BLOCK_COLUMNS,
        "runs": [_run_data(run, axes, names) for _, timeline in drawn for _, run in _runs(timeline)],
        "rows": [_row(row, where if len(drawn) > 1 else "", names) for row, where in tensors[:ROWS]],
    }
    data["names"] = names.all
    counts = Counter(tactic for row, _ in tensors for tactic in row.tactic.split(", "))
    return render(
        "report.html",
        **_devices(report, drawn, axes),
        title=report.title,
        tensors=bool(tensors),
        tactics=sorted(counts.items(), key=lambda item: (item[0] == "keep", item[0])),
        left_out=len(tensors[ROWS:]),
        largest_left_out=max((row.nbytes for row, _ in tensors[ROWS:]), default=0),
        data=_script_json(data),
        script=trusted("page.js"),
    )


def cell(report: Report, drawn: Sequence[Drawn], rows: int) -> str:
    """The output of a notebook's cell: the figures, the charts without details, and the first rows."""
    shown = [(row, where) for row, where in merged_rows(report.devices)[:rows]]
    return render("cell.html", **_devices(report, drawn, Axes.of(drawn)), rows=shown)


def _devices(report: Report, drawn: Sequence[Drawn], axes: Axes) -> dict[str, Any]:
    """The figures and charts of each device, and what they share."""
    return {
        "columns": axes.columns,
        "height": HEIGHT,
        "figures": FIGURES,
        "figures_of_devices": device_rows(report.devices) if len(drawn) > 1 else [],
        "parts": [{**_summary(each), **_charts(each, timeline, axes)} for each, timeline in drawn],
        "notes": notes_of(report.devices),
        "unmodelled": list(dict.fromkeys(kernel for each, _ in drawn for kernel in each.unmodelled)),
    }


def _summary(report: Report) -> dict[str, Any]:
    """The main figures as cards, and the others."""
    before, planned = report.baseline_peak_bytes, report.planned_peak_bytes
    change = f"{100 * (planned / before - 1):+.0f}% of memory" if before and report.kernels else "nothing is changed"
    measured, limit = report.measured_peak_bytes, report.memory_limit_bytes
    peak_row = ("not known", "not reported by the allocator")
    if measured is not None:
        peak_row = (format_bytes(measured), "by the allocator")
    cards = [
        ("peak before, predicted", format_bytes(before), "the step as it is"),
        ("peak planned", format_bytes(planned), change),
        ("peak measured", *peak_row),
        ("memory limit", "none" if limit is None else format_bytes(limit), "" if report.keeps_limit else "NOT KEPT"),
        ("step time, predicted", f"x{report.time_ratio:.2f}", f"{report.costs} costs"),
    ]
    summary = [row for row in report.summary() if row[0] not in ON_CARDS]
    return {"report": report, "cards": cards, "summary": summary}


def _runs(timeline: Timeline | None) -> list[tuple[str, Run]]:
    """The runs that are drawn, with their titles."""
    if timeline is None:
        return []
    planned = [] if timeline.after is None else [("Planned", timeline.after)]
    return [("Before: the step as it is", timeline.before), *planned]


def _charts(report: Report, timeline: Timeline | None, axes: Axes) -> dict[str, Any]:
    """The charts of a device's runs, on the same axes, and their legend."""
    runs, width_s = _runs(timeline), axes.width_s
    if not runs:
        return {"runs": []}
    lines = [("limit", "dashed", report.memory_limit_bytes), ("measured", "dotted", report.measured_peak_bytes)]
    rules = [(name, dash, nbytes) for name, dash, nbytes in lines if nbytes is not None]
    peak = max(run.peak_bytes for _, run in runs)
    shown = [(name, nbytes) for name, _, nbytes in rules if nbytes <= LIMIT_SHOWN * peak]
    top = 1.04 * max(peak, *(nbytes for _, nbytes in shown), 1)
    last = runs[-1][1]
    at_peak = last.at([last.record.peak_state])[0]
    present = {k for _, run in runs for row in run.at(axes.states(run)) for k in STACK if row[k]}
    return {
        "legend": [(KINDS[k], at_peak[k]) for k in reversed(STACK) if k in present],
        "rules": rules,
        "marks": [(name, _y(nbytes, top)) for name, nbytes in shown],
        "time_ticks": [(t, t / width_s) for t in ticks(0, width_s) if t <= 0.97 * width_s],
        "runs": [_chart(title, run, axes, top) for title, run in runs],
    }


def _y(nbytes: float, top: float) -> int:
    return round(HEIGHT * (1 - nbytes / top))


def _chart(title: str, run: Run, axes: Axes, top: float) -> dict[str, Any]:
    """One run's memory, stacked, and its lanes."""
    columns = run.columns(axes.columns, axes.width_s)
    end = max(1, round(run.total_s * axes.columns / axes.width_s))
    states = axes.states(run)
    kinds = dict(zip(states, run.at(states), strict=True))
    areas: list[tuple[str, str]] = []
    for layer in range(len(STACK), 0, -1):  # each area reaches down to zero, so the highest is drawn first
        edge = [(c, _y(sum(kinds[state][k] for k in STACK[:layer]), top)) for c, state in columns]
        areas.append((KINDS[STACK[layer - 1]], _area(edge, end)))
    drawn = {block.kind for block in run.blocks}
    blocks = _merged(run, axes)
    lanes = [lane for lane in LANES if run.blocks and (lane != COPIES_BETWEEN or any(b[0] == lane for b in blocks))]
    return {
        "title": title,
        "peak_bytes": run.peak_bytes,
        "total_s": run.total_s,
        "areas": areas,
        "byte_ticks": [(t, _y(t, top)) for t in _byte_ticks(top)],
        "lanes": [(lane, _bars([b for b in blocks if b[0] == lane], axes)) for lane in lanes],
        "key": [(COLOURS[kind], meaning) for kind, meaning in BLOCKS.items() if kind in drawn],
    }


def _area(edge: Sequence[tuple[int, int]], end: int) -> str:
    """The SVG path of the area below an edge."""
    path: list[str] = []
    before = None
    for x, y in edge:
        if y != before:
            path.append(f"H{x}V{y}" if path else f"M{x} {HEIGHT}V{y}")
            before = y
    return f"{''.join(path)}H{end}V{HEIGHT}Z"


Bar = tuple[str, str, str, float, float, int]
"""Lane, kind, name, start, end, and the number of blocks that were merged into it."""


def _merged(run: Run, axes: Axes) -> list[Bar]:
    """The blocks of all lanes. Neighbours that are too narrow to be seen are merged."""
    narrow_s = BLOCK_COLUMNS * axes.width_s / axes.columns
    found: list[Bar] = []
    for lane in LANES:
        merged: list[Bar] = []
        for block in (b for b in run.blocks if b.lane == lane):
            if merged and block.end_s - merged[-1][3] < narrow_s:
                merged[-1] = _joined(merged[-1], block)
            else:
                merged.append((block.lane, block.kind, block.name, block.start_s, block.end_s, 1))
        found += merged
    return found


def _joined(before: Bar, block: Block) -> Bar:
    lane, kind, name, start, end, count = before
    if block.end_s - block.start_s > end - start:
        kind, name = block.kind, block.name
    return lane, kind, name, start, block.end_s, count + 1


def _bars(blocks: Iterable[Bar], axes: Axes) -> list[tuple[str, str]]:
    """The SVG paths of a lane's blocks, each with its colour."""
    paths: dict[str, list[str]] = {}
    for _, kind, _, start, end, _ in blocks:
        per_s = axes.columns / axes.width_s
        x, width = start * per_s, max((end - start) * per_s, BLOCK_COLUMNS / 2)
        paths.setdefault(kind, []).append(f"M{x:.1f} 1h{width:.1f}v8h-{width:.1f}z")
    return [(COLOURS[kind], "".join(path)) for kind, path in paths.items()]


def _byte_ticks(top: float) -> list[int]:
    """Round sizes up to `top`, in a unit with few digits."""
    unit = next((u for u in (1 << 30, 1 << 20, 1 << 10) if top >= 2 * u), 1)
    return [round(t * unit) for t in ticks(0, top / unit, 7)]


def _script_json(content: dict[str, Any]) -> Any:
    """JSON that can stand in a script element: no text in it ends the element."""
    from jinja2.utils import htmlsafe_json_dumps

    return htmlsafe_json_dumps(content, separators=(",", ":"))


class _Names:
    """Numbers for names and other repeated texts, each of which is in the page once."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def number(self, name: str, length: int = NAME_LENGTH) -> int:
        return self._number.setdefault(_clipped(name, length), len(self._number))

    @property
    def all(self) -> list[str]:
        return list(self._number)


def _run_data(run: Run, axes: Axes, names: _Names) -> dict[str, Any]:
    """The details of a run for page.js."""
    columns = run.columns(axes.columns, axes.width_s)
    states = axes.states(run)
    kinds = dict(zip(states, run.at(states), strict=True))
    largest = sorted(run.record.holds, key=lambda hold: -hold.nbytes)[: axes.holds]
    return {
        "width_s": axes.width_s,
        "count": max(1, round(run.total_s * axes.columns / axes.width_s)),
        "peak": next(c.column for c in columns if run.record.in_use_bytes[c.state] == run.record.peak_bytes),
        "columns": [[column, state, *kinds[state]] for column, state in columns],
        "holds": [[names.number(run.name(h)), run.kind(h), h.nbytes, h.first, h.last] for h in largest if h.nbytes],
        "blocks": [
            [lane, kind, names.number(name), float(f"{start:.5g}"), float(f"{end:.5g}"), count]
            for lane, kind, name, start, end, count in _merged(run, axes)
        ],
    }


def _row(row: TensorRow, where: str, names: _Names) -> dict[str, Any]:
    return {
        "name": names.number(row.name),
        "op": names.number(row.op),
        "where": names.number(where),
        "nbytes": row.nbytes,
        "tactic": row.tactic,
        "reason": names.number(row.reason, REASON_LENGTH),
        "moved": row.cost_bytes,
        "cost_s": row.cost_s,
        "source": names.number(row.source or ""),
    }


def _clipped(text: str, length: int) -> str:
    """`text`, shortened in the middle to about `length`."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
