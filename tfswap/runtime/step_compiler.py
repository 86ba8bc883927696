"""The compiler of one step in this process: its graph, the arena that it is planned for, and the choice of its plan."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tfswap.analysis.constants import folded_bytes
from tfswap.compiler.calibration import calibrated
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.plan_cache import PlanCache
from tfswap.compiler.refusal import unplaced_bytes
from tfswap.compiler.request import Request
from tfswap.compiler.reserved_slots import reserved_slots
from tfswap.device.small_slots import make_slots_in_arena
from tfswap.importers.shapes import HANDLES
from tfswap.importers.source_lines import SourceLines
from tfswap.ir.graph import Graph
from tfswap.passes.nodes import waits_for_others
from tfswap.plan.plan import Plan
from tfswap.planner.promise import promised
from tfswap.runtime import messages
from tfswap.runtime.arena_view import ArenaView
from tfswap.runtime.block_choice import with_blocks
from tfswap.runtime.captures import with_placeholders
from tfswap.runtime.dynamic_sizes import DataDependentSizes
from tfswap.runtime.limit import StepLimit, report_floor, reported_floor
from tfswap.runtime.margins import Margins
from tfswap.runtime.shapes import Shapes
from tfswap.runtime.trace import Trace
from tfswap.simulator.arena_snapshot import ArenaSnapshot

log = logging.getLogger("tfswap")


class StepCompiler:
    """Plans one step for the arena as it is.

    Args:
        shapes: the arguments' shapes, by position; None for any shape that the trace accepts. After them the sizes that
            depend on values.
        dynamic_sizes: gives the types of tensors whose sizes depend on values.
        batches_ahead: how many batches are made in the arena while the step runs.

    Attributes:
        optimizer: the step's optimizer; None before the trace is imported.
        waits: whether kernels of the step may wait for others.
        slots: the tensors that keep the reserved slots apart (planner/small_slots.py); empty where there are none.
    """

    def __init__(
        self,
        trace: Trace,
        shapes: Shapes,
        request: Request,
        limit: StepLimit,
        margins: Margins,
        arena: ArenaView,
        dynamic_sizes: DataDependentSizes | None,
        batches_ahead: int,
    ):
        self._trace = trace
        self._shapes = shapes
        self._request = request
        self._limit = limit
        self._margins = margins
        self._arena = arena
        self._dynamic_sizes = dynamic_sizes
        self._batches_ahead = batches_ahead
        self.optimizer: Optimizer | None = None
        self.waits = False
        self.slots: list[Any] = []
        self._make: Callable[[Graph], Optimizer]  # of forms of the imported graph
        self._import_peak_bytes = 0  # of the arena, where importing the step has raised it

    def import_step(self, inputs: Sequence[Any], *, first: bool) -> bool:
        """Make the optimizer, and give the variables buffers of their own; returns whether there was no optimizer.

        Args:
            first: whether the step has not been planned yet.
        """
        is_new, before_bytes = self.optimizer is None, self._trace.device.peak_bytes or 0
        optimizer = self._make_optimizer(inputs) if self.optimizer is None else self.optimizer
        peak_bytes = self._trace.device.peak_bytes or 0
        self._import_peak_bytes = peak_bytes if peak_bytes > before_bytes else 0
        if first and not self._request.changes_nothing and self._trace.device.has_arena:
            self.own_buffers(inputs)
        if is_new:
            snapshot = self._arena.snapshot().with_allocations(self._made_around(optimizer.graph, inputs))
            optimizer.unoptimised.assume_variables(snapshot)  # a share is of a peak with all of them on the device
            self._limit.compute(optimizer, snapshot)
            if not self._request.changes_nothing:
                self._choose_blocks(optimizer, inputs, snapshot)
        return is_new

    def _choose_blocks(self, optimizer: Optimizer, inputs: Sequence[Any], snapshot: ArenaSnapshot) -> None:
        """Go on with the form of the step that has the blocks of the tactic "fuse"."""
        before_bytes = self._trace.device.peak_bytes or 0
        self.optimizer = with_blocks(optimizer, self._trace, self._planned_for(inputs), self._limit.bytes, self._make)
        self.optimizer.unoptimised.assume_variables(snapshot)
        peak_bytes = self._trace.device.peak_bytes or 0
        if peak_bytes > before_bytes:  # blocks were measured
            self._import_peak_bytes = peak_bytes

    def for_arena(self, inputs: Sequence[Any], *, live: bool, first: bool) -> tuple[Optimizer, ArenaSnapshot]:
        """The optimizer, set to the arena as it is or may be when the step runs, and that arena's snapshot.

        Args:
            live: whether the step runs now.
            first: as of `import_step`.
        """
        optimizer = self.optimizer
        assert optimizer is not None, "the step is imported"
        snapshot = self._arena.snapshot()
        begin_bytes = self._begin_bytes(optimizer, snapshot) if first else 0
        if not live:
            snapshot = snapshot.unseen().with_allocations(self._made_around(optimizer.graph, inputs))
        optimizer.assume_arena(snapshot, begin_bytes)
        return optimizer, snapshot

    def _begin_bytes(self, optimizer: Optimizer, snapshot: ArenaSnapshot) -> int:
        """The most bytes in the arena before any variable leaves it: Grappler takes some while the step is imported."""
        traced = optimizer.graph.traced
        folded = 0 if traced is None or optimizer.device.host_is_separate else folded_bytes(traced)
        return max(snapshot.total_bytes + folded, self._import_peak_bytes)

    def own_buffers(self, inputs: Sequence[Any]) -> None:
        """As of `ArenaView`, for captured variables and those among these arguments.

        An argument that is captured too, or given twice, is left out: the step has several handles of the variable.
        """
        optimizer = self.optimizer
        assert optimizer is not None, "the step is imported"
        captures = with_placeholders(self._trace.concrete)
        counts = Counter(map(id, (*inputs, *captures)))
        handles = [each if _is_handle(each) and counts[id(each)] == 1 else None for each in inputs]
        given = self._trace.given_to(optimizer.graph, [*handles, *captures])
        self._arena.own_buffers(optimizer, {name: each for name, each in given.items() if each is not None})

    def choose(self, optimizer: Optimizer, *, ordered: bool, first: bool, lacking_bytes: int = 0) -> Plan:
        """The plan for the limit, with the largest margins with which there is one.

        Args:
            ordered: order the step also where its limit is well above the unoptimised peak.
            first: whether it has not been planned yet.
            lacking_bytes: by how much an earlier plan exceeded the limit in the arena; a plan with so much more room is
                preferred.

        Raises InfeasibleMemoryLimit.
        """
        margins = self._margins
        if self._request.plan is None and not self._request.changes_nothing:
            optimizer.extra_margin_bytes = max((margins.others_bytes, *margins.spare(optimizer.flow, 0)))
            self._limit.settle(optimizer, lacking_bytes)
        limit_bytes = self._limit.bytes
        if (known := self._trace.plan_made_before(optimizer, limit_bytes, margins.others_bytes)) is not None:
            return known
        if self._request.plan is not None or self._request.changes_nothing:
            return self._request.choose(optimizer, self._trace.device.name)
        spare = margins.spare(optimizer.flow, lacking_bytes)
        if spare:
            for margin in (*spare, margins.others_bytes):
                optimizer.extra_margin_bytes = margin
                if (known := optimizer.recall(limit_bytes, ordered=ordered)) is not None:
                    return known
        for margin in spare:
            optimizer.extra_margin_bytes = margin
            if (plan := optimizer.find(limit_bytes, ordered=ordered)) is not None:
                return plan
        optimizer.extra_margin_bytes = margins.others_bytes
        if (plan := optimizer.find(limit_bytes, ordered=ordered)) is not None:
            if margins.elements_bytes and first:
                log.warning("tfswap: %s", messages.no_room_for_batches(self._trace.name, margins.elements_bytes))
            return plan
        assert limit_bytes is not None, "a plan for no limit is never refused"
        if self._trace.device.has_arena and limit_bytes >= reported_floor(optimizer.fingerprint):
            # A reported floor has to hold in later processes too, whose arenas differ a little: there plans may use up
            # their margin.
            optimizer.extra_margin_bytes -= promised(limit_bytes) - limit_bytes
            if (plan := optimizer.find(limit_bytes, ordered=ordered)) is not None:
                return plan
            optimizer.extra_margin_bytes = margins.others_bytes
        raise optimizer.infeasible(limit_bytes)

    def make_slots(self, optimizer: Optimizer) -> bool:
        """Make reserved slots for small tensors in the arena; returns whether the step needs some and there is room."""
        limit_bytes = self._limit.bytes
        assert limit_bytes is not None, "without one no slot is missed"
        slots = reserved_slots(optimizer.search, self._arena.snapshot())
        self.slots = make_slots_in_arena(self._trace.device.name, slots, limit_bytes)
        return bool(self.slots)

    def floor_bytes(self, plan: Plan, *, rewritten: bool) -> int:
        """The smallest limit to report.

        Args:
            plan: the present one.
            rewritten: whether it is not the trace itself that runs.
        """
        assert self.optimizer is not None, "it has made the plan"
        with self.optimizer.at_floor() as floor:
            floor += unplaced_bytes(self.optimizer.search)
        if rewritten and plan.keeps_limit:  # the present plan proves that it can be
            floor = min(floor, promised(plan.planned_peak_bytes) + self._margins.others_bytes)
            if self._limit.bytes is not None:  # also where that took the plan's own margin
                floor = min(floor, self._limit.bytes)
        report_floor(self.optimizer.fingerprint, floor)
        return floor

    def _make_optimizer(self, inputs: Sequence[Any]) -> Optimizer:
        arguments = self._planned_for(inputs)
        sizes = tuple(tuple(shape or ()) for shape in self._shapes[len(arguments) :])
        types = self._dynamic_sizes.types(sizes) if self._dynamic_sizes is not None and sizes else None
        options = self._request.options
        imported = self._trace.import_graph(arguments, types, keeps=options.names)
        graph = imported.graph
        self._margins.others_bytes += imported.margin_bytes
        given = list(self._trace.given_to(graph, inputs).values())
        others_bytes = self._margins.add_batches(graph, self._trace.device.model, given, self._batches_ahead)
        snapshot = self._arena.snapshot().with_allocations(self._made_around(graph, inputs))
        self.waits = waits_for_others(graph)
        self._make = functools.partial(
            Optimizer,
            device=calibrated(self._trace.device.model, options),
            options=options.shared(imported.parts, imported.passed_bytes),
            snapshot=snapshot,
            locate=SourceLines(self._trace.concrete),
            keeps_results=True,
            held=imported.held,
            others_bytes=others_bytes,
            plan_cache=PlanCache.of_environment(),
            shared=imported.shared,
        )
        self.optimizer = self._make(graph)
        return self.optimizer

    def _made_around(self, graph: Graph, inputs: Sequence[Any]) -> list[int]:
        """The bytes of each input of the step that the function around it computes later."""
        captures = with_placeholders(self._trace.concrete)
        pairs = list(zip((*inputs, *captures), (*self._planned_for(inputs), *captures), strict=True))
        given = self._trace.given_to(graph, pairs).values()
        return [t.shape.num_elements() * t.dtype.size for by, t in given if _is_made_around(by, t)]

    def _planned_for(self, inputs: Sequence[Any]) -> list[Any]:
        """Arguments of the sizes that the plan is for, of which these may be smaller."""
        import tensorflow as tf

        return [
            given if shape is None else tf.TensorSpec(shape, given.dtype)
            for given, shape in zip(inputs, self._shapes[: len(inputs)], strict=True)
        ]


def _is_handle(given: Any) -> bool:
    import tensorflow as tf

    return tf.is_tensor(given) and given.dtype == tf.resource


def _is_made_around(given: Any, planned: Any) -> bool:
    """Whether an input of a step is computed by the function around the step, and has a known size.

    An argument of that function is not: it exists before the call.
    """
    import tensorflow as tf

    if not tf.is_symbolic_tensor(given) or planned.dtype.name in HANDLES or not planned.shape.is_fully_defined():
        return False
    outer = getattr(given.graph, "outer_graph", None)  # None where only sizes are computed
    return given.op.type != "Placeholder" or (outer is not None and outer.building_function)
