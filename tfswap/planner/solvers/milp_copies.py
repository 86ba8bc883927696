"""Copies to and from host memory in the integer program, moment by moment.

Before a kernel runs, the step may wait for copies out, whose buffers are then free, and after that for copies in, whose
buffers are then present, as in a schedule (plan/schedule.py). A buffer that is copied is held whole during the copy.
Copies are fluid: a lane divides its time among several copies in any way. So the bound holds for any placing of copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfswap.planner.solvers.milp_program import Term
from tfswap.planner.solvers.milp_stages import Stages


class Copies:
    """Columns for copies, and the rows that tie them to the presence of values.

    Attributes:
        leaving, coming: by (moment, value), the columns that are 1 where its buffer is held during the moment's kernel
            only because it is being copied out, or in.
        out: by (moment, value), the share that is copied out between the wait for copies in before the moment and the
            wait for copies out after it.
        in_waiting, in_running: by (moment, value), the share that is copied in before the moment's kernel starts, and
            from then on.
    """

    def __init__(self, stages: Stages):
        self.stages = stages
        self._declare()
        for v in stages.uses.candidates:
            self._leave(v)
            self._return(v)

    def _declare(self) -> None:
        program = self.stages.program
        share = self.stages.problem.rates.copy_share
        self.out: dict[tuple[int, int], int] = {}
        self.in_waiting: dict[tuple[int, int], int] = {}
        self.in_running: dict[tuple[int, int], int] = {}
        self.leaving: dict[tuple[int, int], int] = {}
        self.coming: dict[tuple[int, int], int] = {}
        for v in self.stages.uses.candidates:
            for n in self._travels(v):
                self.in_waiting[n, v] = program.column()
                self.out[n - 1, v] = program.column(share * self.stages.seconds_out(v))
            for n in self._travels(v)[:-1]:
                self.leaving[n, v] = program.column(whole=True)
                self.coming[n, v] = program.column(whole=True)
                self.in_running[n, v] = program.column()

    def _travels(self, v: int) -> range:
        """The moments at which `v` may be copied: after its kernel, up to its last return."""
        return range(self.made_at(v) + 1, max(self.stages.backs[v], default=-1) + 1)

    def made_at(self, v: int) -> int:
        return self.stages.moment_of[self.stages.made[v], self.stages.made[v]]

    def _leave(self, v: int) -> None:
        """Rows: a copy out needs the buffer, and is complete before the value comes back."""
        program, backs = self.stages.program, self.stages.backs[v]
        for n in self._travels(v):
            if n in backs:
                program.at_most([*((c, 1.0) for c in backs[n]), *((c, -1.0) for c in self.parts_out(v, n))], 0.0)
            if (n, v) not in self.leaving:
                continue
            leaving = self.leaving[n, v]
            program.at_most([(self.out[n, v], 1.0), *self._there(n, v), (leaving, -1.0)], 0.0)
            if (n - 1, v) in self.leaving:
                stage, kernel = self.stages.moments[n - 1] if self.stages.follows_reruns else self.stages.moments[n]
                made = (
                    self.stages.again.get((stage, self.stages.made[v]))
                    if kernel in (stage, self.stages.made[v])
                    else None
                )
                kept = [*self._there(n - 1, v), (self.leaving[n - 1, v], -1.0)]
                program.at_most([(leaving, 1.0), *kept, *([] if made is None else [(made, -1.0)])], 0.0)

    def _return(self, v: int) -> None:
        """Rows: a buffer that is copied into is held until the value is back, which takes a complete copy."""
        program, backs = self.stages.program, self.stages.backs[v]
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
            program.at_most([*parts, *came, *coming], 0.0)  # no part of the next copy before its buffer is allocated
            absent = [(self.leaving[n, v], 1.0), (self.coming[n, v], 1.0)]
            program.at_most([*((c, 1.0) for c, _ in self._there(n, v)), *absent], 1.0)
            program.at_most([(self.in_running[n, v], 1.0), *coming], 0.0)
            parts.append((self.in_running[n, v], 1.0))
            goes_on = [self.coming[n + 1, v]] if (n + 1, v) in self.coming else []
            ends = [*goes_on, *backs.get(n + 1, ())]
            program.at_most([(self.coming[n, v], 1.0), *((c, -1.0) for c in ends)], 0.0)

    def _there(self, moment: int, v: int) -> list[Term]:
        column = self.stages.presence(*self.stages.moments[moment], v)
        return [] if column is None else [(column, -1.0)]

    def parts_out(self, v: int, moment: int) -> list[int]:
        """The columns of the shares of `v` that are copied out before the kernel of a moment."""
        return [self.out[n, v] for n in range(self.made_at(v), moment) if (n, v) in self.out]

    def copied_out(self, stage: int, kernel: int, v: int) -> Iterator[list[Term]]:
        """Sums that are 1 where the copy out of `v` has not ended before a kernel, and holds its buffer after it."""
        moment = self.stages.moment_of[stage, kernel]
        earlier = [(c, -1.0) for c in self.parts_out(v, moment)]
        later: dict[int, list[Term]] = {}
        for at, backs in self.stages.backs.get(v, {}).items():
            if at <= moment:
                earlier += [(back, -1.0) for back in backs]
            else:
                later.setdefault(self.stages.moments[at][0], []).extend((back, 1.0) for back in backs)
        for backs in later.values():
            yield backs + earlier
