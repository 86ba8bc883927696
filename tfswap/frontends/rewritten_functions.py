"""The ConcreteFunctions that stand for a function's traces: what `get_concrete_function` returns, and what is saved."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfswap.frontends.tracing import sized_like
from tfswap.runtime.joint_trace import Joint
from tfswap.runtime.open_function import has_size, open_function
from tfswap.runtime.shapes import elements
from tfswap.runtime.step import Step
from tfswap.runtime.step_cache import StepCache


class RewrittenFunctions:
    """One rewritten ConcreteFunction for each trace; where the trace leaves sizes open, one that takes all sizes.

    Args:
        name: of the function, for messages.
        steps: its planned steps.
    """

    def __init__(self, name: str, steps: StepCache):
        self._name = name
        self._steps = steps
        self._open: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()  # by the planned one

    def of(
        self,
        concrete: Any,
        arguments: Sequence[Any],
        step_for: Callable[[Any, Sequence[Any]], Step],
        call_trace: Callable[[Any, Sequence[Any]], Any],
        *,
        follows: bool,
    ) -> Any:
        """The function for a trace, planned for sizes up to those of the arguments, as far as these have sizes.

        Args:
            step_for: gives the step for a trace and arguments; plans it where there is none.
            call_trace: runs a trace under the limit.
            follows: whether each call has a limit of its own, which a file has then.
        """
        if all(map(has_size, arguments)):
            base = step_for(concrete, arguments).function
        elif planned := self._steps.planned_of(concrete):
            base = max(planned, key=lambda step: elements(step.shapes)).function
        else:
            sizes = self._planned_for(concrete)
            base = concrete if sizes is None else step_for(concrete, sizes).function
        if all(map(has_size, concrete.inputs)) and not follows:
            return base
        made = self._open.get(base)
        if made is None:
            call = functools.partial(call_trace, concrete)
            made = self._open[base] = open_function(self._name, base, concrete, call)
        return made

    def _planned_for(self, concrete: Any) -> list[Any] | None:
        """Placeholders of the largest sizes that a trace with the same arguments has a plan for: to save a function
        TensorFlow traces it again. None where there is no such plan.
        """
        signature = concrete.structured_input_signature
        traces = [each for each in self._steps.traces if not isinstance(each, Joint)]
        alike = [each for each in traces if each.structured_input_signature == signature]
        planned = [step for each in alike for step in self._steps.planned_of(each)]
        if not planned:
            return None
        shapes = max(planned, key=lambda step: elements(step.shapes)).shapes
        inputs = concrete.inputs[: len(concrete.inputs) - len(concrete._captured_inputs)]
        return [t if shape is None else sized_like(t, shape) for t, shape in zip(inputs, shapes, strict=False)]
