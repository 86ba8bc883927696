"""The owners of a tensor's buffer, as far as the graph shows them.

Not handled: the order of readers. A reader that must run before another one counts as an owner too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tfswap.analysis.constants import constant_nodes
from tfswap.ir.graph import Graph, Output
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.kernel_memory import node_memory


def solely_owned(graph: Graph, device: DeviceModel) -> Callable[[Output], bool]:
    """A predicate of tensors: whether a kernel of the step allocates the buffer, and its only reader alone owns it."""
    uses = Counter(t for node in graph for t in node.inputs)
    uses.update(graph.fetches)
    constants = constant_nodes(graph, graph.topological())

    def alone(tensor: Output) -> bool:
        node = tensor.node
        if uses[tensor] != 1 or node in constants or node in graph.bodies:
            return False
        memory = node_memory(node, device)
        source = dict(memory.alias).get(tensor.index)
        if source is None:
            return memory.exact and ("out", tensor.index) in memory.events
        return len(node.outputs) == 1 and alone(node.inputs[source])

    return alone
