"""What became of the steps of a program: logged when a step can't be planned, and printed when the process ends.

Figures are read at the first call, at calls whose number is a power of two, and at the end: a function that the program
drops is not kept alive for them.

Not handled: forked processes, and those that a signal ends, which print none.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol

from tfswap.device import arena
from tfswap.report.tables import as_text, listing
from tfswap.support.printable import one_line
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from tfswap.report.report import Report

log = logging.getLogger("tfswap")

HEADS = ("calls", "function", "device", "limit", "planned", "measured", "time, predicted")


class Reported(Protocol):
    """What runs under a limit."""

    @property
    def latest_report(self) -> Report | None:
        """The report of its latest run."""
        ...


@dataclass
class Figures:
    """The highest figures of a function on a device."""

    limit_bytes: int = 0
    planned_bytes: int = 0
    measured_bytes: int = 0
    time_ratio: float = 0.0

    def add(self, report: Report) -> None:
        self.limit_bytes = max(self.limit_bytes, report.memory_limit_bytes or 0)
        if report.kernels:  # else it runs as it is
            self.planned_bytes = max(self.planned_bytes, report.planned_peak_bytes)
        self.measured_bytes = max(self.measured_bytes, report.measured_peak_bytes or 0)
        self.time_ratio = max(self.time_ratio, report.time_ratio)

    def cells(self) -> tuple[str, ...]:
        sizes = (self.limit_bytes, self.planned_bytes, self.measured_bytes)
        return *(format_bytes(size) if size else "-" for size in sizes), f"x{self.time_ratio:.2f}"


@dataclass
class Row:
    """The planned functions of one name."""

    calls: int = 0
    devices: dict[str, Figures] = field(default_factory=dict)
    functions: weakref.WeakSet[Reported] = field(default_factory=weakref.WeakSet)

    def note_call(self, function: Reported) -> None:
        """`function` has run under its limit."""
        self.calls += 1
        if self.calls & (self.calls - 1) == 0:
            self.functions.add(function)
            self.read(function)

    def read(self, function: Reported) -> None:
        report = function.latest_report
        for device, each in {} if report is None else report.devices.items():
            self.devices.setdefault(device, Figures()).add(each)


_rows: dict[str, Row] = {}
_as_they_were: dict[tuple[str, str], str] = {}  # the reason, by name and by reason without numbers


_refusals: list[int] = []  # empty, or one for each refused limit


def is_empty() -> bool:
    """Whether there is no row."""
    return not _rows and not _as_they_were


def saw_nothing() -> bool:
    """Whether no step was seen, not even one whose limit was refused."""
    return is_empty() and not _refusals


def note_refusal() -> None:
    """A step was refused, since no plan keeps its limit: the error says so."""
    _refusals.append(1)


def row(name: str) -> Row:
    """The row of functions of this name."""
    _print_at_end()
    return _rows.setdefault(name, Row())


def note_as_it_was(name: str, why: str) -> None:
    """A function runs as it is, for this reason, which is logged once: its other traces differ by numbers in names."""
    _print_at_end()
    key = name, re.sub(r"\d+", "", why)
    if key not in _as_they_were:
        _as_they_were[key] = why
        log.warning("tfswap: %s: runs as it is, without a limit: %s", name, why)


def _print_at_end() -> None:
    if is_empty():
        process = os.getpid()
        atexit.register(_print, process)
        plain = os._exit  # which runs nothing of atexit

        @functools.wraps(plain)
        def _exit(status: int) -> NoReturn:
            _print(process)
            plain(status)

        os._exit = _exit


def _print(process: int) -> None:
    if os.getpid() == process and sys.stderr is not None:  # None: closed
        print(text(), file=sys.stderr, flush=True)


def text() -> str:
    """The summary, for people."""
    lines: list[tuple[str, ...]] = []
    for name, each in _rows.items():
        for function in tuple(each.functions):
            each.read(function)
        lines += [(str(each.calls), name, device, *found.cells()) for device, found in each.devices.items()]
    shown = ["tfswap: steps under a limit:", as_text(listing(HEADS, lines))] if lines else []
    shown += [_peak(device) for device in dict.fromkeys(device for each in _rows.values() for device in each.devices)]
    shown += [
        one_line(f"tfswap: {name}: ran as it is, without a limit: {why}") for (name, _), why in _as_they_were.items()
    ]
    return "\n".join(shown)


def _peak(device: str) -> str:
    info = arena.memory_info(device)
    if info is None:
        return f"tfswap: nothing measures the peak on {device}, without an arena: set TF_CPU_ALLOCATOR_USE_BFC=1"
    return f"tfswap: the allocator's peak on {device}, of the whole process: {format_bytes(info.peak_bytes)}"
