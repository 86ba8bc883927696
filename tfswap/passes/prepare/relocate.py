"""Gives results of loops and conditionals the same addresses in all courses of the step.

The number of a loop's iterations, or the branch taken, may depend on the step's values. The addresses of the results
then differ, and later requests find other chunks: each course has its own peak. The kernels of such nodes relocate
their results (csrc/core/relocation.h), so that one record of the node (analysis/control_flow.py) holds for any number
of iterations and every sequence of branches.

Requires: known sizes. Ensures: nodes whose bodies make results list those that are relocated. Not handled: nodes that
return lists or optionals, whose elements keep their addresses.
"""

from __future__ import annotations

from tfswap.analysis.analyse import undetermined_nodes
from tfswap.ir.custom_ops import RELOCATED
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow
from tfswap.ir.types import REFERENCES
from tfswap.ir.views import origin
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(
    requires="known sizes",
    ensures="addresses of results of loops and conditionals do not depend on iterations and branches",
)
def relocate_results(graph: Graph, target: Target) -> int:
    """Have results of loops and conditionals relocated, in place, where the step's values decide how they run; returns
    of how many.
    """
    if not graph.bodies:
        return 0
    count = 0
    bodies = {node: run for part in (graph, *graph.all_bodies()) for node, run in part.bodies.items()}
    for node in undetermined_nodes(graph, target.device):
        kind = control_flow(node.op)
        assert kind is not None
        runs = bodies[node][1:] if kind.is_loop else bodies[node]
        if all(t.type.dtype != "variant" for body in runs for t in body.fetches):
            node.attrs = {**node.attrs, RELOCATED: _places(node, runs, is_loop=kind.is_loop)}
            count += 1
    return count


def _places(node: Node, bodies: tuple[Graph, ...], *, is_loop: bool) -> tuple[int, ...]:
    """Results of which some are made by the bodies: all others are the node's arguments at the same positions."""
    found: list[int] = []
    for place, kind in enumerate(node.outputs):
        given = {_argument(body, body.fetches[place]) for body in bodies}
        same = {place} if is_loop else given - {None}
        if kind.dtype not in REFERENCES and (given != same or len(given) > 1):
            found.append(place)
    return tuple(found)


def _argument(body: Graph, tensor: Output) -> int | None:
    """The argument that a tensor is a view of."""
    node = origin(tensor).node
    return body.feeds.index(node) if node in body.feeds else None
