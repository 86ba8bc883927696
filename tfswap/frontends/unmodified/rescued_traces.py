"""Traces of functions that are rescued (`rescue.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfswap.frontends.unmodified.earlier_draws import Earlier, continue_draws
from tfswap.frontends.unmodified.rescue import Rescue, same_bits, warn_of_draws
from tfswap.frontends.unmodified.traces import effects, only_shapes, variable_type
from tfswap.importers.function import import_function
from tfswap.runtime.shapes import Shapes, shapes_of
from tfswap.runtime.trace import Trace


class RescuedTrace:
    """A trace that runs as it is, and is planned once it has failed for lack of memory.

    Args:
        concrete: the trace.
        plain: TensorFlow's own `ConcreteFunction._call_flat`.
        planned: makes what runs it under the limit of the device, from its flat arguments.
        owner: of the random states of what `planned` makes.
    """

    def __init__(self, concrete: Any, plain: Callable[..., Any], planned: Callable[[], Callable[..., Any]], owner: int):
        self.concrete = concrete
        self.__name__ = concrete.graph.name
        self.plain = plain
        self._planned = planned
        self._owner = owner
        self._step: Callable[..., Any] | None = None
        self._continued: Counter[Shapes] = Counter()  # calls whose random numbers the planned step has drawn
        self._only_shapes = only_shapes(concrete)
        self._draws, written = effects(concrete)
        self.written = written or []
        self.rescue = Rescue(self.__name__, possible=written is not None)

    def run(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        """The results of a call with these flat arguments and captures."""
        rescue, shapes = self.rescue, self._only_shapes or shapes_of(inputs)
        if rescue.knows(shapes):
            result = self.plain(self.concrete, inputs, captures)
            rescue.calls[shapes] += 1
            return result
        return self.rescue.run(TraceCall(self, inputs, captures))

    def planned(self) -> Callable[..., Any]:
        """What runs it under the limit of the device, from where its calls so far have left its random ops."""
        if self._step is None:
            self._step = self._planned()
        if not self.rescue.is_planned and self._draws:
            calls = self.rescue.calls - self._continued
            if calls and not continue_draws(self._earlier(calls), self._owner, self._place):
                warn_of_draws(self.__name__)
            self._continued += calls
        return self._step

    def _place(self, node: str) -> str:
        """The place of a random op's state."""
        return f"{self.concrete.name.decode()}/{Trace.kind}/{node}"

    def _earlier(self, calls: Mapping[Shapes, int]) -> Iterator[Earlier]:
        import tensorflow as tf

        for shapes, count in calls.items():
            given: Any = zip(shapes, self.concrete.graph.inputs, strict=False)  # without captures
            specs = [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in given]
            yield Earlier(import_function(self.concrete, specs), count)


class TraceCall(NamedTuple):
    """A call of a trace with these flat arguments and captures."""

    trace: RescuedTrace
    inputs: Sequence[Any]
    captures: Sequence[Any]

    @property
    def shapes(self) -> Shapes:
        """Of the arguments."""
        return shapes_of(self.inputs)

    def run(self) -> Any:
        """As Call's."""
        return self.trace.plain(self.trace.concrete, self.inputs, self.captures)

    def run_planned(self) -> Any:
        """As Call's."""
        return self.trace.planned()(self.inputs)

    def values(self) -> list[Any]:
        """As Call's."""
        return [_read(handle) for handle in self._written()]

    def put_back(self, kept: Sequence[Any]) -> None:
        """As Call's."""
        import tensorflow as tf
        from tensorflow.python.ops import gen_resource_variable_ops as ops

        for handle, value in zip(self._written(), kept, strict=True):
            if value is None or same_bits(value, _read(handle)):
                continue
            with tf.device(handle.device):
                ops.assign_variable_op(handle, tf.constant(value, variable_type(handle)))

    def _written(self) -> list[Any]:
        given = [*self.inputs, *self.captures]
        return [given[place] for place in self.trace.written]


def _read(handle: Any) -> Any:
    """The bits of a variable; None where it has no value yet."""
    from tensorflow.python.ops import gen_resource_variable_ops as ops

    if not ops.var_is_initialized_op(handle):
        return None
    return np.array(ops.read_variable_op(handle, variable_type(handle)).numpy())
