"""The part of a step on one device: its arena, its limit, its plan, and the watch over it. Most steps have one part."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.compiler.request import Request
from tfswap.device.variable_buffers import HomePlaces
from tfswap.errors import TfswapError
from tfswap.runtime import messages
from tfswap.runtime.arena_view import ArenaView
from tfswap.runtime.arena_watch import ArenaWatch
from tfswap.runtime.dynamic_sizes import DataDependentSizes
from tfswap.runtime.limit import StepLimit
from tfswap.runtime.margins import Margins
from tfswap.runtime.shapes import Shapes
from tfswap.runtime.step_compiler import StepCompiler

if TYPE_CHECKING:
    from tfswap.compiler.compiler import Optimizer
    from tfswap.device.lent_block import LentBlock
    from tfswap.native.load import CArenaReading
    from tfswap.plan.plan import Plan
    from tfswap.runtime.function_maker import FunctionMaker
    from tfswap.runtime.planning_loop import Planned
    from tfswap.runtime.trace import Trace
    from tfswap.support.sizes import Limit


class StepPart:
    """One part.

    Args:
        trace: the part's trace.
        maker: makes the functions of the whole step.
        granted_bytes: the highest limit of another trace of the function.
        Other arguments: as of Step.

    Attributes:
        plan: the latest plan.
        borrowed: the memory of another device that its swapped tensors take.
    """

    plan: Plan
    borrowed: LentBlock | None = None

    def __init__(
        self,
        trace: Trace,
        shapes: Shapes,
        request: Request,
        maker: FunctionMaker,
        *,
        on_exceeded: str,
        granted_bytes: int,
        dynamic_sizes: DataDependentSizes | None,
        batches_ahead: int,
    ):
        self.trace = trace
        self.request = request
        self._arguments = VariableArguments(trace.concrete)
        self.limit = StepLimit(trace, request, granted_bytes)
        self.margins = Margins()
        self.arena = ArenaView(trace.device)
        self.compiler = StepCompiler(
            trace, shapes, request, self.limit, self.margins, self.arena, dynamic_sizes, batches_ahead
        )
        self.watch = ArenaWatch(trace, request, self.limit, self.margins, self.arena, maker, on_exceeded)

    @property
    def request_in_bytes(self) -> Request:
        """The request, with the limit in bytes."""
        return dataclasses.replace(self.request, memory_limit=self.limit.bytes)

    def renew(self, planned: Planned, lends_bytes: int) -> None:
        """Take a new plan, which a function carries out from now on.

        Args:
            lends_bytes: the memory that the device lends others.
        """
        optimizer, self.plan = planned.optimizer, planned.plan
        optimizer.extra_margin_bytes = self.margins.others_bytes
        if (complaint := self.request.complaint(self.trace.name, self.plan)) is not None:
            self.watch.complain(complaint)
        floor = functools.partial(self._floor_bytes, rewritten=planned.gate is not None)
        report = optimizer.report(self.plan, planned.snapshot)
        notes = [] if self.borrowed is None else [messages.borrows(self.trace.device.name, self.borrowed)]
        notes += [messages.lends(self.trace.device.name, lends_bytes)] if lends_bytes else []
        name = self.trace.device.name
        self.watch.renew(
            planned,
            dataclasses.replace(
                report,
                step=self.trace.name,
                device=name,
                notes=(*report.notes, *notes),
                requested_share=self.request.share(name),
                _floor=floor,
            ),
        )

    def read_before(self, inputs: Sequence[Any] | None) -> CArenaReading:
        """Read the arena before the next step, with the variables among these arguments where the plan has them."""
        if inputs is not None and self._arguments.are_others(inputs):
            self.compiler.own_buffers(inputs)
            self.arena.keep_at_home(self.home_places(self.plan))
        return self.arena.read_before()

    def home_places(self, plan: Plan) -> HomePlaces:
        """Where a plan has the variables."""
        spill = self.request.options.spill
        return HomePlaces(frozenset(plan.at_home), frozenset(plan.on_disk), "" if spill is None else spill.folder)

    def assume_made(self, planned: Planned) -> None:
        """Note that the constants of the plan's function are in the arena: the reported floor is of this arena."""
        planned.optimizer.assume_made(planned.plan, planned.snapshot)
        self.watch.remember_arena()

    def _floor_bytes(self, *, rewritten: bool) -> int:
        return self.compiler.floor_bytes(self.plan, rewritten=rewritten)


class VariableArguments:
    """The variables that a trace takes as arguments, and those of the latest call."""

    def __init__(self, concrete: Any):
        own = concrete.inputs[: len(concrete.inputs) - len(concrete._captured_inputs)]
        self._positions = [i for i, tensor in enumerate(own) if tensor.dtype.name == "resource"]
        self._latest: list[Any] = []

    def are_others(self, inputs: Sequence[Any]) -> bool:
        """Whether the handles of a call are others than those of the call before."""
        if not self._positions:
            return False
        given = [inputs[position] for position in self._positions]
        before, self._latest = self._latest, given
        return len(before) != len(given) or any(a is not b for a, b in zip(before, given, strict=True))


class StepParts(tuple[StepPart, ...]):
    """The parts of one step, in the order of its devices."""

    __slots__ = ()

    @property
    def plans(self) -> list[Plan]:
        """The latest plans."""
        return [part.plan for part in self]

    @property
    def limits(self) -> list[int | None]:
        """The limits in bytes."""
        return [part.limit.bytes for part in self]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers; empty before the trace is imported."""
        return [part.compiler.optimizer for part in self if part.compiler.optimizer is not None]

    @property
    def keep_limits(self) -> bool:
        """Whether each plan keeps its limit in the arena that it was made for."""
        return all(part.watch.keeps_limit for part in self)

    @property
    def wait(self) -> bool:
        """Whether kernels of the step may wait for others."""
        return any(part.compiler.waits for part in self)

    def device_peaks(self) -> dict[str, int | None]:
        """The allocator's peak on each device, by its name; None where it keeps none."""
        return {part.trace.device.name: part.trace.device.peak_bytes for part in self}

    def on(self, device: str | None) -> StepPart:
        """The part on a device, by its name; for None the first. Raises TfswapError where there is none."""
        for part in self:
            if device is None or part.trace.device.name == device.upper():
                return part
        there = ", ".join(part.trace.device.name for part in self)
        raise TfswapError(f"{self[0].trace.name} has no plan for {device!r}: it is planned for {there}")

    # --- before and after a step --------------------------------------------------------------------------

    def read_before(self, inputs: Sequence[Any] | None = None) -> list[CArenaReading]:
        """Read the arenas before the next step, with these arguments if they are known."""
        return [part.read_before(inputs) for part in self]

    def fit(self, now: Sequence[CArenaReading]) -> bool:
        """Whether each part keeps its limit in its arena as it is now."""
        seen = (each for each in zip(self, now, strict=True) if each[0].trace.device.has_arena)
        return all(part.watch.fits(arena) for part, arena in seen)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """The context of the step's call: where a device has too little memory, the error names the cause."""
        from tensorflow.python.framework import errors

        try:
            yield
        except errors.ResourceExhaustedError as error:
            cause = next(filter(None, (part.watch.cause_of_lack() for part in self)), "")
            if not cause:
                raise
            raise errors.ResourceExhaustedError(error.node_def, error.op, f"{cause}\n{error.message}") from None

    def notice(self, before: Sequence[CArenaReading], ticket: int, result: Any) -> None:
        """As `ArenaWatch.notice`, of all arenas."""
        for part, arena in zip(self, before, strict=True):
            part.watch.notice(arena, ticket, result)

    # --- plans --------------------------------------------------------------------------------------------

    def renew(self, planned: Sequence[Planned]) -> None:
        """Take new plans, which one function carries out from now on."""
        blocks = [part.borrowed for part in self if part.borrowed is not None]
        for part, found in zip(self, planned, strict=True):
            part.renew(found, sum(block.nbytes for block in blocks if block.lender == part.trace.device.name))

    def assume_made(self, planned: Sequence[Planned]) -> None:
        """Note that the constants of the plans' function are in the arenas."""
        for part, found in zip(self, planned, strict=True):
            part.assume_made(found)

    def notice_making(self, peaks: Sequence[int]) -> None:
        """Report where the function passed a limit while it was made.

        Args:
            peaks: as `FunctionMaker.making_bytes`.
        """
        for part, peak_bytes in zip(self, peaks, strict=False):
            if part.limit.bytes is not None and peak_bytes > part.limit.bytes:
                part.watch.complain(messages.exceeded_while_made(part.trace.name, peak_bytes, part.limit.bytes))

    def drop_requests(self) -> None:
        """Note that the plans are no longer carried out."""
        for part in self:
            part.borrowed = None
            part.watch.drop_requests()

    def change_limit(self, limit: Limit) -> None:
        """Take another limit, whose bytes are not known yet."""
        for part in self:
            part.limit.change(limit)
            part.watch.forget_excess()

    def compute_limits(self) -> None:
        """Compute the bytes of the limits, where the trace is imported."""
        for part in self:
            if (optimizer := part.compiler.optimizer) is not None:
                part.limit.compute(optimizer, part.arena.snapshot())
