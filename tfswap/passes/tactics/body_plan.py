"""Carries out the plans of bodies: copies to host memory and back, and recomputed kernels.

Requires: bodies that have an order (passes/tactics/order_bodies.py). Ensures: they have the planned order, with every
allocation and release of the copies in it. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from tfswap.analysis.dataflow import Dataflow
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import mark_effects
from tfswap.passes.order import chain_nodes
from tfswap.passes.tactics.swap import insert_schedule
from tfswap.plan.plan import Inside


@graph_pass(
    requires="bodies with an order",
    ensures="each of these bodies runs in its planned order, with its copies and recomputed kernels",
)
def carry_out_in_bodies(
    graph: Graph, target: Target, planned: Sequence[Inside], facts: Callable[[Graph, Inside], Dataflow]
) -> int:
    """Carry out the plans of bodies of `graph`, in place; returns how many bodies.

    Args:
        planned: for each body, those of a body after those of the bodies in it.
        facts: gives the present facts of a body, for its plan; raises InvalidModel for a plan that is not the body's.

    Raises InvalidModel for a body that `graph` does not have.
    """
    bodies = graph.named_bodies()
    for inside in planned:
        body = bodies.get(inside.body)
        if body is None:
            raise InvalidModel(
                f"this plan moves tensors inside of {inside.body!r}, which this graph does not have. Plan again for "
                "this graph."
            )
        carry_out_in_body(body, target, facts(body, inside), inside)
    mark_effects(graph, [bodies[inside.body] for inside in planned])
    return len(planned)


def carry_out_in_body(body: Graph, target: Target, flow: Dataflow, inside: Inside) -> None:
    """Carry out `inside` in `body`, in place.

    Args:
        flow: the facts of a copy of the body before.
    """
    chain = insert_schedule(body, target, flow, inside)
    chained = set(chain)
    for node in chain:
        node.controls = tuple(c for c in node.controls if c not in chained)
    body.paired = {first: second for first, second in pairwise(chain) if body.paired.get(first) is second}
    # The gate that makes the functions of the body's own loops stays the first.
    chain_nodes(body, [*(node for node in body if node.op == custom_ops.GATE), *chain])
    body.prune()
