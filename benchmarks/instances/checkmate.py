"""Checkmate's linear program and its rounding.

Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization" (MLSys 2020): stage t ends with
the first run of node t of the given order. R[t, i] says that node i runs in stage t, S[t, i] that its output is held
when the stage begins, and FREE[t, i, k] that it is freed once node k has run (section 3). Each is relaxed to a share;
then section 4.3's rounding in two phases: S is rounded at one half, and R is the least that makes the outputs
available. The program gets less than the budget, since rounding adds to the memory.
"""

from __future__ import annotations

import numpy as np

from instances.graphs import Instance
from tfswap.planner.solvers.milp_program import OPTIMAL, Program

ALLOWANCES = (0.1, 0.2, 0.3, 0.4)
"""The shares of the budget that are kept for what rounding adds: the paper's, and larger ones."""


def solve(instance: Instance, budget: int, limit_s: float) -> list[int] | None:
    """The fastest rounded schedule that keeps the budget, of those whose programs are solved in time.

    Args:
        limit_s: seconds for each program.
    """
    found: list[list[int]] = []
    for allowance in ALLOWANCES:
        stages = _Stages(instance, (1.0 - allowance) * budget)
        status, values, _ = stages.program.solve(limit_s, 0.0)
        if status == OPTIMAL and values is not None:
            found.append([instance.order[i] for i in stages.rounded(values)])
    return min((order for order in found if instance.peak_of(order) <= budget), key=instance.extra_time, default=None)


class _Stages:
    """The program of an instance. Nodes have their numbers in the given order here, costs and sizes are shares."""

    def __init__(self, instance: Instance, budget: float):
        place = {v: n for n, v in enumerate(instance.order)}
        self._inputs = [tuple(place[u] for u in instance.inputs[v]) for v in instance.order]
        self._count = count = len(self._inputs)
        self._users: list[list[int]] = [[] for _ in range(count)]
        for j, inputs in enumerate(self._inputs):
            for i in inputs:
                self._users[i].append(j)
        self._sizes = [size / max(1.0, budget) for size in instance.ordered(instance.sizes)]
        self.program = program = Program()
        total = max(1, sum(instance.times))
        costs = [time / total for time in instance.ordered(instance.times)]
        self._runs = [[program.column(costs[i], low=float(i == t)) for i in range(t + 1)] for t in range(count)]
        self._held = [[program.column() for _ in range(t)] for t in range(count)]
        for t in range(count):
            self._make_available(t)
            self._count_bytes(t)

    def _make_available(self, t: int) -> None:
        runs, held, program = self._runs, self._held, self.program
        for j in range(t + 1):
            for i in self._inputs[j]:
                program.at_most([(runs[t][j], 1.0), (runs[t][i], -1.0), (held[t][i], -1.0)], 0.0)
        for i in range(t):
            before = [(held[t - 1][i], -1.0)] if i < t - 1 else []
            program.at_most([(held[t][i], 1.0), (runs[t - 1][i], -1.0), *before], 0.0)

    def _count_bytes(self, t: int) -> None:
        """The bytes after each run are a column of their own, at most 1."""
        program, runs = self.program, self._runs[t]
        before = [(column, self._sizes[i]) for i, column in enumerate(self._held[t])]
        for k in range(t + 1):
            used = program.column()
            program.at_most([*before, (runs[k], self._sizes[k]), (used, -1.0)], 0.0)
            freed = ((self._freed(t, i, k), self._sizes[i]) for i in (*self._inputs[k], k))
            before = [(used, 1.0), *((column, -size) for column, size in freed)]

    def _freed(self, t: int, i: int, k: int) -> int:
        """The column of FREE[t, i, k]: less for each reason to hold `i` after `k`."""
        reasons = [(self._runs[t][k], -1.0)]
        reasons += [(self._runs[t][j], 1.0) for j in self._users[i] if k < j <= t]
        reasons += [(self._held[t + 1][i], 1.0)] if t + 1 < self._count else []
        column, most = self.program.column(), float(len(reasons))
        # most * (1 - FREE) >= 1 - R[t, k] + the other reasons
        self.program.at_most([(column, most), *reasons], most - 1.0)
        return column

    def rounded(self, values: np.ndarray) -> list[int]:
        """The schedule that the rounded S needs."""
        held = [{i for i, column in enumerate(columns) if values[column] > 0.5} for columns in self._held]
        held.append(set())
        order: list[int] = []
        for t in range(self._count):
            needed, pending = set[int](), [t, *(i for i in held[t + 1] if i != t and i not in held[t])]
            while pending:
                i = pending.pop()
                if i not in needed:
                    needed.add(i)
                    pending += (u for u in self._inputs[i] if u not in held[t])
            order += sorted(needed)
        return order
