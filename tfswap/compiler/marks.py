"""Marks that a user's program puts on tensors for the planner to find."""

from __future__ import annotations

from typing import Any

from tfswap.ir.graph import KEEP, Graph


def keep(tensor: Any) -> Any:
    """`tensor`, marked to stay in device memory: no tactic is used on it under any limit.

    For use inside the optimized function. Called eagerly, it returns its argument. A variable is returned as it is, and
    has its home on the device.
    """
    import tensorflow as tf

    handles = _handles(tensor)
    for handle in handles:
        _mark_captures(handle)
    if handles or not tf.is_symbolic_tensor(tensor):
        return tensor
    marked = tf.identity(tensor)
    _mark(marked)
    return marked


def _handles(variable: Any) -> list[Any]:
    """The handles of a variable, of one of Keras, or of a variable's replicas; empty for anything else."""
    import tensorflow as tf

    own = variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)
    return [each.handle for each in getattr(own, "values", (own,))] if isinstance(own, tf.Variable) else []


def _mark_captures(handle: Any) -> None:
    """Mark the inputs by which the function that is traced, and those around it, get a handle."""
    import tensorflow as tf
    from tensorflow.python.framework.func_graph import FuncGraph

    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph):
        _mark(graph.capture(handle, name="resource"))
        graph = graph.outer_graph


def _mark(tensor: Any) -> None:
    from tensorflow.core.framework import attr_value_pb2

    tensor.op._set_attr(KEEP, attr_value_pb2.AttrValue(b=True))


def marked_to_keep(graph: Graph) -> list[str]:
    """Names of the tensors that carry the mark."""
    return [node.out().name for node in graph if node.attrs.get(KEEP)]
