"""Lets constants, and what is computed from them beforehand, wait for nothing.

TensorFlow's gradients make constants that wait for the gradient that comes in. Where that follows from constants
itself, as a mean's does, TensorFlow replaces it by its value (analysis/folding.py), and runs its nodes in every step
all the same, for those that wait for them.

Ensures: the same values; nothing runs for an order alone that no constant needs.
"""

from __future__ import annotations

from tfswap.analysis.folding import constant_nodes
from tfswap.ir.graph import Graph


def apply_free_constants(graph: Graph) -> int:
    """Take control inputs off the constants of `graph` and of its bodies, in place; returns how many nodes had some."""
    count = 0
    for part in (graph, *graph.all_bodies()):
        for node in constant_nodes(part, part.topological()):
            count += bool(node.controls)
            node.controls = ()
    return count
