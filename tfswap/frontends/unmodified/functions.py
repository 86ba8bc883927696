"""Traced functions of an unmodified program run under the limit.

TensorFlow calls every trace of a `tf.function` by `ConcreteFunction._call_flat`, with flat arguments. So the program's
own functions choose and make traces as ever, and only the run of a trace is replaced. A trace is judged at its first
call from eager code. Under a limit, one that computes gradients is planned, by itself, and so is a forward function
once there may be no room for all that it computes; without a limit every trace is planned when it runs out of memory
(`rescued_traces.py`). Where it can't be planned, it runs as it is. The verdict is an attribute of the trace, so that
both are freed together.

Not handled: batches that a function takes from an iterator in a loop, without fixed sizes. These run as they are.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tfswap.device import arena
from tfswap.device.placement import step_devices
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.lifted_batches import LiftedTrace, lifted
from tfswap.frontends.unmodified.rescued_traces import RescuedTrace
from tfswap.frontends.unmodified.room import KnownRoom
from tfswap.frontends.unmodified.settings import Settings, settings
from tfswap.frontends.unmodified.traces import computed_bytes, computes_gradients, only_shapes
from tfswap.frontends.unmodified.unplannable import Unplannable, planning
from tfswap.frontends.unmodified.within import within
from tfswap.native.forks import refuse_in_late_child, runs_step
from tfswap.runtime import turn
from tfswap.runtime.batches import copies_of_iterators
from tfswap.runtime.program import Program
from tfswap.runtime.shapes import shapes_of
from tfswap.runtime.step import Step

PROGRAM = Program()
"""All steps of the process share host memory."""
VERDICT = "_tfswap_unmodified"
"""The attribute of a trace: a PlannedTrace, RescuedTrace or LiftedTrace, or False where it runs as it is."""
GRADIENT_FUNCTIONS = ("__forward_", "__backward_")
"""How the names begin of functions that TensorFlow makes for a tape outside (concrete_function.py)."""


class UnmodifiedFunction(OptimizedFunction):
    """A function of an unmodified program. Raises Unplannable for whatever keeps a step from being planned, before it
    runs, other than the limit.

    Args:
        function: the `tf.function`, or a placeholder for one.
        name: its name in messages and in the summary.
        given: the settings.
    """

    def __init__(self, function: Any, name: str, given: Settings):
        super().__init__(function, given.request, given.on_exceeded, PROGRAM, name=name)
        self._given = given

    def same_program(self, function: Any) -> OptimizedFunction:
        return UnmodifiedFunction(function, self.__name__, self._given)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._run(*args, **kwargs)
        summary.row(self.__name__).note_call(self)
        return result

    def _step(self, concrete: Any, inputs: Sequence[Any]) -> Step:
        with planning():
            return super()._step(concrete, inputs)


class PlannedTrace(UnmodifiedFunction):
    """A trace of an unmodified program.

    Once its plan has left it as it is, calls that are known to fit run as they are, in their turn: what a planned step
    checks before and after each call is for layouts that it may not fit.

    Args:
        concrete: the trace.
        plain: TensorFlow's own `ConcreteFunction._call_flat`.
        given: the settings.
    """

    def __init__(self, concrete: Any, plain: Callable[..., Any], given: Settings):
        super().__init__(_Nameless(), concrete.graph.name, given)
        self.concrete = concrete
        self._run_as_it_is = plain
        self._room = KnownRoom(given.limit_bytes)
        self._could_record = _could_record()
        self._only_shapes = only_shapes(concrete)
        self._runs_as_it_is = False  # since its plan has left it so, under a limit that stays

    def run(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        """The results of a call with these flat arguments, under the limit. A plan finds its captures itself."""
        if not self._runs_as_it_is or self._could_record():
            return self(inputs)
        if threading.active_count() > 1:
            return self._in_turn(inputs, captures)
        return self._as_it_is(inputs, captures) if self._fits(inputs) else self(inputs)

    def _fits(self, inputs: Sequence[Any]) -> bool:
        return self._room.fits(self._only_shapes or shapes_of(inputs))

    def _in_turn(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        """As `run`, of a step that its plan has left as it is, while other threads may run steps."""
        refuse_in_late_child(self.__name__)
        step = self._latest.step
        assert step is not None, "it has a plan"
        outer = turn.held()
        try:
            turn.begin(step.parts.wait)
            return self._as_it_is(inputs, captures) if self._fits(inputs) else self(inputs)
        finally:
            turn.end(outer)

    def _as_it_is(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        result = self._run_as_it_is(self.concrete, inputs, captures)
        self._row.note_call(self)
        return result

    @functools.cached_property
    def _row(self) -> summary.Row:
        """Of the summary."""
        return summary.row(self.__name__)

    def _run(self, inputs: Sequence[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] flat arguments
        if self.concrete not in self._steps:
            self.batches_ahead = within.batches_ahead or copies_of_iterators(inputs)
        before = self._room.in_use()
        result = self.call_trace(self.concrete, inputs)
        step = self._latest.planned
        is_unchanged = step is not None and all(plan.changes_nothing for plan in step.parts.plans)
        self._runs_as_it_is = is_unchanged and self._request.limit_file is None
        if is_unchanged:
            self._room.note(shapes_of(inputs), before)
        self._row.note_call(self)
        return result


class ForwardTrace(PlannedTrace):
    """A trace without gradients. It runs as it is where there is room for all tensors that it computes, twice: for a
    kernel's own memory, and chunks that are larger than requested. Under a tape it has gradients as large.
    """

    def __init__(self, concrete: Any, plain: Callable[..., Any], given: Settings):
        super().__init__(concrete, plain, given)
        self._computed_bytes = computed_bytes(concrete)

    def run(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        """As PlannedTrace's."""
        return (
            self._run_as_it_is(self.concrete, inputs, captures) if self._has_room() else super().run(inputs, captures)
        )

    def _has_room(self) -> bool:
        if self._computed_bytes is None:
            return False
        for device in step_devices():
            limit_bytes, info = self._given.limit_bytes(device), arena.memory_info(device)
            if info is None or limit_bytes is None:
                continue
            times = 4 if self._could_record() else 2
            if info.current_bytes + times * self._computed_bytes > limit_bytes:
                return False
        return True


@functools.cache
def _could_record() -> Callable[[], bool]:
    """TensorFlow's function that answers whether a tape, or a forward accumulator, may watch this thread."""
    from tensorflow.python.eager import record

    return record.could_possibly_record


class _Nameless:
    """A placeholder for a `tf.function` where there is none."""

    _run_functions_eagerly = False

    @staticmethod
    def python_function() -> None: ...


def watched(plain: Callable[..., Any], given: Mapping[str, Any]) -> Callable[..., Any]:
    """`ConcreteFunction._call_flat`, which runs steps under the limit.

    Args:
        plain: TensorFlow's own.
        given: the options, as the environment has them.
    """
    from tensorflow.python.eager.context import executing_eagerly

    def _call_flat(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
        verdict = self.__dict__.get(VERDICT)
        if verdict is False or within.step or not executing_eagerly():
            return plain(self, tensor_inputs, captured_inputs)
        if verdict is None or verdict.concrete is not self:  # a copy of a trace has its attributes
            verdict = _judged(self, plain, settings(given))
            setattr(self, VERDICT, verdict)
        if verdict is not False:
            within.step = True  # as `within.call`, which small steps would notice
            try:
                return verdict.run(tensor_inputs, captured_inputs)
            except Unplannable as error:
                summary.note_as_it_was(verdict.__name__, str(error))
                setattr(self, VERDICT, False)
            finally:
                within.step = False
        return plain(self, tensor_inputs, captured_inputs)

    return _call_flat


def _judged(
    concrete: Any, plain: Callable[..., Any], given: Settings
) -> PlannedTrace | RescuedTrace | LiftedTrace | Literal[False]:
    """What runs a trace; False where it runs as it is."""
    if runs_step(concrete) or concrete.graph.name.startswith(GRADIENT_FUNCTIONS):
        return False
    has_limit = given.rescues or any(given.limit_bytes(device) is not None for device in step_devices())
    trains = computes_gradients(concrete)
    if not trains and (given.training_only or not has_limit):
        return False
    if (made := lifted(concrete)) is not None:
        return LiftedTrace(concrete, made, _runs(made, plain, given, trains=trains), plain)
    return _runs(concrete, plain, given, trains=trains)


def _runs(concrete: Any, plain: Callable[..., Any], given: Settings, *, trains: bool) -> PlannedTrace | RescuedTrace:
    """What runs a trace.

    Args:
        trains: whether it computes gradients.
    """
    if given.rescues:
        return RescuedTrace(concrete, plain, lambda: PlannedTrace(concrete, plain, given), PROGRAM.owner)
    return PlannedTrace(concrete, plain, given) if trains else ForwardTrace(concrete, plain, given)
