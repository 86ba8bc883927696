"""Keeps a step's memory the same from step to step: assigned variables keep their buffers.

TensorFlow's AssignVariableOp adopts the buffer of the value assigned. A variable that is assigned in each step
(momentum, a moving average) then changes its address in each step and fragments the arena differently: peaks of the
same order varied by 8%. The copy that replaces the assignment takes the time of copying the variable once.
"""

from __future__ import annotations

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import adopts_value
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(
    ensures="variables that the step assigns keep their buffers",
)
def assign_in_place(graph: Graph, _: Target) -> int:
    """Replace the assignments of `graph` and its bodies, in place; returns how many."""
    assignments = [node for part in (graph, *graph.all_bodies()) for node in part if adopts_value(node.op)]
    for node in assignments:
        node.op = custom_ops.ASSIGN_IN_PLACE
        node.attrs = {"T": node.attrs["dtype"]}
    return len(assignments)
