"""A mixed-integer linear program, built column by column and row by row, and solved by SciPy's HiGHS.

Does not depend on plans: milp_stages.py and others give the columns their meaning. SciPy is imported when a program is
solved, since nothing else needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tfswap.errors import TfswapError

Term = tuple[int, float]
"""A column, and its coefficient in a row."""

OPTIMAL, STOPPED, INFEASIBLE = 0, 1, 2
"""SciPy's codes for the end of a search."""


class Program:
    """Columns and rows of a mixed-integer linear program to be minimised."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.lows: list[float] = []
        self.highs: list[float] = []
        self.whole: list[bool] = []
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []  # (row, column, coefficient)

    def column(self, cost: float = 0.0, *, whole: bool = False, low: float = 0.0, high: float = 1.0) -> int:
        self.costs.append(cost)
        self.lows.append(low)
        self.highs.append(high)
        self.whole.append(whole)
        return len(self.costs) - 1

    def at_most(self, terms: Iterable[Term], limit: float) -> None:
        self.entries += [(len(self.limits), column, factor) for column, factor in terms]
        self.limits.append(limit)

    def solve(self, limit_s: float, gap_share: float) -> tuple[int, np.ndarray | None, float]:
        """(how it ended, the columns' values if any were found, lower bound of the cost).

        Args:
            gap_share: the search ends when no better values are left by more than this share of the cost.
        """
        try:
            import scipy  # pyright: ignore[reportMissingTypeStubs] it has none, here and below
        except ImportError as error:
            raise TfswapError("the exact solver needs SciPy, which is missing: pip install 'tfswap[exact]'") from error
        optimize: Any = scipy.optimize
        rows, columns, factors = zip(*self.entries, strict=True)
        shape = len(self.limits), len(self.costs)
        matrix: Any = scipy.sparse.csr_array((factors, (rows, columns)), shape=shape)
        found: Any = optimize.milp(
            self.costs,
            integrality=np.array(self.whole, dtype=int),
            bounds=optimize.Bounds(self.lows, self.highs),
            constraints=optimize.LinearConstraint(matrix, ub=self.limits),
            options={"time_limit": limit_s, "mip_rel_gap": gap_share},
        )
        if found.status not in (OPTIMAL, STOPPED, INFEASIBLE):
            raise TfswapError(f"the exact solver failed: {found.message}; plan with the default solver")
        bound = found.get("mip_dual_bound")
        return found.status, found.x, self.costs[0] if bound is None or not np.isfinite(bound) else bound
