"""Carries out what is planned inside of a body: copies to host memory and back, and kernels that run again.

Requires: a body that has an order (passes/tactics/order_bodies.py). Ensures: it has one still, the planned one, with
every allocation and release of the copies in it. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from tfswap.analysis.dataflow import Dataflow
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import stateful_form
from tfswap.passes.order import apply_order
from tfswap.passes.tactics.swap import apply_swaps
from tfswap.plan.plan import Inside


def apply_inside(body: Graph, flow: Dataflow, inside: Inside) -> None:
    """Carry out `inside` in `body`, in place.

    Args:
        flow: the facts of a copy of the body, as it is before.
    """
    chain = apply_swaps(body, flow, inside)
    chained = set(chain)
    for node in chain:
        node.controls = tuple(c for c in node.controls if c not in chained)
    body.beside = {first: second for first, second in pairwise(chain) if body.beside.get(first) is second}
    # The gate that makes what the body's own loops run stays the first.
    apply_order(body, [*(node for node in body if node.op == custom_ops.GATE), *chain])
    body.prune()


def tell_effects(graph: Graph, edited: Collection[Graph]) -> bool:
    """Let loops and conditionals in whose bodies there are copies now, those of `edited`, say that they have effects.

    Returns whether there are any in `graph`.
    """
    effects = graph in edited
    for node, bodies in graph.bodies.items():
        inner = [tell_effects(body, edited) for body in bodies]
        if any(inner):
            node.op = stateful_form(node.op)
            effects = True
    return effects
