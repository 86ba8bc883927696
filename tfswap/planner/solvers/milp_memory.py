"""Rows of the integer program that keep live bytes within the target while each kernel runs."""

from __future__ import annotations

from bisect import bisect_left

from tfswap.plan.schedule import build_schedule
from tfswap.planner.solvers.milp_copies import Copies
from tfswap.planner.solvers.milp_program import Term
from tfswap.simulator.memory import simulate_memory


class MemoryRows:
    """Adds the rows to the program when it is constructed.

    Args:
        target_bytes: the most live bytes.
    """

    def __init__(self, copies: Copies, target_bytes: int):
        self.copies, self.stages = copies, copies.stages
        self.target = target_bytes
        self._held: dict[tuple[int, int], int] = {}  # by stage and value, the column of a buffer that is not reused
        self._count_memory()

    def _count_memory(self) -> None:
        problem, uses = self.stages.problem, self.stages.uses
        forwarded = simulate_memory(problem.flow, build_schedule(problem.order, ()), live=True, detail=True).forwarded
        taken = {(problem.flow.values[w].producer, v) for w, v in forwarded}
        self.small = self._small()
        for stage, position in enumerate(self.stages.positions):
            begin = self.stages.positions[stage - 1] + 1 if stage else 0
            there = [v for v in self.stages.values if (stage, v) in self.stages.present]
            spare = self.target + sum(uses.nbytes[v] for v in there if stage <= self.stages.last_use[v])
            made_later = self._made_later(stage, position)
            if begin < position:
                held = [(self.stages.stays[stage, v], float(uses.nbytes[v])) for v in there]
                self._fits(held + made_later, spare - max(uses.live[begin:position]))
            for kernel in self.stages.slots[stage]:
                moment = self.stages.moment_of[stage, kernel] if self.stages.follows_reruns or kernel == stage else -1
                terms: list[Term] = []
                for v in there:
                    columns = (
                        self.stages.presence(stage, kernel, v),
                        self.copies.leaving.get((moment, v)),
                        self.copies.coming.get((moment, v)),
                    )
                    terms += [(column, float(uses.nbytes[v])) for column in columns if column is not None]
                if kernel < stage:
                    terms.append((self.stages.again[stage, kernel], float(uses.needs[self.stages.kernels[kernel]])))
                    limit = spare - uses.before[position]
                else:
                    terms += self._kept_from(stage, taken)
                    limit = spare - uses.live[position]
                self._fits(terms + made_later + self._forwarded_bytes(stage, kernel, taken), limit)
        end = self.stages.positions[-1] + 1 if self.stages.positions else 0
        self._fits([(self.stages.one, 0.0)], self.target - max(uses.live[end:], default=0))

    def _small(self) -> list[tuple[int, int, int, int]]:
        """Small values of kernels that may be recomputed: (kernel, bytes, begin, end), as positions."""
        problem, flow, uses = self.stages.problem, self.stages.problem.flow, self.stages.uses
        found: list[tuple[int, int, int, int]] = []
        last: dict[int, int] = {}
        for position, node in reversed(tuple(enumerate(problem.order))):
            for v in flow.reads[node]:
                last.setdefault(v, position)
            for _, v in flow.makes[node] if problem.repeatable[node] and node in self.stages.stage_of else ():
                if v not in uses.positions and v in last:
                    found.append((self.stages.stage_of[node], uses.nbytes[v], position, last[v]))
        return found

    def _made_later(self, stage: int, position: int) -> list[Term]:
        """Small values count from their first run on, unless their kernels are recomputed before they are read."""
        terms: list[Term] = []
        for kernel, nbytes, begin, end in self.small:
            if begin < position <= end:
                later = range(stage, bisect_left(self.stages.positions, end + 1))
                terms += [
                    (self.stages.again[at, kernel], -float(nbytes)) for at in later if (at, kernel) in self.stages.again
                ]
        return terms

    def _fits(self, terms: list[Term], limit_bytes: int) -> None:
        self.stages.program.at_most(
            [(c, nbytes / self.stages.byte_unit) for c, nbytes in terms], limit_bytes / self.stages.byte_unit
        )

    def _kept_from(self, stage: int, taken: set[tuple[int, int]]) -> list[Term]:
        """A value that stays or is copied out keeps its buffer: the output that was to reuse it allocates one."""
        node = self.stages.kernels[stage]
        temporary = {c for cs in self.stages.problem.flow.temp_forwards.get(node, {}).values() for c in cs}
        terms: list[Term] = []
        for v in self.stages.reads[stage]:
            if (node, v) not in taken and v not in temporary:
                continue
            held = self._held[stage, v] = self.stages.program.column(whole=True)
            if (stage + 1, v) in self.stages.stays:
                self.stages.program.at_most([(self.stages.stays[stage + 1, v], 1.0), (held, -1.0)], 0.0)
            for copied_out in self.copies.copied_out(stage, stage, v):
                self.stages.program.at_most([*copied_out, (held, -1.0)], 0.0)
            terms.append((held, float(self.stages.uses.nbytes[v])))
        return terms

    def _forwarded_bytes(self, stage: int, kernel: int, taken: set[tuple[int, int]]) -> list[Term]:
        """Buffers that a kernel may reuse, and did not in the given order, save an allocation; so do they in place of
        one that it reused there and that is kept now.
        """
        node = self.stages.kernels[kernel]
        terms: list[Term] = []
        used: dict[int, int] = {}
        for _, candidates in self.stages.problem.flow.forwards[node]:
            reused = next((v for v in candidates if stage == kernel and (node, v) in taken), None)
            if reused is not None and (stage, reused) not in self._held:
                continue
            saved: list[int] = []
            for v in dict.fromkeys(candidates):
                if (
                    v == reused
                    or v not in self.stages.made
                    or v in used
                    or self.stages.problem.flow.reads[node].count(v) > 1
                ):
                    continue
                column = used[v] = self.stages.program.column(whole=True)
                saved.append(column)
                terms.append((column, -float(self.stages.uses.nbytes[v])))
                self.stages.program.at_most([(column, 1.0), (self.stages.runs(stage, kernel), -1.0)], 0.0)
                later = [self.stages.again[stage, u] for u in self.stages.readers(stage, v) if kernel < u < stage]
                if stage != kernel and stage in self.stages.users[v]:
                    later.append(self.stages.one)
                if (stage + 1, v) in self.stages.stays:
                    later.append(self.stages.stays[stage + 1, v])
                for other in later:
                    self.stages.program.at_most([(column, 1.0), (other, 1.0)], 1.0)
                for copied_out in self.copies.copied_out(stage, kernel, v):
                    self.stages.program.at_most([(column, 1.0), *copied_out], 1.0)
            if reused is not None:
                kept = self._held[stage, reused]
                self.stages.program.at_most([*((column, 1.0) for column in saved), (kept, -1.0)], 0.0)
            elif len(saved) > 1:
                self.stages.program.at_most([(column, 1.0) for column in saved], 1.0)
        return terms
