"""A report as text: the answer, the figures, what would lower the smallest limit, the tensors with a tactic or of the
largest size, and those alive at the peak.

A step on several devices has a row of figures for each. Tensors that several devices plan alike have one row, which
names these devices: replicas have the names of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from tfswap.ir.custom_ops import TO_DEVICE
from tfswap.report.block_rows import HEADS as BLOCK_HEADS
from tfswap.report.block_rows import texts_of
from tfswap.report.summary import LEVERS, explains_floor, figures_of, levers_of, unit_of
from tfswap.report.tables import figures, listing, stacked
from tfswap.support.sizes import Unit, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from tfswap.report.report import Report
    from tfswap.report.rows import TensorRow

T = TypeVar("T")

HEADS = ("bytes", "tactic", "tensor", "why")
ROWS_SHOWN = 20
ALIVE_SHOWN = 10
BLOCKS_SHOWN = 8
FIGURES = (
    "device",
    "memory limit",
    "peak before, predicted",
    "peak planned",
    "peak measured",
    "persistent",
    "smallest limit",
    "swapped",
    "recomputed",
    "host memory",
    "predicted time",
)
"""The columns of the table of devices."""

ALIKE = "nodes that compute alike on several devices have the names of the first of these devices"

RECEIVED = "tensors named tfswap/NODE_NUMBER/received are copies of that result of a node on another device"


def printed(report: Report) -> RenderableType:
    """The whole report: the answer, the figures, the tensors."""
    reports = report.devices
    several = len(reports) > 1
    parts: list[RenderableType] = []
    for name, each in reports.items():
        answer = each.answer()
        parts.append(f"{name}: {answer}" if several else answer)
    parts += ["", listing(FIGURES, device_rows(reports)) if several else figures(figures_of(report))]
    for name, each in reports.items():
        parts += _lowering(each, f" on {name}" if several else "")
    if rows := merged_rows(reports):
        size = Unit.of(max(row.nbytes for row, _ in rows)).text
        shown = [(size(row.nbytes), row.tactic, row.name, row.reason, where) for row, where in rows[:ROWS_SHOWN]]
        if rest := len(rows) - len(shown):
            shown.append(("", "", f"and {rest} more", "", ""))
        parts += ["", _listing(reports, HEADS, shown)]
    for each in reports.values():
        parts += _fused(each)
    alive = _merged({name: each.alive_at_peak for name, each in reports.items()}, lambda each: each)
    alive.sort(key=lambda each: -each[0][1])
    more = sum(nbytes for (_, nbytes), _ in alive[ALIVE_SHOWN:])
    size = Unit.of(max([more, *(nbytes for (_, nbytes), _ in alive)])).text
    there = [(size(nbytes), name, where) for (name, nbytes), where in alive[:ALIVE_SHOWN]]
    if more:
        there.append((size(more), f"in {len(alive) - ALIVE_SHOWN} more", ""))
    parts += ["", _listing(reports, ("bytes", "alive at the peak"), there)]
    notes = [f"note: {note}" for note in notes_of(reports)]
    return stacked(*parts, *([""] if notes else []), *notes)


def _lowering(report: Report, where: str) -> list[RenderableType]:
    """Why no limit is smaller, and what would lower it."""
    if not explains_floor(report):
        return []
    parts: list[RenderableType] = ["", f"{report.reason()[:-1]}{where}."]
    if rows := levers_of(report):
        unit = unit_of(report).name
        heads = (f"to, {unit}", LEVERS[1], f"by, {unit}", *LEVERS[3:])
        parts.append(listing(heads, rows, (heads[2],)))
    return [*parts, *([f"{report.floor.note}."] if report.floor.note else [])]


def _fused(report: Report) -> list[RenderableType]:
    """The blocks that XLA compiles: those that save the most."""
    if not report.blocks:
        return []
    rows = texts_of(report.blocks[:BLOCKS_SHOWN])
    if rest := len(report.blocks) - len(rows):
        rows.append(("", f"and {rest} more", "", "", ""))
    return ["", listing(BLOCK_HEADS, rows)]


def device_rows(reports: Mapping[str, Report]) -> list[tuple[str, ...]]:
    """The figures of each device, under FIGURES."""
    size = max((unit_of(each) for each in reports.values()), key=lambda unit: unit.nbytes).text
    return [(name, *_figures(each, size)) for name, each in reports.items()]


def merged_rows(reports: Mapping[str, Report], *, rest: bool = False) -> list[tuple[TensorRow, str]]:
    """The rows of all devices, each with the devices that it is of: those with a tactic first, then the largest.

    Args:
        rest: the tensors that were not considered as well.
    """
    rows = {name: (*each.rows, *each.others) if rest else each.rows for name, each in reports.items()}
    merged = _merged(rows, lambda row: (row.name, row.op, row.nbytes, row.tactic))  # a reason may have each one's time
    return sorted(merged, key=lambda row: (row[0].tactic == "keep", -row[0].nbytes))


def notes_of(reports: Mapping[str, Report]) -> list[str]:
    """The notes of all devices, each once, and those on names where there are several."""
    notes = [note for each in reports.values() for note in each.notes]
    if len(reports) > 1:
        notes.append(ALIKE)
        notes += [RECEIVED for each in reports.values() for row in each.rows if row.op == TO_DEVICE]
    return list(dict.fromkeys(notes))


def _figures(report: Report, size: Callable[[int], str]) -> tuple[str, ...]:
    limit, measured = report.memory_limit_bytes, report.measured_peak_bytes
    kept = "" if report.keeps_limit else " NOT KEPT"
    return (
        "none" if limit is None else size(limit) + kept,
        size(report.baseline_peak_bytes),
        size(report.planned_peak_bytes),
        "not known" if measured is None else size(measured),
        size(report.persistent_bytes),
        size(report.floor_bytes),
        _amount(report.swapped, size),
        _amount(report.recomputed, size),
        size(report.host_bytes),
        f"x{report.time_ratio:.2f}, {report.costs}",
    )


def _amount(rows: Sequence[TensorRow], size: Callable[[int], str]) -> str:
    return f"{size(sum(row.nbytes for row in rows))} in {format_count(len(rows), 'tensor')}" if rows else "none"


def _merged(by_device: Mapping[str, Iterable[T]], alike: Callable[[T], Hashable]) -> list[tuple[T, str]]:
    """The first of those that are alike, with the names of their devices. Those of one device are never merged."""
    found: dict[tuple[Hashable, int], tuple[T, list[str]]] = {}
    for name, each in by_device.items():
        seen: Counter[Hashable] = Counter()
        for one in each:
            key = alike(one)
            found.setdefault((key, seen[key]), (one, []))[1].append(name)
            seen[key] += 1
    return [(one, ", ".join(names)) for one, names in found.values()]


def _listing(reports: Mapping[str, Report], heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of rows whose last column is of devices; it is left out where there is one device."""
    if len(reports) > 1:
        return listing((*heads, "on"), rows)
    return listing(heads, [row[:-1] for row in rows])
