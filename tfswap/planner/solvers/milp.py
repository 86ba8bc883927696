"""The least time for a target of live bytes, by integer programming: what the fast solvers are measured against.

After Checkmate (Jain et al., MLSys 2020, section 4). The order of first runs is given and cut into stages, one for
each kernel that reads or makes a value large enough to matter. In stage t kernels from before may run again (R),
in the order of their first runs, and then kernel t runs; S says what stays from stage to stage. What Checkmate counts
with FREE variables is said here by presence: a value is there while a kernel runs if it is read by that kernel or a
later one of the stage, or stays. It may also come back from host memory just before any kernel that reads it.

Copies are followed from moment to moment, one for each kernel that runs, or may run again, in a stage: before it the
step may wait for copies out, whose buffers go then, and then for copies in, whose buffers have come by then, as in a
schedule (schedule.py). A buffer that is copied out of or into is held whole all that time. Copies are fluid: a lane
divides its time among several arbitrarily. So the bound holds for any placing of the copies, and choices that are made
of what was found seldom take longer.

Not covered: a kernel that runs twice in one stage, or in another order there; a rerun of kernels that make only what is
too small to matter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner.problem import Choice, Gap, Problem
from tfswap.planner.solvers.belady import place_copies
from tfswap.planner.solvers.milp_program import INFEASIBLE, OPTIMAL, Program, Term
from tfswap.simulator.simulate import simulate_memory, simulate_time

GAP_SHARE = 1e-3
"""An optimum is proven when no better one is left by more than this share of the step's time."""
MAX_FOLLOWED = 1500
"""With more ways than this to copy beside what runs again, copies are followed by stages alone: the program would be
too large. They may then go on beside what runs again as if their buffers took no memory there: a bound still, and a
lower one."""
SOLVE_S = 10.0
"""For one target, where nobody says how long."""
MAX_REPAIRS = 3
"""The program takes a kernel to save a buffer that it may take over; where the executor does not, the search is made
again for that much less. The bound stays that of the first."""
PARTS_LOST = 1e-6
"""A copy whose parts sum to 1 but for so much has been made."""
SCALE = 1000.0
"""The step's time, and the live peak, in the program's units: solvers work with absolute tolerances."""


class Optimum(NamedTuple):
    """What was found in the time given.

    Attributes:
        choice: the best found; None if there is none, or none was found in time (then `proven` is False).
        total_s: the step's time with it, as simulated; infinite without one.
        bound_s: no choice is faster; infinite where there is provably none.
        proven: whether the search came to its end; if not, the limit on time ended it. What placing the copies adds
            to the bound is the difference between `total_s` and `bound_s`.
    """

    choice: Choice | None
    total_s: float
    bound_s: float
    proven: bool


def solve(problem: Problem, target_bytes: int) -> Choice | None:
    """As `optimise`, in the form that all solvers have, for SOLVE_S at most; None also where none was found in time."""
    return optimise(problem, target_bytes, SOLVE_S).choice


def optimise(problem: Problem, target_bytes: int, limit_s: float) -> Optimum:
    """The fastest way to at most `target_bytes` live, searched for at most `limit_s` seconds.

    Raises TfswapError where SciPy is missing.
    """
    found = _search(problem, target_bytes, target_bytes, limit_s)
    result, aim = found, target_bytes
    for _ in range(MAX_REPAIRS):
        if result.choice is None or (over := problem.live_peak_of(result.choice) - target_bytes) <= 0:
            break
        aim -= over
        result = _search(problem, aim, target_bytes, limit_s)
    else:
        result = Optimum(None, float("inf"), found.bound_s, False)
    return result._replace(
        bound_s=found.bound_s, proven=found.proven and (result is found or result.choice is not None)
    )


def _search(problem: Problem, aim_bytes: int, target_bytes: int, limit_s: float) -> Optimum:
    """The best choice for `aim_bytes`; of the ways to place its copies the fastest within `target_bytes`."""
    model = _Model(problem, aim_bytes)
    status, values, bound = model.program.solve(limit_s, GAP_SHARE)
    infinity = float("inf")
    if status == INFEASIBLE:
        return Optimum(None, infinity, infinity, True)
    bound_s = model.seconds(bound)
    if values is None:
        return Optimum(None, infinity, bound_s, False)
    # What absences let kernels take over is not in the live bytes that copies are placed by: tightly they fit too.
    choice = min(
        model.choices(values),
        key=lambda c: (max(target_bytes, problem.live_peak_of(c)), _seconds(problem, c)),
    )
    return Optimum(choice, _seconds(problem, choice), bound_s, status == OPTIMAL)


def _seconds(problem: Problem, choice: Choice) -> float:
    return simulate_time(problem.flow, build_schedule(*choice), problem.cost_s, problem.rates).total_s


class _Model:
    """The program of one problem. Kernels and stages go by the same number: stage k is the one that first runs k.

    Attributes:
        moments: (stage, kernel) of what copies are followed by, in order. `moment_of` has their numbers, and of what
            runs again and is none of them that of its stage's kernel.
        again: by (stage, kernel), the column that says that the kernel runs again.
        stays: by (stage, value), the column that says that the value is there when the stage begins.
        back: by (stage, kernel, value), the column that says that a copy comes back just before the kernel.
        backs: by value and moment, these.
        leaving, coming: by (moment, value), the columns that say that its buffer is there while the moment's kernel
            runs only because it is copied out of, or into.
        out: by (moment, value), how much of it is copied out from when the step waits for copies in before the moment
            until it has waited for copies out after it.
        in_waiting, in_beside: likewise, how much is copied in before the moment's kernel, and from then on.
    """

    def __init__(self, problem: Problem, target_bytes: int):
        self.problem = problem
        self.uses = uses = problem.uses
        self.program = program = Program()
        self.time_unit = float(problem.starts_s[-1]) / SCALE
        self.byte_unit = max(1, problem.live_peak_bytes) / SCALE
        self.target = target_bytes
        self.one = program.column(SCALE, low=1.0)  # the step itself
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
        self._declare_copies()
        for v in uses.candidates:
            self._leave(v)
            self._return(v)
        self._count_memory()
        self._count_time()

    def _runs_until(self, kernel: int) -> int:
        """The last stage in which it may run again, as far as what it reads lets it."""
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
        share, in_s = self.problem.rates.copy_share, self._seconds_in
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
                for kernel in self._readers(stage, v):
                    self.back[stage, kernel, v] = program.column(share * in_s(v), whole=True)
                    self.backs[v].setdefault(self.moment_of[stage, kernel], []).append(self.back[stage, kernel, v])

    def _seconds_in(self, v: int) -> float:
        return self.problem.flow.values[v].nbytes / self.problem.rates.in_bytes_per_s / self.time_unit

    def _seconds_out(self, v: int) -> float:
        return self.problem.flow.values[v].nbytes / self.problem.rates.out_bytes_per_s / self.time_unit

    def _readers(self, stage: int, v: int) -> list[int]:
        """Kernels that may read `v` in a stage, in order."""
        return [u for u in self.users[v] if u == stage or (stage, u) in self.again]

    def _runs(self, stage: int, kernel: int) -> int:
        return self.one if kernel == stage else self.again[stage, kernel]

    def _arrivals(self, stage: int, v: int, until: int) -> list[Term]:
        """How `v` may come to be there in a stage by the time that kernel `until` runs."""
        columns = [self.stays.get((stage, v)), self.again.get((stage, self.made[v]))]
        columns += [self.back.get((stage, u, v)) for u in self.users[v] if u <= until]
        return [(c, 1.0) for c in columns if c is not None]

    def _follow(self) -> None:
        """What is read is there, what stays was there; and when values are there within a stage.

        `self.present` gets, by (stage, value), (readers in order, columns while each runs, columns before each).
        """
        program = self.program
        self.present: dict[tuple[int, int], tuple[list[int], list[int], list[int]]] = {}
        for stage in range(len(self.kernels)):
            for v in self.values:
                if not self.made[v] < stage <= self.needed[v]:
                    continue
                readers = self._readers(stage, v)
                arrivals = self._arrivals(stage, v, stage)
                program.at_most(arrivals, 1.0)
                later = self.stays.get((stage + 1, v))
                if later is not None:
                    program.at_most([(later, 1.0), *((c, -1.0) for c, _ in arrivals)], 0.0)
                during: list[int] = []
                before: list[int] = []
                for reader in reversed(readers):
                    runs = self._runs(stage, reader)
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
                        program.at_most([(back, 1.0), (self._runs(stage, reader), -1.0)], 0.0)
                        later = program.column()
                        program.at_most([(runs, 1.0), (back, -1.0), (later, -1.0)], 0.0)
                        program.at_most([(later, 1.0), *((c, -1.0) for c, _ in there if c != back)], 0.0)
                    before.append(later)
                self.present[stage, v] = readers, during[::-1], before[::-1]

    def _presence(self, stage: int, kernel: int, v: int) -> int | None:
        """The column that says whether `v` is there while a kernel runs in a stage; None where it can't be."""
        if self.made[v] >= kernel:
            return self.stays.get((stage, v))
        readers, during, before = self.present[stage, v]
        n = bisect_left(readers, kernel)
        if n == len(readers):
            return self.stays.get((stage + 1, v))
        return during[n] if readers[n] == kernel else before[n]

    def _count_memory(self) -> None:
        problem, uses = self.problem, self.uses
        forwarded = simulate_memory(problem.flow, build_schedule(problem.order, ()), live=True, detail=True).forwarded
        taken = {(problem.flow.values[w].producer, v) for w, v in forwarded}
        self.small = self._small()
        for stage, position in enumerate(self.positions):
            begin = self.positions[stage - 1] + 1 if stage else 0
            there = [v for v in self.values if (stage, v) in self.present]
            spare = self.target + sum(uses.nbytes[v] for v in there if stage <= self.last_use[v])
            made_later = self._made_later(stage, position)
            if begin < position:
                held = [(self.stays[stage, v], float(uses.nbytes[v])) for v in there]
                self._fits(held + made_later, spare - max(uses.live[begin:position]))
            for kernel in self.slots[stage]:
                moment = self.moment_of[stage, kernel] if self.follows_reruns or kernel == stage else -1
                terms: list[Term] = []
                for v in there:
                    columns = (
                        self._presence(stage, kernel, v),
                        self.leaving.get((moment, v)),
                        self.coming.get((moment, v)),
                    )
                    terms += [(column, float(uses.nbytes[v])) for column in columns if column is not None]
                if kernel < stage:
                    terms.append((self.again[stage, kernel], float(uses.needs[self.kernels[kernel]])))
                    limit = spare - uses.before[position]
                else:
                    terms += self._kept_from(stage, taken)
                    limit = spare - uses.live[position]
                self._fits(terms + made_later + self._taken_over(stage, kernel, taken), limit)
        end = self.positions[-1] + 1 if self.positions else 0
        self._fits([(self.one, 0.0)], self.target - max(uses.live[end:], default=0))

    def _small(self) -> list[tuple[int, int, int, int]]:
        """What too small values of kernels that may run again take: (kernel, bytes, begin, end), as positions."""
        problem, flow, uses = self.problem, self.problem.flow, self.uses
        found: list[tuple[int, int, int, int]] = []
        last: dict[int, int] = {}
        for position, node in reversed(tuple(enumerate(problem.order))):
            for v in flow.reads[node]:
                last.setdefault(v, position)
            for _, v in flow.makes[node] if problem.repeatable[node] and node in self.stage_of else ():
                if v not in uses.positions and v in last:
                    found.append((self.stage_of[node], uses.nbytes[v], position, last[v]))
        return found

    def _made_later(self, stage: int, position: int) -> list[Term]:
        """Small values are there from their first run on, unless their kernels run again before they are read."""
        terms: list[Term] = []
        for kernel, nbytes, begin, end in self.small:
            if begin < position <= end:
                later = range(stage, bisect_left(self.positions, end + 1))
                terms += [(self.again[at, kernel], -float(nbytes)) for at in later if (at, kernel) in self.again]
        return terms

    def _fits(self, terms: list[Term], limit_bytes: int) -> None:
        self.program.at_most([(c, nbytes / self.byte_unit) for c, nbytes in terms], limit_bytes / self.byte_unit)

    def _kept_from(self, stage: int, taken: set[tuple[int, int]]) -> list[Term]:
        """What stays or is copied out can't be taken over: what was to have its buffer takes one of its own."""
        node = self.kernels[stage]
        temporary = {c for cs in self.problem.flow.temp_forwards.get(node, {}).values() for c in cs}
        terms: list[Term] = []
        for v in self.reads[stage]:
            if (node, v) not in taken and v not in temporary:
                continue
            held = self.program.column(whole=True)
            if (stage + 1, v) in self.stays:
                self.program.at_most([(self.stays[stage + 1, v], 1.0), (held, -1.0)], 0.0)
            for copied_out in self._copied_out(stage, stage, v):
                self.program.at_most([*copied_out, (held, -1.0)], 0.0)
            terms.append((held, float(self.uses.nbytes[v])))
        return terms

    def _taken_over(self, stage: int, kernel: int, taken: set[tuple[int, int]]) -> list[Term]:
        """What a kernel may take over, and did not in the order as it was, it does not allocate."""
        node = self.kernels[kernel]
        terms: list[Term] = []
        used: dict[int, int] = {}
        for _, candidates in self.problem.flow.forwards[node]:
            if stage == kernel and any((node, v) in taken for v in candidates):
                continue
            saved: list[int] = []
            for v in dict.fromkeys(candidates):
                if v not in self.made or v in used or self.problem.flow.reads[node].count(v) > 1:
                    continue
                column = used[v] = self.program.column(whole=True)
                saved.append(column)
                terms.append((column, -float(self.uses.nbytes[v])))
                self.program.at_most([(column, 1.0), (self._runs(stage, kernel), -1.0)], 0.0)
                later = [self.again[stage, u] for u in self._readers(stage, v) if kernel < u < stage]
                if stage != kernel and stage in self.users[v]:
                    later.append(self.one)
                if (stage + 1, v) in self.stays:
                    later.append(self.stays[stage + 1, v])
                for other in later:
                    self.program.at_most([(column, 1.0), (other, 1.0)], 1.0)
                for copied_out in self._copied_out(stage, kernel, v):
                    self.program.at_most([(column, 1.0), *copied_out], 1.0)
            if len(saved) > 1:
                self.program.at_most([(column, 1.0) for column in saved], 1.0)
        return terms

    def _copied_out(self, stage: int, kernel: int, v: int) -> Iterator[list[Term]]:
        """Sums that are 1 where the copy out of `v` holds its buffer after a kernel: it had not ended before."""
        moment = self.moment_of[stage, kernel]
        earlier = [(c, -1.0) for c in self._parts_out(v, moment)]
        later: dict[int, list[Term]] = {}
        for at, backs in self.backs.get(v, {}).items():
            if at <= moment:
                earlier += [(back, -1.0) for back in backs]
            else:
                later.setdefault(self.moments[at][0], []).extend((back, 1.0) for back in backs)
        for backs in later.values():
            yield backs + earlier

    def _parts_out(self, v: int, moment: int) -> list[int]:
        """The columns of what is copied out of `v` before the kernel of a moment runs."""
        return [self.out[n, v] for n in range(self._made_at(v), moment) if (n, v) in self.out]

    def _declare_copies(self) -> None:
        program = self.program
        share = self.problem.rates.copy_share
        self.out: dict[tuple[int, int], int] = {}
        self.in_waiting: dict[tuple[int, int], int] = {}
        self.in_beside: dict[tuple[int, int], int] = {}
        self.leaving: dict[tuple[int, int], int] = {}
        self.coming: dict[tuple[int, int], int] = {}
        for v in self.uses.candidates:
            for n in self._travels(v):
                self.in_waiting[n, v] = program.column()
                self.out[n - 1, v] = program.column(share * self._seconds_out(v))
            for n in self._travels(v)[:-1]:
                self.leaving[n, v] = program.column(whole=True)
                self.coming[n, v] = program.column(whole=True)
                self.in_beside[n, v] = program.column()

    def _travels(self, v: int) -> range:
        """The moments at which `v` may be under way: after it has been made, and up to its last return."""
        return range(self._made_at(v) + 1, max(self.backs[v], default=-1) + 1)

    def _made_at(self, v: int) -> int:
        return self.moment_of[self.made[v], self.made[v]]

    def _leave(self, v: int) -> None:
        """A copy out goes on while the buffer is there, and has been made before the value comes back."""
        program, backs = self.program, self.backs[v]
        for n in self._travels(v):
            if n in backs:
                program.at_most([*((c, 1.0) for c in backs[n]), *((c, -1.0) for c in self._parts_out(v, n))], 0.0)
            if (n, v) not in self.leaving:
                continue
            leaving = self.leaving[n, v]
            program.at_most([(self.out[n, v], 1.0), *self._there(n, v), (leaving, -1.0)], 0.0)
            if (n - 1, v) in self.leaving:
                stage, kernel = self.moments[n - 1] if self.follows_reruns else self.moments[n]
                made = self.again.get((stage, self.made[v])) if kernel in (stage, self.made[v]) else None
                kept = [*self._there(n - 1, v), (self.leaving[n - 1, v], -1.0)]
                program.at_most([(leaving, 1.0), *kept, *([] if made is None else [(made, -1.0)])], 0.0)

    def _return(self, v: int) -> None:
        """A buffer that is copied into is held until the value is back, for which it has been copied whole."""
        program, backs = self.program, self.backs[v]
        came: list[Term] = []
        parts: list[Term] = []
        for n in self._travels(v):
            back = [(c, -1.0) for c in backs.get(n, ())]
            coming = [(self.coming[n, v], -1.0)] if (n, v) in self.coming else []
            program.at_most([(self.in_waiting[n, v], 1.0), *back, *coming], 0.0)
            parts.append((self.in_waiting[n, v], 1.0))
            came += back
            if back:
                program.at_most([*((c, 1.0) for c, _ in came), *((c, -1.0) for c, _ in parts)], 0.0)
            if not coming:
                continue
            program.at_most([*parts, *came, *coming], 0.0)  # no part of the next copy before its buffer is there
            absent = [(self.leaving[n, v], 1.0), (self.coming[n, v], 1.0)]
            program.at_most([*((c, 1.0) for c, _ in self._there(n, v)), *absent], 1.0)
            program.at_most([(self.in_beside[n, v], 1.0), *coming], 0.0)
            parts.append((self.in_beside[n, v], 1.0))
            goes_on = [self.coming[n + 1, v]] if (n + 1, v) in self.coming else []
            ends = [*goes_on, *backs.get(n + 1, ())]
            program.at_most([(self.coming[n, v], 1.0), *((c, -1.0) for c in ends)], 0.0)

    def _there(self, moment: int, v: int) -> list[Term]:
        column = self._presence(*self.moments[moment], v)
        return [] if column is None else [(column, -1.0)]

    def _count_time(self) -> None:
        """Copies take their lanes' time: beside kernels, and while these wait."""
        program, count = self.program, len(self.moments)
        releases = [program.column(1.0, high=np.inf) for _ in range(count + 1)]  # waits for copies out
        returns = [program.column(1.0, high=np.inf) for _ in range(count)]  # then, for copies in
        out, in_waiting, in_beside = (self._by_moment(parts) for parts in (self.out, self.in_waiting, self.in_beside))
        between = [*self._between(), []]
        beside_s: list[Term] = []
        run: list[Term] = []
        for n, (stage, kernel) in enumerate(self.moments):
            release, back, after = (releases[n], -1.0), (returns[n], -1.0), (releases[n + 1], -1.0)
            waiting_s = [(c, self._seconds_in(v)) for v, c in in_waiting[n]]
            if between[n]:  # among these, buffers may come before others go
                program.at_most([*waiting_s, *between[n], release, back], 0.0)
                program.at_most([*beside_s, *waiting_s, *run, *between[n], release, back], 0.0)
            else:
                program.at_most([*waiting_s, back], 0.0)
            run = [self._run_s(stage, kernel)]
            out_s = [(c, self._seconds_out(v)) for v, c in out[n]]
            fresh_s = [(c, self._seconds_out(v)) for v, c in out[n] if self._made_at(v) == n]
            beside_s = [(c, self._seconds_in(v)) for v, c in in_beside[n]]
            program.at_most([*out_s, back, *run, *between[n + 1], after], 0.0)
            program.at_most([*fresh_s, *between[n + 1], after], 0.0)
            program.at_most([*beside_s, *run, *between[n + 1], after], 0.0)

    def _run_s(self, stage: int, kernel: int) -> Term:
        return self._runs(stage, kernel), -self.problem.cost_s[self.kernels[kernel]] / self.time_unit

    def _by_moment(self, columns: dict[tuple[int, int], int]) -> list[list[tuple[int, int]]]:
        """(value, column) of each moment."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.moments]
        for (n, v), column in columns.items():
            found[n].append((v, column))
        return found

    def _between(self) -> list[list[Term]]:
        """By moment, the time of what runs before it and copies are not followed by."""
        starts = self.uses.starts
        between: list[list[Term]] = [[] for _ in self.moments]
        for stage, position in enumerate(self.positions):
            begin = self.positions[stage - 1] + 1 if stage else 0
            first = self.moment_of[stage, self.slots[stage][0]]
            if begin < position:
                between[first].append((self.one, (starts[begin] - starts[position]) / self.time_unit))
            if not self.follows_reruns:
                between[first] += [self._run_s(stage, kernel) for kernel in self.slots[stage][:-1]]
        return between

    def seconds(self, cost: float) -> float:
        return cost * self.time_unit

    def _is_out(self, moment: int, v: int, values: np.ndarray) -> bool:
        """Whether the copy out of `v` ends before the kernel of a moment."""
        return sum(values[c] for c in self._parts_out(v, moment)) > 1 - PARTS_LOST

    def choices(self, values: np.ndarray) -> list[Choice]:
        """What the columns' values say, with copies where they say, placed within the target, and as short."""
        problem, flow = self.problem, self.problem.flow
        reruns: list[tuple[int, int]] = []
        swapped: list[Gap] = []
        stays: list[tuple[int, int]] = []  # of these, by moments: the buffer is gone, and it is there again
        made: dict[int, int] = {}
        used: dict[int, tuple[int, int]] = {}  # the moment of its last use, position after which it may leave
        at_moment: dict[int, int] = {}  # position of the first kernel that runs from then on
        for (stage, kernel), moment in self.moment_of.items():
            at = at_moment[moment] = self.positions[stage] + len(reruns)
            if values[self._runs(stage, kernel)] < 0.5:
                continue
            for v in self.reads[kernel]:
                column = self.back.get((stage, kernel, v))
                if column is not None and values[column] > 0.5:
                    last, start = used[v]
                    swapped.append(Gap(v, flow.values[v].nbytes, made[v], start, at))
                    stays.append(self._stay(v, last, moment, values))
                # A copy out that has ended leaves the buffer to the kernel that reads it last.
                used[v] = moment, at - self._is_out(moment, v, values)
            for v in self.uses.makes[self.kernels[kernel]]:
                made[v], used[v] = at, (moment, at)
            if kernel < stage:
                reruns.append((self.positions[stage], self.kernels[kernel]))
        order = problem.extended(reruns, problem.live_bytes).order
        extended = problem.extended(reruns, self._live(order) + problem.there_bytes)
        tight, said = _tight(swapped), list[Interval]()
        for interval, gap, (gone, there) in zip(tight, swapped, stays, strict=True):
            release = min(gap.end, max(gap.start + 1, at_moment[gone]))
            said.append(interval._replace(release=release, back=min(gap.end, max(release, at_moment[there]))))
        return [Choice(order, way) for way in (said, place_copies(extended, swapped, self.target), tight)]

    def _stay(self, v: int, last: int, until: int, values: np.ndarray) -> tuple[int, int]:
        """The first moment after `last` at which the buffer of `v` is gone, and that from which it is there `until`."""
        absent = range(last + 1, until)
        gone = next((n for n in absent if not self._is_held(n, v, values)), until)
        there = next((n + 1 for n in reversed(absent) if not self._is_coming(n, v, values)), last + 1)
        return gone, there

    def _is_held(self, moment: int, v: int, values: np.ndarray) -> bool:
        """Whether the buffer of `v` is there during a moment, or copied out of."""
        columns = self._presence(*self.moments[moment], v), self.leaving.get((moment, v))
        return any(values[c] > 0.5 for c in columns if c is not None)

    def _is_coming(self, moment: int, v: int, values: np.ndarray) -> bool:
        column = self.coming.get((moment, v))
        return column is not None and values[column] > 0.5

    def _live(self, order: list[int]) -> np.ndarray:
        memory = simulate_memory(self.problem.flow, build_schedule(order, ()), live=True)
        return np.array(memory.during_bytes, dtype=np.int64)


def _tight(swapped: list[Gap]) -> list[Interval]:
    """Every buffer goes as soon as it may, and comes as late."""
    result: list[Interval] = []
    copied: set[tuple[int, int]] = set()
    for gap in swapped:
        out = None if (gap.value, gap.made) in copied else gap.made
        copied.add((gap.value, gap.made))
        result.append(Interval(gap.value, out, gap.start + 1, gap.end, gap.end))
    return result
