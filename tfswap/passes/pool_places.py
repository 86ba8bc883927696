"""Where the maxima of a pooling lie is kept for its gradient, where oneDNN would keep that.

oneDNN's graph pass has MaxPool give a second output, a byte for each value that it makes, to the MaxPoolGrad that reads
what it made (mkl_layout_pass.cc, MaxpoolGradRewrite and AddWorkSpaceEdgeIfNeeded). That lies in the arena from the one
kernel to the other, and the gradient's kernel then pools nothing again. A graph that says so itself can be planned: the
places are a tensor as others are, and the gradient's kernel stays oneDNN's, with its bits, where what it reads was
swapped meanwhile.

Not handled: pools in the bodies of loops and branches.
"""

from __future__ import annotations

from tfswap.analysis.device import DeviceModel
from tfswap.ir.graph import Graph, Node
from tfswap.ir.types import TensorType
from tfswap.passes.join import JOINED_DTYPES, KERNEL_LABEL

POOL, GRADIENT = "MaxPool", "MaxPoolGrad"
WITH_PLACES, FROM_PLACES = "_MklNativeMaxPool", "_MklNativeMaxPoolGrad"
LARGEST_WINDOW = 255
"""Places in larger windows take more than a byte."""


def apply_pool_places(graph: Graph, device: DeviceModel) -> int:
    """Have the MaxPools of `graph` give places to their gradients, in place; returns how many gradients that were."""
    if not device.onednn:
        return 0
    found = 0
    for node in graph:
        if node.op != GRADIENT or len(node.inputs) != 3:
            continue
        pool, index = node.inputs[1]
        if index or pool.op not in (POOL, WITH_PLACES) or pool.device != node.device or not _has_places(pool):
            continue
        if pool.op == POOL:
            places = TensorType("uint8", (pool.outputs[0].num_elements,))
            pool.op, pool.outputs = WITH_PLACES, (*pool.outputs, places)
            pool.attrs = {**pool.attrs, "workspace_enabled": True, "_kernel": KERNEL_LABEL}
        node.op, node.inputs = FROM_PLACES, (*node.inputs, pool.out(1))
        node.attrs = {**node.attrs, "workspace_enabled": True, "_kernel": KERNEL_LABEL}
        found += 1
    return found


def _has_places(pool: Node) -> bool:
    window, pooled = pool.attrs.get("ksize"), pool.outputs[0]
    return (
        pooled.dtype in JOINED_DTYPES
        and pooled.num_elements is not None
        and pool.attrs.get("padding") != b"EXPLICIT"
        and pool.attrs.get("data_format", b"NHWC") == b"NHWC"
        and isinstance(window, tuple)
        and len(window) == 4
        and window[0] == window[3] == 1
        and window[1] * window[2] <= LARGEST_WINDOW
    )
