"""Convolutions and poolings."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers


def convolutions() -> list[Case]:
    cases = []
    for n, h, w, c, k, o, stride, padding in [
        (2, 128, 128, 64, 3, 64, 1, "SAME"),  # one image of columns is more than the cache
        (8, 128, 128, 3, 3, 64, 1, "SAME"),
        (4, 8, 8, 512, 3, 512, 1, "SAME"),  # shards of three images
        (32, 102, 102, 3, 7, 64, 2, "VALID"),
        (32, 24, 24, 256, 1, 64, 1, "SAME"),
        (32, 24, 24, 256, 1, 512, 2, "SAME"),
        (8, 6, 6, 512, 3, 512, 1, "SAME"),
        (32, 3, 3, 960, 1, 320, 1, "SAME"),
    ]:
        oh = -(-h // stride) if padding == "SAME" else -(-(h - k + 1) // stride)
        ow = -(-w // stride) if padding == "SAME" else -(-(w - k + 1) // stride)
        x, f, y = floats(n, h, w, c), floats(k, k, c, o), floats(n, oh, ow, o)
        attrs = {"strides": [1, stride, stride, 1], "padding": padding}
        cases += [
            Case("Conv2D", {"input": x, "filter": f}, attrs),
            Case("Conv2DBackpropInput", {"input_sizes": integers(x[1]), "filter": f, "out_backprop": y}, attrs),
            Case("Conv2DBackpropFilter", {"input": x, "filter_sizes": integers(f[1]), "out_backprop": y}, attrs),
        ]
    for n, h, c, k, m, stride, padding in [
        (32, 49, 96, 3, 1, 2, "VALID"),
        (32, 24, 144, 3, 1, 1, "SAME"),
        (8, 14, 33, 7, 2, 1, "SAME"),
    ]:
        oh = -(-h // stride) if padding == "SAME" else -(-(h - k + 1) // stride)
        x, f, y = floats(n, h, h, c), floats(k, k, c, m), floats(n, oh, oh, c * m)
        attrs = {"strides": [1, stride, stride, 1], "padding": padding}
        cases += [
            Case("DepthwiseConv2dNative", {"input": x, "filter": f}, attrs),
            Case(
                "DepthwiseConv2dNativeBackpropInput",
                {"input_sizes": integers(x[1]), "filter": f, "out_backprop": y},
                attrs,
            ),
            Case(
                "DepthwiseConv2dNativeBackpropFilter",
                {"input": x, "filter_sizes": integers(f[1]), "out_backprop": y},
                attrs,
            ),
        ]
    attrs = {"strides": [1] * 5, "padding": "SAME"}
    for batch, side in ((2, 32), (1, 32), (8, 16)):
        x, f, y = floats(batch, side, side, side, 16), floats(3, 3, 3, 16, 32), floats(batch, side, side, side, 32)
        cases += [
            Case("Conv3D", {"input": x, "filter": f}, attrs),
            Case("Conv3DBackpropInputV2", {"input_sizes": integers(x[1]), "filter": f, "out_backprop": y}, attrs),
            Case("Conv3DBackpropFilterV2", {"input": x, "filter_sizes": integers(f[1]), "out_backprop": y}, attrs),
        ]
    return cases


def pools() -> list[Case]:
    x, y = floats(8, 32, 32, 64), floats(8, 16, 16, 64)
    attrs = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
    x3, y3 = floats(2, 16, 16, 16, 32), floats(2, 8, 8, 8, 32)
    attrs3 = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "SAME"}
    overlap = {"ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    return [
        Case("MaxPool", {"input": x}, attrs),
        Case("MaxPoolGrad", {"orig_input": x, "orig_output": y, "grad": y}, attrs),
        Case("MaxPoolGradGrad", {"orig_input": x, "orig_output": y, "grad": x}, attrs),
        Case("MaxPoolWithArgmax", {"input": x}, attrs),
        Case("MaxPoolGradWithArgmax", {"input": x, "grad": y, "argmax": ["int64", y[1]]}, attrs),
        Case(
            "MaxPoolGrad",
            {
                "orig_input": floats(8, 50, 50, 64),
                "orig_output": floats(8, 24, 24, 64),
                "grad": floats(8, 24, 24, 64),
            },
            overlap,
        ),
        Case("AvgPool", {"value": x}, attrs),
        Case("AvgPoolGrad", {"orig_input_shape": integers(x[1]), "grad": y}, attrs),
        Case("MaxPool3D", {"input": x3}, attrs3),
        Case("MaxPool3DGrad", {"orig_input": x3, "orig_output": y3, "grad": y3}, attrs3),
        Case("AvgPool3D", {"input": x3}, attrs3),
        Case("AvgPool3DGrad", {"orig_input_shape": integers(x3[1]), "grad": y3}, attrs3),
    ]
