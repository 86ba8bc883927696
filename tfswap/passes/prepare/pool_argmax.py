"""Keeps the positions of a pooling's maxima for its gradient, where oneDNN would keep them.

oneDNN's graph pass gives MaxPool and MaxPool3D a second output, one byte for each pooled value, for the gradient that
reads the pooled tensor (mkl_layout_pass.cc, MaxpoolGradRewrite and AddWorkSpaceEdgeIfNeeded). It stays in the arena
from one kernel to the other, and the gradient's kernel need not pool again. In a graph with that output the positions
are a tensor like others and can be planned. The gradient's kernel stays oneDNN's, with its bits, even if its inputs
were swapped in between. In the bodies of loops and branches TensorFlow's own kernels run (`DeviceModel.in_bodies`).

A gradient outside of the pool's graph (taken outside, or of another gradient) has no positions: its kernel searches the
maxima again, and may find another one of equal maxima. If the pool is recomputed right before the gradient, this must
not change.
"""

from __future__ import annotations

import math
from typing import cast

from tfswap.ir.graph import Graph, Node
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.contract import graph_pass
from tfswap.passes.device_carriers import unit
from tfswap.passes.prepare.defer_constants import add_defer
from tfswap.passes.prepare.onednn_fusion import KERNEL_LABEL

POOLS = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D"}
"""By gradient."""
ONEDNN = "_MklNative"
"""What the names of oneDNN's ops begin with."""
SMALL_WINDOW = 255
"""Places in larger windows take four bytes each."""
SPATIAL = {b"NHWC": (1, 2), b"NCHW": (2, 3), b"NDHWC": (1, 2, 3), b"NCDHW": (2, 3, 4)}
"""By layout, the dimensions that a window may span."""


@graph_pass(
    ensures="positions of maxima that oneDNN keeps for a pooling's gradient are a tensor of the graph",
)
def keep_pool_argmax(graph: Graph, target: Target) -> int:
    """Have the MaxPools of `graph` give positions to their gradients, in place; returns the number of gradients."""
    if not target.onednn:
        return 0
    found = 0
    for node in graph:
        plain = POOLS.get(node.op)
        if plain is None:
            continue
        pool, index = node.inputs[1]
        if (
            index
            or pool.op not in (plain, ONEDNN + plain)
            or unit(pool.device) != unit(node.device)
            or not _has_places(pool, target.device)
        ):
            continue
        if pool.op == plain:
            _keep_places(graph, pool)
        node.op, node.inputs = ONEDNN + node.op, (*node.inputs, pool.out(1))
        node.attrs = {**node.attrs, "workspace_enabled": True, "_kernel": KERNEL_LABEL}
        found += 1
    return found


@graph_pass(
    ensures="oneDNN's graph pass pairs no pooling with a gradient that it does not pair in `before`",
)
def keep_gradients_unpaired(graph: Graph, target: Target, before: Graph) -> int:
    """Keep oneDNN's pass from pairing nodes that it does not pair in `before`, the step that `graph` carries out.

    In place; returns the number of such gradients.
    """
    if not target.onednn:
        return 0
    found = 0
    for node in list(graph):
        if node.op in POOLS and _reads_pool(node) and node.name in before and not _reads_pool(before[node.name]):
            graph.replace_input(node, 1, add_defer(graph, node.inputs[1], node.device))
            found += 1
    return found


def _reads_pool(gradient: Node) -> bool:
    return gradient.inputs[1].node.op == POOLS[gradient.op]


def _keep_places(graph: Graph, pool: Node) -> None:
    pooled = pool.outputs[0]
    each = 1 if math.prod(cast("tuple[int, ...]", pool.attrs["ksize"])) <= SMALL_WINDOW else 4
    pool.op = ONEDNN + pool.op
    pool.outputs = (pooled, TensorType("uint8", (each * (pooled.num_elements or 0),), bound=pooled.bound))
    pool.attrs = {**pool.attrs, "workspace_enabled": True, "_kernel": KERNEL_LABEL}
    if pool.out(0) in graph.permits:
        graph.permits[pool.out(1)] = graph.permits[pool.out(0)]


def _has_places(pool: Node, device: DeviceModel) -> bool:
    layout, pooled = pool.attrs.get("data_format", b"NDHWC" if "3D" in pool.op else b"NHWC"), pool.outputs[0]
    spatial = SPATIAL.get(layout) if isinstance(layout, bytes) else None
    sizes = pool.attrs.get("ksize"), pool.attrs.get("strides")
    return (
        pooled.dtype in device.onednn_dtypes
        and pooled.num_elements is not None
        and pool.attrs.get("padding") != b"EXPLICIT"
        and spatial is not None
        and all(
            isinstance(size, tuple) and all(s == 1 for d, s in enumerate(size) if d not in spatial) for size in sizes
        )
    )
