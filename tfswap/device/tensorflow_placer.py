"""Where TensorFlow puts the nodes of a step on several GPUs (placer.cc).

Grappler hoists, shares and fuses among nodes of one device only, so the last bits of a step depend on where its nodes
are. It is given these devices. A planned step may run a node elsewhere (placer.py): where all that it reads is.

Not handled: nodes inside of loops and conditionals, since Grappler does not run on steps with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tfswap.device.placer import HANDLES, is_on_cpu
from tfswap.ir.graph import Graph, Node
from tfswap.passes.device_carriers import FIRST, unit

READS_SHAPE = frozenset({"Rank", "Shape", "Size"})
"""Ops that are on the device of their input (IsMetadata)."""
PASSES_ON = "Identity"
"""The op that is on the device of its input where that has as many readers as it (MatchIdentityOperation)."""


def tensorflow_placed(graph: Graph, given: Mapping[Node, str], first: str, hosted: Collection[Node]) -> dict[Node, str]:
    """The unit of each node's device.

    Args:
        graph: as it was imported.
        given: the units of the arguments.
        first: the device of nodes that no rule gives one.
        hosted: arguments that are handles of objects on the CPU.
    """
    readers = _readers(graph)
    found = dict(given)
    later: list[Node] = []
    for node in graph.topological():
        if node in given:
            continue
        handles = {found.get(tensor.node) for tensor in node.inputs if tensor.type.dtype in HANDLES} - {None}
        if is_on_cpu(node, hosted):
            found[node] = FIRST
        elif node.device:
            found[node] = unit(node.device)
        elif len(handles) == 1:
            found[node] = next(iter(handles)) or first
        elif _is_generator(node):
            later.append(node)
        elif _is_with_input(node, readers):
            found[node] = found.get(node.inputs[0].node, first)
        else:
            found[node] = first
    for node in later:
        where = {found.get(reader, first) if reader else first for reader in readers.get(node, ())}
        found[node] = where.pop() if len(where) == 1 else first
    return found


def _readers(graph: Graph) -> dict[Node, list[Node | None]]:
    """By node, what reads its results or waits for it; None for the step's own results."""
    found: dict[Node, list[Node | None]] = {}
    for node in graph:
        for source in (*(tensor.node for tensor in node.inputs), *node.controls):
            found.setdefault(source, []).append(node)
    for fetch in graph.fetches:
        found.setdefault(fetch.node, []).append(None)
    return found


def _is_generator(node: Node) -> bool:
    """Whether a node is on the device of all of its readers (IsGeneratorNode)."""
    return not node.inputs and len(node.outputs) == 1


def _is_with_input(node: Node, readers: Mapping[Node, list[Node | None]]) -> bool:
    """Whether a node is on the device of its input."""
    if node.op in READS_SHAPE:
        return True
    if node.op != PASSES_ON or len(node.inputs) + len(node.controls) != 1 or len(readers.get(node, ())) != 1:
        return False
    (reader,) = readers[node]
    return node.inputs[0].node.device == (reader.device if reader else "")
