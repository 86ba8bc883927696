"""Lets nothing wait for constants, and for what is computed from them beforehand.

TensorFlow's gradients make constants, and kernels, that wait for the gradient that comes in. Where that follows from
constants itself, as a mean's does, TensorFlow replaces it by its value (analysis/constants.py), and runs its nodes in
every step all the same, for those that wait for them: no plan knows when.

Ensures: the same values, and the same order of all else: who waited for a constant waits for what that waited for.
In TensorFlow 1's graphs that may be all that keeps an update in the step, or before what reads its variable.
"""

from __future__ import annotations

from tfswap.analysis.constants import constant_nodes
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(
    ensures="no node waits for a constant, nor for what follows from constants alone",
)
def free_constants(graph: Graph, _: Target) -> int:
    """Take constants off what the nodes of `graph` and of its bodies wait for, in place; returns of how many."""
    count = 0
    for part in (graph, *graph.all_bodies()):
        order = part.topological()
        constants = constant_nodes(part, order)
        waits: dict[Node, tuple[Node, ...]] = {}  # what else a constant waits for, directly or through constants
        for node in order:
            count += any(first in constants for first in node.controls)
            node.controls = tuple(dict.fromkeys(w for first in node.controls for w in waits.get(first, (first,))))
            if node in constants:
                own = (*node.controls, *(w for t in node.inputs for w in waits[t.node]))
                waits[node] = tuple(dict.fromkeys(own))
    return count
