"""Ops that XLA compiles into one block with their neighbours (analysis/fusion.py), on a CPU, in float32, and how much
their values may differ from those of TensorFlow's kernels.
"""

from __future__ import annotations

from typing import cast

from tfswap.ir.graph import Node
from tfswap.kernels.close_lines import most_difference

COMPOSED = "_UnaryOpsComposition"
"""Grappler's chain of unary ops, which XLA does not know; the ops that it is made of, it knows."""

FUSABLE: dict[str, int] = {
    # element by element, with the same bits
    "Abs": 0,
    "Cast": 0,
    "Greater": 0,
    "GreaterEqual": 0,
    "Less": 0,
    "LessEqual": 0,
    "LogicalAnd": 0,
    "LogicalNot": 0,
    "LogicalOr": 0,
    "Maximum": 0,
    "Minimum": 0,
    "Neg": 0,
    "Relu": 0,
    "ReluGrad": 0,
    "SelectV2": 0,
    # sums, into which XLA takes products without rounding these
    "AddN": 4,
    "AddV2": 4,
    "SquaredDifference": 4,
    "Sub": 4,
    # products and quotients: XLA multiplies by constants' products and reciprocals
    "Div": 4,
    "Mul": 4,
    "RealDiv": 4,
    "Square": 4,
    # functions of its own
    "Erf": 16,
    "Erfc": 8,  # of 1: where its value is small, XLA's has fewer exact bits
    "Exp": 8,
    "Expm1": 20,
    "Log": 12,
    "Log1p": 12,
    "Pow": 8,
    "Reciprocal": 8,
    "Rsqrt": 8,
    "RsqrtGrad": 12,
    "Sigmoid": 16,
    "SigmoidGrad": 12,
    "Softplus": 16,
    "SoftplusGrad": 16,
    "Sqrt": 4,
    "SqrtGrad": 8,
    "Tanh": 16,
    "TanhGrad": 8,
    COMPOSED: 0,  # as what it is composed of
    # to larger tensors
    "BroadcastTo": 0,
    "Tile": 0,
    # along axes, in another order: close_lines.py has the bound
    "Mean": 4,
    "Sum": 0,
    # in another shape
    "ExpandDims": 0,
    "Reshape": 0,
    "Squeeze": 0,
}
"""The ops that blocks may have, each with the most by which XLA's result differs from TensorFlow's for the same inputs:
in halves of the distance of 1 to the next larger float, as a share of the result's magnitude, or of that of the terms
that it adds. About twice what was measured (tests/ops/test_fused_kernels.py). Sums of many terms differ by more.

Softmax and LogSoftmax are left out: XLA's blocks took 0.86 to 1.45 of the time of TensorFlow's kernels.
"""

BLOCK = "tfswap_block_"
"""The prefix of the names of blocks' functions."""

BLOCK_SUFFIX = "/fused"
"""A block's call is named after the last node that it replaces, with this suffix."""

HALF_STEP = 2.0**-24
"""Half the distance of 1 to the next larger number in float32."""

REDUCTIONS = frozenset(
    {
        "Mean",
        "Sum",
    }
)


def composed_of(node: Node) -> tuple[str, ...]:
    """The ops that compute a node's result, one after the other."""
    if node.op != COMPOSED:
        return (node.op,)
    return tuple(name.decode() for name in cast("tuple[bytes, ...]", node.attrs["op_names"]))


def most_block_difference(node: Node) -> float:
    """The most by which a kernel's result in a block differs from TensorFlow's for the same inputs, as a share of the
    magnitudes of the result or of the terms that are added.
    """
    rounding = sum(FUSABLE[op] for op in composed_of(node)) * HALF_STEP
    terms = len(node.inputs) if node.op == "AddN" else 1
    return most_difference(node) + terms * rounding
