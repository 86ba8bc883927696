"""Orders accesses to variables in TensorFlow 1's graphs.

Where no edge orders a read and a write of a variable, or two writes, TensorFlow 1 runs them in any order. (In a
`tf.function` there is always an edge.) A plan has one order, so edges are added before planning: each write waits for
the reads that may come first, and of two writes the second waits for the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tfswap.analysis.variables import resources_used
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_view, makes_handle, writes_variable
from tfswap.support.reach import reach

REFERENCE_VARIABLES = frozenset(
    (
        "Variable",
        "VariableV2",
    )
)
"""Variables whose tensors are references: a reader gets the variable's value at the time when it runs."""

Users = dict[Node, list[Node]]
"""For each node, the nodes that read it or wait for it."""


@functools.cache
def writes_reference(op: str) -> bool:
    """Whether the op changes a variable through a reference, which it takes and passes on."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    if definition is None or op.startswith("Ref"):  # RefIdentity and its like only route references
        return False
    return any(a.is_ref for a in definition.input_arg) and any(a.is_ref for a in definition.output_arg)


def reference_variables(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op in REFERENCE_VARIABLES]


def order_writes(graph: Graph) -> int:
    """Let every write wait for its variable's reads that do not follow it, and for the write before it, in place.

    Returns the number of edges added.
    """
    users: Users = {}
    nodes = graph.topological()
    for node in nodes:
        for source in {t.node for t in node.inputs} | set(node.controls):
            users.setdefault(source, []).append(node)
    place = {node: i for i, node in enumerate(nodes)}
    added = 0
    for variable in nodes:
        if variable.op not in REFERENCE_VARIABLES and not makes_handle(variable.op):
            continue
        readers, writers = _uses(graph, variable, users, place.__getitem__)
        for i, writer in enumerate(writers):
            after = _descendants(writer, users)
            for first in (*readers, *writers[:i][-1:]):
                if first not in after and graph.add_control(writer, first):
                    users.setdefault(first, []).append(writer)
                    added += 1
    return added


def _uses(graph: Graph, variable: Node, users: Users, place: Callable[[Node], int]) -> tuple[list[Node], list[Node]]:
    """The nodes that read the variable, directly or through views and what writes hand on, and those that write."""
    writers: dict[Node, None] = {}

    def read_by(source: Node) -> list[Node]:
        if source is not variable and source not in writers and not is_view(source.op):
            return []
        found = [user for user in users.get(source, ()) if any(t.node is source for t in user.inputs)]
        writers.update((user, None) for user in found if _writes(graph, user, source))
        return found

    seen = list(reach([variable], read_by))[1:]
    readers = [node for node in seen if node not in writers and not is_view(node.op)]
    return sorted(readers, key=place), sorted(writers, key=place)


def _writes(graph: Graph, node: Node, source: Node) -> bool:
    """Whether `node` writes the variable that `source` is the reference or the handle of."""
    if not any(t.node is source and t.type.dtype == "resource" for t in node.inputs):
        return writes_reference(node.op) and node.inputs[0].node is source
    if node in graph.bodies:
        return any(node.inputs[i].node is source for i in resources_used(node, graph.bodies[node]).written)
    return writes_variable(node.op)


def _descendants(node: Node, users: Users) -> set[Node]:
    return set(reach([node], lambda one: users.get(one, ())))
