"""Memory against time of a step, under limits from its floor to its unoptimised peak."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tfswap.report.markup import format_seconds, render, ticks
from tfswap.report.picture import new_figure, png
from tfswap.support.files import write_whole
from tfswap.support.printable import as_lines
from tfswap.support.sizes import format_bytes

BAR = 24
WIDTH, HEIGHT, LEFT, EDGE = 640, 340, 56, 32
FLAT = 0.01
"""Ratios within 1% of each other are equal: times are predicted no better."""


@dataclass(frozen=True)
class Point:
    """One limit, and the fastest plan under it.

    Attributes:
        limit_bytes: the limit.
        peak_bytes: predicted peak.
        time_ratio: predicted step time over that of the unoptimised step.
        step_s: predicted step time.
        moved_bytes: bytes copied in a step, both ways together.
        host_bytes: peak of host memory for swapped tensors.
        workspace_bytes: the largest workspace of a convolution; 0 without convolutions or without cuDNN.
        algorithms: (name, number of convolutions) for each of cuDNN's algorithms.
    """

    limit_bytes: int
    peak_bytes: int
    time_ratio: float
    step_s: float
    moved_bytes: int
    host_bytes: int
    workspace_bytes: int = 0
    algorithms: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, repr=False)
class Curve:
    """The predicted time of a step under limits from its floor to its unoptimised peak, on one machine.

    Attributes:
        step: the function that trains.
        machine: the machine that it was simulated on.
        costs: the source of the times: "analytic", "analytic, at measured rates" or "profiled".
        baseline_peak_bytes: predicted peak of the unoptimised step.
        baseline_s: predicted time of the unoptimised step.
        floor_bytes: the smallest limit with a plan, within the host's memory.
        memory_bytes: the limit of the machine's allocator; None for none.
        host_bytes: the limit of host memory for swapped tensors; None for none.
        points: one for each limit, the smallest first.
    """

    step: str
    machine: str
    costs: str
    baseline_peak_bytes: int
    baseline_s: float
    floor_bytes: int
    memory_bytes: int | None
    host_bytes: int | None
    points: tuple[Point, ...]

    @property
    def feasible(self) -> bool:
        """Whether the step fits the machine under any of the limits."""
        return self.memory_bytes is None or self.floor_bytes <= self.memory_bytes

    def fits(self, point: Point) -> bool:
        """Whether a point's peak is within the machine's memory."""
        return self.memory_bytes is None or point.peak_bytes <= self.memory_bytes

    @property
    def has_workspaces(self) -> bool:
        """Whether convolutions' algorithms depend on the limit."""
        return any(point.algorithms for point in self.points)

    @cached_property
    def knee(self) -> Point:
        """The point below which less memory costs much more time: the furthest below the line between the ends, with
        both axes scaled to the curve's extent (Satopaa et al. 2011, "Finding a Kneedle in a Haystack").

        The floor where the curve is flat. Points that do not fit the machine count only where none fits.
        """
        points = [p for p in self.points if self.fits(p)] or self.points
        first, last = points[0], points[-1]
        slowest, fastest = first.time_ratio, last.time_ratio
        if slowest - fastest <= FLAT * fastest:
            return first
        width = max(last.limit_bytes - first.limit_bytes, 1)

        def below(point: Point) -> float:
            across = (point.limit_bytes - first.limit_bytes) / width
            return (slowest - point.time_ratio) / (slowest - fastest) - across

        return max(points, key=below)

    def to_json(self) -> str:
        """All figures as JSON text."""
        content = dataclasses.asdict(self)
        content["points"] = [dataclasses.asdict(p) | {"fits": self.fits(p)} for p in self.points]
        content |= {"knee": dataclasses.asdict(self.knee), "feasible": self.feasible}
        return json.dumps(content, indent=1, sort_keys=True)

    def summary(self) -> list[tuple[str, str]]:
        """The main figures, as (label, text)."""
        room = "no bound" if self.memory_bytes is None else format_bytes(self.memory_bytes)
        host = "no bound" if self.host_bytes is None else format_bytes(self.host_bytes)
        share = 100 * self.floor_bytes / max(self.baseline_peak_bytes, 1)
        rows = [
            ("machine", self.machine),
            ("its memory", f"{room}; for swapped tensors, on the host: {host}"),
            ("unoptimised", f"{format_bytes(self.baseline_peak_bytes)}, {format_seconds(self.baseline_s)} a step"),
            ("smallest limit", f"{format_bytes(self.floor_bytes)}  ({share:.0f}%)"),
            ("knee", f"{format_bytes(self.knee.limit_bytes)}, x{self.knee.time_ratio:.2f}"),
            ("times", self.costs),
        ]
        if not self.feasible:
            short = self.floor_bytes - (self.memory_bytes or 0)
            rows.append(("verdict", f"does not fit: {format_bytes(short)} short at the smallest limit"))
        elif self.memory_bytes is not None and self.baseline_peak_bytes > self.memory_bytes:
            rows.append(("verdict", "does not fit as it is; fits under a limit"))
        return rows

    def __str__(self) -> str:
        lines = [self.step, *(f"  {label:<16}{text}" for label, text in self.summary()), ""]
        top = max(p.time_ratio for p in self.points)
        workspace = f"  {'workspace':>10}" if self.has_workspaces else ""
        axis = f"  0{f'x{top:.2f}':.>{BAR - 1}}"
        lines.append(f"  {'limit':>10}  {'peak':>10}  {'time':>6}  {'moved':>10}  {'host':>10}{workspace}{axis}")
        for p in self.points:
            bar = "#" * max(1, round(BAR * p.time_ratio / top))
            mark = ("  <- knee" if p is self.knee else "") + ("" if self.fits(p) else "  more than the machine has")
            figures = [format_bytes(b) for b in (p.limit_bytes, p.peak_bytes, p.moved_bytes, p.host_bytes)]
            workspace = f"{format_bytes(p.workspace_bytes):>10}  " if self.has_workspaces else ""
            lines.append(
                f"  {figures[0]:>10}  {figures[1]:>10}  x{p.time_ratio:<5.2f} {figures[2]:>10}  {figures[3]:>10}  "
                f"{workspace}{bar}{mark}"
            )
        return as_lines(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render("curve_cell.html", **self._drawing())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with the curve, which needs no network."""
        title = f"tfswap: {self.step}, memory against time"
        write_whole(path, render("curve.html", title=title, **self._drawing()))

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve. Raises TfswapError where matplotlib is missing."""
        figure = new_figure(7, 4.2)
        axes = figure.subplots()
        mib = [p.limit_bytes / 2**20 for p in self.points]
        axes.plot(mib, [p.time_ratio for p in self.points], marker="o", markersize=3)
        axes.plot(self.knee.limit_bytes / 2**20, self.knee.time_ratio, "D", label="knee")
        axes.plot(self.baseline_peak_bytes / 2**20, 1.0, "s", label="unoptimised")
        if self.memory_bytes is not None and self.memory_bytes < max(mib) * 2**20:
            axes.axvspan(self.memory_bytes / 2**20, max(mib), alpha=0.15, label="more than the machine has")
        axes.set(xlabel="memory limit, MiB", ylabel="step time, predicted, over unoptimised")
        axes.set_title(f"{self.step} on {self.machine}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        write_whole(path, png(figure))

    def body(self) -> str:
        """The curve as a part of a page."""
        return render("curve_body.html", **self._drawing())

    def _drawing(self) -> dict[str, Any]:
        """The values for the curve's template: time over limit, the knee marked, points that do not fit in grey."""
        low, high = self.points[0].limit_bytes, max(self.points[-1].limit_bytes, self.baseline_peak_bytes)
        ratios = [*(p.time_ratio for p in self.points), 1.0]
        slowest, fastest = max(max(ratios), min(ratios) * 1.05), min(ratios)
        right, bottom = WIDTH - EDGE, HEIGHT - LEFT

        def x(limit_bytes: float) -> float:
            return round(LEFT + (right - LEFT) * (limit_bytes - low) / max(high - low, 1), 1)

        def y(ratio: float) -> float:
            return round(EDGE + (bottom - EDGE) * (slowest - ratio) / (slowest - fastest), 1)

        dots = [
            ("point", x(p.limit_bytes), y(p.time_ratio), f"{format_bytes(p.limit_bytes)}: x{p.time_ratio:.2f}")
            for p in self.points
        ]
        dots.append(("knee", x(self.knee.limit_bytes), y(self.knee.time_ratio), "knee"))
        dots.append(("plain", x(self.baseline_peak_bytes), y(1.0), "unoptimised"))
        beyond = self.memory_bytes is not None and self.memory_bytes < high
        megabytes = [int(value * 2**20) for value in ticks(low / 2**20, high / 2**20)]
        return {
            "curve": self,
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "top": EDGE,
            "right": right,
            "bottom": bottom,
            "out_x": max(LEFT, x(self.memory_bytes)) if beyond and self.memory_bytes is not None else None,
            "time_ticks": [(value, y(value)) for value in ticks(fastest, slowest)],
            "byte_ticks": [(nbytes, x(nbytes)) for nbytes in megabytes],
            "dots": dots,
        }
