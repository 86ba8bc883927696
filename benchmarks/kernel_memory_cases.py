"""The cases that `kernel_memory.py` measures: shapes from common training steps, one op each."""

from __future__ import annotations

from typing import Any

from kernel_memory import Case


def _f(*shape: int) -> list[Any]:
    return ["float32", list(shape)]


def _i(value: Any) -> dict[str, Any]:
    return {"const": value, "dtype": "int32"}


def _c(value: float) -> dict[str, Any]:
    return {"const": value, "dtype": "float32"}


def _convolutions() -> list[Case]:
    cases = []
    for n, h, w, c, k, o, stride, padding in [
        (16, 128, 128, 64, 3, 64, 1, "SAME"),
        (16, 128, 128, 3, 3, 64, 1, "SAME"),
        (16, 8, 8, 512, 3, 512, 1, "SAME"),
        (32, 102, 102, 3, 7, 64, 2, "VALID"),
        (32, 24, 24, 256, 1, 64, 1, "SAME"),
        (32, 24, 24, 256, 1, 512, 2, "SAME"),
        (32, 6, 6, 512, 3, 512, 1, "SAME"),
        (32, 3, 3, 960, 1, 320, 1, "SAME"),
    ]:
        oh = -(-h // stride) if padding == "SAME" else -(-(h - k + 1) // stride)
        ow = -(-w // stride) if padding == "SAME" else -(-(w - k + 1) // stride)
        x, f, y = _f(n, h, w, c), _f(k, k, c, o), _f(n, oh, ow, o)
        attrs = {"strides": [1, stride, stride, 1], "padding": padding}
        cases += [
            Case("Conv2D", {"input": x, "filter": f}, attrs),
            Case("Conv2DBackpropInput", {"input_sizes": _i(x[1]), "filter": f, "out_backprop": y}, attrs),
            Case("Conv2DBackpropFilter", {"input": x, "filter_sizes": _i(f[1]), "out_backprop": y}, attrs),
        ]
    for n, h, c, k, m, stride, padding in [
        (32, 49, 96, 3, 1, 2, "VALID"),
        (32, 24, 144, 3, 1, 1, "SAME"),
        (8, 14, 33, 7, 2, 1, "SAME"),
    ]:
        oh = -(-h // stride) if padding == "SAME" else -(-(h - k + 1) // stride)
        x, f, y = _f(n, h, h, c), _f(k, k, c, m), _f(n, oh, oh, c * m)
        attrs = {"strides": [1, stride, stride, 1], "padding": padding}
        cases += [
            Case("DepthwiseConv2dNative", {"input": x, "filter": f}, attrs),
            Case(
                "DepthwiseConv2dNativeBackpropInput",
                {"input_sizes": _i(x[1]), "filter": f, "out_backprop": y},
                attrs,
            ),
            Case(
                "DepthwiseConv2dNativeBackpropFilter",
                {"input": x, "filter_sizes": _i(f[1]), "out_backprop": y},
                attrs,
            ),
        ]
    attrs = {"strides": [1] * 5, "padding": "SAME"}
    for batch, side in ((2, 32), (1, 32), (8, 16)):
        x, f, y = _f(batch, side, side, side, 16), _f(3, 3, 3, 16, 32), _f(batch, side, side, side, 32)
        cases += [
            Case("Conv3D", {"input": x, "filter": f}, attrs),
            Case("Conv3DBackpropInputV2", {"input_sizes": _i(x[1]), "filter": f, "out_backprop": y}, attrs),
            Case("Conv3DBackpropFilterV2", {"input": x, "filter_sizes": _i(f[1]), "out_backprop": y}, attrs),
        ]
    return cases


def _pools() -> list[Case]:
    x, y = _f(16, 128, 128, 64), _f(16, 64, 64, 64)
    attrs = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    x3, y3 = _f(2, 16, 16, 16, 32), _f(2, 8, 8, 8, 32)
    attrs3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}
    overlap = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    return [
        Case("MaxPool", {"input": x}, attrs),
        Case("MaxPoolGrad", {"orig_input": x, "orig_output": y, "grad": y}, attrs),
        Case("MaxPoolGradGrad", {"orig_input": x, "orig_output": y, "grad": x}, attrs),
        Case("MaxPoolWithArgmax", {"input": x}, attrs),
        Case("MaxPoolGradWithArgmax", {"input": x, "grad": y, "argmax": ["int64", [16, 64, 64, 64]]}, attrs),
        Case(
            "MaxPoolGrad",
            {"orig_input": _f(32, 50, 50, 64), "orig_output": _f(32, 24, 24, 64), "grad": _f(32, 24, 24, 64)},
            overlap,
        ),
        Case("AvgPool", {"value": x}, attrs),
        Case("AvgPoolGrad", {"orig_input_shape": _i(x[1]), "grad": y}, attrs),
        Case("MaxPool3D", {"input": x3}, attrs3),
        Case("MaxPool3DGrad", {"orig_input": x3, "orig_output": y3, "grad": y3}, attrs3),
        Case("AvgPool3D", {"input": x3}, attrs3),
        Case("AvgPool3DGrad", {"orig_input_shape": _i(x3[1]), "grad": y3}, attrs3),
    ]


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


def _elementwise() -> list[Case]:
    x, row, scalar = _f(64, 32, 256), _f(256), _f()
    cases = [Case(op, {"x": x}) for op in _UNARY]
    cases += [Case(op, {"features": x}) for op in _FEATURES]
    for op in _BINARY:
        a, b = ("y", "x") if op == "Atan2" else ("x", "y")
        cases += [Case(op, {a: x, b: x}), Case(op, {a: x, b: row}), Case(op, {a: scalar, b: x})]
    cases += [
        Case("Mul", {"x": _f(64, 1, 256), "y": _f(1, 32, 256)}),
        Case("Mul", {"x": _f(64, 32, 256), "y": _f(64, 1, 1)}),
        Case("AddV2", {"x": _f(64, 32, 256), "y": _f(64, 1, 256)}),
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
        Case("ClipByValue", {"t": x, "clip_value_min": _c(0.1), "clip_value_max": _c(0.2)}),
        Case("AddN", {"inputs": [x, x]}),
        Case("AddN", {"inputs": [x, x, x]}),
        Case("AddN", {"inputs": [x] * 9}),
        Case("LogicalNot", {"x": ["bool", [64, 512]]}),
        Case("LogicalAnd", {"x": ["bool", [64, 512]], "y": ["bool", [64, 512]]}),
        Case("LogicalOr", {"x": ["bool", [64, 512]], "y": ["bool", [64, 512]]}),
        Case("Select", {"condition": ["bool", [64, 32, 256]], "x": x, "y": x}),
        Case("SelectV2", {"condition": ["bool", [64, 32, 256]], "t": x, "e": x}),
        Case("SelectV2", {"condition": ["bool", [64, 32, 256]], "t": x, "e": _c(0.0)}),
        Case("SelectV2", {"condition": ["bool", [1, 1, 256]], "t": x, "e": _c(0.0)}),
        Case("SelectV2", {"condition": ["bool", [64, 32, 256]], "t": _f(1, 32, 256), "e": _f(64, 32, 1)}),
        Case("SelectV2", {"condition": ["bool", []], "t": x, "e": x}),
        Case("BiasAdd", {"value": x, "bias": row}),
        Case("BiasAdd", {"value": _f(16, 64, 64, 64), "bias": _f(64)}),
        Case("BiasAddGrad", {"out_backprop": x}),
        Case("BiasAddGrad", {"out_backprop": _f(16, 64, 64, 64)}),
        Case("Softmax", {"logits": _f(16, 4, 128, 128)}),
        Case("Softmax", {"logits": _f(2048, 2000)}),
        Case("LogSoftmax", {"logits": _f(2048, 2000)}),
        Case("SparseSoftmaxCrossEntropyWithLogits", {"features": _f(2048, 2000), "labels": ["int32", [2048]]}),
        Case("SoftmaxCrossEntropyWithLogits", {"features": _f(2048, 2000), "labels": _f(2048, 2000)}),
        Case("SoftmaxCrossEntropyWithLogits", {"features": _f(2048, 2000), "labels": _f(1, 2000)}),
        Case("L2Loss", {"t": x}),
        Case("LRN", {"input": _f(16, 32, 32, 64)}),
        Case(
            "LRNGrad",
            {
                "input_grads": _f(16, 32, 32, 64),
                "input_image": _f(16, 32, 32, 64),
                "output_image": _f(16, 32, 32, 64),
            },
        ),
        Case("CheckNumerics", {"tensor": x}, {"message": "m"}),
        Case("PreventGradient", {"input": x}),
        Case("StopGradient", {"input": x}),
        Case("Identity", {"input": x}),
        Case("IdentityN", {"input": [x, row]}),
        Case("Snapshot", {"input": x}),
        Case("DeepCopy", {"x": x}),
        Case("Reshape", {"tensor": x, "shape": _i([64, 8192])}),
        Case("ExpandDims", {"input": x, "axis": _i(0)}),
        Case("Squeeze", {"input": _f(64, 1, 256)}),
        Case("EnsureShape", {"input": x}, {"shape": [64, 32, 256]}),
        Case("Shape", {"input": x}),
        Case("ShapeN", {"input": [x, row]}),
        Case("Size", {"input": x}),
        Case("Rank", {"input": x}),
        Case("Cumsum", {"x": x, "axis": _i(1)}),
        Case("Cumprod", {"x": x, "axis": _i(1)}),
    ]
    return cases


def _reductions() -> list[Case]:
    cases = []
    x = _f(32, 24, 24, 96)
    for op in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm"):
        for axes in ([0, 1, 2], [1, 2], [3], [0], [0, 1, 2, 3], [0, 2], [1, 3], [], [-1]):
            for keep in (True, False):
                cases.append(Case(op, {"input": x, "axis": {"const": axes, "dtype": "int32"}}, {"keep_dims": keep}))
    cases += [
        Case("Sum", {"input": _f(8, 4, 6, 5, 7, 32), "axis": _i([0, 2, 4])}, {"keep_dims": True}),
        Case("Sum", {"input": _f(8, 4, 6, 5, 7, 32), "axis": _i([1, 3, 5])}, {"keep_dims": False}),
        Case("Sum", {"input": _f(1, 1, 64, 32), "axis": _i([0, 1])}, {"keep_dims": False}),
        Case("Mean", {"input": _f(64, 1, 32), "axis": _i([1])}, {"keep_dims": True}),
        Case("All", {"input": ["bool", [64, 512]], "axis": _i([0])}),
        Case("Any", {"input": ["bool", [64, 512]], "axis": _i([1])}),
        Case("ArgMax", {"input": x, "dimension": _i(3)}),
        Case("ArgMin", {"input": x, "dimension": _i(3)}),
        Case("TopKV2", {"input": _f(256, 512), "k": _i(5)}),
        Case("InTopKV2", {"predictions": _f(256, 512), "targets": ["int32", [256]], "k": _i(5)}),
    ]
    return cases


def _matrices() -> list[Case]:
    def mm(m: int, k: int, n: int, ta: bool = False, tb: bool = False) -> Case:
        return Case(
            "MatMul",
            {"a": _f(k, m) if ta else _f(m, k), "b": _f(n, k) if tb else _f(k, n)},
            {"transpose_a": ta, "transpose_b": tb},
        )

    def bmm(batch: list[int], m: int, k: int, n: int, ax: bool = False, ay: bool = False) -> Case:
        return Case(
            "BatchMatMulV2",
            {"x": _f(*batch, *((k, m) if ax else (m, k))), "y": _f(*batch, *((n, k) if ay else (k, n)))},
            {"adj_x": ax, "adj_y": ay},
        )

    return [
        mm(8192, 1024, 1024),
        mm(1024, 8192, 1024, ta=True),
        mm(8192, 1024, 1024, tb=True),
        mm(64, 256, 1024),
        mm(1, 1024, 512),
        mm(512, 1024, 1),
        mm(2048, 256, 2000),
        Case("MatMul", {"a": ["float16", [256, 512]], "b": ["float16", [512, 128]]}),
        Case("MatMul", {"a": ["bfloat16", [256, 512]], "b": ["bfloat16", [512, 128]]}),
        Case("MatMul", {"a": ["bfloat16", [512, 256]], "b": ["bfloat16", [512, 128]]}, {"transpose_a": True}),
        bmm([16, 4], 128, 64, 128),
        bmm([16, 4], 128, 64, 128, ax=True),
        bmm([16, 4], 128, 64, 128, ay=True),
        Case("BatchMatMulV2", {"x": ["float16", [8, 64, 64]], "y": ["float16", [8, 64, 64]]}),
        Case("BatchMatMulV2", {"x": ["bfloat16", [8, 64, 64]], "y": ["bfloat16", [8, 64, 64]]}),
        Case("BatchMatMulV2", {"x": _f(16, 1, 256, 256), "y": _f(16, 128, 256, 64)}),
        Case("BatchMatMulV2", {"x": _f(16, 128, 256), "y": _f(256, 768)}),
        Case("BatchMatMulV2", {"x": _f(16, 256, 256), "y": _f(16, 256, 32)}, {"adj_x": True}),
        Case("BatchMatMulV2", {"x": _f(16, 256, 256), "y": _f(16, 32, 256)}, {"adj_x": True, "adj_y": True}),
        Case("BatchMatMul", {"x": _f(16, 128, 256), "y": _f(16, 256, 128)}),
        Case("Einsum", {"inputs": [_f(16, 128, 256), _f(256, 4, 64)]}, {"equation": "abc,cde->abde"}),
        Case("Einsum", {"inputs": [_f(16, 128, 4, 64), _f(16, 128, 4, 64)]}, {"equation": "aecd,abcd->acbe"}),
        Case("Einsum", {"inputs": [_f(16, 4, 128, 128), _f(16, 128, 4, 64)]}, {"equation": "acbe,aecd->abcd"}),
        Case("Einsum", {"inputs": [_f(16, 128, 4, 64), _f(4, 64, 256)]}, {"equation": "abcd,cde->abe"}),
    ]


def _layout() -> list[Case]:
    x = _f(16, 128, 4, 64)
    return [
        Case("Transpose", {"x": x, "perm": _i([0, 2, 1, 3])}),
        Case("Transpose", {"x": x, "perm": _i([0, 1, 2, 3])}),
        Case("Transpose", {"x": _f(64, 1, 100, 64), "perm": _i([1, 0, 2, 3])}),
        Case("ConjugateTranspose", {"x": x, "perm": _i([0, 2, 1, 3])}),
        Case("ConcatV2", {"values": [_f(64, 256), _f(64, 256)], "axis": _i(1)}),
        Case("ConcatV2", {"values": [_f(64, 256), _f(0, 256)], "axis": _i(0)}),
        Case("Pack", {"values": [_f(64, 256)]}, {"axis": 0}),
        Case("Pack", {"values": [_f(64, 256), _f(64, 256)]}, {"axis": 1}),
        Case("Unpack", {"value": _f(2, 64, 256)}, {"num": 2, "axis": 0}),
        Case("Unpack", {"value": _f(64, 2, 256)}, {"num": 2, "axis": 1}),
        Case("Unpack", {"value": _f(1, 64, 256)}, {"num": 1, "axis": 0}),
        Case("Split", {"axis": _i(1), "value": _f(64, 1024)}, {"num_split": 4}),
        Case("Split", {"axis": _i(0), "value": _f(64, 1024)}, {"num_split": 4}),
        Case("Split", {"axis": _i(0), "value": _f(64, 1024)}, {"num_split": 1}),
        Case("SplitV", {"value": _f(64, 1024), "size_splits": _i([256, 768]), "axis": _i(1)}, {"num_split": 2}),
        Case("SplitV", {"value": _f(64, 1024), "size_splits": _i([16, 48]), "axis": _i(0)}, {"num_split": 2}),
        Case("Slice", {"input": _f(32, 49, 49, 96), "begin": _i([0, 0, 0, 0]), "size": _i([32, 48, 48, 96])}),
        Case("Slice", {"input": _f(32, 49, 96), "begin": _i([0, 0, 0]), "size": _i([32, 49, 96])}),
        Case("Slice", {"input": _f(32, 49, 96), "begin": _i([8, 0, 0]), "size": _i([16, 49, 96])}),
        Case(
            "StridedSlice",
            {"input": _f(100, 64, 256), "begin": _i([-1]), "end": _i([0]), "strides": _i([1])},
            {"shrink_axis_mask": 1, "end_mask": 1},
        ),
        Case(
            "StridedSlice",
            {"input": _f(100, 64, 256), "begin": _i([3]), "end": _i([4]), "strides": _i([1])},
            {"shrink_axis_mask": 1},
        ),
        Case("StridedSlice", {"input": _f(100, 64, 256), "begin": _i([2]), "end": _i([10]), "strides": _i([1])}),
        Case(
            "StridedSlice",
            {"input": _f(100, 64, 256), "begin": _i([0, 2]), "end": _i([100, 10]), "strides": _i([1, 1])},
        ),
        Case(
            "StridedSlice",
            {"input": _f(100, 64, 256), "begin": _i([0]), "end": _i([100]), "strides": _i([1])},
        ),
        Case("StridedSlice", {"input": _f(64, 255), "begin": _i([3]), "end": _i([10]), "strides": _i([1])}),
        Case(
            "StridedSlice",  # x[:, None] of rows that are not aligned: all of it, and so handed on
            {"input": _f(64, 255), "begin": _i([0, 0]), "end": _i([0, 0]), "strides": _i([1, 1])},
            {"begin_mask": 3, "end_mask": 3, "new_axis_mask": 2},
        ),
        Case(
            "StridedSlice",  # x[::-1]
            {"input": _f(64, 256), "begin": _i([0]), "end": _i([0]), "strides": _i([-1])},
            {"begin_mask": 1, "end_mask": 1},
        ),
        Case(
            "StridedSliceGrad",
            {
                "shape": _i([100, 64, 256]),
                "begin": _i([3]),
                "end": _i([4]),
                "strides": _i([1]),
                "dy": _f(64, 256),
            },
            {"shrink_axis_mask": 1},
        ),
        Case("Pad", {"input": _f(32, 48, 48, 96), "paddings": _i([[0, 0], [0, 1], [0, 1], [0, 0]])}),
        Case("Pad", {"input": _f(32, 48, 96), "paddings": _i([[0, 0], [0, 0], [0, 0]])}),
        Case(
            "PadV2",
            {
                "input": _f(32, 48, 48, 96),
                "paddings": _i([[0, 0], [0, 1], [0, 1], [0, 0]]),
                "constant_values": _c(1.0),
            },
        ),
        Case(
            "MirrorPad",
            {"input": _f(32, 48, 48, 96), "paddings": _i([[0, 0], [1, 1], [1, 1], [0, 0]])},
            {"mode": "REFLECT"},
        ),
        Case(
            "MirrorPadGrad",
            {"input": _f(32, 50, 50, 96), "paddings": _i([[0, 0], [1, 1], [1, 1], [0, 0]])},
            {"mode": "REFLECT"},
        ),
        Case("Tile", {"input": _f(1, 1, 1, 96), "multiples": _i([32, 48, 48, 1])}),
        Case("Tile", {"input": _f(32, 48, 96), "multiples": _i([1, 1, 1])}),
        Case("BroadcastTo", {"input": _f(1, 1, 96), "shape": _i([32, 48, 96])}),
        Case("BroadcastTo", {"input": _f(32, 48, 96), "shape": _i([32, 48, 96])}),
        Case("Fill", {"dims": _i([64, 256]), "value": _f()}),
        Case("Range", {"start": ["int32", []], "limit": _i(1000), "delta": _i(1)}),
        Case(
            "OneHot",
            {"indices": ["int32", [2048]], "depth": _i(1000), "on_value": _c(1.0), "off_value": _c(0.0)},
        ),
        Case("GatherV2", {"params": _f(2000, 256), "indices": ["int32", [16, 128]], "axis": _i(0)}),
        Case("GatherV2", {"params": _f(64, 2000), "indices": ["int32", [128]], "axis": _i(1)}),
        Case(
            "GatherV2",
            {"params": _f(16, 200, 64), "indices": ["int32", [16, 128]], "axis": _i(1)},
            {"batch_dims": 1},
        ),
        Case("Gather", {"params": _f(2000, 256), "indices": ["int32", [16, 128]]}),
        Case("GatherNd", {"params": _f(200, 256), "indices": ["int32", [128, 1]]}),
        Case("ScatterNd", {"indices": ["int32", [128, 1]], "updates": _f(128, 256), "shape": _i([200, 256])}),
        Case(
            "TensorScatterUpdate",
            {"tensor": _f(200, 256), "indices": ["int32", [128, 1]], "updates": _f(128, 256)},
        ),
        Case(
            "TensorScatterAdd",
            {"tensor": _f(200, 256), "indices": ["int32", [128, 1]], "updates": _f(128, 256)},
        ),
        Case(
            "UnsortedSegmentSum",
            {"data": _f(2048, 256), "segment_ids": ["int32", [2048]], "num_segments": _i(2000)},
        ),
        Case(
            "UnsortedSegmentMax",
            {"data": _f(2048, 256), "segment_ids": ["int32", [2048]], "num_segments": _i(2000)},
        ),
        Case(
            "SegmentSum",
            {"data": _f(2048, 256), "segment_ids": {"const": list(range(2048)), "dtype": "int32"}},
        ),
        Case("ReverseV2", {"tensor": _f(64, 100, 64), "axis": _i([1])}),
        Case("ReverseV2", {"tensor": _f(64, 100, 64), "axis": _i([])}),
        Case("ReverseSequence", {"input": _f(64, 100, 64), "seq_lengths": ["int32", [64]]}, {"seq_dim": 1}),
        Case("Roll", {"input": _f(64, 100, 64), "shift": _i(2), "axis": _i(1)}),
        Case(
            "SpaceToBatchND",
            {"input": _f(8, 32, 32, 16), "block_shape": _i([2, 2]), "paddings": _i([[0, 0], [0, 0]])},
        ),
        Case(
            "BatchToSpaceND",
            {"input": _f(8, 32, 32, 16), "block_shape": _i([2, 2]), "crops": _i([[0, 0], [0, 0]])},
        ),
        Case("SpaceToDepth", {"input": _f(8, 32, 32, 16)}, {"block_size": 2}),
        Case("DepthToSpace", {"input": _f(8, 32, 32, 16)}, {"block_size": 2}),
        Case("ResizeBilinear", {"images": _f(8, 32, 32, 16), "size": _i([64, 64])}),
        Case("ResizeBilinear", {"images": _f(8, 32, 32, 16), "size": _i([32, 32])}),
        Case("ResizeBilinearGrad", {"grads": _f(8, 64, 64, 16), "original_image": _f(8, 32, 32, 16)}),
        Case("ResizeNearestNeighbor", {"images": _f(8, 32, 32, 16), "size": _i([64, 64])}),
        Case("ResizeNearestNeighborGrad", {"grads": _f(8, 64, 64, 16), "size": _i([32, 32])}),
        Case("ResizeBicubic", {"images": _f(8, 32, 32, 16), "size": _i([64, 64])}),
        Case(
            "ExtractImagePatches",
            {"images": _f(8, 32, 32, 16)},
            {"ksizes": [1, 3, 3, 1], "strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case("MatrixBandPart", {"input": _f(16, 128, 128), "num_lower": _i(-1), "num_upper": _i(0)}),
        Case(
            "MatrixDiagV3",
            {
                "diagonal": _f(16, 128),
                "k": _i(0),
                "num_rows": _i(-1),
                "num_cols": _i(-1),
                "padding_value": _c(0.0),
            },
        ),
        Case("Where", {"condition": ["bool", [64, 512]]}),
    ]


def _normalisation_and_random() -> list[Case]:
    x, c = _f(32, 24, 24, 64), _f(64)
    training = {"is_training": True}
    seeds = {"key": ["uint64", [1]], "counter": {"const": [1, 2], "dtype": "uint64"}, "alg": _i(1)}
    return [
        Case("FusedBatchNormV3", {"x": x, "scale": c, "offset": c, "mean": c, "variance": c}, training),
        Case(
            "FusedBatchNormV3",
            {"x": x, "scale": c, "offset": c, "mean": c, "variance": c},
            {"is_training": False},
        ),
        Case(
            "FusedBatchNormGradV3",
            {
                "y_backprop": x,
                "x": x,
                "scale": c,
                "reserve_space_1": c,
                "reserve_space_2": c,
                "reserve_space_3": c,
            },
            training,
        ),
        Case(
            "FusedBatchNormGradV3",
            {
                "y_backprop": x,
                "x": x,
                "scale": c,
                "reserve_space_1": c,
                "reserve_space_2": c,
                "reserve_space_3": c,
            },
            {"is_training": False},
        ),
        Case("StatelessRandomUniformV2", {"shape": _i([16, 4, 128, 128]), **seeds}),
        Case("StatelessRandomNormalV2", {"shape": _i([16, 4, 128, 128]), **seeds}),
        Case("StatelessTruncatedNormalV2", {"shape": _i([16, 4, 128, 128]), **seeds}),
        Case(
            "StatelessRandomUniformIntV2",
            {"shape": _i([16, 4, 128]), **seeds, "minval": _i(0), "maxval": _i(9)},
        ),
        Case("StatelessRandomUniform", {"shape": _i([16, 4, 128, 128]), "seed": ["int32", [2]]}),
        Case("StatelessRandomGetKeyCounter", {"seed": ["int32", [2]]}),
        Case("RandomUniform", {"shape": _i([16, 4, 128, 128])}, {"dtype": "float32"}),
        Case("RandomStandardNormal", {"shape": _i([16, 4, 128, 128])}, {"dtype": "float32"}),
        Case("TruncatedNormal", {"shape": _i([16, 4, 128, 128])}, {"dtype": "float32"}),
        *_variables_and_lists(),
        *variables_in_part(),
        *_fused(),
        Case(
            "LSTMBlockCell",
            {
                "x": _f(64, 128),
                "cs_prev": _f(64, 256),
                "h_prev": _f(64, 256),
                "w": _f(384, 1024),
                "wci": _f(256),
                "wcf": _f(256),
                "wco": _f(256),
                "b": _f(1024),
            },
        ),
        Case(
            "GRUBlockCell",
            {
                "x": _f(64, 128),
                "h_prev": _f(64, 256),
                "w_ru": _f(384, 512),
                "w_c": _f(384, 256),
                "b_ru": _f(512),
                "b_c": _f(256),
            },
        ),
    ]


def _variables_and_lists() -> list[Case]:
    v, g, lr = {"variable": _f(512, 256)}, _f(512, 256), _c(0.1)
    types = {"dtype": "float32"}
    return [
        Case("ReadVariableOp", {"resource": v}, types),
        Case("AssignVariableOp", {"resource": v, "value": g}),
        Case("AssignAddVariableOp", {"resource": v, "value": g}),
        Case("AssignSubVariableOp", {"resource": v, "value": g}),
        Case("VariableShape", {"input": v}),
        Case("ResourceApplyGradientDescent", {"var": v, "alpha": lr, "delta": g}),
        Case("ResourceApplyMomentum", {"var": v, "accum": v, "lr": lr, "grad": g, "momentum": lr}),
        Case("ResourceApplyKerasMomentum", {"var": v, "accum": v, "lr": lr, "grad": g, "momentum": lr}),
        Case("ResourceApplyAdagradV2", {"var": v, "accum": v, "lr": lr, "epsilon": lr, "grad": g}),
        Case(
            "ResourceApplyRMSProp",
            {"var": v, "ms": v, "mom": v, "lr": lr, "rho": lr, "momentum": lr, "epsilon": lr, "grad": g},
        ),
        Case(
            "ResourceApplyAdam",
            {
                "var": v,
                "m": v,
                "v": v,
                "beta1_power": lr,
                "beta2_power": lr,
                "lr": lr,
                "beta1": lr,
                "beta2": lr,
                "epsilon": lr,
                "grad": g,
            },
        ),
        Case(
            "ResourceApplyFtrl",
            {
                "var": v,
                "accum": v,
                "linear": v,
                "grad": g,
                "lr": lr,
                "l1": lr,
                "l2": lr,
                "lr_power": _c(-0.5),
            },
        ),
        # Tensor lists are not here: what they hold depends on the ops around them (tfswap/analysis/tensor_lists.py),
        # and whole programs show it to the byte (tests/runtime/test_control_flow.py).
    ]


def variables_in_part() -> list[Case]:
    """Each op that turns the copy-on-read mode of its variables on."""
    v, lr, rows = {"variable": _f(512, 256)}, _c(0.1), _f(64, 256)
    ids, places = ["int32", [64]], ["int32", [64, 1]]
    types = {"dtype": "float32"}
    start, end, stride = _i([0, 0]), _i([64, 256]), _i([1, 1])
    slots: dict[str, dict[str, Any]] = {
        "Adadelta": {"accum": v, "accum_update": v, "lr": lr, "rho": lr, "epsilon": lr},
        "Adagrad": {"accum": v, "lr": lr},
        "AdagradV2": {"accum": v, "lr": lr, "epsilon": lr},
        "CenteredRMSProp": {
            "mg": v,
            "ms": v,
            "mom": v,
            "lr": lr,
            "rho": lr,
            "momentum": lr,
            "epsilon": lr,
        },
        "Ftrl": {"accum": v, "linear": v, "lr": lr, "l1": lr, "l2": lr, "lr_power": _c(-0.5)},
        "FtrlV2": {
            "accum": v,
            "linear": v,
            "lr": lr,
            "l1": lr,
            "l2": lr,
            "l2_shrinkage": lr,
            "lr_power": _c(-0.5),
        },
        "KerasMomentum": {"accum": v, "lr": lr, "momentum": lr},
        "Momentum": {"accum": v, "lr": lr, "momentum": lr},
        "ProximalAdagrad": {"accum": v, "lr": lr, "l1": lr, "l2": lr},
        "ProximalGradientDescent": {"alpha": lr, "l1": lr, "l2": lr},
        "RMSProp": {"ms": v, "mom": v, "lr": lr, "rho": lr, "momentum": lr, "epsilon": lr},
    }
    return [
        Case("ResourceGather", {"resource": v, "indices": ids}, types),
        Case("ResourceGatherNd", {"resource": v, "indices": places}, types),
        Case(
            "ResourceStridedSliceAssign",
            {"ref": v, "begin": start, "end": end, "strides": stride, "value": rows},
        ),
        *(
            Case(f"ResourceScatter{how}", {"resource": v, "indices": ids, "updates": rows})
            for how in ("Add", "Div", "Max", "Min", "Mul", "Sub", "Update")
        ),
        *(
            Case(f"ResourceScatterNd{how}", {"ref": v, "indices": places, "updates": rows})
            for how in ("Add", "Max", "Min", "Sub", "Update")
        ),
        *(
            Case(f"ResourceSparseApply{name}", {"var": v, **inputs, "grad": rows, "indices": ids})
            for name, inputs in slots.items()
        ),
    ]


def _fused() -> list[Case]:
    """What Grappler makes of a graph."""
    x, f, b, y = _f(16, 32, 32, 64), _f(3, 3, 64, 128), _f(128), _f(16, 32, 32, 128)
    attrs = {
        "strides": [1, 1, 1, 1],
        "padding": "SAME",
        "num_args": 1,
        "explicit_paddings": [],
        "data_format": "NHWC",
        "filter_format": "HWIO",
        "dilations": [1, 1, 1, 1],
        "use_cudnn_on_gpu": True,
        "epsilon": 0.0,
        "leakyrelu_alpha": 0.2,
    }
    ops = {"transpose_a": False, "transpose_b": False, "epsilon": 0.0, "leakyrelu_alpha": 0.2}
    return [
        Case(
            "_FusedConv2D",
            {"input": x, "filter": f, "args": [b], "host_args": []},
            {**attrs, "fused_ops": ["BiasAdd"]},
        ),
        Case(
            "_FusedConv2D",
            {"input": x, "filter": f, "args": [b], "host_args": []},
            {**attrs, "fused_ops": ["BiasAdd", "Relu"]},
        ),
        Case(
            "_FusedMatMul",
            {"a": _f(64, 256), "b": _f(256, 512), "args": [_f(512)]},
            {**ops, "fused_ops": ["BiasAdd"]},
        ),
        Case(
            "_FusedMatMul",
            {"a": _f(64, 256), "b": _f(256, 512), "args": [_f(512)]},
            {**ops, "fused_ops": ["BiasAdd", "Relu"]},
        ),
        Case("_UnaryOpsComposition", {"x": _f(64, 256)}, {"op_names": ["Neg", "Exp"]}),
        Case(
            "Conv2D",
            {"input": x, "filter": f},
            {"strides": [1, 1, 1, 1], "padding": "EXPLICIT", "explicit_paddings": [0, 0, 1, 1, 2, 2, 0, 0]},
        ),
        Case(
            "Conv2D",
            {"input": x, "filter": f},
            {"strides": [1, 1, 1, 1], "padding": "SAME", "dilations": [1, 2, 2, 1]},
        ),
        Case("Conv2D", {"input": x, "filter": _f(3, 3, 16, 128)}, {"strides": [1, 1, 1, 1], "padding": "SAME"}),
        Case(
            "Conv2D",
            {"input": ["float16", x[1]], "filter": ["float16", f[1]]},
            {"strides": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case(
            "Conv2D",
            {"input": ["bfloat16", x[1]], "filter": ["bfloat16", f[1]]},
            {"strides": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case(
            "Conv2DBackpropInput",
            {"input_sizes": _i(x[1]), "filter": ["float16", f[1]], "out_backprop": ["float16", y[1]]},
            {"strides": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case(
            "Conv2DBackpropFilter",
            {"input": ["float16", x[1]], "filter_sizes": _i(f[1]), "out_backprop": ["float16", y[1]]},
            {"strides": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case("Relu", {"features": ["float16", [64, 512]]}),
        Case("Sum", {"input": ["float16", [64, 32, 256]], "axis": _i([0, 1])}),
        Case("Mean", {"input": ["float16", [64, 32, 256]], "axis": _i([2])}),
        Case("Softmax", {"logits": ["float16", [64, 512]]}),
        Case("LogSoftmax", {"logits": ["float16", [64, 512]]}),
        Case("BiasAddGrad", {"out_backprop": ["float16", [64, 32, 64]]}),
        Case(
            "FusedBatchNormV3",
            {
                "x": ["float16", [32, 24, 24, 64]],
                "scale": _f(64),
                "offset": _f(64),
                "mean": _f(64),
                "variance": _f(64),
            },
            {"is_training": True},
        ),
        *(
            Case(
                "FusedBatchNormGradV3",
                {
                    "y_backprop": [dtype, [8, 16, 16, 32]],
                    "x": [dtype, [8, 16, 16, 32]],
                    "scale": _f(32),
                    "reserve_space_1": _f(32),
                    "reserve_space_2": _f(32),
                    "reserve_space_3": _f(32),
                },
                {"is_training": training},
            )
            for dtype, training in (("float16", True), ("bfloat16", False))
        ),
        Case("BiasAddGrad", {"out_backprop": ["bfloat16", [64, 16]]}),
    ]


def _linear_algebra() -> list[Case]:
    x, z = _f(4, 64, 64), ["complex64", [64, 64]]
    return [
        Case("Cholesky", {"input": x}),
        Case("CholeskyGrad", {"l": x, "grad": x}),
        Case("MatrixInverse", {"input": x}),
        Case("MatrixLogarithm", {"input": z}),
        Case("MatrixSolve", {"matrix": x, "rhs": x}),
        Case("MatrixSquareRoot", {"input": x}),
        Case("MatrixTriangularSolve", {"matrix": x, "rhs": x}),
        Case("LogMatrixDeterminant", {"input": x}),
        Case("Qr", {"input": x}),
        Case("Qr", {"input": _f(4, 64, 16)}),
        Case("SelfAdjointEigV2", {"input": x}),
        Case("Svd", {"input": x}),
        Case("Conj", {"input": z}),
        Case("FFT2D", {"input": z}),
        Case("RFFT2D", {"input": x, "fft_length": _i([64, 64])}),
        Case("IRFFT2D", {"input": ["complex64", [8, 64, 33]], "fft_length": _i([64, 64])}),
    ]


def _images_and_counts() -> list[Case]:
    x, image, twice = _f(64, 512), _f(8, 32, 32, 3), {"const": [1.5, 1.5], "dtype": "float32"}
    nowhere = {"const": [0.0, 0.0], "dtype": "float32"}
    places = {"const": [[i, i] for i in range(64)], "dtype": "int64"}
    shape = {"const": [64, 64], "dtype": "int64"}
    bounds = {"input_min": _c(-1.0), "input_max": _c(1.0)}
    return [
        Case("AdjustContrastv2", {"images": image, "contrast_factor": _c(1.1)}),
        Case("AdjustHue", {"images": image, "delta": _c(0.1)}),
        Case("RGBToHSV", {"images": image}),
        Case(
            "ScaleAndTranslate",
            {"images": image, "size": _i([48, 40]), "scale": twice, "translation": nowhere},
        ),
        Case(
            "ScaleAndTranslateGrad",
            {"grads": _f(8, 48, 40, 3), "original_image": image, "scale": twice, "translation": nowhere},
        ),
        Case("BesselI0e", {"x": x}),
        Case("Polygamma", {"a": x, "x": x}),
        Case("IgammaGradA", {"a": x, "x": x}),
        Case("FakeQuantWithMinMaxArgs", {"inputs": x}),
        Case("FakeQuantWithMinMaxArgsGradient", {"gradients": x, "inputs": x}),
        Case("QuantizeAndDequantizeV2", {"input": x, **bounds}, {"range_given": True}),
        Case("QuantizeAndDequantizeV4", {"input": x, **bounds}, {"range_given": False}),
        Case(
            "QuantizeAndDequantizeV4",
            {"input": x, "input_min": _f(512), "input_max": _f(512)},
            {"range_given": False, "axis": 1},
        ),
        Case("Bincount", {"arr": ["int32", [4096]], "size": _i(64), "weights": _f(4096)}),
        Case("DenseBincount", {"input": ["int32", [4096]], "size": _i(64), "weights": _f(4096)}),
        Case(
            "DenseBincount",
            {"input": ["int32", [8, 512]], "size": _i(64), "weights": _f(0)},
            {"binary_output": True},
        ),
        Case("Unique", {"x": ["int32", [4096]]}),
        Case("Multinomial", {"logits": x, "num_samples": _i(8)}),
        Case("SparseSoftmax", {"sp_indices": places, "sp_values": _f(64), "sp_shape": shape}),
        Case(
            "SparseToDense",
            {
                "sparse_indices": _i([0, 1, 2]),
                "output_shape": _i([512]),
                "sparse_values": _f(3),
                "default_value": _c(0.0),
            },
        ),
        Case(
            "TensorStridedSliceUpdate",
            {"input": x, "begin": _i([0, 0]), "end": _i([32, 512]), "strides": _i([1, 1]), "value": _f(32, 512)},
        ),
    ]


def _views() -> list[Case]:
    """Pieces of the first dimension: shared where they are aligned, copied where not."""

    def piece(shape: list[int], begin: list[int], size: list[int]) -> Case:
        return Case("Slice", {"input": _f(*shape), "begin": _i(begin), "size": _i(size)})

    def stride(shape: list[int], begin: list[int], end: list[int], strides: list[int], **masks: int) -> Case:
        inputs = {"input": _f(*shape), "begin": _i(begin), "end": _i(end), "strides": _i(strides)}
        return Case("StridedSlice", inputs, masks)

    return [
        piece([64, 8], [0, 0], [32, 8]),
        piece([64, 8], [2, 0], [32, 8]),
        piece([64, 4], [16, 0], [32, 4]),
        piece([4096], [64], [1024]),
        piece([4096], [8], [1024]),
        piece([4096], [16], [1000]),
        piece([4096], [3], [1024]),
        stride([4096], [64], [1024], [1]),
        stride([4096], [3], [1024], [1]),
        stride([64, 64], [0], [64], [2]),
        stride([64, 64], [0, 0], [0, 0], [-1, 1], begin_mask=3, end_mask=3),
        stride([64, 64], [0, 0], [32, 0], [1, -1], begin_mask=2, end_mask=2),
        stride([64, 64], [0, 0], [0, 3], [1, 1], begin_mask=1, end_mask=1),
        stride([64, 64], [0, 0], [0, 0], [1, 1], begin_mask=3, end_mask=3, new_axis_mask=1),
        stride([64, 64], [3, 0], [4, 64], [1, 1], shrink_axis_mask=1),
        Case("Split", {"axis": _i(0), "value": _f(64, 8)}, {"num_split": 4}),
        Case("Split", {"axis": _i(0), "value": _f(64, 4)}, {"num_split": 4}),
        Case("Split", {"axis": _i(0), "value": _f(64, 3)}, {"num_split": 4}),
        Case("Unpack", {"value": _f(16, 8)}, {"num": 16, "axis": 0}),
        Case("Unpack", {"value": _f(16, 4)}, {"num": 16, "axis": 0}),
        Case("Unpack", {"value": _f(16, 16)}, {"num": 16, "axis": 1}),
        Case("SplitV", {"value": _f(64, 64), "size_splits": _i([32, 32]), "axis": _i(1)}, {"num_split": 2}),
        Case("SplitV", {"value": _f(64, 4), "size_splits": _i([16, 48]), "axis": _i(0)}, {"num_split": 2}),
        Case("SplitV", {"value": _f(4096), "size_splits": _i([1024, 3072]), "axis": _i(0)}, {"num_split": 2}),
        Case("SplitV", {"value": _f(4096), "size_splits": _i([1023, 3073]), "axis": _i(0)}, {"num_split": 2}),
        Case("Split", {"axis": _i(0), "value": _f(4096)}, {"num_split": 2}),
        Case("Transpose", {"x": _f(16, 4, 128, 128), "perm": _i([0, 1, 3, 2])}),
        Case("Transpose", {"x": _f(16, 4, 128, 128), "perm": _i([0, 1, 2, 3])}),
        Case("ConcatOffset", {"concat_dim": _i(1), "shape": [["int32", [2]], ["int32", [2]]]}),
    ]


def _codecs() -> list[Case]:
    """Large enough that they run on several threads."""
    x, gradient, image = _f(1_000_003), _f(1_000_003), _f(8, 64, 63, 33)
    mask = ["uint8", [125_001]]
    window = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME", "explicit_paddings": []}
    large = {**window, "ksize": [1, 5, 5, 1]}
    # The middle of each window, which lies inside of the image whatever the padding: 4 of 9, twice in a byte; 12 of 25.
    positions, pooled = ["uint8", [8 * 32 * 32 * 17], 0x44], _f(8, 32, 32, 33)
    bytes_each = ["uint8", [8 * 32 * 32 * 33], 12]
    half, levels = ["uint8", [2_000_006]], ["uint8", [3907 * (8 + 256)]]
    f32, levels_of = {"T": "float32"}, {"bits": 8, "group_size": 256}
    return [
        Case("Tfswap>EncodeMask", {"tensor": x}, {"predicate": "relu6"}),
        Case("Tfswap>EncodeMask", {"tensor": ["bool", [1000, 1001]]}, {"predicate": "true"}),
        Case("Tfswap>DecodeMask", {"mask": mask, "shape": _i([1_000_003])}),
        Case("Tfswap>DecodeMask", {"mask": mask, "shape": _i([1_000_003])}, {"T": "float32"}),
        Case("Tfswap>MultiplyByMask", {"gradients": gradient, "mask": mask}),
        Case("Tfswap>LeakyReluGradFromMask", {"gradients": gradient, "mask": mask}, {"alpha": 0.2}),
        Case("Tfswap>SelectByMask", {"mask": mask, "then": x, "else": _c(0.0), "shape": _i([1_000_003])}),
        Case("Tfswap>SelectByMask", {"mask": mask, "then": _c(0.0), "else": x, "shape": _i([1_000_003])}),
        Case("Tfswap>EncodeIntegers", {"tensor": ["int64", [1_000_003]]}, {"minimum": -3, "U": "uint8"}),
        Case("Tfswap>DecodeIntegers", {"encoded": ["uint8", [1_000_003]]}, {"minimum": -3, "T": "int64"}),
        Case("Tfswap>EncodeSparse", {"tensor": x}, {"capacity": 600_000}),
        Case("Tfswap>EncodeFloats", {"tensor": x}, {"format": "gist_float10"}),
        Case("Tfswap>DecodeFloats", {"encoded": half, "shape": _i([1_000_003])}, {"format": "float16", **f32}),
        Case("Tfswap>EncodeGroups", {"tensor": x}, {"seed": 7, "bits": 4, "group_size": 256}),
        Case("Tfswap>DecodeGroups", {"encoded": levels, "shape": _i([1_000_003])}, {**f32, **levels_of}),
        Case("Tfswap>EncodeMaxPool", {"image": image}, window),
        Case("Tfswap>EncodeMaxPool", {"image": image}, large),
        Case(
            "Tfswap>MaxPoolGradFromPositions",
            {"gradients": pooled, "positions": positions, "shape": _i([8, 64, 63, 33])},
            window,
        ),
        Case(
            "Tfswap>MaxPoolGradFromPositions",
            {"gradients": pooled, "positions": bytes_each, "shape": _i([8, 64, 63, 33])},
            large,
        ),
    ]


def _cells() -> list[Case]:
    """Of steps whose rows are aligned, of steps whose inputs are not, and of steps where nothing is."""
    cases: list[Case] = []
    for (batch, width, cell), steps, version in [((32, 48, 64), 12, ""), ((8, 7, 64), 12, "V2"), ((5, 7, 9), 3, "V2")]:
        x, state, gates, peephole = _f(batch, width), _f(batch, cell), _f(4 * cell), _f(cell)
        lstm = {
            "x": x, "cs_prev": state, "h_prev": state, "w": _f(width + cell, 4 * cell),
            "wci": peephole, "wcf": peephole, "wco": peephole, "b": gates,
        }  # fmt: skip
        gru = {
            "x": x, "h_prev": state, "w_ru": _f(width + cell, 2 * cell), "w_c": _f(width + cell, cell),
            "b_ru": _f(2 * cell), "b_c": _f(cell),
        }  # fmt: skip
        all_steps = {"seq_len_max": {"const": steps, "dtype": "int64"}, **lstm, "x": _f(12, batch, width)}
        names = ("i", "cs", "f", "o", "ci", "co", "h", "cs_grad", "h_grad")
        made = dict.fromkeys(names, _f(12, batch, cell))
        of_step = {name: state for name in names if name != "h"}
        cases += [
            Case("LSTMBlockCell", lstm),
            Case("LSTMBlockCellGrad", {**lstm, **of_step}, {"use_peephole": True}),
            Case("GRUBlockCell", gru),
            Case("GRUBlockCellGrad", {**gru, "r": state, "u": state, "c": state, "d_h": state}),
            Case(f"BlockLSTM{version}", all_steps),
            Case(f"BlockLSTMGrad{version}", {**all_steps, **made}, {"use_peephole": True}),
        ]
    return cases


def _einsums() -> list[Case]:
    one, other = _f(16, 8, 32, 24), _f(16, 8, 24, 40)
    return [
        Case("Einsum", {"inputs": inputs}, {"equation": equation})
        for equation, inputs in [
            ("...ij,...jk->...ik", [one, other]),
            ("...ij,...jk->...ik", [one, _f(24, 40)]),
            ("...ij,...jk->...ik", [one, _f(1, 8, 24, 40)]),
            ("...ij,jk->...ik", [one, _f(24, 40)]),
            ("...x,xy->...y", [one, _f(24, 40)]),
            ("...ij,...kj->...ki", [one, _f(16, 8, 40, 24)]),
            ("i...j,...jk->k...i", [_f(32, 16, 8, 24), other]),
            ("bi...,bj...->bij...", [_f(16, 8, 32), _f(16, 24, 32)]),
            ("...ij->...ji", [one]),
            ("...ij->...i", [one]),
            ("...ij->...", [one]),
            ("abcd->abcd", [one]),
            ("abcd->dcba", [one]),
            ("abcd->ab", [one]),
            ("abcd->db", [one]),
            ("abcd->cd", [one]),
            ("iij->ij", [_f(32, 32, 24)]),
            ("iji->ij", [_f(32, 24, 32)]),
            ("ij->iij", [_f(32, 24)]),
            ("ij->iji", [_f(32, 24)]),
            ("iij,jk->ik", [_f(32, 32, 24), _f(24, 40)]),
            ("ij,jk->iki", [_f(32, 24), _f(24, 40)]),
            ("abx,bcy->ac", [_f(16, 8, 32), _f(8, 24, 40)]),
            ("ab,cd->", [_f(16, 8), _f(32, 24)]),
            ("ab,ab->ab", [_f(16, 8), _f(16, 8)]),
            ("a,b->ab", [_f(16), _f(8)]),
            ("aecd,abcd->acbe", [["float16", [16, 12, 4, 6]]] * 2),
            ("...ij,...jk->...ik", [["bfloat16", [16, 8, 24]], ["bfloat16", [1, 24, 10]]]),
        ]
    ]


def _sparse() -> list[Case]:
    where = {"const": [[i, i * 7 % 50] for i in range(64)], "dtype": "int64"}
    shape, values = {"const": [64, 50], "dtype": "int64"}, _f(64)
    sparse = {"sp_indices": where, "sp_values": values, "sp_shape": shape}
    given = {"input_indices": where, "input_values": values, "input_shape": shape}
    rows, segments = _i([i % 32 for i in range(64)]), _i(sorted(i % 40 for i in range(64)))
    cases = [
        Case("SparseAdd", {f"{one}_{part}": spec for one in "ab" for part, spec in
             (("indices", where), ("values", values), ("shape", shape))} | {"thresh": _c(0.0)}),
        Case("SparseConcat", {"indices": [where] * 3, "values": [values] * 3, "shapes": [shape] * 3},
             {"concat_dim": 0}),
        Case("SparseDenseCwiseAdd", {**sparse, "dense": _f(64, 50)}),
        Case("SparseDenseCwiseDiv", {**sparse, "dense": _f(64, 50)}),
        Case("SparseDenseCwiseMul", {**sparse, "dense": _f(50)}),
        Case("SparseFillEmptyRows",
             {"indices": where, "values": values, "dense_shape": shape, "default_value": _c(0.0)}),
        Case("SparseFillEmptyRowsGrad",
             {"reverse_index_map": {"const": list(range(64)), "dtype": "int64"}, "grad_values": values}),
        Case("SparseReduceMax", {**given, "reduction_axes": _i([1])}),
        Case("SparseReshape", {"input_indices": ["int64", [64, 2]], "input_shape": shape,
                               "new_shape": {"const": [50, 64], "dtype": "int64"}}),
        Case("SparseSlice", {"indices": where, "values": values, "shape": shape,
                             "start": {"const": [0, 0], "dtype": "int64"}, "size": shape}),
    ]  # fmt: skip
    for kind, dtype in (("Sum", "float32"), ("Mean", "bfloat16"), ("SqrtN", "float16")):
        taken, counted = {"data": [dtype, [32, 16]], "indices": rows, "segment_ids": segments}, {"num_segments": _i(41)}
        back = {"grad": [dtype, [40, 16]], "indices": rows, "segment_ids": segments}
        cases += [
            Case(f"SparseSegment{kind}", taken),
            Case(f"SparseSegment{kind}WithNumSegments", {**taken, **counted}),
            Case(f"SparseSegment{kind}Grad", {**back, "output_dim0": _i(32)}),
            Case(f"SparseSegment{kind}GradV2", {**back, "dense_output_dim0": _i(32)}),
        ]
    return cases


def _others() -> list[Case]:
    image = ["float16", [4, 16, 16, 3]]
    boxes = {"boxes": _f(2, 64, 1, 4), "scores": _f(2, 64, 3), "max_output_size_per_class": _i(5)}
    kept = {"max_total_size": _i(10), "iou_threshold": _c(0.5), "score_threshold": _c(0.0)}
    return [
        Case("CTCGreedyDecoder", {"inputs": _f(12, 4, 6), "sequence_length": _i([12] * 4)}),
        Case("CombinedNonMaxSuppression", {**boxes, **kept}),
        Case("HistogramFixedWidth", {"values": _f(64, 32), "value_range": {"const": [0.0, 1.0], "dtype": "float32"},
                                     "nbins": _i(10)}),
        Case("InplaceAdd", {"x": _f(64, 32), "i": _i([1, 2]), "v": _f(2, 32)}),
        Case("InplaceSub", {"x": _f(64, 32), "i": _i([1, 2]), "v": _f(2, 32)}),
        Case("InplaceUpdate", {"x": _f(64, 32), "i": _i([1, 2]), "v": _f(2, 32)}),
        Case("Lu", {"input": _f(8, 32, 32)}),
        Case("MatrixSetDiagV2", {"input": _f(8, 32, 32), "diagonal": _f(8, 32), "k": _i(0)}),
        Case("ResizeBilinearGrad", {"grads": _f(4, 32, 32, 3), "original_image": image}),
        Case("UnravelIndex", {"indices": ["int32", [64]], "dims": _i([4, 4, 16])}),
    ]  # fmt: skip


CASES = [
    *_cells(),
    *_sparse(),
    *_others(),
    *_einsums(),
    *_codecs(),
    *_views(),
    *_convolutions(),
    *_pools(),
    *_elementwise(),
    *_reductions(),
    *_matrices(),
    *_layout(),
    *_linear_algebra(),
    *_images_and_counts(),
    *_normalisation_and_random(),
]
