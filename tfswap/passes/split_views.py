"""Lets tensors go one by one: an IdentityN holds all its inputs until the last of them is there.

Optimizers put one around all gradients, which then pile up until the backward pass has ended. Its readers are
pointed at what it passes on. Values are not touched; an IdentityN that waits for control inputs is kept.
"""

from __future__ import annotations

from tfswap.ir.graph import Graph, Output
from tfswap.ir.ops import is_view


def apply_split_views(graph: Graph) -> int:
    """Bypass multi-output views in `graph`, in place; returns how many inputs were changed."""

    def source(tensor: Output) -> Output:
        node = tensor.node
        while len(node.outputs) > 1 and len(node.inputs) == len(node.outputs) and is_view(node.op):
            if node.controls:
                break
            tensor = node.inputs[tensor.index]
            node = tensor.node
        return tensor

    changed = 0
    for node in graph:
        inputs = tuple(source(t) for t in node.inputs)
        if inputs != node.inputs:
            changed += sum(a != b for a, b in zip(inputs, node.inputs, strict=True))
            node.inputs = inputs
    graph.fetches = [source(f) for f in graph.fetches]
    return changed
