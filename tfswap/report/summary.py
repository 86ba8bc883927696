"""The main figures of a report in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfswap.ir.permits import STATE
from tfswap.support.sizes import format_bytes, format_count

if TYPE_CHECKING:
    from tfswap.report.report import Report

NO_BACKWARD = "no backward pass: it updates no variable and computes no gradient, so next to nothing waits"


def summary_of(report: Report) -> list[tuple[str, str]]:
    """The main figures of a report, as (label, text)."""
    limit = "none" if report.memory_limit_bytes is None else format_bytes(report.memory_limit_bytes)
    moved = sum(row.cost_bytes for row in report.swapped)
    return [
        *([] if report.trains else [("step", NO_BACKWARD)]),
        ("memory limit", limit if report.keeps_limit else f"{limit}: NOT KEPT, see the smallest limit"),
        ("peak before, predicted", _before_text(report)),
        ("peak planned", format_bytes(report.planned_peak_bytes)),
        *([] if (peak := report.measured_peak_bytes) is None else [("peak measured", format_bytes(peak))]),
        ("persistent", format_bytes(report.persistent_bytes)),
        ("smallest limit", _floor_text(report)),
        *([("reuse", _reuse_text(report))] if report.kernels else []),
        *([("workspaces", _workspaces_text(report))] if report.convolutions else []),
        ("swapped", f"{format_count(len(report.swapped), 'tensor')}, {format_bytes(moved)} travel per step"),
        ("recomputed", _recomputed_text(report)),
        *([("encoded", _encoded_text(report))] if report.encoded else []),
        *([("in slices", _sliced_text(report))] if report.sliced else []),
        ("host memory", format_bytes(report.host_bytes)),
        *([("variables there", _variables_text(report))] if report.at_home_bytes else []),
        *([("disk", format_bytes(report.disk_bytes))] if report.disk_bytes else []),
        ("predicted time", f"x{report.time_ratio:.2f}, {report.costs}"),
        *([("proven", _bounds_text(report))] if report.kernels else []),
    ]


def headline_of(report: Report) -> str:
    """One line: the peak, and the tactics and time that it needs."""
    return _peak_text(report) if report.trains else f"{_peak_text(report)} ({NO_BACKWARD})"


def _bounds_text(report: Report) -> str:
    if report.bounds is None:
        return "nothing: loops, conditionals and kernels in slices have no bound"
    slower = 100 * (report.seconds / report.bounds.seconds - 1)
    peak = format_bytes(report.bounds.peak_bytes)
    return f"at most {slower:.1f}% slower than any plan for this limit; none as fast peaks below {peak}"


def _before_text(report: Report) -> str:
    text, more = format_bytes(report.baseline_peak_bytes), report.overlapping_bytes
    return f"{text}; iterations that run concurrently hold up to {format_bytes(more)} more" if more else text


def _floor_text(report: Report) -> str:
    floor = f"{format_bytes(report.floor_bytes)} ({report.floor_bytes} bytes)"
    if not report.largest_kernel:
        return floor
    return f"{floor}; {report.largest_kernel} takes {format_bytes(report.working_set_bytes)} of it"


def _reuse_text(report: Report) -> str:
    within, between = report.reuse.within_layers_bytes, report.reuse.between_layers_bytes
    return f"{format_bytes(within)} by buffer forwarding, {format_bytes(between)} by eviction"


def _workspaces_text(report: Report) -> str:
    least, count = report.convolutions[0], format_count(len(report.convolutions), "convolution")
    return f"{format_bytes(least.free_bytes)} at least for each of {count} ({least.name} has least)"


def _recomputed_text(report: Report) -> str:
    runs = "kernel runs" if report.reruns == 1 else "kernels run"
    return f"{format_count(len(report.recomputed), 'tensor')}, {report.reruns} {runs} again per step"


def _sliced_text(report: Report) -> str:
    """The number of kernels in slices of each size."""
    return "; ".join(
        f"{format_count(len(slices.kernels), 'kernel')} in {-(-slices.of // slices.rows)} slices of rows"
        for slices in report.sliced
    )


def _peak_text(report: Report) -> str:
    if not report.keeps_limit:
        return f"peak {format_bytes(report.planned_peak_bytes)} is over the limit"
    if not report.kernels:
        return f"peak {format_bytes(report.planned_peak_bytes)} is within the limit: nothing is changed"
    swapped = f"{format_count(len(report.swapped), 'tensor')} swapped"
    done = f"{swapped}, {len(report.recomputed)} recomputed, {len(report.encoded)} encoded"
    return f"peak {format_bytes(report.planned_peak_bytes)}, {done}"


def _encoded_text(report: Report) -> str:
    """The encoded tensors, and their bytes before and after."""
    encoded, reduced = report.encoded, report.reduced
    before, after = sum(row.nbytes for row in encoded), sum(row.encoded_bytes or 0 for row in encoded)
    rounded = f"; {len(reduced)} of them rounded, so that gradients differ" if reduced else ""
    tensors = format_count(len(encoded), "tensor")
    return f"{tensors}, {format_bytes(before)} read as {format_bytes(after)}{rounded}"


def _variables_text(report: Report) -> str:
    """The variables at home on the host, and their copies."""
    there = [row for row in report.variables if row.tactic == STATE]
    moved, count = sum(row.cost_bytes for row in there), format_count(len(there), "variable")
    text = f"{format_bytes(report.at_home_bytes)} in {count}, {format_bytes(moved)} travel per step"
    on_disk = [row for row in there if row.home == "disk"]
    if not on_disk:
        return text
    stored, moved = sum(row.nbytes for row in on_disk), sum(row.cost_bytes for row in on_disk)
    return f"{text}; on disk {format_bytes(stored)}, of which {format_bytes(moved)} travel"
