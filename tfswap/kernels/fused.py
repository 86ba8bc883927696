"""Ops that XLA compiles into one block with their neighbours (analysis/fusion.py), on a CPU, in float32."""

from __future__ import annotations

from typing import cast

from tfswap.ir.custom_ops import AGAIN
from tfswap.ir.graph import Node

COMPOSED = "_UnaryOpsComposition"
"""Grappler's chain of unary ops, which XLA does not know; the ops that it is made of, it knows."""

FUSABLE = frozenset(
    {
        # element by element
        "Abs",
        "AddN",
        "AddV2",
        "Cast",
        "Div",
        "Erf",
        "Erfc",
        "Exp",
        "Expm1",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "Log",
        "Log1p",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mul",
        "Neg",
        "Pow",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "ReluGrad",
        "Rsqrt",
        "RsqrtGrad",
        "SelectV2",
        "Sigmoid",
        "SigmoidGrad",
        "Softplus",
        "SoftplusGrad",
        "Sqrt",
        "SqrtGrad",
        "Square",
        "SquaredDifference",
        "Sub",
        "Tanh",
        "TanhGrad",
        COMPOSED,
        # to larger tensors
        "BroadcastTo",
        "Tile",
        # along axes
        "Mean",
        "Sum",
        # in another shape
        "ExpandDims",
        "Reshape",
        "Squeeze",
    }
)
"""Softmax and LogSoftmax are left out: XLA's blocks took 0.86 to 1.45 of the time of TensorFlow's kernels."""

BLOCK = "tfswap_block_"
"""The prefix of the names of blocks' functions."""

BLOCK_SUFFIX = "/fused"
"""A block's call is named after the last node that it replaces, with this suffix."""

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


def is_block(node: Node) -> bool:
    """Whether a node of the step is a call of a block; that it is recomputed too does not count."""
    return node.op == "PartitionedCall" and node.name.endswith(BLOCK_SUFFIX) and not node.name.startswith(AGAIN)
