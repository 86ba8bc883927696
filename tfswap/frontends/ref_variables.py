"""TensorFlow 1's variables, whose tensors are references: what a planned order must respect of them.

A reference reads whatever is in the variable when its reader runs, so TensorFlow 1 leaves a read and an update
that no edge orders to chance. Before planning, each update is made to wait for the reads that can come first,
as updates of resource variables are by the planner itself.
"""

from __future__ import annotations

import functools

from tfswap.ir.graph import Graph, Node
from tfswap.ir.ops import is_view

REFERENCE_VARIABLES = frozenset(
    (
        "Variable",
        "VariableV2",
    )
)


@functools.cache
def writes_reference(op: str) -> bool:
    """Whether the op changes a variable through a reference: it takes one and hands it on."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op)
    if definition is None or op.startswith("Ref"):  # RefIdentity and its like only route references
        return False
    return any(a.is_ref for a in definition.input_arg) and any(a.is_ref for a in definition.output_arg)


def reference_variables(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op in REFERENCE_VARIABLES]


def order_writes(graph: Graph) -> int:
    """Let every write through a reference wait for its variable's reads that do not follow it, in place.

    Returns the number of edges added.
    """
    users: dict[Node, list[Node]] = {}
    for node in graph.topological():
        for source in {t.node for t in node.inputs} | set(node.controls):
            users.setdefault(source, []).append(node)
    added = 0
    for variable in reference_variables(graph):
        readers, writers = _uses(variable, users)
        for writer in writers:
            after = _descendants(writer, users)
            for reader in readers:
                if reader not in after and graph.add_control(writer, reader):
                    users.setdefault(reader, []).append(writer)
                    added += 1
    return added


def _uses(variable: Node, users: dict[Node, list[Node]]) -> tuple[list[Node], list[Node]]:
    """The nodes that read the variable, at once or through views and what writes hand on, and those that write."""
    readers, writers = [], []
    pending, seen = [variable], {variable}
    while pending:
        source = pending.pop()
        for user in users.get(source, ()):
            if user in seen or not any(t.node is source for t in user.inputs):
                continue
            seen.add(user)
            if writes_reference(user.op) and user.inputs[0].node is source:
                writers.append(user)
                pending.append(user)
            elif is_view(user.op):
                pending.append(user)
            else:
                readers.append(user)
    return readers, writers


def _descendants(node: Node, users: dict[Node, list[Node]]) -> set[Node]:
    seen, pending = {node}, [node]
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in seen:
                seen.add(user)
                pending.append(user)
    return seen
