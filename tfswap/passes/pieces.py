"""Lets the outputs of a split lie in their order, in bodies too.

TensorFlow's kernels for a CPU let threads request four outputs or more, as an LSTM's gates, in any order: the arena
then has them, and the holes that they leave, elsewhere in each run. tfswap's own request them one after the other
(csrc/core/pieces_ops.cc). The bits are the same.

Not handled: pieces that can't be copied byte by byte, which are small as a rule.
"""

from __future__ import annotations

from typing import Final

from tfswap.analysis.device import DeviceModel
from tfswap.ir.graph import Graph
from tfswap.oplib.names import KERNEL, OWN_KERNEL

OUT_OF_ORDER: Final = 4
"""So many outputs are requested by several threads (kMinimumSplitNum in split_op.cc and split_v_op.cc)."""


def apply_pieces(graph: Graph, device: DeviceModel) -> int:
    """Let splits of so many outputs run as tfswap's own kernel, in place; returns how many."""
    if device.kind != "cpu":
        return 0
    splits = [
        node
        for part in (graph, *graph.all_bodies())
        for node in part
        if node.op in ("Split", "SplitV")
        and len(node.outputs) >= OUT_OF_ORDER
        and node.outputs[0].dtype not in ("string", "variant", "resource")
    ]
    for node in splits:
        node.attrs = {**node.attrs, KERNEL: OWN_KERNEL.encode()}
    return len(splits)
