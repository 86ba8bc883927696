"""A trace and its gradients as one graph to plan, for a caller that takes the gradients outside.

    results = forward(arguments)           the trace, with what the backward pass needs
    gradients = Outside(results)           the caller's part
    ... = backward(gradients, saved)       TensorFlow's own derivative of the trace

Forward and backward function are those that TensorFlow itself runs for a tape that takes first-order gradients once
(concrete_function.py), so that values are the same. Persistent tapes, nested tapes and forward mode ask for more: for
those no `Joint` is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfswap.exporters.function import WATCHED
from tfswap.importers.function import import_function, own_outputs
from tfswap.importers.shapes import HANDLES
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.target import Target
from tfswap.passes.prepare.result_slots import use_result_slots
from tfswap.passes.tactics.outer_gradients import fix_sides, outside_of

FORWARD = "forward"
BACKWARD = "backward"
INLINED = "Func/"
"""The prefix of the nodes that inlining puts around a function's body."""
ROOM = 4
"""The caller's part may hold this many tensors of each result's size, besides the results and their gradients: a
squared error has the difference, its square, the gradient that a mean spreads, and their product."""

# Reasons why a call that a tape watches has no plan.
WITHIN = WATCHED.format(
    why="both are inside of another tf.function, where its gradients are not planned",
    remedy="Take tfswap.optimize from it to the outer function",
)
SEVERAL = WATCHED.format(
    why="it may ask for gradients more than once, or for gradients of gradients: it is persistent, or inside of "
    "another tape, which is not planned for on a GPU",
    remedy="Use one tape that is not persistent",
)
FORWARD_MODE = WATCHED.format(
    why="a forward accumulator does too, which is not planned for", remedy="Call it outside of the accumulator"
)
DERIVED = WATCHED.format(
    why="one that is persistent, inside of another tape or inside of another tf.function has done so before, for which "
    "TensorFlow has given its trace more results",
    remedy="Optimize another tf.function of the same Python function for that tape",
)
HANDLES_RETURNED = WATCHED.format(
    why="it returns handles or lists, whose gradients are not planned", remedy="Let it return tensors"
)
CAPTURES = WATCHED.format(
    why="its backward pass (a custom gradient's, perhaps) takes tensors of elsewhere, which the trace does not have",
    remedy="Read them in its forward pass",
)


class Joint:
    """One trace with its gradients.

    Attributes:
        trace: the ConcreteFunction.
        gradients: whether any argument has a gradient.
        function: a ConcreteFunction of all of it, to be planned and never called; None without gradients.
        backward: TensorFlow's backward function of the trace.
        results: how many tensors the trace returns.
        differentiable: positions of the results that have gradients.
    """

    def __init__(self, trace: Any, pair: Any):
        self.trace = trace
        self.backward = pair._backward
        self.results = len(own_outputs(trace))
        self.differentiable = [i for i, t in enumerate(own_outputs(trace)) if is_trainable(t)]
        self.gradients = bool(self.differentiable and self.backward.outputs)
        self.function = self._join(pair) if self.gradients else None

    @property
    def inputs(self) -> Any:
        """The trace's."""
        return self.trace.inputs

    def _join(self, pair: Any) -> Any:
        import tensorflow as tf
        from tensorflow.python.eager import graph_only_ops
        from tensorflow.python.eager.polymorphic_function import concrete_function
        from tensorflow.python.framework import func_graph, op_def_library
        from tensorflow.python.ops import handle_data_util

        from tfswap.native.load import load

        load()
        source = self.trace.graph
        made = func_graph.FuncGraph(f"{source.name}_joint")
        with made.as_default():
            arguments = []
            for tensor in source.inputs:
                argument = graph_only_ops.graph_placeholder(tensor.dtype, tensor.shape, name=tensor.op.name)
                handle_data_util.copy_handle_data(tensor, argument)
                arguments.append(argument)
            with tf.name_scope(FORWARD):
                saved = pair._forward.call_flat(*arguments)
            results = saved[: self.results]
            gradients: Any = op_def_library.apply_op(
                "Tfswap>Outside", results=[results[i] for i in self.differentiable], room=ROOM, name="outside"
            )
            captured = self.trace.captured_inputs
            here = {id(t): a for t, a in zip(captured, arguments[len(arguments) - len(captured) :], strict=True)}
            here |= {id(t): s for t, s in zip(pair._forward_graph.outputs, saved, strict=False)}
            taken = [here[id(t)] for t in self.backward.captured_inputs]
            with tf.name_scope(BACKWARD):
                derived = self.backward.inference_fn.call_flat(*gradients, *taken)
        made.inputs = arguments
        made.structured_outputs = made.outputs = [*results, *derived]
        made.control_outputs = [op for op in made.get_operations() if op.type == "StatefulPartitionedCall"]
        return concrete_function.ConcreteFunction.from_func_graph(made, None, {})

    def import_graph(self, arguments: Sequence[Any]) -> Graph:
        """The graph."""
        return import_function(self.function, arguments)

    def fix(self, graph: Graph, target: Target) -> Graph:
        """Fix the nodes of the graph that must come before and after the caller's part, and add the tensors that the
        caller holds until the end, in place; returns it.
        """
        outside = outside_of(graph)
        use_result_slots(graph, target)
        fix_sides(graph, target, self.results, is_backward)
        graph.fetches += [outside.out(i) for i in range(len(outside.outputs))]
        return graph


def is_backward(node: Node) -> bool:
    """Whether a node of such a graph is of the backward function."""
    return node.name.removeprefix(INLINED).startswith(f"{BACKWARD}/")


def saved(graph: Graph) -> list[str]:
    """Names of the tensors that TensorFlow's forward function returns for its backward function."""
    others = {*graph.feeds, outside_of(graph)}
    read = (t for node in graph if is_backward(node) for t in node.inputs)
    return list(dict.fromkeys(t.name for t in read if t.node not in others and not is_backward(t.node)))


def is_trainable(tensor: Any) -> bool:
    from tensorflow.python.eager import backprop_util

    return backprop_util.IsTrainable(tensor)


def in_forward_mode(arguments: Sequence[Any]) -> bool:
    """Whether a forward accumulator watches any of these."""
    from tensorflow.python.eager import forwardprop_util

    return bool(forwardprop_util.pack_tangents(list(arguments)).indices)


def joint_of(trace: Any, arguments: Sequence[Any]) -> Joint | str:
    """The trace with its gradients, for a tape that watches these arguments; or the reason why there is none.

    The backward function may read the forward function's results and the trace's own captures, as that of
    `tf.recompute_grad` reads variables again.
    """
    from tensorflow.python.ops import gradients_util

    call = trace._select_forward_and_backward_functions(
        list(arguments), gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER, True
    )
    call.forward()
    pair, results = call._functions, own_outputs(trace)
    known = {id(t) for t in (*pair._forward_graph.outputs, *trace.captured_inputs)}
    if pair._num_inference_outputs != len(results):
        return DERIVED
    if any(t.dtype.name in HANDLES for t in results):
        return HANDLES_RETURNED
    if any(id(t) not in known for t in pair._backward.captured_inputs):
        return CAPTURES
    return Joint(trace, pair)
