"""An optimized step that another `tf.function` calls: when that one runs, Python runs the step as if it were called
directly.

So it is planned for the present arena, has its turn from the first reading of the arena to the end, and is watched.
The outer function has one node for it (csrc/core/inside_ops.cc). The node has the number of the Python function to run,
and the name of a function that carries out the plan made while the outer one was traced, which runs where a file is
loaded.

Invariant: the outer function holds a reference to what its node runs.

Not handled: GPUs; steps on several devices; collectives, whose keys are taken when the outer function is called; and
steps that capture tensors of the outer function. Those run the plan that was made while the outer function was traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfswap.errors import InfeasibleMemoryLimit
from tfswap.ir.custom_ops import INSIDE
from tfswap.ir.graph import Graph
from tfswap.passes.device_carriers import FIRST, units
from tfswap.runtime.captures import deferred
from tfswap.runtime.function_maker import FunctionMaker
from tfswap.runtime.trace import Trace


class NestedStep:
    """A step as other functions call it."""

    def __init__(self, trace: Trace, maker: FunctionMaker, run: Callable[[list[Any]], Any]):
        """
        Args:
            run: runs the step in its turn, from its arguments to its structured results.
        """
        self._trace = trace
        self._maker = maker
        self._run_step = run
        self._function: Any = None

    def can_run(self, graph: Graph) -> bool:
        """Whether Python can run the step, whose graph this is, where another function calls it."""
        import tensorflow as tf

        concrete = self._trace.concrete
        on_others = any({*units(part)} - {FIRST} for part in (graph, *graph.all_bodies()))
        if self._trace.device.model.is_gpu or on_others or any(deferred(concrete)):
            return False
        return not any(map(tf.is_symbolic_tensor, concrete.captured_inputs))  # that the other function computes

    def function(self, *, rewritten: bool, waits: bool) -> Any:
        """The function that a caller's trace calls: it runs the step when the caller runs.

        Args:
            rewritten: whether the step has a plan that changes something.
            waits: as of `_inside_function`.
        """
        if self._function is None:
            concrete = self._trace.concrete
            planned = self._maker.for_file() if rewritten else concrete
            self._function = _inside_function(planned, concrete, self._run, waits=waits)
        return self._function

    def _run(self, *given: Any) -> list[Any]:
        """Run it now for another function, on its inputs, captures included; returns flat results."""
        concrete = self._trace.concrete
        arguments = given[: len(given) - len(concrete._captured_inputs)]
        try:
            result = self._run_step([*arguments])
        except InfeasibleMemoryLimit as refusal:
            raise MemoryError(str(refusal)) from None  # TensorFlow turns it into a ResourceExhaustedError
        return concrete.function_type.output.to_tensors(result)


def _inside_function(planned: Any, original: Any, run: Callable[..., Sequence[Any]], *, waits: bool) -> Any:
    """A ConcreteFunction that is called in the place of a trace where another function is traced.

    Args:
        planned: the ConcreteFunction that carries out a plan where Python does not know the step.
        original: the trace.
        run: from all inputs of the trace, captures included, to its flat results. On a thread of its own, in the
            step's turn.
        waits: whether kernels of the step may wait for other steps.
    """
    from tensorflow.core.framework import attr_value_pb2
    from tensorflow.python.framework import func_graph as func_graph_module

    import tfswap.ops
    from tfswap.exporters.function import call_attributes, called_as, placeholders_like
    from tfswap.importers.function import own_outputs

    source, results = original.graph, own_outputs(original)
    made = func_graph_module.FuncGraph(f"{source.name}_tfswap_inside")
    token, made._tfswap_run = _python_name(run, source.inputs, results)
    step = tfswap.ops.new_step(token)
    weakref.finalize(made, tfswap.ops.forget_step, step).atexit = False
    planned.add_to_graph(made)
    name = planned._inference_function.name.decode()
    options = call_attributes()
    with made.as_default():
        made.inputs = placeholders_like(source.inputs, [tensor.op.name for tensor in source.inputs])
        tfswap.ops.load().ops.tfswap_inside(
            args=made.inputs,
            Tout=[tensor.dtype for tensor in results],
            f=attr_value_pb2.NameAttrList(name=name),
            step=step,
            waits=waits,
            **dict(zip(options[::2], options[1::2], strict=True)),
        )
    node = next(operation for operation in made.get_operations() if operation.type == INSIDE)
    for output, result in zip(node.outputs, results, strict=True):
        output.set_shape(result.shape)
    made.outputs, made.control_outputs = list(node.outputs), [node]
    return called_as(original, made, is_step=False)


def _python_name(run: Callable[..., Sequence[Any]], inputs: Sequence[Any], results: Sequence[Any]) -> tuple[str, Any]:
    """The token by which TensorFlow's kernels call a Python function, and the object that keeps it registered."""
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        given = [tf.compat.v1.placeholder(tensor.dtype) for tensor in inputs]
        tf.py_function(run, given, [tensor.dtype for tensor in results])
    node = next(operation for operation in graph.get_operations() if operation.type == "EagerPyFunc")
    return node.get_attr("token").decode(), graph
