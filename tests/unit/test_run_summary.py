"""The table of steps at the end of `tfswap run`."""

from types import SimpleNamespace
from typing import Any

from tfswap.frontends.unmodified.summary import Figures


def _cells(kernels: int) -> tuple[str, ...]:
    figures = Figures()
    report: Any = SimpleNamespace(
        kernels=kernels,
        memory_limit_bytes=20 << 20,
        planned_peak_bytes=24 << 20,
        measured_peak_bytes=19 << 20,
        time_ratio=1.0,
    )
    figures.add(report)
    return figures.cells()


def test_a_step_that_runs_as_it_is_has_no_planned_peak():
    """Its prediction is a bound on all orders of its kernels, and no promise."""
    assert _cells(kernels=0) == ("20.0 MiB", "-", "19.0 MiB", "x1.00")
    assert _cells(kernels=3)[1] == "24.0 MiB"
