"""What has no effect is not computed: products with one and sums with zero, which TensorFlow drops when it may.

Activations with a scale (`tf.nn.silu`) multiply by one, forward and again for their gradient, where the product waits
for the rest of the backward pass: a second copy of every activation, which a step that tfswap leaves alone does not
hold (tensorflow/core/grappler/optimizers/constant_folding.cc, SimplifyArithmeticOperations), nor its prediction.

Not handled: products with zero, and constants that TensorFlow only finds by computing them.
"""

from __future__ import annotations

from collections.abc import Callable

from tfswap.ir.graph import Graph, Node
from tfswap.ir.ops import neutral


def apply_neutral(graph: Graph, number_of: Callable[[Node], float | None]) -> int:
    """Make operations without effect in `graph` identities, in place; returns how many.

    Args:
        number_of: what a constant holds throughout, None for nodes of which that is not known.
    """
    count = 0
    for node in graph:
        element = neutral(node.op)
        if element is None:
            continue
        for position in element.positions:
            kept, constant = node.inputs[1 - position], node.inputs[position].node
            if kept.type == node.outputs[0] and not constant.controls and number_of(constant) == element.number:
                node.op, node.inputs, node.attrs = "Identity", (kept,), {"T": node.attrs["T"]}
                count += 1
                break
    return count
