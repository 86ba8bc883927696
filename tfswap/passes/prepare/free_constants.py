"""Removes control edges from constants, and from nodes that TensorFlow computes from constants in advance.

TensorFlow's gradients add constants, and kernels, that wait for the incoming gradient. If that is computed from
constants only, as a mean's is, TensorFlow replaces it by its value (analysis/constants.py), but still runs its nodes in
each step for the nodes that wait for them, at times that no plan decides.

Ensures: the same values, and the same order of all other nodes: a node that waited for a constant waits for the
constant's control inputs. In TensorFlow 1's graphs only these may keep an update in the step, or before readers of its
variable.
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
    """Remove constants from the control inputs of nodes of `graph` and of its bodies, in place; returns of how many
    nodes.
    """
    count = 0
    for part in (graph, *graph.all_bodies()):
        order = part.topological()
        constants = constant_nodes(part, order)
        waits: dict[Node, tuple[Node, ...]] = {}  # the control inputs of a constant, directly or through constants
        for node in order:
            count += any(first in constants for first in node.controls)
            node.controls = tuple(dict.fromkeys(w for first in node.controls for w in waits.get(first, (first,))))
            if node in constants:
                own = (*node.controls, *(w for t in node.inputs for w in waits[t.node]))
                waits[node] = tuple(dict.fromkeys(own))
    return count
