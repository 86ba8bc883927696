"""Traces that take batches from iterators run as traces that get them as arguments.

Sizes of a batch that an iterator gives may be open in the trace, and are known once it has been taken; a step that is
run again must not take another. So each call takes the batches first, as the trace would, in the traced order.

Not handled: iterators in loops, conditionals and called functions, iterators that are arguments of other ops of the
trace, and captures that are computed at each call. Such traces run as they were traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.unplannable import Unplannable
from tfswap.frontends.unmodified.within import within
from tfswap.runtime.batches import batches_ahead

TAKES = frozenset(
    {
        "IteratorGetNext",
        "IteratorGetNextSync",
    }
)
"""Ops that take a batch from an iterator."""


class LiftedTrace:
    """A trace whose batches are taken before it runs.

    Args:
        concrete: the trace.
        lifted: as of `lifted`.
        step: what runs that.
        plain: TensorFlow's own `ConcreteFunction._call_flat`.
    """

    def __init__(self, concrete: Any, lifted: Any, step: Any, plain: Callable[..., Any]):
        self.concrete = concrete
        self.__name__ = concrete.graph.name
        self._step = step
        self._lifted = lifted
        self._plain = plain
        self._is_plannable = True
        self._takes = _takes(concrete)
        places = {id(tensor): place for place, tensor in enumerate(concrete.inputs)}
        self._iterators = [places[id(op.inputs[0])] for op in self._takes]

    def run(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        """The results of a call with these flat arguments and captures."""
        import tensorflow as tf

        given = [*inputs, *captures]
        batches = [
            tf.raw_ops.IteratorGetNext(
                iterator=given[place],
                output_types=[t.dtype for t in op.outputs],
                output_shapes=[t.shape for t in op.outputs],
            )
            for place, op in zip(self._iterators, self._takes, strict=True)
        ]
        batch = [tensor for each in batches for tensor in each]
        before, within.batches_ahead = within.batches_ahead, batches_ahead(batch)
        try:
            arguments = [tensor for place, tensor in enumerate(inputs) if place not in self._iterators]
            results = self._results([*arguments, *batch])
        finally:
            within.batches_ahead = before
        return self.concrete.function_type.pack_output(results)

    def _results(self, inputs: Sequence[Any]) -> Any:
        captures = self._lifted.captured_inputs
        if self._is_plannable:
            try:
                return self._step.run(inputs, captures)
            except Unplannable as error:
                summary.note_as_it_was(self.__name__, str(error))
                self._is_plannable = False
        return self._plain(self._lifted, inputs, captures)  # with the batch that was taken


def lifted(concrete: Any) -> Any:
    """A trace with the batches as further arguments, whose results are those of `concrete`, flat; None for a trace that
    takes none, and for those that are not handled.
    """
    from tensorflow.python.eager import lift_to_graph
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
    from tensorflow.python.framework.func_graph import FuncGraph

    takes, graph = _takes(concrete), concrete.graph
    if not takes or graph._function_captures.by_ref_external:
        return None
    iterators = {id(op.inputs[0]) for op in takes}
    readers = [op for op in graph.get_operations() if any(id(tensor) in iterators for tensor in op.inputs)]
    if len(readers) > len(takes) or not iterators <= {id(tensor) for tensor in graph.inputs}:
        return None
    captures = [(external, internal) for external, internal in graph.captures if id(internal) not in iterators]
    inner = [internal for _, internal in captures]
    arguments = [t for t in graph.inputs[: len(graph.inputs) - len(graph.captures)] if id(t) not in iterators]
    batch = [tensor for op in takes for tensor in op.outputs]
    with graph.as_default():
        made = FuncGraph(graph.name)
    effects = [op for op in graph.control_outputs if op not in takes]
    found = lift_to_graph.lift_to_graph(
        [*graph.outputs, *effects], made, sources=[*arguments, *batch, *inner], base_graph=graph
    )
    made.inputs.extend(found[tensor] for tensor in (*arguments, *batch))
    made.outputs.extend(found[tensor] for tensor in graph.outputs)
    made.structured_outputs = list(made.outputs)
    made.control_outputs.extend(found[op] for op in effects)
    for external, internal in captures:
        made.add_capture(external, found[internal])
    for function in graph._functions.values():
        made._add_function(function)
    return ConcreteFunction.from_func_graph(made, None, {})


def _takes(concrete: Any) -> list[Any]:
    return [op for op in concrete.graph.get_operations() if op.type in TAKES]
