"""Has splits request their outputs in order, in bodies too.

In TensorFlow's CPU kernels several threads request four outputs or more, such as an LSTM's gates, in any order. Their
addresses, and the fragmentation of the arena, then differ in each run. tfswap's own kernels request them one after the
other (csrc/core/ordered_split_ops.cc). The bits are the same.

Not handled: types that can't be copied bytewise, which are small as a rule.
"""

from __future__ import annotations

from typing import Final

from tfswap.ir.graph import Graph, Node
from tfswap.ir.types import REFERENCES
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.nodes import use_own_kernel

OUT_OF_ORDER: Final = 4
"""Several threads request the outputs of splits with this many or more (kMinimumSplitNum in split_op.cc)."""


@graph_pass(
    ensures="the outputs of a split are requested in their order",
)
def order_split_outputs(graph: Graph, target: Target) -> int:
    """Have splits whose outputs several threads request run tfswap's own kernel, in place; returns how many."""
    return use_own_kernel(graph, target.device, _is_out_of_order)


def _is_out_of_order(node: Node) -> bool:
    if node.op not in ("Split", "SplitV") or len(node.outputs) < OUT_OF_ORDER:
        return False
    return node.outputs[0].dtype not in REFERENCES
