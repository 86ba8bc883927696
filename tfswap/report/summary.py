"""The main figures of a report in words: the answer first, then why no limit is smaller and what would lower it.

All sizes of a report are in one unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tfswap.ir.permits import STATE
from tfswap.report.block_rows import figure_of
from tfswap.support.sizes import Unit, format_bytes, format_count, parse_limit

if TYPE_CHECKING:
    from tfswap.report.report import Report

NO_BACKWARD = "no backward pass: it updates no variable and computes no gradient, so next to nothing waits"


class Figure(NamedTuple):
    """A row of the figures: what it is, its bytes in the unit of all rows ("" for none), and what there is to say."""

    label: str
    amount: str
    text: str = ""

    @property
    def joined(self) -> str:
        """The amount with the text."""
        separator = "" if not self.amount or not self.text or self.text[0] in ",;:" else " "
        return f"{self.amount}{separator}{self.text}"


def unit_of(report: Report) -> Unit:
    """The unit of all figures of a report."""
    limit = report.memory_limit_bytes or 0
    return Unit.of(
        max(report.planned_peak_bytes, report.baseline_peak_bytes, min(limit, 2 * report.planned_peak_bytes))
    )


def summary_of(report: Report) -> list[tuple[str, str]]:
    """The main figures of a report, as (label, text)."""
    return [(figure.label, figure.joined) for figure in figures_of(report)]


def answer_of(report: Report) -> str:
    """Whether the step fits its limit, by how much, and at what cost."""
    size = unit_of(report).text
    limit, peak = report.memory_limit_bytes, report.planned_peak_bytes
    if limit is None:
        cost = f" at {report.time_ratio:.2f} of the time, predicted" if report.kernels else ": nothing is changed"
        return f"Peaks at {size(peak)}{cost}. No limit was given."
    if not report.keeps_limit:
        short = report.floor_bytes - limit
        return f"Does not fit {size(limit)}: the smallest limit is {size(report.floor_bytes)}, {size(short)} more."
    room = f"{size(limit - peak)} to spare"
    if not report.kernels:
        return f"Fits {size(limit)} as it is, with {room}: nothing is changed."
    return f"Fits {size(limit)} with {room}, at {report.time_ratio:.2f} of the time, predicted."


def reason_of(report: Report) -> str:
    """Why no limit is smaller than the floor."""
    size = unit_of(report).text
    if not report.largest_kernel:
        return f"No limit below {size(report.floor_bytes)} can be kept."
    rows = (*report.rows, *report.others)
    source = next((row.source for row in rows if row.source and _node(row.name) == report.largest_kernel), None)
    where = f" ({source})" if source else ""
    return (
        f"No limit below {size(report.floor_bytes)} can be kept: {report.largest_kernel}{where} takes "
        f"{size(report.working_set_bytes)} while it runs, and {size(report.persistent_bytes)} are persistent."
    )


def explains_floor(report: Report) -> bool:
    """Whether printed reports say what would lower the smallest limit: not where the step fits as it is."""
    return bool(report.kernels) or not report.keeps_limit


def levers_of(report: Report) -> list[tuple[str, str, str, str, str]]:
    """What would lower the smallest limit: that limit then, how that is known, by how much, the change, what to do."""
    number = unit_of(report).number
    return [
        (number(each.floor_bytes), each.known, number(report.floor.nbytes - each.floor_bytes), each.what, each.how)
        for each in report.levers
    ]


LEVERS = ("to", "", "by", "with", "how")
"""The heads of `levers_of`. The unit of the numbers follows the first two."""


def _node(tensor: str) -> str:
    return tensor.rpartition(":")[0]


def _kept_text(report: Report) -> str:
    return "" if report.keeps_limit else ": NOT KEPT, see the smallest limit"


def _share_text(report: Report, size: Callable[[int], str]) -> str:
    """What the limit is a share of."""
    if not report.requested_share:
        return ""
    of = f"{report.requested_share} of the likely peak before ({size(report.baseline_peak_bytes)})"
    share_bytes = parse_limit(report.requested_share, lambda: report.baseline_peak_bytes)
    if report.memory_limit_bytes == share_bytes:
        return f"is {of}"
    return f"where {of} is {size(share_bytes)}"


def range_text(report: Report, size: Callable[[int], str]) -> str:
    """The range of peaks."""
    lowest, highest = report.baseline.lowest_bytes, report.baseline.highest_bytes
    return f"in runs {size(lowest)} to {size(highest)}" if lowest < highest else ""


def figures_of(report: Report) -> list[Figure]:
    """The main figures of a report, in one unit."""
    size = unit_of(report).text
    limit = report.memory_limit_bytes
    measured, more = report.measured_peak_bytes, report.baseline.overlapping_bytes
    moved = sum(row.cost_bytes for row in report.swapped)
    swapped = f"{format_count(len(report.swapped), 'tensor')}, {size(moved)} travel per step"
    concurrent = f"; iterations that run concurrently hold up to {size(more)} more" if more else ""
    kernel = f"({report.floor_bytes} bytes)"
    if report.largest_kernel:
        kernel = f"{kernel}; {report.largest_kernel} takes {size(report.working_set_bytes)} of it"
    return [
        *([] if report.trains else [Figure("step", "", NO_BACKWARD)]),
        Figure("memory limit", "", "none")
        if limit is None
        else Figure("memory limit", size(limit), f"{_share_text(report, size)}{_kept_text(report)}"),
        Figure("peak before, predicted", size(report.baseline_peak_bytes), f"{range_text(report, size)}{concurrent}"),
        Figure("peak planned", size(report.planned_peak_bytes)),
        *([] if measured is None else [Figure("peak measured", size(measured))]),
        Figure("persistent", size(report.persistent_bytes)),
        Figure("smallest limit", size(report.floor_bytes), kernel),
        *(_reuse(report, size) if report.kernels else []),
        *(_workspaces(report, size) if report.convolutions else []),
        Figure("swapped", size(sum(row.nbytes for row in report.swapped)), f"in {swapped}"),
        Figure("recomputed", size(sum(row.nbytes for row in report.recomputed)), _recomputed_text(report)),
        *([_encoded(report, size)] if report.encoded else []),
        *([Figure("in slices", "", _sliced_text(report))] if report.sliced else []),
        *([Figure("fused", "", figure_of(report.blocks))] if report.blocks else []),
        Figure("host memory", size(report.host_bytes)),
        *([_variables(report, size)] if report.at_home_bytes else []),
        *([Figure("disk", size(report.disk_bytes))] if report.disk_bytes else []),
        Figure("predicted time", "", f"x{report.time_ratio:.2f}, {report.costs}"),
        *([Figure("proven", "", _bounds_text(report, size))] if report.kernels else []),
    ]


def headline_of(report: Report) -> str:
    """One line: the peak, and the tactics and time that it needs."""
    return _peak_text(report) if report.trains else f"{_peak_text(report)} ({NO_BACKWARD})"


def _bounds_text(report: Report, size: Callable[[int], str]) -> str:
    if report.bounds is None:
        return "nothing: loops, conditionals and kernels in slices have no bound"
    slower = 100 * (report.seconds / report.bounds.seconds - 1)
    return (
        f"at most {slower:.1f}% slower than any plan for this limit; none as fast peaks below "
        f"{size(report.bounds.peak_bytes)}"
    )


def _reuse(report: Report, size: Callable[[int], str]) -> list[Figure]:
    within, between = report.reuse.within_layers_bytes, report.reuse.between_layers_bytes
    return [Figure("reuse", size(within), f"by buffer forwarding, {size(between)} by eviction")]


def _workspaces(report: Report, size: Callable[[int], str]) -> list[Figure]:
    least, count = report.convolutions[0], format_count(len(report.convolutions), "convolution")
    return [Figure("workspaces", size(least.free_bytes), f"at least for each of {count} ({least.name} has least)")]


def _recomputed_text(report: Report) -> str:
    runs = "kernel runs" if report.reruns == 1 else "kernels run"
    return f"in {format_count(len(report.recomputed), 'tensor')}, {report.reruns} {runs} again per step"


def _sliced_text(report: Report) -> str:
    """The number of kernels in slices of each size, and of those that run once, in bounded memory."""
    counts = ((format_count(len(each.kernels), "kernel"), -(-each.of // each.rows)) for each in report.sliced)
    return "; ".join(
        f"{kernels} in {count} slices of rows" if count > 1 else f"{kernels} with sums block by block"
        for kernels, count in counts
    )


def _peak_text(report: Report) -> str:
    if not report.keeps_limit:
        return f"peak {format_bytes(report.planned_peak_bytes)} is over the limit"
    if not report.kernels:
        return f"peak {format_bytes(report.planned_peak_bytes)} is within the limit: nothing is changed"
    swapped = f"{format_count(len(report.swapped), 'tensor')} swapped"
    done = f"{swapped}, {len(report.recomputed)} recomputed, {len(report.encoded)} encoded"
    return f"peak {format_bytes(report.planned_peak_bytes)}, {done}"


def _encoded(report: Report, size: Callable[[int], str]) -> Figure:
    """The encoded tensors, and their bytes before and after."""
    encoded, reduced = report.encoded, report.reduced
    before, after = sum(row.nbytes for row in encoded), sum(row.encoded_bytes or 0 for row in encoded)
    rounded = f"; {len(reduced)} of them rounded, so that gradients differ" if reduced else ""
    return Figure("encoded", size(before), f"in {format_count(len(encoded), 'tensor')}, read as {size(after)}{rounded}")


def _variables(report: Report, size: Callable[[int], str]) -> Figure:
    """The variables at home on the host, and their copies."""
    there = [row for row in report.variables if row.tactic == STATE]
    moved, count = sum(row.cost_bytes for row in there), format_count(len(there), "variable")
    text = f"in {count}, {size(moved)} travel per step"
    if on_disk := [row for row in there if row.home == "disk"]:
        stored, moved = sum(row.nbytes for row in on_disk), sum(row.cost_bytes for row in on_disk)
        text += f"; on disk {size(stored)}, of which {size(moved)} travel"
    return Figure("variables there", size(report.at_home_bytes), text)
