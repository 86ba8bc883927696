"""A report as one page that needs no network: memory over the step, the lanes of kernels and copies, and every tensor
with its reason.

The markup is in `templates/`, its values are computed here, and `page.js` draws on canvases and shows details under the
pointer. Without scripts, as in a notebook, charts are SVG with fewer columns.

A page stays below MOST_BYTES for graphs of any size, on any number of devices: time is divided into columns, each of
which shows its maximum, and tensors and kernels that are too small to be seen are summed up. Data of more than
MOST_PLAIN bytes is compressed: browsers decompress it themselves.
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.report.markup import render, ticks, trusted, trusted_text
from tfswap.report.printed import FIGURES, device_rows, merged_rows, notes_of
from tfswap.report.summary import explains_floor, figures_of, levers_of, range_text, unit_of
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

if TYPE_CHECKING:
    from tfswap.report.report import Report
    from tfswap.report.rows import TensorRow

    Drawn = tuple[Report, Timeline | None]

MOST_BYTES = 8 << 20
MOST_PLAIN = 1 << 20
COLUMNS = 120_000
"""Columns of a chart's data, for zooming in on single kernels."""
DRAWN_COLUMNS = 1500
"""Columns of a chart as SVG."""
LEAST_COLUMNS = 5000
"""Columns of the data of a step on many devices."""
HEIGHT = 1000
HOLDS = 120_000
"""The number of a run's tensors and workspaces, the largest, that the page lists one by one."""
ROWS = 100_000
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
COLOURS = {"run": "activations", "again": "again", "wait": "wait", "copy": "copies"}
BLOCKS = {"run": "kernels", "again": "recomputed kernels", "wait": "waiting for a copy", "copy": "copies"}
"""The legend of the lanes' blocks, by kind."""


class Axes(NamedTuple):
    """What all charts of a page share.

    Attributes:
        width_s: the seconds that the width of a chart stands for.
        columns: the columns of a chart's data.
        drawn: those of a chart as SVG.
        holds: the most buffers of a run that the page lists.
    """

    width_s: float
    columns: int
    drawn: int
    holds: int

    @classmethod
    def of(cls, drawn: Sequence[Drawn], divisor: int = 1) -> Axes:
        """For these devices. The more there are, the fewer details each has, so that the page stays small.

        Args:
            divisor: details are divided by it too.
        """
        width_s = max((run.total_s for _, timeline in drawn for _, run in _runs(timeline)), default=0.0) or 1.0
        count = len(drawn)
        columns = max(LEAST_COLUMNS, COLUMNS // count) // divisor
        return cls(width_s, columns, max(500, DRAWN_COLUMNS // count), HOLDS // count // divisor)

    def states(self, run: Run) -> list[int]:
        """The states of a run that are drawn as SVG."""
        return sorted({column.state for column in run.columns(self.drawn, self.width_s)})


def page(report: Report, drawn: Sequence[Drawn]) -> str:
    """The whole page, with as many details as it has room for.

    Args:
        drawn: the report on each device, with its timeline. None: the device has no charts.
    """
    tensors = merged_rows(report.devices, rest=True)
    divisor = 1
    while len(text := _page(report, drawn, tensors, divisor)) > MOST_BYTES and divisor < LEAST_COLUMNS // 10:
        divisor *= 2
    return text


def _page(report: Report, drawn: Sequence[Drawn], tensors: Sequence[tuple[TensorRow, str]], divisor: int) -> str:
    """The page with details divided by `divisor`."""
    axes, names = Axes.of(drawn, divisor), _Names()
    shown, left_out = tensors[: ROWS // divisor], tensors[ROWS // divisor :]
    data = {
        "kinds": KINDS,
        "margin": MARGIN,
        "columns": axes.columns,
        "stack": STACK,
        "colours": COLOURS,
        "runs": [_run_data(run, axes, names) for _, timeline in drawn for _, run in _runs(timeline)],
        "rows": [_row(row, where if len(drawn) > 1 else "", names) for row, where in shown],
    }
    data["names"] = names.all
    packed = _packed(data)
    counts = Counter(tactic for row, _ in tensors for tactic in row.tactic.split(", "))
    return render(
        "report.html",
        **_devices(report, drawn, axes),
        title=report.title,
        tensors=bool(tensors),
        tactics=sorted(counts.items(), key=lambda item: (item[0] == "keep", item[0])),
        left_out=len(left_out),
        largest_left_out=max((row.nbytes for row, _ in left_out), default=0),
        data=_script_json(data) if packed is None else trusted_text(packed),
        is_packed=packed is not None,
        charts=trusted("charts.js"),
        search=trusted("search.js"),
        script=trusted("page.js"),
    )


def cell(report: Report, drawn: Sequence[Drawn], rows: int) -> str:
    """The output of a notebook's cell: the figures, the charts without details, and the first rows."""
    shown = [(row, where) for row, where in merged_rows(report.devices)[:rows]]
    return render("cell.html", **_devices(report, drawn, Axes.of(drawn)), rows=shown)


def _devices(report: Report, drawn: Sequence[Drawn], axes: Axes) -> dict[str, Any]:
    """The figures and charts of each device, and what they share."""
    return {
        "columns": axes.drawn,
        "height": HEIGHT,
        "figures": FIGURES,
        "figures_of_devices": device_rows(report.devices) if len(drawn) > 1 else [],
        "parts": [{**_summary(each), **_charts(each, timeline, axes)} for each, timeline in drawn],
        "notes": notes_of(report.devices),
        "unmodelled": list(dict.fromkeys(kernel for each, _ in drawn for kernel in each.unmodelled)),
    }


def _summary(report: Report) -> dict[str, Any]:
    """The answer, the main figures as cards, the others, and what would lower the smallest limit."""
    size = unit_of(report).text
    before, planned = report.baseline_peak_bytes, report.planned_peak_bytes
    change = f"{100 * (planned / before - 1):+.0f}% of memory" if before and report.kernels else "nothing is changed"
    measured, limit = report.measured_peak_bytes, report.memory_limit_bytes
    peak_row = ("not known", "not reported by the allocator")
    if measured is not None:
        peak_row = (size(measured), "by the allocator")
    cards = [
        ("peak before, predicted", size(before), range_text(report, size) or "the step as it is"),
        ("peak planned", size(planned), change),
        ("peak measured", *peak_row),
        ("memory limit", "none" if limit is None else size(limit), "" if report.keeps_limit else "NOT KEPT"),
        ("step time, predicted", f"x{report.time_ratio:.2f}", f"{report.costs} costs"),
    ]
    summary = [figure for figure in figures_of(report) if figure.label not in ON_CARDS]
    lowering: dict[str, Any] = {"reason": "", "levers": [], "lever_note": ""}
    if explains_floor(report):
        lowering = {"reason": report.reason(), "levers": levers_of(report), "lever_note": report.floor.note}
    shown = {"report": report, "answer": report.answer(), "cards": cards, "summary": summary}
    return {**shown, "size": size, "unit": unit_of(report).name, **lowering}


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
        "runs": [{**_chart(title, run, axes, top), "top": top, "marks": shown} for title, run in runs],
    }


def _y(nbytes: float, top: float) -> int:
    return round(HEIGHT * (1 - nbytes / top))


def _chart(title: str, run: Run, axes: Axes, top: float) -> dict[str, Any]:
    """One run's memory, stacked, and its lanes."""
    columns = run.columns(axes.drawn, axes.width_s)
    end = max(1, round(run.total_s * axes.drawn / axes.width_s))
    states = axes.states(run)
    kinds = dict(zip(states, run.at(states), strict=True))
    areas: list[tuple[str, str]] = []
    for layer in range(len(STACK), 0, -1):  # each area reaches down to zero, so the highest is drawn first
        edge = [(c, _y(sum(kinds[state][k] for k in STACK[:layer]), top)) for c, state in columns]
        areas.append((KINDS[STACK[layer - 1]], _area(edge, end)))
    drawn = {block.kind for block in run.blocks}
    blocks = _merged(run, axes.drawn, axes.width_s)
    lanes = [lane for lane in LANES if run.blocks and (lane != COPIES_BETWEEN or any(b[0] == lane for b in blocks))]
    return {
        "title": title,
        "peak_bytes": run.peak_bytes,
        "total_s": run.total_s,
        "areas": areas,
        "byte_ticks": [(t, _y(t, top)) for t in _byte_ticks(top)],
        "lanes": [(lane, _bars([b for b in blocks if b[0] == lane], axes.drawn / axes.width_s)) for lane in lanes],
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


def _merged(run: Run, columns: int, width_s: float) -> list[Bar]:
    """The blocks of all lanes. Neighbours that are too narrow for this number of columns are merged."""
    narrow_s = BLOCK_COLUMNS * width_s / columns
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


def _bars(blocks: Iterable[Bar], per_s: float) -> list[tuple[str, str]]:
    """The SVG paths of a lane's blocks, each with its colour."""
    paths: dict[str, list[str]] = {}
    for _, kind, _, start, end, _ in blocks:
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
    """The details of a run for page.js, column by column: numbers that rise as their differences, which are short.

    A tensor's begin and end are numbers of drawn columns. Tensors that are in none are left out.
    """
    columns = run.columns(axes.columns, axes.width_s)
    states = [column.state for column in columns]
    kinds = run.at(states)
    largest = sorted(run.record.holds, key=lambda hold: -hold.nbytes)[: axes.holds]
    shown = [(bisect_left(states, h.first), bisect_left(states, h.last), h) for h in largest if h.nbytes]
    shown = sorted((each for each in shown if each[0] < each[1]), key=lambda each: (each[0], each[1], -each[2].nbytes))
    per_s = axes.columns / axes.width_s
    blocks = _merged(run, axes.columns, axes.width_s)
    return {
        "width_s": axes.width_s,
        "count": max(1, round(run.total_s * per_s)),
        "peak": max(columns, key=lambda column: run.record.in_use_bytes[column.state]).column,
        "at": _steps(column.column for column in columns),
        "kinds": [_steps(row[kind] for row in kinds) for kind in range(len(KINDS))],
        "name": [names.number(run.name(h)) for *_, h in shown],
        "kind": [run.kind(h) for *_, h in shown],
        "nbytes": [h.nbytes for *_, h in shown],
        "begin": _steps(begin for begin, *_ in shown),
        "length": [end - begin for begin, end, _ in shown],
        "blocks": [
            [lane, kind, names.number(name), round(start * per_s, 2), round((end - start) * per_s, 2), count]
            for lane, kind, name, start, end, count in blocks
        ],
    }


def _steps(numbers: Iterable[int]) -> list[int]:
    """Each number's difference from the one before."""
    return [number - before for before, number in pairwise((0, *numbers))]


def _packed(data: dict[str, Any]) -> str | None:
    """The data compressed, as text; None for data that is small."""
    text = json.dumps(data, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(text, 9)).decode() if len(text) > MOST_PLAIN else None


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
