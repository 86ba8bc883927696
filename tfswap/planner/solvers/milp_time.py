"""Rows of the integer program for time: copies use their lanes while kernels run, and while the step waits."""

from __future__ import annotations

import numpy as np

from tfswap.planner.solvers.milp_copies import Copies
from tfswap.planner.solvers.milp_program import Term


class TimeRows:
    """Adds the rows, and the columns of waits, to the program when it is constructed."""

    def __init__(self, copies: Copies):
        self.copies, self.stages = copies, copies.stages
        self._count_time()

    def _count_time(self) -> None:
        """Rows: copies use their lanes' time while kernels run, and while these wait."""
        program, count = self.stages.program, len(self.stages.moments)
        releases = [program.column(1.0, high=np.inf) for _ in range(count + 1)]  # waits for copies out
        returns = [program.column(1.0, high=np.inf) for _ in range(count)]  # then, for copies in
        out, in_waiting, in_running = (
            self._by_moment(parts) for parts in (self.copies.out, self.copies.in_waiting, self.copies.in_running)
        )
        between = [*self._between(), []]
        running_s: list[Term] = []
        run: list[Term] = []
        for n, (stage, kernel) in enumerate(self.stages.moments):
            release, back, after = (releases[n], -1.0), (returns[n], -1.0), (releases[n + 1], -1.0)
            waiting_s = [(c, self.stages.seconds_in(v)) for v, c in in_waiting[n]]
            if between[n]:  # among these, buffers may be allocated before others are freed
                program.at_most([*waiting_s, *between[n], release, back], 0.0)
                program.at_most([*running_s, *waiting_s, *run, *between[n], release, back], 0.0)
            else:
                program.at_most([*waiting_s, back], 0.0)
            run = [self._run_s(stage, kernel)]
            out_s = [(c, self.stages.seconds_out(v)) for v, c in out[n]]
            fresh_s = [(c, self.stages.seconds_out(v)) for v, c in out[n] if self.copies.made_at(v) == n]
            running_s = [(c, self.stages.seconds_in(v)) for v, c in in_running[n]]
            program.at_most([*out_s, back, *run, *between[n + 1], after], 0.0)
            program.at_most([*fresh_s, *between[n + 1], after], 0.0)
            program.at_most([*running_s, *run, *between[n + 1], after], 0.0)

    def _run_s(self, stage: int, kernel: int) -> Term:
        return self.stages.runs(stage, kernel), -self.stages.problem.cost_s[
            self.stages.kernels[kernel]
        ] / self.stages.time_unit

    def _by_moment(self, columns: dict[tuple[int, int], int]) -> list[list[tuple[int, int]]]:
        """(value, column) of each moment."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.stages.moments]
        for (n, v), column in columns.items():
            found[n].append((v, column))
        return found

    def _between(self) -> list[list[Term]]:
        """By moment, the time of kernels before it at which copies are not followed."""
        starts = self.stages.uses.starts
        between: list[list[Term]] = [[] for _ in self.stages.moments]
        for stage, position in enumerate(self.stages.positions):
            begin = self.stages.positions[stage - 1] + 1 if stage else 0
            first = self.stages.moment_of[stage, self.stages.slots[stage][0]]
            if begin < position:
                between[first].append((self.stages.one, (starts[begin] - starts[position]) / self.stages.time_unit))
            if not self.stages.follows_reruns:
                between[first] += [self._run_s(stage, kernel) for kernel in self.stages.slots[stage][:-1]]
        return between
