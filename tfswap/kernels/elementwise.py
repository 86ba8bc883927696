"""Element by element: kernels that may write over an input (buffer forwarding)."""

from __future__ import annotations

from tfswap.ir.custom_ops import KERNEL
from tfswap.ir.types import HALVES
from tfswap.kernels.memory_rules import BINARY, CHOICE, UNARY, Entry, KernelMemory, candidates, events_rule
from tfswap.kernels.onednn import onednn
from tfswap.kernels.temporaries import OUT0, UNKNOWN, Events, Facts, after_output, element_bytes, known_shape


def add_n(facts: Facts) -> KernelMemory:
    """aggregate_ops.h: a single input is shared; otherwise the sum is written into the first reusable input.

    On a GPU, and for 16-bit floats, tfswap's own kernel reuses only the first two inputs (ops/csrc/core/sum_ops.cc).
    """
    if len(facts.inputs) == 1:
        return KernelMemory(alias=((0, 0),))
    first_two = KERNEL in facts.attrs and (facts.device.is_gpu or facts.outputs[0].dtype in HALVES)
    reusable = facts.inputs[:2] if first_two else facts.inputs
    return KernelMemory(forward=candidates(facts, 0, range(len(reusable))), events=(("out", 0),))


def quantize(facts: Facts) -> Events:
    """quantize_and_dequantize_op.cc: the minima and maxima of each slice along an axis, unless the range is given."""
    shape, axis = known_shape(facts.inputs[0]), facts.attrs.get("axis", -1)
    if facts.attrs.get("range_given"):
        return (OUT0,), True
    if shape is None or not isinstance(axis, int):
        return UNKNOWN
    slices = shape[axis] if axis >= 0 else 1
    return after_output([slices * element_bytes(facts.outputs[0])] * 2)


RULES: dict[str, Entry] = {
    "Abs": UNARY,
    "Acos": UNARY,
    "Acosh": UNARY,
    "Asin": UNARY,
    "Asinh": UNARY,
    "Atan": UNARY,
    "Atanh": UNARY,
    "BesselI0": UNARY,
    "BesselI0e": UNARY,
    "BesselI1": UNARY,
    "BesselI1e": UNARY,
    "BesselJ0": UNARY,
    "BesselJ1": UNARY,
    "BesselK0": UNARY,
    "BesselK0e": UNARY,
    "BesselK1": UNARY,
    "BesselK1e": UNARY,
    "BesselY0": UNARY,
    "BesselY1": UNARY,
    "Ceil": UNARY,
    "Conj": UNARY,
    "Cos": UNARY,
    "Cosh": UNARY,
    "Dawsn": UNARY,
    "Digamma": UNARY,
    "Elu": UNARY,
    "Erf": UNARY,
    "Erfc": UNARY,
    "Erfinv": UNARY,
    "Exp": UNARY,
    "Expint": UNARY,
    "Expm1": UNARY,
    "Floor": UNARY,
    "FresnelCos": UNARY,
    "FresnelSin": UNARY,
    "Inv": UNARY,
    "Invert": UNARY,
    "LeakyRelu": UNARY,
    "Lgamma": UNARY,
    "Log": UNARY,
    "Log1p": UNARY,
    "LogicalNot": UNARY,
    "Ndtri": UNARY,
    "Neg": UNARY,
    "OnesLike": UNARY,
    "Reciprocal": UNARY,
    "Relu": UNARY,
    "Relu6": UNARY,
    "Rint": UNARY,
    "Round": UNARY,
    "Rsqrt": UNARY,
    "Selu": UNARY,
    "Sigmoid": UNARY,
    "Sign": UNARY,
    "Sin": UNARY,
    "Sinh": UNARY,
    "Softplus": UNARY,
    "Softsign": UNARY,
    "Spence": UNARY,
    "Sqrt": UNARY,
    "Square": UNARY,
    "Tan": UNARY,
    "Tanh": UNARY,
    "ZerosLike": UNARY,
    "Add": BINARY,
    "AddV2": BINARY,
    "Atan2": BINARY,
    "BitwiseAnd": BINARY,
    "BitwiseOr": BINARY,
    "BitwiseXor": BINARY,
    "Div": BINARY,
    "DivNoNan": BINARY,
    "EluGrad": BINARY,
    "Equal": BINARY,
    "FloorDiv": BINARY,
    "FloorMod": BINARY,
    "Greater": BINARY,
    "GreaterEqual": BINARY,
    "Igamma": BINARY,
    "IgammaGradA": BINARY,
    "Igammac": BINARY,
    "InvGrad": BINARY,
    "LeakyReluGrad": BINARY,
    "LeftShift": BINARY,
    "Less": BINARY,
    "LessEqual": BINARY,
    "LogicalAnd": BINARY,
    "LogicalOr": BINARY,
    "Maximum": BINARY,
    "Minimum": BINARY,
    "Mod": BINARY,
    "Mul": BINARY,
    "MulNoNan": BINARY,
    "NextAfter": BINARY,
    "NotEqual": BINARY,
    "Polygamma": BINARY,
    "Pow": BINARY,
    "RandomGammaGrad": BINARY,
    "RealDiv": BINARY,
    "ReciprocalGrad": BINARY,
    "Relu6Grad": BINARY,
    "ReluGrad": BINARY,
    "RightShift": BINARY,
    "RsqrtGrad": BINARY,
    "SeluGrad": BINARY,
    "SigmoidGrad": BINARY,
    "SoftplusGrad": BINARY,
    "SoftsignGrad": BINARY,
    "SqrtGrad": BINARY,
    "SquaredDifference": BINARY,
    "Sub": BINARY,
    "TanhGrad": BINARY,
    "TruncateDiv": BINARY,
    "TruncateMod": BINARY,
    "Xdivy": BINARY,
    "Xlog1py": BINARY,
    "Xlogy": BINARY,
    "Zeta": BINARY,
    "AddN": Entry(add_n, attrs=(KERNEL,)),
    "BiasAdd": UNARY,
    "BiasAddV1": UNARY,
    "ClipByValue": UNARY,
    "FakeQuantWithMinMaxArgs": UNARY,
    "FakeQuantWithMinMaxArgsGradient": BINARY,
    "_MklFusedMish": Entry(events_rule(onednn)),
    "_MklSwish": Entry(events_rule(onednn)),
    "_UnaryOpsComposition": UNARY,
    "ScatterNdNonAliasingAdd": UNARY,
    "Select": CHOICE,
    "SelectV2": CHOICE,
    "Snapshot": UNARY,
    "TensorStridedSliceUpdate": UNARY,
    "QuantizeAndDequantizeV2": Entry(events_rule(quantize), attrs=("axis", "range_given")),
    "QuantizeAndDequantizeV3": Entry(events_rule(quantize), attrs=("axis", "range_given")),
    "QuantizeAndDequantizeV4": Entry(events_rule(quantize), attrs=("axis", "range_given")),
}
