"""Copies of nodes: the one place that knows which facts about a node its copy has too."""

from __future__ import annotations

from collections.abc import Iterable

from tfswap.ir.graph import Graph, Node, Output


def add_copy(
    graph: Graph,
    node: Node,
    name: str,
    inputs: Iterable[Output],
    *,
    controls: Iterable[Node] = (),
    device: str = "",
    source: Graph | None = None,
) -> Node:
    """Add a node with the op, attributes, types and measured facts of `node`.

    Args:
        name: the name, or its stem where the graph has such a node.
        device: empty for the device of `node`.
        source: the graph of `node` if that is another one. Facts that a graph has about its nodes are copied from it:
            bodies, small constants and permits.
    """
    made = graph.add(
        node.op,
        graph.unique_name(name),
        inputs,
        controls=controls,
        attrs=node.attrs,
        outputs=node.outputs,
        device=device or node.device,
    )
    made.measured, made.tape = node.measured, node.tape
    if source is not None:
        _copy_facts(source, node, graph, made)
    return made


def _copy_facts(source: Graph, node: Node, graph: Graph, made: Node) -> None:
    if node in source.bodies:
        graph.bodies[made] = tuple(body.copy() for body in source.bodies[node])
    if node in source.small_constants:
        graph.small_constants[made] = source.small_constants[node]
    for index in range(len(node.outputs)) if source.permits else ():
        if (permit := source.permits.get(node.out(index))) is not None:
            graph.restrict(made.out(index), permit)
