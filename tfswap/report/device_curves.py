"""Memory against time of a step on several devices: a curve for each, and the step's time by the slowest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tfswap.report.curve import Curve, Point
from tfswap.report.markup import format_seconds, render
from tfswap.report.picture import new_figure, png
from tfswap.report.tables import as_text, listing, stacked
from tfswap.support.files import write_whole
from tfswap.support.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADS = ("device", "machine", "its memory", "unoptimised", "smallest limit", "knee", "verdict")
NOTE = "the step takes as long as its slowest device, to which others send their tensors as if they moved nothing"
BY_HOST = "copies go by way of the host"


@dataclass(frozen=True)
class JointPoint:
    """A limit for each device.

    Attributes:
        points: the point of each device, by its name.
        step_s: predicted step time: that of the slowest device.
        time_ratio: the same over that of the unoptimised step.
        fits: whether each peak is within its device's memory.
    """

    points: Mapping[str, Point]
    step_s: float
    time_ratio: float
    fits: bool


@dataclass(frozen=True, repr=False)
class DeviceCurves:
    """The predicted time of a step on several devices, under limits from each one's floor to its unoptimised peak.

    Attributes:
        step: the function that trains.
        devices: the curve of each device, by its name ("GPU:0").
        peer_bytes_per_s: the rate of a link between two devices; 0 where copies go by way of the host.
    """

    step: str
    devices: Mapping[str, Curve]
    peer_bytes_per_s: float

    @property
    def feasible(self) -> bool:
        """Whether each device's part fits it under any of the limits."""
        return all(curve.feasible for curve in self.devices.values())

    @property
    def baseline_s(self) -> float:
        """Predicted time of the unoptimised step."""
        return max(curve.baseline_s for curve in self.devices.values())

    @cached_property
    def points(self) -> tuple[JointPoint, ...]:
        """The n-th limit of all devices, the smallest first. Each device's limits are spaced evenly."""
        count = max(len(curve.points) for curve in self.devices.values())
        return tuple(map(self._point, range(count)))

    def _point(self, number: int) -> JointPoint:
        points = {name: curve.points[min(number, len(curve.points) - 1)] for name, curve in self.devices.items()}
        step_s = max(point.step_s for point in points.values())
        fits = all(self.devices[name].fits(point) for name, point in points.items())
        return JointPoint(points, step_s, step_s / self.baseline_s if self.baseline_s else 1.0, fits)

    @property
    def link(self) -> str:
        """How tensors go from one device to another."""
        rate = f"a link of {self.peer_bytes_per_s / 1e9:.0f} GB/s each way"
        return f"{rate}, and tfswap's {BY_HOST}" if self.peer_bytes_per_s else BY_HOST

    def to_json(self) -> str:
        """All figures as JSON text; those of each device by its name in "devices"."""
        content = {
            "step": self.step,
            "devices": {name: json.loads(curve.to_json()) for name, curve in self.devices.items()},
            "points": [asdict(point) for point in self.points],
            "peer_bytes_per_s": self.peer_bytes_per_s,
            "baseline_s": self.baseline_s,
            "feasible": self.feasible,
        }
        return json.dumps(content, indent=1, sort_keys=True)

    def __rich__(self) -> RenderableType:
        rows: list[tuple[str, ...]] = []
        for name, curve in self.devices.items():
            known = dict(curve.summary())
            figures = (known[head] for head in HEADS[1:-1])
            rows.append((name, *figures, known.get("verdict", "fits")))
        heads = [head for name in self.devices for head in (f"limit of {name}", "peak", "time")]
        table = listing((*heads, "step", ""), list(map(self._row, self.points)))
        times = f"between devices: {self.link}; times: {next(iter(self.devices.values())).costs}"
        return stacked(self.step, listing(HEADS, rows), times, "", table, f"note: {NOTE}")

    @staticmethod
    def _row(point: JointPoint) -> list[str]:
        cells: list[str] = []
        for each in point.points.values():
            cells += [format_bytes(each.limit_bytes), format_bytes(each.peak_bytes), f"x{each.time_ratio:.2f}"]
        step = f"x{point.time_ratio:.2f}, {format_seconds(point.step_s)}"
        return [*cells, step, "" if point.fits else "more than a device has"]

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render("curves_cell.html", **self._drawing())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with all curves, which needs no network."""
        title = f"tfswap: {self.step}, memory against time"
        write_whole(path, render("curves.html", title=title, **self._drawing()))

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw the curves. Raises TfswapError where matplotlib is missing."""
        figure = new_figure(7, 4.2)
        axes = figure.subplots()
        for name, curve in self.devices.items():
            mib = [p.limit_bytes / 2**20 for p in curve.points]
            axes.plot(mib, [p.time_ratio for p in curve.points], marker="o", markersize=3, label=name)
        axes.set(xlabel="memory limit, MiB", ylabel="time on the device, predicted, over unoptimised")
        axes.set_title(f"{self.step} on {len(self.devices)} devices", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        write_whole(path, png(figure))

    def _drawing(self) -> dict[str, Any]:
        """The values for the template: the text of each device's curve, and the table of all."""
        from markupsafe import Markup

        bodies = [(name, Markup(curve.body())) for name, curve in self.devices.items()]
        return {"bodies": bodies, "points": self.points, "names": list(self.devices), "link": self.link, "note": NOTE}
