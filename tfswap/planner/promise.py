"""The margin between a simulated peak and the peak that a plan promises.

Invariant: `promised(simulated_limit(n)) <= n`, and no larger simulated peak has that property.
"""

from __future__ import annotations

from tfswap.planner.problem import NEVER

MARGIN_SHARE, MARGIN_BYTES = 0.001, 1024
"""The share of the planned peak, and the least bytes, that are left free: later steps of a training loop find other
layouts of the arena, and their results are still held in the next step.
"""


def promised(peak_bytes: int) -> int:
    """The peak that a plan promises whose simulated one is `peak_bytes`."""
    return peak_bytes + max(int(peak_bytes * MARGIN_SHARE), MARGIN_BYTES)


def simulated_within(limit_bytes: float) -> float:
    """As `simulated_limit`, also of no limit."""
    return NEVER if limit_bytes == NEVER else simulated_limit(int(limit_bytes))


def simulated_limit(limit_bytes: int) -> int:
    """The highest simulated peak of a plan that keeps this limit."""
    most = min(limit_bytes - MARGIN_BYTES, int(limit_bytes / (1 + MARGIN_SHARE)) + 1)
    return most if promised(most) <= limit_bytes else most - 1
