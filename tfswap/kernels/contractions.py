"""Products of matrices, and linear algebra.

Eigen's packed blocks are outside of the arena; oneDNN's are in it (onednn.py).
"""

from __future__ import annotations

from math import prod

from tfswap.ir.types import HALVES
from tfswap.kernels.einsum import einsum
from tfswap.kernels.memory_rules import UNARY, Entry, KernelMemory, candidates, events_rule, fused, outs
from tfswap.kernels.onednn import Product, onednn, onednn_product_bytes
from tfswap.kernels.temporaries import OUT0, UNKNOWN, Events, Facts, Measured, after_output, known_shape


def matmul(facts: Facts) -> Events | Measured:
    """matmul_op_impl.h: 16-bit floats are widened to float32, both inputs and the result."""
    if facts.device.is_gpu:
        return UNKNOWN
    if facts.outputs[0].dtype in HALVES:
        counts = [kind.num_elements for kind in (facts.inputs[0], facts.inputs[1], facts.outputs[0])]
        if None in counts:
            return UNKNOWN
        widened = [4 * count for count in counts if count is not None]
        return after_output(widened, exact=not facts.device.onednn)
    return onednn(facts) if facts.device.onednn else ((OUT0,), True)


def batch_matmul(facts: Facts) -> Events | Measured:
    """As `matmul`, with oneDNN's scratchpad by shape (mkl_batch_matmul_op.cc). `MatMul` had none when measured."""
    left, product = known_shape(facts.inputs[0]), known_shape(facts.outputs[0])
    replaced = not facts.device.is_gpu and facts.device.onednn and facts.outputs[0].dtype not in HALVES
    if not replaced or left is None or product is None:
        return matmul(facts)
    first, second = bool(facts.attrs.get("adj_x")), bool(facts.attrs.get("adj_y"))
    inner = left[-2 if first else -1]
    shape = Product(prod(product[:-2]), product[-2], inner, product[-1], (first, second))
    return onednn(facts, thread_bytes=onednn_product_bytes(shape))


def linear_algebra(facts: Facts) -> KernelMemory:
    """linalg_ops_common.cc: each output takes the first input of its size that no earlier output has taken."""
    inputs = range(len(facts.inputs))
    forward = tuple(pair for output in range(len(facts.outputs)) for pair in candidates(facts, output, inputs))
    return KernelMemory(forward=forward, events=outs(len(facts.outputs)))


RULES: dict[str, Entry] = {
    "_FusedMatMul": Entry(fused(matmul), attrs=("fused_ops",)),
    "_MklFusedBatchMatMulV2": Entry(events_rule(batch_matmul), attrs=("adj_x", "adj_y")),
    "MatrixBandPart": UNARY,
    "MatrixSetDiag": UNARY,
    "MatrixSetDiagV2": UNARY,
    "MatrixSetDiagV3": UNARY,
    "Cholesky": Entry(linear_algebra),
    "CholeskyGrad": Entry(linear_algebra),
    "Lu": Entry(linear_algebra),
    "MatrixInverse": Entry(linear_algebra),
    "MatrixLogarithm": Entry(linear_algebra),
    "MatrixSquareRoot": Entry(linear_algebra),
    "Qr": Entry(linear_algebra),
    "SelfAdjointEigV2": Entry(linear_algebra),
    "Svd": Entry(linear_algebra),
    "BatchMatMul": Entry(events_rule(batch_matmul), attrs=("adj_x", "adj_y")),
    "BatchMatMulV2": Entry(events_rule(batch_matmul), attrs=("adj_x", "adj_y")),
    "BatchMatMulV3": Entry(events_rule(batch_matmul), attrs=("adj_x", "adj_y")),
    "Einsum": Entry(einsum, attrs=("equation",)),
    "MatMul": Entry(events_rule(matmul)),
}
