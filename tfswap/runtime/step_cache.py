"""The steps of one function: which of them a call runs, by trace and by the sizes of its arguments.

A step covers arguments that are no larger than those that it was planned for. A size that no step covers is planned for
at its first call, with room to grow where sizes keep growing. A smaller size that recurs gets a step of its own where
the step that covers it evicts tensors that would have room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfswap.compiler.options import Options
from tfswap.compiler.preconditions import UnknownSizes
from tfswap.compiler.request import Request
from tfswap.compiler.rival_rewriters import refuse_rewriters
from tfswap.device import arena, machine
from tfswap.device.live import live_device
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, UnsupportedGraph
from tfswap.ir.permits import FUSE
from tfswap.runtime.dynamic_sizes import (
    DataDependentSizes,
    find_data_dependent_sizes,
    follow_from_arguments,
    have_values,
)
from tfswap.runtime.joint_trace import SEVERAL, Joint, joint_of
from tfswap.runtime.open_function import has_size
from tfswap.runtime.outer_gradient_trace import OuterGradientTrace
from tfswap.runtime.program import Program
from tfswap.runtime.separate_passes import SeparatePasses, separate_passes
from tfswap.runtime.shapes import Shapes, elements, grown, shapes_of
from tfswap.runtime.step import Step
from tfswap.runtime.trace import Trace
from tfswap.support.sizes import Limit, is_share

MAX_COUNTED = 1024
"""The most sizes, covered by a plan for larger ones, whose calls are counted."""
RECURS = 16
"""After this many calls a size gets a plan of its own, where the plan that covers it evicts tensors that only larger
sizes need evicted. These calls gain about the time that planning takes.
"""
MAX_OWN = 8
"""The most sizes of one trace with plans of their own. Each holds another copy of the step's constants."""

_FOLLOWS = "It depends on the arguments' values. Such sizes are computed before each call, but not "
_FROM_PYTHON = "Call the optimized function from Python, with the arguments themselves"
WITH_OUTER_GRADIENTS = _FOLLOWS + "for a call whose gradients are taken outside of the function: take them inside."
WITHOUT_VALUES = _FOLLOWS + (
    "where the arguments have no values: inside of another tf.function, or traced for specs. "
    f"{_FROM_PYTHON}, and what is around it before or after."
)
OPEN_ARGUMENTS = (
    "Arguments have open sizes here, as sparse tensors have inside of another tf.function, or where a step is traced "
    f"for specs. {_FROM_PYTHON}, or give the function around it an input_signature of full shapes; "
    "batches of Keras' fit have one size with drop_remainder=True."
)


class StepCache:
    """The steps of one function.

    Args:
        name: the function's name, for messages.
        request: what to do to each trace.
        on_exceeded: "warn" or "raise".
        program: the program that the function is a part of.
        lock: held while a step of the function runs.
        optimized: puts a `tf.function` under a limit, from it, a request and `on_exceeded`: functions that compute
            sizes keep the limit too.
        trace_of: makes the trace of a step from a ConcreteFunction.
        first_shapes: from the number of a trace's arguments to the shapes that its first step is planned for, where
            they cover those of the call; None where it is planned for those of the call.

    Attributes:
        batches_ahead: as of OptimizedFunction.
        joint_of: by trace, the trace with its gradients, or why there is none.
    """

    def __init__(
        self,
        name: str,
        request: Request,
        on_exceeded: str,
        program: Program,
        lock: threading.RLock,
        optimized: Callable[[Any, Request, str], Any],
        trace_of: Callable[[Any], Trace],
        first_shapes: Callable[[int], Shapes] | None = None,
    ):
        self._name = name
        self._request = request
        self._on_exceeded = on_exceeded
        self._program = program
        self._lock = lock
        self._optimized = optimized
        self._trace_of = trace_of
        self._first_shapes = first_shapes
        self._steps: dict[Any, list[Step]] = {}
        self._dynamic_sizes: dict[Any, DataDependentSizes] = {}  # by trace, where shapes alone do not give all sizes
        self._calls: Counter[tuple[Any, Shapes]] = Counter()  # of sizes that a plan for larger ones covers
        self._computing: weakref.WeakSet[Any] = weakref.WeakSet()  # functions that compute sizes, under the limit
        self.batches_ahead: Mapping[str, int] = {}
        self.joint_of: dict[Any, Joint | str] = {}
        self._separate: dict[Any, SeparatePasses | str] = {}  # by trace
        self._part_of: dict[Any, Joint] = {}  # by trace of a pass, what a share of the limit is of

    def __contains__(self, concrete: Any) -> bool:
        return concrete in self._steps

    @property
    def traces(self) -> Iterable[Any]:
        """The traces that have steps."""
        return tuple(self._steps)

    def planned_of(self, concrete: Any) -> list[Step]:
        """The steps of a trace that are planned."""
        return [step for step in self._steps.get(concrete, ()) if step.planned]

    @property
    def plans(self) -> int:
        """The number of plans of all traces."""
        return sum(step.planned for steps in self._steps.values() for step in steps)

    def granted_bytes(self, device: str) -> int:
        """The highest limit of all plans on a device; 0 where there is none."""
        steps = (step for steps in tuple(self._steps.values()) for step in tuple(steps))  # threads add some
        return _granted_by(steps, device)

    def change_limit(self, limit: Limit) -> None:
        """Plan every step again for another limit, at its next call."""
        with self._lock:
            had_host, self._request = self._request.limits_host, dataclasses.replace(self._request, memory_limit=limit)
            self._calls.clear()
            if self._request.limits_host != had_host:  # steps have other parts
                for step in (step for steps in self._steps.values() for step in steps if step.planned):
                    step.unplan()
                self._steps.clear()
            for concrete in sorted(self._steps, key=lambda each: not isinstance(each, Joint)):
                self._steps[concrete] = [step for step in self._steps[concrete] if step.instead_of is None]
                for step in self._steps[concrete]:
                    step.change_limit(self._limit_of(concrete))
            for function in self._computing:
                function.memory_limit = self._limit_of_sizes() or limit

    def step_for(self, concrete: Any, inputs: Sequence[Any]) -> Step:
        """The planned step for these arguments."""
        steps = self._steps.get(concrete, ())
        if len(steps) == 1 and steps[0].covers_all:
            return steps[0]
        shapes = self._sizes(concrete, inputs)
        with self._lock:
            covering = [s for s in self._steps.get(concrete, ()) if s.covers(shapes)]
            if not covering:
                return self._plan(concrete, shapes, inputs)
            step = min(covering, key=lambda s: elements(s.shapes))  # a step for fewer evicts less
            step.prepare(inputs)
            if step.plan.moves and step.shapes != shapes:
                return self._own(concrete, shapes, inputs, step)
            return step

    def _plan(self, concrete: Any, shapes: Shapes, inputs: Sequence[Any]) -> Step:
        """A new step for these arguments; for larger ones too where they keep growing and the limit allows it."""
        if self._first_shapes is not None and not self._steps.get(concrete):
            covering = self._plan_covering(concrete, self._first_shapes(len(inputs)), shapes, inputs)
            if covering is not None:
                return covering
        refuse_rewriters()
        steps = self._steps.setdefault(concrete, [])
        if all(has_size(t) for t in concrete.inputs[: len(inputs)]):
            shapes = (*(None,) * len(inputs), *shapes[len(inputs) :])
        planned = [step.shapes for step in steps if step.planned and step.instead_of is None]
        larger = grown(shapes, planned, len(inputs))
        if larger != shapes:
            step = self._new_step(concrete, larger)
            with contextlib.suppress(InfeasibleMemoryLimit, InvalidModel, UnsupportedGraph):
                step.prepare(inputs)
                steps.append(step)
                return step
        step = self._new_step(concrete, shapes)
        steps.append(step)
        try:
            step.prepare(inputs)
        except InfeasibleMemoryLimit:
            # The cause may be sizes that are known by a bound only.
            if isinstance(concrete, Joint) or not have_values(inputs) or not self._find_sizes(concrete, inputs):
                raise
            steps.remove(step)
            return self.step_for(concrete, inputs)
        except UnsupportedGraph as error:
            steps.remove(step)
            self._refuse(error, concrete, inputs)
            try:
                found = self._find_sizes(concrete, inputs)
            except UnknownSizes as remaining:
                raise remaining from None
            if not found:
                raise
            return self.step_for(concrete, inputs)
        return step

    def _plan_covering(self, concrete: Any, larger: Shapes, shapes: Shapes, inputs: Sequence[Any]) -> Step | None:
        """A step that is planned for `larger`, where that covers `shapes` and has a plan."""
        if larger == shapes:
            return None
        step = self._new_step(concrete, larger)
        step.planned = True  # `covers` depends on it
        covers, step.planned = step.covers(shapes), False
        with contextlib.suppress(InfeasibleMemoryLimit):
            if covers:
                step.prepare(inputs)
                self._steps.setdefault(concrete, []).append(step)
                return step
        return None

    def _refuse(self, error: UnsupportedGraph, concrete: Any, inputs: Sequence[Any]) -> None:
        """Raise `error`, with the reason, where sizes can't be computed before the call."""
        joint = isinstance(concrete, Joint)
        why = WITH_OUTER_GRADIENTS if joint else "" if have_values(inputs) else WITHOUT_VALUES
        if not why:
            return
        if not isinstance(error, UnknownSizes):
            raise error
        if why is WITHOUT_VALUES and not all(map(has_size, inputs)):
            why = OPEN_ARGUMENTS
        elif not joint and not follow_from_arguments(concrete, inputs):
            raise error
        raise UnknownSizes(error.what, why) from None

    def _under_limit(self, function: Any) -> Any:
        """A function that computes sizes, under the limit too, as far as that is known by then."""
        limit = self._limit_of_sizes()
        if limit is None or self._request.changes_nothing:
            return function
        left_out = {"swap", FUSE}  # host memory is the step's, and sizes are exact
        tactics = tuple(t for t in self._request.options.tactics if t not in left_out)
        made = self._optimized(function, Request(limit, Options(tactics), None, "optimize"), self._on_exceeded)
        self._computing.add(made)
        return made

    def _limit_of_sizes(self) -> Limit:
        """The limit of functions that compute sizes, as far as it is known, for each device that has one of its own; in
        bytes if the request is a share.
        """
        limit = self._request.memory_limit
        if not isinstance(limit, Mapping):
            return self._bytes_on(machine.current_device()[0], limit)
        known = {device: self._bytes_on(device, of_device) for device, of_device in limit.items()}
        return {device: of_device for device, of_device in known.items() if of_device is not None}

    def _bytes_on(self, device: str, limit: int | str | None) -> int | str | None:
        """The limit on a device. A share is that of another trace; without one, the device's own limit."""
        known = self.granted_bytes(device) if limit is None or is_share(limit) else limit
        return known or arena.device_limit_bytes(device)

    def _limit_of(self, concrete: Any) -> Limit:
        """The limit of a trace. A share is of the training step's peak, where that is known: a share of the forward
        pass alone would be far too low.
        """
        device = machine.current_device()[0]
        joint = self._part_of.get(concrete) or self.joint_of.get(concrete)
        return _granted_by(self._steps.get(joint, ()), device) or self._request.memory_limit

    def is_pass(self, concrete: Any) -> bool:
        """Whether a trace is one of the passes of another."""
        return concrete in self._part_of

    def separate_passes(self, concrete: Any, arguments: Sequence[Any]) -> SeparatePasses | str:
        """The passes of a trace as steps of their own; or why it has none.

        Args:
            arguments: the trace's, with its captures.
        """
        if concrete not in self._separate:
            source = self._part_of.get(concrete)
            if source is None:
                source = self.joint_of.setdefault(concrete, joint_of(concrete, arguments))
            if live_device().model.host_is_separate:
                source = SEVERAL
            found = source if isinstance(source, str) else separate_passes(concrete, arguments)
            self._separate[concrete] = found
            if isinstance(found, SeparatePasses):
                self._part_of |= dict.fromkeys((found.forward, found.once.step, found.again.step), source)
                if concrete in self.joint_of and is_share(self._request.memory_limit):
                    with contextlib.suppress(InfeasibleMemoryLimit, UnsupportedGraph):  # its limit is known then
                        self.step_for(source, arguments[: len(arguments) - len(concrete.captured_inputs)])
        return self._separate[concrete]

    def _find_sizes(self, concrete: Any, inputs: Sequence[Any]) -> bool:
        """From now on, compute more of the trace's sizes from arguments; returns whether there are more."""
        known = self._dynamic_sizes.get(concrete)  # of smaller arguments, which left fewer sizes open
        found = find_data_dependent_sizes(concrete, inputs, self._under_limit, known)
        if found is not None:
            self._dynamic_sizes[concrete] = found
        return found is not None

    def _sizes(self, concrete: Any, inputs: Sequence[Any]) -> Shapes:
        """The shapes of a call's arguments, and the sizes that depend on their values."""
        dynamic = self._dynamic_sizes.get(concrete)
        shapes = shapes_of(inputs)
        return shapes if dynamic is None or not have_values(inputs) else (*shapes, *dynamic.sizes(concrete, inputs))

    def _own(self, concrete: Any, shapes: Shapes, inputs: Sequence[Any], covering: Step) -> Step:
        """The step for these arguments: `covering`, or, where they recur, one that evicts only what their size needs.

        Which tensors stay can't be decided while the step runs: a tensor that stays changes the addresses of all
        others, and only a simulated plan is known to keep the limit.
        """
        import tensorflow as tf

        if self._request.plan is not None or self._request.changes_nothing or not tf.executing_eagerly():
            return covering
        if len(self._calls) >= MAX_COUNTED:
            self._calls.clear()
        self._calls[concrete, shapes] += 1
        made = self._steps[concrete]
        if self._calls[concrete, shapes] != RECURS or sum(s.instead_of is not None for s in made) >= MAX_OWN:
            return covering
        own = self._new_step(concrete, shapes, covering.instead_of or covering)
        with contextlib.suppress(InfeasibleMemoryLimit):
            own.prepare(inputs)
            # Its constants, which it adds to the arena, must not break the limit of the other steps.
            if own.plan.moves < covering.plan.moves and covering.fits():
                made.append(own)
                return own
        return covering

    def _new_step(self, concrete: Any, shapes: Shapes, instead_of: Step | None = None) -> Step:
        first = not any(self._steps.values())
        given = (self._on_exceeded, self._program, self.batches_ahead, instead_of, first)
        if isinstance(concrete, Joint):
            return Step(OuterGradientTrace(self._name, concrete, self._lock), shapes, self._request, *given)
        request = dataclasses.replace(self._request, memory_limit=self._limit_of(concrete))
        return Step(self._trace_of(concrete), shapes, request, *given, self._dynamic_sizes.get(concrete))


def _granted_by(steps: Iterable[Step], device: str) -> int:
    """The highest limit in bytes that these steps have on a device; 0 where none is known."""
    return max((step.limit_on(device) for step in steps), default=0)
