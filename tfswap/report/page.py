"""A report as one page that needs no network: memory over the step, what runs when, and every tensor with its reason.

The charts are SVG that is drawn here, and stretch with the page; labels are HTML and do not. `page.js` adds what a
pointer asks for. Whatever the graph's size, a page stays below MOST_BYTES: stretches of time are columns, of which each
shows the most in it, and of tensors and kernels that are too small to be seen only the sums are there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfswap.report.markup import document, escaped, fields, format_seconds, fragment, ticks
from tfswap.report.timeline import COMPUTE, COPIES_IN, COPIES_OUT, KINDS, MARGIN, OTHERS, Block, Run, Timeline
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.report.report import Report
    from tfswap.report.rows import TensorRow

MOST_BYTES = 6 << 20
COLUMNS = 3000
"""Stretches of time that a chart is drawn of: zoomed in, a part of it still has a thousand."""
HEIGHT = 1000
HOLDS = 4000
"""Tensors and workspaces of a run, the largest, that a pointer is told of one by one."""
ROWS = 10_000
"""Tensors of the table: all that something is done about, and the largest of the others."""
NAME_LENGTH, REASON_LENGTH = 160, 400
BLOCK_COLUMNS = 0.7
"""Blocks of a lane that are narrower are drawn as one."""
LIMIT_SHOWN = 1.6
"""A limit further above the highest peak than this many times is not worth the room in the chart."""
STACK = (OTHERS, *range(OTHERS), MARGIN)
"""From the bottom to the top: persistent bytes first."""
ON_CARDS = ("memory limit", "peak before, predicted", "peak planned", "peak measured", "predicted time")
LANES = (COMPUTE, COPIES_OUT, COPIES_IN)
COLOURS = {"run": "activations", "again": "again", "wait": "wait", "copy": "accent"}
ZOOM = (
    "<div class=zoom><span class=soft>drag to zoom</span>"
    + "".join(
        f"<button data-zoom={by} aria-label='{what}' title='{what}'>{sign}</button>"
        for by, what, sign in (
            ("in", "zoom in", "+"),
            ("out", "zoom out", "\N{MINUS SIGN}"),
            ("all", "show the whole step", "all"),
        )
    )
    + "</div>"
)
"""Shown where the page's script runs."""
BLOCKS = {"run": "kernels", "again": "recomputed kernels", "wait": "waiting for a copy", "copy": "copies"}
"""What the blocks of the lanes are, by kind."""
SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")


def page(report: Report, timeline: Timeline | None) -> str:
    """The whole page.

    Args:
        timeline: of the step; without one there are no charts.
    """
    tensors = sorted((*report.rows, *report.others), key=lambda row: (row.tactic == "keep", -row.nbytes))
    runs, charts = _charts(report, timeline)
    names = _Names()
    data = {
        "kinds": KINDS,
        "margin": MARGIN,
        "columns": COLUMNS,
        "width": BLOCK_COLUMNS,
        "runs": [run(names) for run in runs],
        "rows": [_row(row, names) for row in tensors[:ROWS]],
    }
    data["names"] = names.all
    largest = format_bytes(max((row.nbytes for row in tensors[ROWS:]), default=0))
    rest = f"{len(tensors) - ROWS} more are left out, of {largest} at most." if tensors[ROWS:] else ""
    heads = (("n", "bytes"), ("", "tactic"), ("", "tensor"), ("", "why"), ("n", "travels"), ("n", "recomputing"))
    columns = "".join(f"<th scope=col class='{c}'><button>{text}</button></th>" for c, text in heads)
    table = (
        "<h2>Every tensor</h2><p class=soft>Choose a tensor to see in the charts when it is in memory.</p>"
        f"<div class=tools>{_tactics(tensors)}<input type=search placeholder='name, op, tactic or source' "
        "aria-label='filter'><span class='soft found'></span></div><table class=tensors><thead><tr>"
        f"{columns}</tr></thead><tbody></tbody></table><button class=more>show more</button><p class=soft>{rest}</p>"
    )
    content = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return document(
        report.title,
        f"{_top(report)}{charts}{table if tensors else ''}{_notes(report)}",
        f"<script type=application/json id=data>{content}</script><script>{SCRIPT}</script>",
    )


def cell(report: Report, timeline: Timeline | None, rows: int) -> str:
    """What a notebook shows: the figures, the charts as they stand, and the first rows."""
    _, charts = _charts(report, timeline)
    body = "".join(
        f"<tr><td class=n>{format_bytes(r.nbytes)}</td><td>{r.tactic}</td><td class=name>{escaped(r.name)}</td>"
        f"<td class=why>{escaped(r.reason)}</td></tr>"
        for r in report.rows[:rows]
    )
    heads = "<thead><tr><th class=n>bytes</th><th>tactic</th><th>tensor</th><th>why</th></tr></thead>"
    table = f"<table>{heads}<tbody>{body}</tbody></table>" if body else ""
    return fragment(f"{_top(report)}{charts}{table}{_notes(report)}")


def _tactics(tensors: Sequence[TensorRow]) -> str:
    """A switch for each tactic that some tensor has."""
    counts = Counter(tactic for row in tensors for tactic in row.tactic.split(", "))
    return "".join(
        f"<button class=switch data-tactic={tactic} aria-pressed=false>{tactic} "
        f"<span class=soft>{count}</span></button>"
        for tactic, count in sorted(counts.items(), key=lambda item: (item[0] == "keep", item[0]))
    )


def _top(report: Report) -> str:
    """What matters most, and then the rest."""
    before, planned = report.baseline_peak_bytes, report.planned_peak_bytes
    change = f"{100 * (planned / before - 1):+.0f}% of memory" if before and report.kernels else "nothing is changed"
    measured, limit = report.measured_peak_bytes, report.memory_limit_bytes
    told = ("not known", "not reported by the allocator")
    if measured is not None:
        told = (format_bytes(measured), "by the allocator")
    cards = [
        ("peak before, predicted", format_bytes(before), "the step as it is"),
        ("peak planned", format_bytes(planned), change),
        ("peak measured", *told),
        ("memory limit", "none" if limit is None else format_bytes(limit), "" if report.keeps_limit else "NOT KEPT"),
        ("step time, predicted", f"x{report.time_ratio:.2f}", f"{report.costs} costs"),
    ]
    shown = "".join(
        f"<div class=card><span class=soft>{label}</span><b>{text}</b><span class=soft>{more}</span></div>"
        for label, text, more in cards
    )
    facts = fields(row for row in report.summary() if row[0] not in ON_CARDS)
    return f"<p class=soft>{escaped(report.headline())}</p><div class=cards>{shown}</div>{facts}"


def _notes(report: Report) -> str:
    told = [f"<p class=soft>{escaped(note)}</p>" for note in report.notes]
    if report.unmodelled:
        told.append(
            f"<p class=soft>Of {len(report.unmodelled)} kernels the memory is known by a bound only, such as "
            f"{escaped(report.unmodelled[0])}: the plan keeps the limit with as much and without.</p>"
        )
    return "<h2>Notes</h2>" + "".join(told) if told else ""


RunData = Callable[["_Names"], dict[str, Any]]


def _charts(report: Report, timeline: Timeline | None) -> tuple[list[RunData], str]:
    """What a pointer may ask of each run, and the charts."""
    if timeline is None:
        return [], ""
    runs = [("Before: the step as it is", timeline.before)]
    if timeline.after is not None:
        runs.append(("Planned", timeline.after))
    width_s = max(run.total_s for _, run in runs) or 1.0
    lines = [("limit", report.memory_limit_bytes), ("measured", report.measured_peak_bytes)]
    peak = max(run.peak_bytes for _, run in runs)
    shown = [(name, nbytes) for name, nbytes in lines if nbytes is not None and nbytes <= LIMIT_SHOWN * peak]
    top = 1.04 * max(peak, *(nbytes for _, nbytes in shown), 1)
    last = runs[-1][1]
    at_peak = last.at([last.record.peak_state])[0]
    legend = "".join(
        f"<li><i style='--c:var(--{KINDS[k]})'></i>{KINDS[k]} <span class=soft>{format_bytes(at_peak[k])}</span></li>"
        for k in reversed(STACK)
        if any(any(row[k] for row in run.at(_states(run, width_s))) for _, run in runs)
    )
    dashes = {"limit": "dashed", "measured": "dotted"}
    legend += "".join(
        f"<li><i class=rule style='--c:var(--{name});--dash:{dashes[name]}'></i>{name} "
        f"<span class=soft>{format_bytes(nbytes)}</span></li>"
        for name, nbytes in lines
        if nbytes is not None
    )
    marks = "".join(
        f"<line class={name} x1=0 x2={COLUMNS} y1={_y(nbytes, top)} y2={_y(nbytes, top)} />" for name, nbytes in shown
    )
    pictures = "".join(
        f"<h2>{title} <span class=soft>peak {format_bytes(run.peak_bytes)}, {format_seconds(run.total_s)}</span>"
        f"</h2>{_plot(run, width_s, top, marks)}"
        for title, run in runs
    )
    legend = f"<h2>Device memory over one step</h2><ul class=legend>{legend}</ul>"
    which = "planned peak" if len(runs) > 1 else "peak"
    legend += (
        f"<p class=soft>Simulated. The number at each kind is its bytes at the {which}; optimizers' arithmetic counts "
        "as gradients; the margin is what the predicted peak has above the simulated one.</p>"
    )
    return [_teller(run, width_s) for _, run in runs], legend + pictures


def _states(run: Run, width_s: float) -> list[int]:
    return sorted({column.state for column in run.columns(COLUMNS, width_s)})


def _y(nbytes: float, top: float) -> int:
    return round(HEIGHT * (1 - nbytes / top))


def _plot(run: Run, width_s: float, top: float, marks: str) -> str:
    """One run's memory, stacked, and its lanes."""
    columns = run.columns(COLUMNS, width_s)
    end = max(1, round(run.total_s * COLUMNS / width_s))
    states = _states(run, width_s)
    kinds = dict(zip(states, run.at(states), strict=True))
    areas: list[str] = []
    for layer in range(len(STACK), 0, -1):  # each is drawn down to the ground, the highest first
        edge = [(c, _y(sum(kinds[state][k] for k in STACK[:layer]), top)) for c, state in columns]
        areas.append(_area(edge, end, KINDS[STACK[layer - 1]]))
    grid = "".join(f"<line class=grid x1=0 x2={COLUMNS} y1={_y(t, top)} y2={_y(t, top)} />" for t in _byte_ticks(top))
    labels = "".join(
        f"<span class='tick y' style='top:{_y(t, top) / HEIGHT:.2%}'>{format_bytes(t)}</span>"
        for t in _byte_ticks(top)
        if t
    )
    times = "".join(
        f"<span class='tick x' style='left:{t / width_s:.2%}'>{format_seconds(t)}</span>"
        for t in ticks(0, width_s)
        if t <= 0.97 * width_s
    )
    lanes = "".join(
        f"<div class=lane>{_svg(_bars([b for b in _drawn(run, width_s) if b[0] == lane], width_s), 10)}"
        f"<span class='tick y'>{lane}</span></div>"
        for lane in LANES
        if run.blocks
    )
    drawn = {block.kind for block in run.blocks}
    key = "".join(
        f"<li class=soft><i style='--c:var(--{COLOURS[kind]})'></i>{what}</li>"
        for kind, what in BLOCKS.items()
        if kind in drawn
    )
    told = (
        f"memory in use over the step, at most {format_bytes(run.peak_bytes)}; arrow keys move the cursor, plus and "
        "minus zoom, zero shows the whole step"
    )
    return (
        f"<div class=plot>{ZOOM}<div class=box tabindex=0 role=img aria-label='{told}'>"
        f"{_svg(''.join(areas) + grid + marks, HEIGHT)}{labels}</div>"
        f"<div class=lanes>{lanes}</div><div class=times>{times}</div>{key and f'<ul class=legend>{key}</ul>'}</div>"
        "<div class=read></div>"
    )


def _svg(content: str, height: int) -> str:
    return f"<svg viewBox='0 0 {COLUMNS} {height}' preserveAspectRatio=none aria-hidden=true>{content}</svg>"


def _area(edge: Sequence[tuple[int, int]], end: int, kind: str) -> str:
    path: list[str] = []
    before = None
    for x, y in edge:
        if y != before:
            path.append(f"H{x}V{y}" if path else f"M{x} {HEIGHT}V{y}")
            before = y
    return f"<path fill='var(--{kind})' d='{''.join(path)}H{end}V{HEIGHT}Z'/>"


Drawn = tuple[str, str, str, float, float, int]
"""Lane, kind, name, start, end, and how many blocks it stands for."""


def _drawn(run: Run, width_s: float) -> list[Drawn]:
    """The blocks of all lanes; of those too narrow to be seen, neighbours are one while that is narrow."""
    narrow_s = BLOCK_COLUMNS * width_s / COLUMNS
    found: list[Drawn] = []
    for lane in LANES:
        merged: list[Drawn] = []
        for block in (b for b in run.blocks if b.lane == lane):
            if merged and block.end_s - merged[-1][3] < narrow_s:
                merged[-1] = _joined(merged[-1], block)
            else:
                merged.append((block.lane, block.kind, block.name, block.start_s, block.end_s, 1))
        found += merged
    return found


def _joined(before: Drawn, block: Block) -> Drawn:
    lane, kind, name, start, end, count = before
    if block.end_s - block.start_s > end - start:
        kind, name = block.kind, block.name
    return lane, kind, name, start, block.end_s, count + 1


def _bars(blocks: Iterable[Drawn], width_s: float) -> str:
    paths: dict[str, list[str]] = {}
    for _, kind, _, start, end, _ in blocks:
        x, width = start / width_s * COLUMNS, max((end - start) / width_s * COLUMNS, BLOCK_COLUMNS / 2)
        paths.setdefault(kind, []).append(f"M{x:.1f} 1h{width:.1f}v8h-{width:.1f}z")
    return "".join(f"<path fill='var(--{COLOURS[kind]})' d='{''.join(d)}'/>" for kind, d in paths.items())


def _byte_ticks(top: float) -> list[int]:
    """Round sizes up to `top`, of a unit that leaves few digits."""
    unit = next((u for u in (1 << 30, 1 << 20, 1 << 10) if top >= 2 * u), 1)
    return [round(t * unit) for t in ticks(0, top / unit, 7)]


class _Names:
    """Names, and other text that comes again and again, by number: each is in the page once."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def number(self, name: str, length: int = NAME_LENGTH) -> int:
        return self._number.setdefault(_clipped(name, length), len(self._number))

    @property
    def all(self) -> list[str]:
        return list(self._number)


def _teller(run: Run, width_s: float) -> RunData:
    """What a pointer may ask of a run, as page.js takes it."""

    def told(names: _Names) -> dict[str, Any]:
        columns = run.columns(COLUMNS, width_s)
        states = _states(run, width_s)
        kinds = dict(zip(states, run.at(states), strict=True))
        largest = sorted(run.record.holds, key=lambda hold: -hold.nbytes)[:HOLDS]
        return {
            "width_s": width_s,
            "count": max(1, round(run.total_s * COLUMNS / width_s)),
            "peak": next(c.column for c in columns if run.record.in_use_bytes[c.state] == run.record.peak_bytes),
            "columns": [[column, state, *kinds[state]] for column, state in columns],
            "holds": [[names.number(run.name(h)), run.kind(h), h.nbytes, h.first, h.last] for h in largest if h.nbytes],
            "blocks": [
                [lane, kind, names.number(name), float(f"{start:.5g}"), float(f"{end:.5g}"), count]
                for lane, kind, name, start, end, count in _drawn(run, width_s)
            ],
        }

    return told


def _row(row: TensorRow, names: _Names) -> dict[str, Any]:
    return {
        "name": names.number(row.name),
        "op": names.number(row.op),
        "nbytes": row.nbytes,
        "tactic": row.tactic,
        "reason": names.number(row.reason, REASON_LENGTH),
        "moved": row.cost_bytes,
        "cost_s": row.cost_s,
        "source": names.number(row.source or ""),
    }


def _clipped(text: str, length: int) -> str:
    """`text`, without its middle where it is longer."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
