"""A simulated step as a trace in Chrome's format, for https://ui.perfetto.dev and chrome://tracing.

Times are the simulator's, in microseconds from the step's start. On each device the planned step is one process, with a
thread for each lane and a counter of memory by kind. The unoptimised step, whose kernels overlap at random, is another
process with the counter only. Devices are not simulated together: each one's time begins with its first kernel, and a
tensor of another device is there when it is read. Format: "Trace Event Format", Google.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.report.timeline import COMPUTE, COPIES_BETWEEN, COPIES_IN, COPIES_OUT, KINDS, Run, Timeline

if TYPE_CHECKING:
    from tfswap.report.report import Report

PLANNED, BEFORE = 1, 2
PROCESSES = 2
"""The number of processes of a device."""
THREADS = {COMPUTE: 1, COPIES_OUT: 2, COPIES_IN: 3, COPIES_BETWEEN: 4}
MICROSECONDS = 1e6
FIGURES = ("baseline_peak_bytes", "planned_peak_bytes", "memory_limit_bytes", "measured_peak_bytes")


def trace(drawn: Sequence[tuple[Report, Timeline]]) -> dict[str, Any]:
    """The trace as a JSON object.

    Args:
        drawn: the report on each device, with its timeline.
    """
    events: list[dict[str, Any]] = []
    for number, (report, timeline) in enumerate(drawn):
        events += _events(report, timeline, number * PROCESSES)
    figures = {report.device: {name: getattr(report, name) for name in FIGURES} for report, _ in drawn}
    first = next(iter(figures.values()))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**first, "devices": figures}}


def _events(report: Report, timeline: Timeline, before: int) -> Iterator[dict[str, Any]]:
    """The events of a device.

    Args:
        before: the number of the processes of other devices.
    """
    runs = [(BEFORE, "unoptimised", timeline.before)]
    if timeline.after is not None:
        runs.insert(0, (PLANNED, "planned", timeline.after))
    for process, name, run in runs:
        yield _named("process_name", before + process, 0, f"{report.step or 'step'}, {name}")
        yield from _slices(before + process, run)
        yield from _counters(before + process, run)


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slices(process: int, run: Run) -> Iterator[dict[str, Any]]:
    if run.blocks:
        used = {lane for lane, *_ in run.blocks}
        lanes = (lane for lane in THREADS if lane != COPIES_BETWEEN or lane in used)
        yield from (_named("thread_name", process, THREADS[lane], lane) for lane in lanes)
    for lane, kind, name, start_s, end_s in run.blocks:
        yield {
            "name": f"wait for {name}" if kind == "wait" else name,
            "cat": kind,
            "ph": "X",
            "pid": process,
            "tid": THREADS[lane],
            "ts": MICROSECONDS * start_s,
            "dur": MICROSECONDS * (end_s - start_s),
        }


def _counters(process: int, run: Run) -> Iterator[dict[str, Any]]:
    """Memory by kind, at each change. Of several states at one time, the one with the most bytes, and the last."""
    began, used = run.record.began_s, run.record.in_use_bytes
    states: list[int] = []
    first = 0
    for state in range(1, len(used) + 1):
        if state == len(used) or began[state] > began[first]:
            states += sorted({max(range(first, state), key=used.__getitem__), state - 1})
            first = state
    for state, kinds in zip(states, run.at(states), strict=True):
        yield {
            "name": "device memory, bytes",
            "ph": "C",
            "pid": process,
            "tid": 0,
            "ts": MICROSECONDS * began[state] * run.seconds_per_second,
            "args": dict(zip(KINDS, kinds, strict=True)),
        }
