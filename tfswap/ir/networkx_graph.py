"""A graph as a networkx graph, for its algorithms and for export. networkx is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tfswap.ir.graph import Graph

CYCLE_SHOWN = 8
"""The most nodes of a cycle that an error names."""


def to_networkx(graph: Graph) -> Any:
    """A networkx.MultiDiGraph of the nodes by name.

    Nodes have `op` and `device`. The edge of an input has the input's position as its key, and `tensor`, `type` and,
    where it is known, `nbytes`. The edge of a control input has no attributes. Nodes of bodies are not in it: bodies
    are graphs of their own (`Graph.named_bodies`).
    """
    import networkx

    found = cast(Any, networkx).MultiDiGraph()
    for node in graph:
        found.add_node(node.name, op=node.op, device=node.device)
    for node in graph:
        for n, tensor in enumerate(node.inputs):
            size = {} if tensor.type.nbytes is None else {"nbytes": tensor.type.nbytes}
            facts = {"tensor": tensor.name, "type": str(tensor.type), **size}
            found.add_edge(tensor.node.name, node.name, key=n, **facts)
        for source in node.controls:
            found.add_edge(source.name, node.name, key="control")
    return found


def cycle_text(graph: Graph) -> str:
    """The names of the nodes of a cycle, which the graph must have: "a -> b -> a"."""
    import networkx

    cycle: list[str] = [source for source, *_ in cast(Any, networkx).find_cycle(to_networkx(graph))]
    shown = [*cycle[:CYCLE_SHOWN], "..."] if len(cycle) > CYCLE_SHOWN else cycle
    return " -> ".join([*shown, cycle[0]])
