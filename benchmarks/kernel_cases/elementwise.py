"""Element-wise kernels."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers, number

_UNARY = [
    "Neg", "Exp", "Log", "Log1p", "Expm1", "Sqrt", "Rsqrt", "Square", "Abs", "Sign", "Tanh", "Sigmoid",
    "Erf", "Erfc", "Sin", "Cos", "Reciprocal", "Inv", "Round", "Floor", "Ceil", "Rint", "Erfinv", "Lgamma",
    "Digamma", "Atan", "Asin", "Ndtri", "IsFinite", "IsNan", "IsInf", "Tan", "Sinh", "Cosh", "Acos",
    "Acosh", "Asinh", "Atanh", "OnesLike", "ZerosLike",
]  # fmt: skip


_FEATURES = ["Relu", "Relu6", "Elu", "Selu", "Softplus", "Softsign", "LeakyRelu"]


_BINARY = [
    "AddV2", "Add", "Sub", "Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan", "Maximum", "Minimum", "Pow",
    "FloorDiv", "FloorMod", "Mod", "SquaredDifference", "Xdivy", "Xlogy", "Xlog1py", "Atan2", "Greater",
    "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "TruncateDiv",
]  # fmt: skip


_UNARY_GRADS = ["SqrtGrad", "RsqrtGrad", "TanhGrad", "SigmoidGrad", "ReciprocalGrad", "InvGrad"]


def elementwise() -> list[Case]:
    x, row, scalar = floats(64, 32, 256), floats(256), floats()
    cases = [Case(op, {"x": x}) for op in _UNARY]
    cases += [Case(op, {"features": x}) for op in _FEATURES]
    for op in _BINARY:
        a, b = ("y", "x") if op == "Atan2" else ("x", "y")
        cases += [Case(op, {a: x, b: x}), Case(op, {a: x, b: row}), Case(op, {a: scalar, b: x})]
    cases += [
        Case("Mul", {"x": floats(64, 1, 256), "y": floats(1, 32, 256)}),
        Case("Mul", {"x": floats(64, 32, 256), "y": floats(64, 1, 1)}),
        Case("AddV2", {"x": floats(64, 32, 256), "y": floats(64, 1, 256)}),
    ]
    cases += [Case(op, {"y": x, "dy": x}) for op in _UNARY_GRADS]
    cases += [
        Case("ReluGrad", {"gradients": x, "features": x}),
        Case("Relu6Grad", {"gradients": x, "features": x}),
        Case("LeakyReluGrad", {"gradients": x, "features": x}),
        Case("SoftplusGrad", {"gradients": x, "features": x}),
        Case("SoftsignGrad", {"gradients": x, "features": x}),
        Case("EluGrad", {"gradients": x, "outputs": x}),
        Case("SeluGrad", {"gradients": x, "outputs": x}),
        Case("Cast", {"x": x}, {"DstT": "float16"}),
        Case("Cast", {"x": x}, {"DstT": "int32"}),
        Case("Cast", {"x": x}, {"DstT": "float32"}),
        Case("Bitcast", {"input": x}, {"type": "int32"}),
        Case("ClipByValue", {"t": x, "clip_value_min": number(0.1), "clip_value_max": number(0.2)}),
        Case("AddN", {"inputs": [x, x]}),
        Case("AddN", {"inputs": [x, x, x]}),
        Case("AddN", {"inputs": [x] * 9}),
        Case("LogicalNot", {"x": ["bool", [64, 512]]}),
        Case("LogicalAnd", {"x": ["bool", [64, 512]], "y": ["bool", [64, 512]]}),
        Case("LogicalOr", {"x": ["bool", [64, 512]], "y": ["bool", [64, 512]]}),
        Case("Select", {"condition": ["bool", [64, 32, 256]], "x": x, "y": x}),
        Case("SelectV2", {"condition": ["bool", [64, 32, 256]], "t": x, "e": x}),
        Case("SelectV2", {"condition": ["bool", [64, 32, 256]], "t": x, "e": number(0.0)}),
        Case("SelectV2", {"condition": ["bool", [1, 1, 256]], "t": x, "e": number(0.0)}),
        Case("SelectV2", {"condition": ["bool", [64, 32, 256]], "t": floats(1, 32, 256), "e": floats(64, 32, 1)}),
        Case("SelectV2", {"condition": ["bool", []], "t": x, "e": x}),
    ]
    return [*cases, *_of_rows(), *_unchanged()]


def _of_rows() -> list[Case]:
    """Sums, softmaxes and losses."""
    x, row = floats(64, 32, 256), floats(256)
    return [
        Case("BiasAdd", {"value": x, "bias": row}),
        Case("BiasAdd", {"value": floats(16, 64, 64, 64), "bias": floats(64)}),
        Case("BiasAddGrad", {"out_backprop": x}),
        Case("BiasAddGrad", {"out_backprop": floats(16, 64, 64, 64)}),
        Case("Softmax", {"logits": floats(16, 4, 128, 128)}),
        Case("Softmax", {"logits": floats(2048, 2000)}),
        Case("LogSoftmax", {"logits": floats(2048, 2000)}),
        Case("SparseSoftmaxCrossEntropyWithLogits", {"features": floats(2048, 2000), "labels": ["int32", [2048]]}),
        Case("SoftmaxCrossEntropyWithLogits", {"features": floats(2048, 2000), "labels": floats(2048, 2000)}),
        Case("SoftmaxCrossEntropyWithLogits", {"features": floats(2048, 2000), "labels": floats(1, 2000)}),
        Case("L2Loss", {"t": x}),
        Case("LRN", {"input": floats(2, 32, 32, 64)}),
        Case(
            "LRNGrad",
            {
                "input_grads": floats(2, 32, 32, 64),
                "input_image": floats(2, 32, 32, 64),
                "output_image": floats(2, 32, 32, 64),
            },
        ),
    ]


def _unchanged() -> list[Case]:
    """The same elements, their shapes, and their running sums."""
    x, row = floats(64, 32, 256), floats(256)
    return [
        Case("CheckNumerics", {"tensor": x}, {"message": "m"}),
        Case("PreventGradient", {"input": x}),
        Case("StopGradient", {"input": x}),
        Case("Identity", {"input": x}),
        Case("IdentityN", {"input": [x, row]}),
        Case("Snapshot", {"input": x}),
        Case("DeepCopy", {"x": x}),
        Case("Reshape", {"tensor": x, "shape": integers([64, 8192])}),
        Case("ExpandDims", {"input": x, "axis": integers(0)}),
        Case("Squeeze", {"input": floats(64, 1, 256)}),
        Case("EnsureShape", {"input": x}, {"shape": [64, 32, 256]}),
        Case("Shape", {"input": x}),
        Case("ShapeN", {"input": [x, row]}),
        Case("Size", {"input": x}),
        Case("Rank", {"input": x}),
        Case("Cumsum", {"x": x, "axis": integers(1)}),
        Case("Cumprod", {"x": x, "axis": integers(1)}),
    ]
