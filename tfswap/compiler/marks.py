"""Marks that a user's program puts on tensors for the planner to find."""

from __future__ import annotations

from typing import Any

from tfswap.ir.graph import Graph

KEEP = "_tfswap_keep"


def keep(tensor: Any) -> Any:
    """`tensor`, marked to stay in device memory: no tactic is used on it under any limit.

    For use inside the optimized function. Called eagerly, it returns its argument.
    """
    import tensorflow as tf
    from tensorflow.core.framework import attr_value_pb2

    if not tf.is_symbolic_tensor(tensor):
        return tensor
    marked = tf.identity(tensor)
    marked.op._set_attr(KEEP, attr_value_pb2.AttrValue(b=True))
    return marked


def marked_to_keep(graph: Graph) -> list[str]:
    """Names of the tensors that carry the mark."""
    return [node.out().name for node in graph if node.attrs.get(KEEP)]
