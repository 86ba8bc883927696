"""Keeps TensorFlow from computing large constants when it makes the step.

When TensorFlow makes a step's executor, it computes all nodes that depend on constants alone, all of them together and
of any size, and keeps results of up to 10 MiB (analysis/constants.py). A large constant gradient, as of a mean over
examples, or a mask is so computed and thrown away each time that the step is made: the first call then peaks far above
the plan, and where memory is short TensorFlow crashes. A `Defer` before such a node makes it, and all that is computed
from it, part of the step, as in the plan. It passes its input's buffer on and costs nothing.

TensorFlow keeps smaller constants that spread one value: they are persistent, in whatever chunk is free when the step
is made, of up to twice their size, so that a limit could be kept in one process and not in the next. They too become
part of the step, except in bodies that run several times in one.

Requires a CPU: on other devices TensorFlow computes constants in host memory with the CPU's kernels, whose bits may
differ from the device's. There the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from tfswap.analysis.constants import large_spreads, thrown_away
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Output
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass

_TELLING = {
    "int32": 1,  # shapes: TensorFlow's shape inference does not see through a Defer
    "int64": 1,  # the same
    "variant": 2,  # lists, whose elements analysis follows
}


@graph_pass(
    ensures="TensorFlow computes no large constant while it makes the step",
)
def defer_constants(graph: Graph, target: Target, *, body: bool = False) -> int:
    """Defer nodes of `graph`, in place; returns how many.

    Args:
        body: whether it may run several times in a step.
    """
    if target.device.host_is_separate:
        return 0
    deferred: dict[tuple[Output, str], Output] = {}  # by device
    nodes = dict.fromkeys((*thrown_away(graph), *(() if body else large_spreads(graph))))
    for node in nodes:
        tensor = least_known(node.inputs)
        key = tensor, node.device
        if key not in deferred:
            deferred[key] = add_defer(graph, tensor, node.device)
        node.inputs = tuple(deferred[key] if t == tensor else t for t in node.inputs)
    return len(nodes)


def least_known(inputs: Iterable[Output]) -> Output:
    """The input that gives the least information about a node's result."""
    return min(inputs, key=lambda t: (_TELLING.get(t.type.dtype, 0), t.type.nbytes or 0))


def add_defer(graph: Graph, tensor: Output, device: str) -> Output:
    """A node that passes `tensor` on, and hides its producer from TensorFlow."""
    name = graph.unique_name(f"tfswap/{tensor.node.name}_{tensor.index}/defer")
    attrs = {"T": Dtype(tensor.type.dtype)}
    return graph.add(custom_ops.DEFER, name, (tensor,), attrs=attrs, outputs=(tensor.type,), device=device).out()
