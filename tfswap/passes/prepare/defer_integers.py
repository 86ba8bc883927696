"""Makes kernels of constants part of the step where TensorFlow does not fold them for a GPU: those of small integers.

TensorFlow replaces no int32 in device memory by a constant (`ReplaceTensorWithConstant` in constant_folding.cc), since
an int32 constant is in host memory. A kernel of constants that makes one, such as a cast, a gather or an argmax, runs
in each step, and so do the kernels of constants that only it reads. A `Defer` before the first of these gives all of
them a place in the order.

Not handled: portable models; types that `Defer` has no kernel for on a GPU (`_TYPES`); a kernel that is read by such a
kernel and by one that TensorFlow folds, which is not folded here.
"""

from __future__ import annotations

from tfswap.analysis.constants import constant_nodes
from tfswap.analysis.output_bytes import is_tensor_on_host
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import is_const
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import move_behind_sources
from tfswap.passes.prepare.defer_constants import add_defer, least_known

_TYPES = frozenset(
    {
        "bfloat16",
        "bool",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
    }
)
"""The types of `Defer` on a GPU (REGISTER_ON_GPU in ops/csrc/core/arena_ops.cc)."""


@graph_pass(
    ensures="kernels of constants that TensorFlow does not fold for a GPU have a place in the order",
)
def defer_integers(graph: Graph, target: Target) -> int:
    """Defer such kernels, in place, in bodies too; returns how many inputs."""
    if not target.device.host_is_separate:
        return 0
    return sum(_defer(part, target.device) for part in (graph, *graph.all_bodies()))


def _defer(graph: Graph, device: DeviceModel) -> int:
    run = _kernels_that_run(graph, device)
    made: dict[tuple[Output, str], Output] = {}  # by device
    for node in run:
        if any(t.node in run for t in node.inputs):
            continue
        inputs = [t for t in node.inputs if t.type.dtype in _TYPES]
        if inputs:
            tensor = least_known(inputs)
            key = tensor, node.device
            if key not in made:
                made[key] = add_defer(graph, tensor, node.device)
            node.inputs = tuple(made[key] if t == tensor else t for t in node.inputs)
    move_behind_sources(graph, [output.node for output in made.values()])
    return len(made)


def _kernels_that_run(graph: Graph, device: DeviceModel) -> dict[Node, None]:
    """The kernels of constants that TensorFlow does not fold, in topological order."""
    order = graph.topological()
    constants = constant_nodes(graph, order)
    readers: dict[Node, list[Node]] = {}
    kept: set[Output] = {Output(f.node, f.index) for f in graph.fetches}
    for node in order:
        for tensor in node.inputs:
            readers.setdefault(tensor.node, []).append(node)
            if node not in constants:
                kept.add(Output(tensor.node, tensor.index))
    replaced_or_read = {tensor.node for tensor in kept}
    unfolded = {t.node for t in kept if t.type.dtype == "int32" and not is_tensor_on_host(t, (), device)}
    run: set[Node] = set()
    for node in reversed(order):
        if node in constants and not is_const(node.op):
            read_by_these = node not in replaced_or_read and run.issuperset(readers.get(node, (node,)))
            if node in unfolded or read_by_these:
                run.add(node)
    return {node: None for node in order if node in run}
