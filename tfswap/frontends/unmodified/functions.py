"""Traced functions of an unmodified program run under the limit.

TensorFlow calls every trace of a `tf.function` by `ConcreteFunction._call_flat`, with flat arguments. So the program's
own functions choose and make traces as ever, and only the run of a trace is replaced. A trace is judged at its first
call from eager code. Under a limit, one that computes gradients is planned, by itself, and so is a forward function
once there may be no room for all that it computes; without a limit every trace is planned when it runs out of memory
(`rescued_traces.py`). Where it can't be planned, it runs as it is. The verdict is an attribute of the trace, so that
both are freed together.

Not handled: gradients that a tape outside takes of a function without gradients of its own, and batches that a function
takes from an iterator without fixed sizes. These run as they are.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from tfswap.device import arena
from tfswap.device.placement import step_devices
from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.rescued_traces import RescuedTrace
from tfswap.frontends.unmodified.settings import Settings, settings
from tfswap.frontends.unmodified.traces import computed_bytes, computes_gradients
from tfswap.native.forks import runs_step
from tfswap.runtime.batches import copies_of_iterators
from tfswap.runtime.program import Program
from tfswap.runtime.step import Step

PROGRAM = Program()
"""All steps of the process share host memory."""
VERDICT = "_tfswap_unmodified"
"""The attribute of a trace: a PlannedTrace or RescuedTrace, or False where it runs as it is."""
GRADIENT_FUNCTIONS = ("__forward_", "__backward_")
"""How the names begin of functions that TensorFlow makes for a tape outside (concrete_function.py)."""


class Unplannable(UnsupportedGraph):
    """A step that can't be planned. The program goes on without a plan."""


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Raises Unplannable for whatever keeps a step from being planned inside, and InfeasibleMemoryLimit as it is."""
    try:
        yield
    except InfeasibleMemoryLimit:
        summary.note_refusal()
        raise
    except TfswapError as error:
        raise Unplannable(str(error)) from error
    except Exception as error:
        raise Unplannable(f"tfswap has a fault: {type(error).__name__}: {error}") from error


class Within(threading.local):
    """What this thread does.

    Attributes:
        step: whether it runs a step: functions that tfswap calls then are not the program's.
        batches_ahead: by device, how many batches a pipeline makes during the step that it runs.
    """

    step = False
    batches_ahead: Mapping[str, int] = types.MappingProxyType({})

    def call(self, run: Callable[..., Any], *arguments: Any) -> Any:
        before, self.step = self.step, True
        try:
            return run(*arguments)
        finally:
            self.step = before


within = Within()


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

    Args:
        concrete: the trace.
        given: the settings.
    """

    def __init__(self, concrete: Any, given: Settings):
        super().__init__(_Nameless(), concrete.graph.name, given)
        self.concrete = concrete

    def run(self, inputs: Sequence[Any], _: Sequence[Any]) -> Any:
        """The results of a call with these flat arguments, under the limit. The step finds its captures itself."""
        return self(inputs)

    def _run(self, inputs: Sequence[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] flat arguments
        if self.concrete not in self._steps:
            self.batches_ahead = within.batches_ahead or copies_of_iterators(inputs)
        result = self.call_trace(self.concrete, inputs)
        summary.row(self.__name__).note_call(self)
        return result


class ForwardTrace(PlannedTrace):
    """A trace without gradients. It runs as it is where there is room for all tensors that it computes, twice: for a
    kernel's own memory, and chunks that are larger than requested.

    Args:
        plain: TensorFlow's own `ConcreteFunction._call_flat`.
    """

    def __init__(self, concrete: Any, plain: Callable[..., Any], given: Settings):
        super().__init__(concrete, given)
        self._run_as_it_is = plain
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
            if info.current_bytes + 2 * self._computed_bytes > limit_bytes:
                return False
        return True


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
        verdict = vars(self).get(VERDICT)
        if verdict is False or within.step or not executing_eagerly():
            return plain(self, tensor_inputs, captured_inputs)
        if verdict is None or verdict.concrete is not self:  # a copy of a trace has its attributes
            verdict = _judged(self, plain, settings(given))
            setattr(self, VERDICT, verdict)
        if verdict is not False:
            try:
                return within.call(verdict.run, tensor_inputs, captured_inputs)
            except Unplannable as error:
                summary.note_as_it_was(verdict.__name__, str(error))
                setattr(self, VERDICT, False)
        return plain(self, tensor_inputs, captured_inputs)

    return _call_flat


def _judged(concrete: Any, plain: Callable[..., Any], given: Settings) -> PlannedTrace | RescuedTrace | Literal[False]:
    """What runs a trace; False where it runs as it is."""
    if runs_step(concrete) or concrete.graph.name.startswith(GRADIENT_FUNCTIONS):
        return False
    if given.rescues and not (given.training_only and not computes_gradients(concrete)):
        return RescuedTrace(concrete, plain, lambda: PlannedTrace(concrete, given), PROGRAM.owner)
    if computes_gradients(concrete):
        return PlannedTrace(concrete, given)
    has_limit = any(given.limit_bytes(device) is not None for device in step_devices())
    return ForwardTrace(concrete, plain, given) if has_limit and not given.training_only else False
