"""Fused kernels."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers


def fused() -> list[Case]:
    """What Grappler makes of a graph, other convolutions, and kernels of 16-bit floats."""
    return [*_fused(), *_convolutions(), *_half_floats()]


def _fused() -> list[Case]:
    x, f, b = floats(4, 32, 32, 64), floats(3, 3, 64, 128), floats(128)
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
            {"a": floats(64, 256), "b": floats(256, 512), "args": [floats(512)]},
            {**ops, "fused_ops": ["BiasAdd"]},
        ),
        Case(
            "_FusedMatMul",
            {"a": floats(64, 256), "b": floats(256, 512), "args": [floats(512)]},
            {**ops, "fused_ops": ["BiasAdd", "Relu"]},
        ),
        Case("_UnaryOpsComposition", {"x": floats(64, 256)}, {"op_names": ["Neg", "Exp"]}),
    ]


def _convolutions() -> list[Case]:
    x, f, y = floats(4, 32, 32, 64), floats(3, 3, 64, 128), floats(4, 32, 32, 128)
    return [
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
        Case("Conv2D", {"input": x, "filter": floats(3, 3, 16, 128)}, {"strides": [1, 1, 1, 1], "padding": "SAME"}),
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
            {"input_sizes": integers(x[1]), "filter": ["float16", f[1]], "out_backprop": ["float16", y[1]]},
            {"strides": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case(
            "Conv2DBackpropFilter",
            {"input": ["float16", x[1]], "filter_sizes": integers(f[1]), "out_backprop": ["float16", y[1]]},
            {"strides": [1, 1, 1, 1], "padding": "SAME"},
        ),
    ]


def _half_floats() -> list[Case]:
    return [
        Case("Relu", {"features": ["float16", [64, 512]]}),
        Case("Sum", {"input": ["float16", [64, 32, 256]], "axis": integers([0, 1])}),
        Case("Mean", {"input": ["float16", [64, 32, 256]], "axis": integers([2])}),
        Case("Softmax", {"logits": ["float16", [64, 512]]}),
        Case("LogSoftmax", {"logits": ["float16", [64, 512]]}),
        Case("BiasAddGrad", {"out_backprop": ["float16", [64, 32, 64]]}),
        Case(
            "FusedBatchNormV3",
            {
                "x": ["float16", [32, 24, 24, 64]],
                "scale": floats(64),
                "offset": floats(64),
                "mean": floats(64),
                "variance": floats(64),
            },
            {"is_training": True},
        ),
        *(
            Case(
                "FusedBatchNormGradV3",
                {
                    "y_backprop": [dtype, [8, 16, 16, 32]],
                    "x": [dtype, [8, 16, 16, 32]],
                    "scale": floats(32),
                    "reserve_space_1": floats(32),
                    "reserve_space_2": floats(32),
                    "reserve_space_3": floats(32),
                },
                {"is_training": training},
            )
            for dtype, training in (("float16", True), ("bfloat16", False))
        ),
        Case("BiasAddGrad", {"out_backprop": ["bfloat16", [64, 16]]}),
    ]
