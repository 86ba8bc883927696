"""Traced functions of an unmodified program: those that compute gradients run under the limit.

TensorFlow calls every trace of a `tf.function` by `ConcreteFunction._call_flat`, with flat arguments. So the program's
own functions choose and make traces as ever, and only the run of a trace is replaced. A trace is judged at its first
call from eager code. Where it computes gradients it is planned, by itself; where it can't be planned, and in all other
cases, it runs as it is. The verdict is an attribute of the trace, so that both are freed together.

Not handled: gradients that a tape outside takes of a function without gradients of its own, functions without
gradients, and batches that a function takes from an iterator without fixed sizes. These run as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfswap.analysis.phases import is_gradient
from tfswap.errors import InfeasibleMemoryLimit, TfswapError, UnsupportedGraph
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.settings import Settings, settings
from tfswap.native.forks import runs_step, with_children
from tfswap.runtime.batches import copies_of_iterators
from tfswap.runtime.program import Program
from tfswap.runtime.step import Step

PROGRAM = Program()
"""All steps of the process share host memory."""
VERDICT = "_tfswap_unmodified"
"""The attribute of a trace: a PlannedTrace, or False where it runs as it is."""
GRADIENT_FUNCTIONS = ("__forward_", "__backward_")
"""How the names begin of functions that TensorFlow makes for a tape outside (concrete_function.py)."""


class Unplannable(UnsupportedGraph):
    """A step that can't be planned. The program goes on without a plan."""


class Within(threading.local):
    """Whether this thread runs a step: functions that tfswap calls then are not the program's."""

    step = False

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
        try:
            return super()._step(concrete, inputs)
        except InfeasibleMemoryLimit:
            raise
        except TfswapError as error:
            raise Unplannable(str(error)) from error
        except Exception as error:
            raise Unplannable(f"tfswap has a fault: {type(error).__name__}: {error}") from error


class PlannedTrace(UnmodifiedFunction):
    """A trace of an unmodified program.

    Args:
        concrete: the trace.
        given: the settings.
    """

    def __init__(self, concrete: Any, given: Settings):
        super().__init__(_Nameless(), concrete.graph.name, given)
        self.concrete = concrete

    def _run(self, inputs: Sequence[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] flat arguments
        if self.concrete not in self._steps:
            self.batches_ahead = copies_of_iterators(inputs)
        result = self.call_trace(self.concrete, inputs)
        summary.row(self.__name__).note_call(self)
        return result


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
            verdict = PlannedTrace(self, settings(given)) if _computes_gradients(self) else False
            setattr(self, VERDICT, verdict)
        if verdict is not False:
            try:
                return within.call(verdict, tensor_inputs)
            except Unplannable as error:
                summary.note_as_it_was(verdict.__name__, str(error))
                setattr(self, VERDICT, False)
        return plain(self, tensor_inputs, captured_inputs)

    return _call_flat


def _computes_gradients(concrete: Any) -> bool:
    """Whether a trace computes gradients, by itself or in functions that it calls, and is the program's."""
    if runs_step(concrete) or concrete.graph.name.startswith(GRADIENT_FUNCTIONS):
        return False
    if any(is_gradient(op.type, op.name) for op in concrete.graph.get_operations()):
        return True
    called = with_children(concrete._inference_function)
    definitions = (getattr(each, "cached_definition", None) for each in called)
    return any(is_gradient(n.op, n.name) for made in definitions if made is not None for n in made.node_def)
