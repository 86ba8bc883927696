"""Lets constants, and what is computed from them beforehand, wait for no constants.

TensorFlow's gradients make constants that wait for the gradient that comes in. Where that follows from constants
itself, as a mean's does, TensorFlow replaces it by its value (analysis/folding.py), and runs its nodes in every step
all the same, for those that wait for them.

Ensures: the same values, and the same order of all else: a constant waits for what those that it waited for wait for.
In TensorFlow 1's graphs that may be all that keeps an update in the step, or before what reads its variable.
"""

from __future__ import annotations

from tfswap.analysis.folding import constant_nodes
from tfswap.ir.graph import Graph, Node


def apply_free_constants(graph: Graph) -> int:
    """Take constants off what constants of `graph` and of its bodies wait for, in place; returns of how many."""
    count = 0
    for part in (graph, *graph.all_bodies()):
        order = part.topological()
        constants = constant_nodes(part, order)
        waits: dict[Node, tuple[Node, ...]] = {}  # what else a constant waits for, directly or through constants
        for node in order:
            if node not in constants:
                continue
            own = dict.fromkeys(w for first in node.controls for w in waits.get(first, (first,)))
            count += any(first in constants for first in node.controls)
            node.controls = tuple(own)
            waits[node] = tuple(dict.fromkeys((*own, *(w for t in node.inputs for w in waits[t.node]))))
    return count
