"""Which kernels of a device's part wait for other devices, and for which kernels others wait.

In the joined step an edge takes the place of a Send and its Receive (passes/join_parts.py): the reader of what is
received waits for the kernel that makes what is sent. The places of the two nodes in the orders do not matter. A
Receive that nothing reads only waits, at its own place.
"""

from __future__ import annotations

from collections.abc import Collection

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.custom_ops import RECEIVE, SEND


def waits_for_others(flow: Dataflow, awaiting: Collection[str]) -> dict[int, frozenset[str]]:
    """By kernel that waits for other devices, the names of the nodes that it does so by.

    Args:
        awaiting: the names of nodes that wait for other devices.
    """
    if not awaiting:
        return {}
    sources = {tensor.node for node in flow.nodes for tensor in node.inputs}
    edges = {i for i, node in enumerate(flow.nodes) if node.op == RECEIVE and node in sources}
    through: dict[int, frozenset[str]] = {}
    for i, node in enumerate(flow.nodes):
        read = {flow.place[tensor.node.name] for tensor in node.inputs}
        found = frozenset({node.name}) if node.name in awaiting else frozenset[str]()
        for d in flow.own_deps[i]:
            passes = not flow.is_kernel[d] or (d in read and d in edges)
            if d in through and passes:
                found |= through[d]
        if found:
            through[i] = found
    return {i: found for i, found in through.items() if flow.is_kernel[i] and i not in edges}


def awaited_kernels(flow: Dataflow, name: str) -> Collection[int]:
    """The kernels that have run when another device may go on which waits for a node."""
    i = flow.place.get(name)
    if i is None:
        return ()
    node = flow.nodes[i]
    before = [flow.place[tensor.node.name] for tensor in node.inputs] if node.op == SEND else [i]
    return {kernel for b in before for kernel in ((b,) if flow.is_kernel[b] else flow.kernels_before(b))}
