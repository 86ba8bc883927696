"""One trace of a function under its limit: planned, called in turn with other steps, and planned again.

In a live process a plan is made for the arena as it is (`planning_loop.py`). Before each later call the arena is
checked again (`arena_watch.py`); a step that would not fit is planned again before it runs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.request import Request
from tfswap.device.cudnn import limit_workspaces, without_redzones
from tfswap.device.live import free_functions, runs_eagerly
from tfswap.errors import InfeasibleMemoryLimit
from tfswap.native.forks import calls_steps
from tfswap.plan.plan import Plan
from tfswap.report.report import Report, report_of_devices
from tfswap.runtime import messages, turn
from tfswap.runtime.agreement import plan_with_others
from tfswap.runtime.captures import captured
from tfswap.runtime.dynamic_sizes import DataDependentSizes
from tfswap.runtime.function_maker import FunctionMaker
from tfswap.runtime.nested_calls import NestedStep
from tfswap.runtime.planning_loop import PlanningLoop
from tfswap.runtime.program import Program
from tfswap.runtime.shapes import Shapes, covers
from tfswap.runtime.step_part import StepPart, StepParts
from tfswap.runtime.trace import Trace
from tfswap.support import progress
from tfswap.support.sizes import Limit

if TYPE_CHECKING:
    from tfswap.native.load import CArenaReading
    from tfswap.ops.runtime import StepStats

log = logging.getLogger("tfswap")


class Step:
    """One trace, for arguments up to certain shapes.

    Args:
        trace: the trace.
        shapes: the arguments' shapes, by position; None for any shape that the trace accepts. After them the sizes that
            depend on values.
        request: what to do to it.
        on_exceeded: "warn" or "raise".
        program: the program that it is a part of: all its steps share host memory.
        batches_ahead: as of OptimizedFunction.
        instead_of: a step for larger arguments, which evicts more than these need. This one keeps the same limit, in
            bytes, and the same order of additions, so that values do not depend on which of the two runs.
        first: whether it is the function's first step to be planned.
        dynamic_sizes: computes sizes that the arguments' shapes leave open.

    Attributes:
        function: the rewritten ConcreteFunction; the trace itself where the plan changes nothing.
        planned: whether there is a plan.
        parts: the part on each device.
    """

    function: Any

    def __init__(
        self,
        trace: Trace,
        shapes: Shapes,
        request: Request,
        on_exceeded: str,
        program: Program,
        batches_ahead: Mapping[str, int] | None = None,
        instead_of: Step | None = None,
        first: bool = False,
        dynamic_sizes: DataDependentSizes | None = None,
    ):
        self.instead_of = instead_of
        self.name = trace.name
        self.shapes = shapes
        self.planned = self._was_planned = False  # a step with another limit than before is not planned yet, and was
        self._trace = trace
        self._request = request
        self._program = program
        self._first = first
        self._gate: int | None = None
        self._calls_steps = False  # whether the unchanged trace runs, and calls optimized steps
        self._maker = FunctionMaker(trace, request, program.owner)
        self._nested = NestedStep(trace, self._maker, self._run_nested)
        self.parts = StepParts(
            StepPart(
                part,
                shapes,
                request if instead_of is None else instead_of.parts[number].request_in_bytes,
                self._maker,
                on_exceeded=on_exceeded,
                granted_bytes=program.granted_bytes(part.device.name),
                dynamic_sizes=dynamic_sizes,
                batches_ahead=(batches_ahead or {}).get(part.device.name, 0),
            )
            for number, part in enumerate(trace.parts(with_host=request.limits_host))
        )

    @property
    def plan(self) -> Plan:
        """The latest plan; of several devices, the first one's."""
        return self.parts[0].plan

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that planned it, or its part on the first device; None before."""
        return self.parts[0].compiler.optimizer

    def limit_on(self, device: str) -> int:
        """The limit on a device, in bytes; 0 where there is none, or it is not known."""
        return sum(part.limit.bytes or 0 for part in self.parts if part.trace.device.name == device)

    def covers(self, shapes: Sequence[tuple[int, ...] | None]) -> bool:
        """Whether arguments of these shapes are no larger than those planned for."""
        return covers(self.shapes, shapes, exactly=not self.planned)

    @property
    def covers_all(self) -> bool:
        """Whether all arguments that the trace accepts are covered."""
        return self.planned and all(shape is None for shape in self.shapes)

    def fits(self) -> bool:
        """Whether the planned step keeps its limit in the arena as it is now."""
        return not self._trace.device.has_arena or self.parts.fit(self.parts.read_before())

    def audit(self) -> None:
        """Compare the graphs that TensorFlow executed, also inside of other functions, with the planned ones.

        Raises VerificationError where they differ.
        """
        self._maker.audit()

    def report(self, device: str | None) -> Report:
        """The report on a device, by its name; for None on all. Raises TfswapError where the step is not on it."""
        if device is not None:
            return self.parts.on(device).watch.report
        return report_of_devices(self.name, {part.trace.device.name: part.watch.report for part in self.parts})

    def stats(self) -> StepStats:
        """The swaps of the function's latest run."""
        from tfswap.ops.runtime import StepStats, step_stats

        hits = 0
        if self.instead_of is not None:
            hits = sum(map(_spared, self.parts.plans, self.instead_of.parts.plans))
        unchanged = self._request.changes_nothing or all(plan.changes_nothing for plan in self.parts.plans)
        counted = StepStats() if unchanged else step_stats(self._program.owner)
        return dataclasses.replace(counted, device_peaks=self.parts.device_peaks(), cache_hits=hits)

    def __call__(self, inputs: Sequence[Any], plain: bool = False) -> Any:
        """Run the step under its limit.

        Args:
            plain: the call runs eagerly, with neither a tape nor a cancellation manager.
        """
        captures = captured(self._trace.concrete)
        if self._request.changes_nothing or not self._trace.device.has_arena or not (plain or runs_eagerly()):
            result = self._call(inputs, plain, captures)
            if self._maker.has_made:
                self._maker.audit_new(self._trace.device.read_arena(before=False))
        else:
            result = self._in_turn(self._trace.on_device(inputs), plain, captures)
        return self._trace.finish(result, self._run_part)

    def _in_turn(self, inputs: Sequence[Any], plain: bool, captures: list[Any] | None) -> Any:
        """Run it now, in its turn, on a device whose arena can be read.

        Args:
            captures: the call's captures, where they are computed for each call.
        """
        outer = turn.held()
        try:
            ticket = turn.begin(self.parts.wait)
            before = self.parts.read_before(inputs)
            if turn.alone(ticket) and not self.parts.fit(before):
                with progress.task(f"planning {self.name} again"):
                    self._plan_again(inputs)
                before = self.parts.read_before()
            if self._calls_steps:
                turn.end(outer)  # each of the called steps has its own
            return self._watched(inputs, plain, captures, before, ticket)
        finally:
            turn.end(outer)

    def _watched(
        self,
        inputs: Sequence[Any],
        plain: bool,
        captures: list[Any] | None,
        before: Sequence[CArenaReading],
        ticket: int,
    ) -> Any:
        with self.parts.explained():
            result = self._call(inputs, plain, captures)
        self.parts.notice(before, ticket, result)
        return result

    def _run_part(self, run: Callable[[], Any]) -> Any:
        """Run, under the limit, what the call has left for later."""
        if not self._trace.device.has_arena:
            result = run()
            self._maker.audit_new(self._trace.device.read_arena(before=False))
            return result
        outer = turn.held()
        try:
            ticket = turn.begin(self.parts.wait)
            before = [part.trace.device.read_arena(before=False) for part in self.parts]
            result = run()
            self.parts.notice(before, ticket, result)
            return result
        finally:
            turn.end(outer)

    def _call(self, inputs: Sequence[Any], plain: bool, captures: list[Any] | None) -> Any:
        takes_turns = self._trace.device.has_arena and not self._request.changes_nothing
        inside = self._inside if takes_turns and not (plain or runs_eagerly()) else None
        rewritten = self._gate is not None
        return self._trace.call(self.function, inputs, captures, rewritten=rewritten, plain=plain, inside=inside)

    def _run_nested(self, inputs: Sequence[Any]) -> Any:
        """Run it now for the function that calls it."""

        def run() -> Any:
            self.prepare(inputs)  # its limit may have changed since that was traced
            return self._in_turn(inputs, plain=True, captures=None)

        return self._program.call(run)

    def _inside(self) -> Any:
        """The function that a caller's trace calls: it runs this step when the caller runs, where Python can."""
        assert self.optimizer is not None, "it has been planned"
        if self._calls_steps or not self._nested.can_run(self.optimizer.graph):
            return self.function
        return self._nested.function(rewritten=not self.plan.changes_nothing, waits=self.parts.wait)

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Plan, if that has not been done. Raises InfeasibleMemoryLimit and UnsupportedGraph."""
        if self.planned:
            return
        with turn.planning(self._trace.device), progress.task(f"planning {self.name}"):
            if self.planned:
                return
            inputs = self._trace.on_device(inputs)
            try:
                if self._first:
                    request = self._request
                    alone = (
                        request.changes_nothing or request.plan is not None or not self._trace.device.is_live(inputs)
                    )
                    plan_with_others(self, inputs, alone=alone)
                else:
                    self.plan_now(inputs, ordered=self.instead_of is not None)
            finally:
                for part in self.parts:
                    part.limit.is_final = part.limit.bytes is not None

    def plan_now(self, inputs: Sequence[Any], *, given: Sequence[Plan] | None = None, ordered: bool = False) -> None:
        """Plan for the arenas as they are, and make the function.

        Args:
            given: for each part, carry out this plan instead, whatever it needs.
            ordered: order the step also where its limit is well above the unoptimised peak.
        """
        with self._trace.planning():
            live = not self._request.changes_nothing and self._trace.device.is_live(inputs)
            planned = PlanningLoop(
                self.parts,
                self._trace,
                self._maker,
                inputs,
                live=live,
                given=given,
                ordered=ordered or self._trace.always_ordered,
                first=not self._was_planned,
            ).run()
            self.function, self._gate = planned[0].function, planned[0].gate
            self.parts.renew(planned)
            self._calls_steps = self._gate is None and calls_steps(self._trace.concrete)
            self.planned = self._was_planned = True
            if self.plan.limit_bytes is not None and self._trace.device.model.uses_cudnn:
                without_redzones()
            report = self.parts[0].watch.report
            limit_workspaces(report.workspace_bytes if self._request.options.limit_workspaces else None)
            if live and self._gate is not None:
                self.parts.assume_made(planned)
            for part in self.parts:
                log.info("tfswap: %s: %s", part.trace.name, part.watch.report.headline())
            if given is None:
                self.parts.notice_making(self._maker.making_bytes)

    def unplan(self) -> None:
        """Drop the plan: nothing of it stays in the arena."""
        self.planned = False
        self.function = self._gate = None
        self.parts.drop_requests()
        free_functions()

    def change_limit(self, limit: Limit) -> None:
        """Drop the plan, and plan for another limit at the next call, with the same trace and facts.

        Workers do not agree on that plan: each changes its own limit.
        """
        self._first = False
        self.parts.change_limit(limit)
        if self.planned:
            self.unplan()
        self.parts.compute_limits()

    def _plan_again(self, inputs: Sequence[Any]) -> None:
        """Plan for the arenas as they are, before the step runs; where no plan fits, keep the present one.

        Room is left for what others allocated during an earlier step, unless no plan fits with it: it has been freed.
        """
        before, was_live = self.parts.plans, self.parts[0].watch.live
        margins = [part.watch.margins_to_try() for part in self.parts]
        self.function = None
        self.parts.drop_requests()
        refusals: list[InfeasibleMemoryLimit] = []
        for number in range(max(map(len, margins))):
            for part, own in zip(self.parts, margins, strict=True):
                part.margins.others_bytes = own[min(number, len(own) - 1)]
            try:
                self.plan_now(inputs, ordered=was_live)
            except InfeasibleMemoryLimit as error:
                refusals.append(error.with_traceback(None))  # its frames hold the arguments, and this one holds it
                continue
            if refusals:
                log.warning("tfswap: %s", messages.no_room(self.name, refusals[0].floor_bytes))
            for part, own in zip(self.parts, margins, strict=True):
                part.watch.note_planned_again(own[0] if refusals else 0)
            return
        if not was_live:  # it has never run: there is no training to continue
            raise refusals.pop()
        self.plan_now(inputs, given=before)
        for part in self.parts:
            part.watch.note_unsatisfiable(refusals[-1])


def _spared(plan: Plan, larger: Plan) -> int:
    """The number of tensors that a plan for larger arguments evicts, and this one does not."""
    return len({eviction.tensor for eviction in larger.evictions} - {eviction.tensor for eviction in plan.evictions})
