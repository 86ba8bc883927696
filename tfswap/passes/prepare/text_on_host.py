"""Gives a GPU's step the texts that its kernels read on the host, such as the message of an assertion.

TensorFlow has no constants of text on a GPU: it puts them on the CPU, and sends them to the step. An order is of one
device, and a body of a conditional, in which an assertion usually is, runs on the device of its node. So such a
constant becomes a node of tfswap's with a kernel for GPUs, whose result is in host memory, as strings are anywhere.

Not handled: portable models, whose steps are refused; ops without a kernel for GPUs that make or read text (tf.print).
"""

from __future__ import annotations

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass


@graph_pass(ensures="constants of text have kernels on the device of the step")
def keep_text_on_host(graph: Graph, target: Target) -> int:
    """Replace such constants of `graph` and of its bodies, in place; returns how many."""
    if not target.device.host_is_separate:
        return 0
    parts = (graph, *graph.all_bodies())
    found = [node for part in parts for node in part if is_text(node)]
    for node in found:
        node.op = custom_ops.TEXT
    return len(found)


def is_text(node: Node) -> bool:
    """Whether it is a constant of text."""
    return is_const(node.op) and node.outputs[0].dtype == "string"
