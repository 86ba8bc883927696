"""The stages of the integer program: which kernels run in each, and when values are present (Checkmate, section 4).

The order of first runs is cut into stages, one for each kernel that reads or makes a value large enough to matter. In
stage t, kernels of earlier stages may be recomputed, in the order of their first runs; then kernel t runs. A value
stays from stage to stage, is recomputed, or is copied back from host memory just before a kernel that reads it.
"""

from __future__ import annotations

from bisect import bisect_left

from tfswap.planner.problem import Problem
from tfswap.planner.solvers.milp_program import Program, Term

MAX_FOLLOWED = 1500
"""The most ways to copy during recomputed kernels that are followed moment by moment. With more, the program would be
too large, and copies are followed by stages alone. Their buffers then do not count while recomputed kernels run, which
lowers the bound.
"""
SCALE = 1000.0
"""The step's time, and the live peak, in the program's units: solvers work with absolute tolerances."""


class Stages:
    """Columns for what runs and what is present. A kernel and its stage have the same number.

    Attributes:
        program: the program, to which all columns and rows are added.
        moments: (stage, kernel) pairs in order, at which copies are followed.
        moment_of: by (stage, kernel), its moment; for a recomputed kernel that has none, that of its stage's kernel.
        again: by (stage, kernel), the column that is 1 where the kernel is recomputed.
        stays: by (stage, value), the column that is 1 where the value is present when the stage begins.
        back: by (stage, kernel, value), the column that is 1 where a copy comes back just before the kernel.
        backs: these columns, by value and moment.
        present: by (stage, value): readers in order, columns of its presence during each, columns of it before each.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        self.uses = uses = problem.uses
        self.program = program = Program()
        self.time_unit = float(problem.starts_s[-1]) / SCALE
        self.byte_unit = max(1, problem.live_peak_bytes) / SCALE
        self.one = program.column(SCALE, low=1.0)  # always 1: the step itself
        self.positions = [p for p, i in enumerate(problem.order) if uses.reads[i] or uses.makes[i]]
        self.kernels = [problem.order[p] for p in self.positions]
        self.stage_of = {kernel: stage for stage, kernel in enumerate(self.kernels)}
        flow = problem.flow
        self.values = [v for v in uses.positions if v not in problem.refusals]
        self.made = {v: self.stage_of[flow.values[v].producer] for v in self.values}
        self.reads = [[v for v in uses.reads[i] if v in self.made] for i in self.kernels]
        self.users: dict[int, list[int]] = {v: [] for v in self.values}
        for stage, reads in enumerate(self.reads):
            for v in reads:
                self.users[v].append(stage)
        self.last_use = {v: max([self.made[v], *users]) for v, users in self.users.items()}
        self.needed = dict(self.last_use)  # by value: the last stage in which anything may read it
        self.runs_until = [self._runs_until(kernel) for kernel in range(len(self.kernels))]
        self._declare()
        self._follow()

    def _runs_until(self, kernel: int) -> int:
        """The last stage in which it may be recomputed: its inputs must be available."""
        problem, uses = self.problem, self.uses
        node = self.kernels[kernel]
        if not problem.repeatable[node]:
            return kernel
        last = len(problem.order)
        for v in problem.flow.reads[node]:
            last = min(last, uses.ended.get(v, last))
            if v in uses.positions and v in problem.refusals and v not in problem.flow.fetched:
                last = min(last, uses.positions[v][-1])
        return bisect_left(self.positions, last + 1) - 1

    def _declare(self) -> None:
        program, uses = self.program, self.uses
        self.again: dict[tuple[int, int], int] = {}
        self.stays: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int, int], int] = {}
        self.backs: dict[int, dict[int, list[int]]] = {v: {} for v in uses.candidates}
        self.slots: list[list[int]] = [[] for _ in self.kernels]
        share, in_s = self.problem.rates.copy_share, self.seconds_in
        for kernel in reversed(range(len(self.kernels))):
            made = [v for v in uses.makes[self.kernels[kernel]] if v in self.made]
            last = min(self.runs_until[kernel], max((self.needed[v] for v in made), default=kernel))
            cost = self.problem.cost_s[self.kernels[kernel]] / self.time_unit
            for stage in range(kernel + 1, last + 1):
                self.again[stage, kernel] = program.column(cost, whole=True)
            for v in self.reads[kernel]:
                self.needed[v] = max(self.needed[v], last)
        for stage, kernel in sorted(self.again):
            self.slots[stage].append(kernel)
        for stage, slots in enumerate(self.slots):
            slots.append(stage)
        ways = sum(self.made[v] < stage <= self.needed[v] for stage, _ in self.again for v in uses.candidates)
        self.follows_reruns = ways <= MAX_FOLLOWED
        runs = [(stage, kernel) for stage, slots in enumerate(self.slots) for kernel in slots]
        self.moments = [(stage, kernel) for stage, kernel in runs if kernel == stage or self.follows_reruns]
        numbers = {moment: n for n, moment in enumerate(self.moments)}
        self.moment_of = {run: numbers.get(run, numbers[run[0], run[0]]) for run in runs}
        for v in self.values:
            for stage in range(self.made[v] + 1, self.needed[v] + 1):
                self.stays[stage, v] = program.column(whole=True)
        for v in uses.candidates:
            for stage in range(self.made[v] + 2, self.needed[v] + 1):
                for kernel in self.readers(stage, v):
                    self.back[stage, kernel, v] = program.column(share * in_s(v), whole=True)
                    self.backs[v].setdefault(self.moment_of[stage, kernel], []).append(self.back[stage, kernel, v])

    def seconds_in(self, v: int) -> float:
        return self.problem.flow.values[v].nbytes / self.problem.rates.in_bytes_per_s / self.time_unit

    def seconds_out(self, v: int) -> float:
        return self.problem.flow.values[v].nbytes / self.problem.rates.out_bytes_per_s / self.time_unit

    def seconds(self, cost: float) -> float:
        return cost * self.time_unit

    def readers(self, stage: int, v: int) -> list[int]:
        """Kernels that may read `v` in a stage, in order."""
        return [u for u in self.users[v] if u == stage or (stage, u) in self.again]

    def runs(self, stage: int, kernel: int) -> int:
        return self.one if kernel == stage else self.again[stage, kernel]

    def _arrivals(self, stage: int, v: int, until: int) -> list[Term]:
        """The columns by which `v` may be present in a stage when kernel `until` runs."""
        columns = [self.stays.get((stage, v)), self.again.get((stage, self.made[v]))]
        columns += [self.back.get((stage, u, v)) for u in self.users[v] if u <= until]
        return [(c, 1.0) for c in columns if c is not None]

    def _follow(self) -> None:
        """Rows: what is read is present, and what stays was present. Sets `present`.

        `self.present` gets, by (stage, value), (readers in order, columns while each runs, columns before each).
        """
        program = self.program
        self.present: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}
        for stage in range(len(self.kernels)):
            for v in self.values:
                if not self.made[v] < stage <= self.needed[v]:
                    continue
                readers = self.readers(stage, v)
                arrivals = self._arrivals(stage, v, stage)
                program.at_most(arrivals, 1.0)
                later = self.stays.get((stage + 1, v))
                if later is not None:
                    program.at_most([(later, 1.0), *((c, -1.0) for c, _ in arrivals)], 0.0)
                during: list[int] = []
                before: list[int] = []
                for reader in reversed(readers):
                    runs = self.runs(stage, reader)
                    there = self._arrivals(stage, v, reader)
                    program.at_most([(runs, 1.0), *((c, -1.0) for c, _ in there)], 0.0)
                    if later is not None and runs != self.one:
                        both = program.column()
                        program.at_most([(runs, 1.0), (both, -1.0)], 0.0)
                        program.at_most([(later, 1.0), (both, -1.0)], 0.0)
                        program.at_most([(both, 1.0), *((c, -1.0) for c, _ in there)], 0.0)
                        runs = both
                    during.append(runs)
                    later = runs
                    back = self.back.get((stage, reader, v))
                    if back is not None:
                        program.at_most([(back, 1.0), (self.runs(stage, reader), -1.0)], 0.0)
                        later = program.column()
                        program.at_most([(runs, 1.0), (back, -1.0), (later, -1.0)], 0.0)
                        program.at_most([(later, 1.0), *((c, -1.0) for c, _ in there if c != back)], 0.0)
                    before.append(later)
                self.present[stage, v] = readers, during[::-1], before[::-1]

    def presence(self, stage: int, kernel: int, v: int) -> int | None:
        """The column of the presence of `v` while a kernel runs in a stage; None where it can't be present."""
        if self.made[v] >= kernel:
            return self.stays.get((stage, v))
        readers, during, before = self.present[stage, v]
        n = bisect_left(readers, kernel)
        if n == len(readers):
            return self.stays.get((stage + 1, v))
        return during[n] if readers[n] == kernel else before[n]
