"""The result of the search for the largest batch, image or sequence."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from tfswap.support.printable import as_lines
from tfswap.support.sizes import format_bytes


@dataclass(frozen=True)
class Fit:
    """The largest batch, image or sequence that was found to fit.

    Attributes:
        step: the function that trains.
        machine: the machine that it was planned for.
        limit_bytes: the step's limit.
        varied: the axes that have the size, as (argument, axes).
        size: the largest that fits under a plan.
        planned_size: the largest that has a plan. It exceeds `size` where runs of larger sizes exceeded the limit,
            because of other tensors in the device's memory.
        unoptimised_size: the largest that fits without a plan; 0 where not even the smallest does.
        peak_bytes: planned peak at `size`.
        time_ratio: predicted step time at `size` over that of an unoptimised step of that size.
        host_bytes: host memory for swapped tensors at `size`.
        confirmed: whether a step of that size was run, and its measured peak kept the limit.
        measured_bytes: that peak; None where no run reported it.
    """

    step: str
    machine: str
    limit_bytes: int
    varied: tuple[tuple[str, tuple[int, ...]], ...]
    size: int
    planned_size: int
    unoptimised_size: int
    peak_bytes: int
    time_ratio: float
    host_bytes: int
    confirmed: bool
    measured_bytes: int | None = None

    def to_json(self) -> str:
        """All figures as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    def __str__(self) -> str:
        axes = "; ".join(f"axis {', '.join(map(str, axes))} of {name}" for name, axes in self.varied)
        gain = f"  (x{self.size / self.unoptimised_size:.1f})" if self.unoptimised_size else "  (not even the smallest)"
        note = ", confirmed by a run" if self.confirmed else ", planned; no run has measured it"
        if self.planned_size > self.size:
            note += f"; {self.planned_size} as planned, which passed the limit with what others had allocated"
        rows = [
            ("machine", self.machine),
            ("limit", format_bytes(self.limit_bytes)),
            ("searched", axes),
            ("as it is", f"{self.unoptimised_size}"),
            ("under tfswap", f"{self.size}{gain}{note}"),
            ("peak planned", format_bytes(self.peak_bytes)),
            *([("peak measured", format_bytes(self.measured_bytes))] if self.measured_bytes is not None else []),
            ("host memory", format_bytes(self.host_bytes)),
            ("predicted time", f"x{self.time_ratio:.2f} of an unoptimised step of that size"),
        ]
        return as_lines([self.step, *(f"  {label:<16} {text}" for label, text in rows)])
