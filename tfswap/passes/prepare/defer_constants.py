"""Keeps TensorFlow from computing beforehand what it then throws away, or keeps for nothing.

TensorFlow makes a step's executor by computing every node that follows from constants alone, all of them together and
however large, and keeps what is not over 10 MiB (analysis/constants.py). A large constant gradient, as of a mean over
examples, or a mask is computed so for nothing, each time that the step is made: its first call then peaks far above
the plan, and where memory is short TensorFlow crashes. A `Defer` before such a node makes it one of the step, and all
that is computed from it, as the plan has it. It passes a buffer on and costs nothing.

A constant that spreads one value is smaller, and TensorFlow keeps it: it is there throughout, and takes whatever place
is free when the step is made, with up to as much again in addition, so that one limit could be kept in one process and
not in the next. It too becomes a part of the step, but not of what runs several times in one.

Requires a CPU: on other devices TensorFlow computes constants in host memory, with the CPU's kernels, whose bits the
device's own need not have. There the graph is left alone.
"""

from __future__ import annotations

from tfswap.analysis.constants import large_spreads, thrown_away
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass

_TELLING = {
    "int32": 1,  # shapes, which TensorFlow can't see through a Defer
    "int64": 1,  # the same
    "variant": 2,  # lists, whose elements are followed
}


@graph_pass(
    ensures="TensorFlow computes no large constant while it makes the step",
)
def defer_constants(graph: Graph, target: Target, *, body: bool = False) -> int:
    """Defer nodes of `graph`, in place; returns how many.

    Args:
        body: whether it may run several times in a step.
    """
    if not target.on_cpu:
        return 0
    deferred: dict[tuple[Output, str], Output] = {}  # by device
    nodes = dict.fromkeys((*thrown_away(graph), *(() if body else large_spreads(graph))))
    for node in nodes:
        tensor = _least_known(node)
        key = tensor, node.device
        if key not in deferred:
            deferred[key] = add_defer(graph, tensor, node.device)
        node.inputs = tuple(deferred[key] if t == tensor else t for t in node.inputs)
    return len(nodes)


def _least_known(node: Node) -> Output:
    """The input that says least about what the node makes."""
    return min(node.inputs, key=lambda t: (_TELLING.get(t.type.dtype, 0), t.type.nbytes or 0))


def add_defer(graph: Graph, tensor: Output, device: str) -> Output:
    """A node that passes `tensor` on, and hides from TensorFlow what made it."""
    name = graph.unique_name(f"tfswap/{tensor.node.name}_{tensor.index}/defer")
    attrs = {"T": Dtype(tensor.type.dtype)}
    return graph.add(custom_ops.DEFER, name, (tensor,), attrs=attrs, outputs=(tensor.type,), device=device).out()
