"""How fast this machine's processor runs kernels, relative to the analytic model's default rates. No TensorFlow here.

A calibration is part of a `DeviceModel`, so that all that depends on a device depends on it, as plans and their cache
do. Described devices have none. device/calibration_kernels.py measures one, compiler/calibration.py keeps it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MOST_RATIO = 6.0
"""A processor is at most this much faster or slower than the default rates. What is measured beyond it is taken for
this, so that one bad moment of a busy machine does not decide plans."""
LEAST_LAUNCH_S, MOST_LAUNCH_S = 1e-6, 20e-6
DIGITS = 2
"""The significant digits that are kept: another measurement of the same machine mostly gives the same figures."""


class Calibration(NamedTuple):
    """Rates of a CPU as multiples of the default ones, and the time to start a kernel.

    Attributes:
        products: of products of matrices.
        convolutions: of convolutions and their gradients.
        steps: of element-wise and irregular arithmetic.
        memory: of element-wise kernels that are bound by memory.
        copies: of copies for swaps while kernels run.
        launch_s: the seconds that a small kernel takes between large ones.
    """

    products: float
    convolutions: float
    steps: float
    memory: float
    copies: float
    launch_s: float

    def bounded(self) -> Calibration:
        """The same, within the bounds above and rounded. Figures that are no numbers are those of the default rates."""
        *ratios, launch_s = self
        return Calibration(
            *(_rounded(_within(ratio, 1 / MOST_RATIO, MOST_RATIO, 1.0)) for ratio in ratios),
            launch_s=_rounded(_within(launch_s, LEAST_LAUNCH_S, MOST_LAUNCH_S, LEAST_LAUNCH_S)),
        )

    def __str__(self) -> str:
        *names, _ = self._fields
        shown = ", ".join(f"{name} x{ratio:.2g}" for name, ratio in zip(names, self, strict=False))
        return f"{shown}, {self.launch_s * 1e6:.2g} us to start a kernel"


def _within(value: float, lowest: float, highest: float, otherwise: float) -> float:
    return min(max(value, lowest), highest) if math.isfinite(value) else otherwise


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
