"""Ops that request their outputs only: cases that `kernel_memory.py` measures, and tests do not."""

from __future__ import annotations

from typing import Any

from kernel_cases.case import Case, floats, integers, number

_HALVES = ("bfloat16", "float16")


def _signals() -> list[Case]:
    waves, spectra, half = floats(8, 64, 64), ["complex64", [8, 64, 64]], ["complex64", [8, 64, 33]]
    lengths = {"": [64], "2D": [64, 64], "3D": [8, 64, 64]}
    return [
        *[Case(f"{way}FFT{rank}", {"input": spectra}) for way in ("", "I") for rank in lengths],
        *[Case(f"RFFT{rank}", {"input": waves, "fft_length": integers(n)}) for rank, n in lengths.items()],
        *[Case(f"IRFFT{rank}", {"input": half, "fft_length": integers(n)}) for rank, n in lengths.items()],
        *[Case(op, {"input": spectra}) for op in ("Angle", "Imag", "Real")],
        Case("ComplexAbs", {"x": spectra}),
        Case("Complex", {"real": waves, "imag": waves}),
        Case("CTCLoss", {
            "inputs": floats(12, 4, 6),
            "labels_indices": {"const": [[i, 0] for i in range(4)], "dtype": "int64"},
            "labels_values": integers([1, 2, 1, 0]),
            "sequence_length": integers([12] * 4),
        }),
    ]  # fmt: skip


def _segments() -> list[Case]:
    rows, ids = floats(64, 16), integers(sorted(i % 40 for i in range(64)))
    unsorted = {"segment_ids": integers([i % 7 for i in range(64)]), "num_segments": integers(7)}
    chosen = {"indices": integers([[i] for i in range(8)]), "updates": floats(8, 16)}
    where = {"const": [[i, i * 7 % 50] for i in range(64)], "dtype": "int64"}
    shape = {"const": [64, 50], "dtype": "int64"}
    sparse = {"a_indices": where, "a_values": floats(64), "a_shape": shape}
    halves = [integers(list(range(32))), integers(list(range(32, 64)))]
    return [
        *[Case(f"Segment{k}", {"data": rows, "segment_ids": ids}) for k in ("Max", "Mean", "Min", "Prod", "Sum")],
        *[Case("SegmentSum", {"data": [dtype, [64, 16]], "segment_ids": ids}) for dtype in _HALVES],
        *[Case(f"UnsortedSegment{k}", {"data": rows, **unsorted}) for k in ("Min", "Prod")],
        *[Case(f"TensorScatter{k}", {"tensor": rows, **chosen}) for k in ("Add", "Max", "Min", "Sub", "Update")],
        Case("DynamicPartition", {"data": rows, "partitions": unsorted["segment_ids"]}, {"num_partitions": 7}),
        Case("DynamicStitch", {"indices": halves, "data": [floats(32, 16)] * 2}),
        Case("ParallelDynamicStitch", {"indices": halves, "data": [floats(32, 16)] * 2}),
        Case("SparseReorder", {"input_indices": ["int64", [64, 2]], "input_values": floats(64), "input_shape": shape}),
        Case("SparseTensorDenseAdd", {**sparse, "b": floats(64, 50)}),
        Case("SparseTensorDenseMatMul", {**sparse, "b": floats(50, 16)}),
        Case("SparseTensorDenseMatMul", {**sparse, "b": floats(64, 16)}, {"adjoint_a": True}),
    ]


def _images() -> list[Case]:
    image, boxes = floats(4, 32, 32, 3), {"boxes": floats(6, 4), "box_ind": integers([0, 1, 2, 3, 0, 1])}
    window = {"strides": [1] * 4, "rates": [1] * 4, "padding": "SAME"}
    dilation, back = {"input": image, "filter": floats(3, 3, 3)}, {"out_backprop": image}
    warped = {"images": image, "transforms": floats(4, 8), "output_shape": integers([32, 32])}
    bilinear = {"interpolation": "BILINEAR"}
    blocks = {"ksizes": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
    return [
        Case("AdjustSaturation", {"images": image, "scale": number(0.5)}),
        Case("CropAndResize", {"image": image, **boxes, "crop_size": integers([14, 14])}),
        Case("CropAndResizeGradBoxes", {"grads": floats(6, 14, 14, 3), "image": image, **boxes}),
        Case(
            "CropAndResizeGradImage",
            {"grads": floats(6, 14, 14, 3), **boxes, "image_size": integers([4, 32, 32, 3])},
            {"T": "float32"},
        ),
        Case("Dilation2D", dilation, window),
        Case("Dilation2DBackpropFilter", {**dilation, **back}, window),
        Case("Dilation2DBackpropInput", {**dilation, **back}, window),
        Case("ExtractVolumePatches", {"input": floats(2, 8, 8, 8, 3)}, blocks),
        Case("HSVToRGB", {"images": image}),
        Case("ImageProjectiveTransformV2", warped, bilinear),
        Case("ImageProjectiveTransformV3", {**warped, "fill_value": number(0.0)}, bilinear),
        Case("ResizeArea", {"images": image, "size": integers([16, 16])}),
        Case("ResizeBicubicGrad", {"grads": floats(4, 64, 64, 3), "original_image": image}),
    ]


def _algebra() -> list[Case]:
    x, matrices, right = floats(64, 32, 16), floats(8, 32, 32), floats(8, 32, 5)
    bounds = {"min": number(0.0), "max": number(1.0)}
    each = {name: {"const": [value] * 16, "dtype": "float32"} for name, value in (("min", 0.0), ("max", 1.0))}
    return [
        Case("BandedTriangularSolve", {"matrix": floats(8, 3, 32), "rhs": right}),
        Case("Betainc", {"a": x, "b": x, "x": x}),
        Case("Cross", {"a": floats(64, 3), "b": floats(64, 3)}),
        Case("CumulativeLogsumexp", {"x": x, "axis": integers(1)}),
        Case("Diag", {"diagonal": floats(64)}),
        Case("DiagPart", {"input": floats(64, 64)}),
        Case("Eig", {"input": matrices}, {"Tout": "complex64"}),
        Case("FakeQuantWithMinMaxVars", {"inputs": x, **bounds}),
        Case("FakeQuantWithMinMaxVarsPerChannel", {"inputs": x, **each}),
        Case("LogMatrixDeterminant", {"input": matrices}),
        Case("MatrixDeterminant", {"input": matrices}),
        Case("MatrixDiag", {"diagonal": floats(8, 32)}),
        Case("MatrixDiagPart", {"input": matrices}),
        Case("MatrixDiagPartV3", {"input": matrices, "k": integers(0), "padding_value": number(0.0)}),
        Case("MatrixSolve", {"matrix": matrices, "rhs": right}),
        Case("MatrixSolveLs", {"matrix": matrices, "rhs": right, "l2_regularizer": {"const": 0.1, "dtype": "float64"}}),
        Case("MatrixTriangularSolve", {"matrix": matrices, "rhs": right}),
    ]


def _halves() -> list[Case]:
    """Kernels on 16-bit floats take no memory beyond their results, except where noted."""
    cases: list[Case] = []
    for dtype in _HALVES:
        rows: list[Any] = [dtype, [64, 32, 16]]
        table: list[Any] = [dtype, [64, 50]]
        cases += [
            Case(op, {"input": rows, "axis": integers(axis)}) for op in ("Sum", "Mean", "Max") for axis in ([0], [0, 2])
        ]
        cases += [
            Case("AvgPool", {"value": [dtype, [4, 16, 16, 8]]},
                 {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}),
            Case("Cumsum", {"x": table, "axis": integers(0)}),
            Case("L2Loss", {"t": table}),
            Case("LogSoftmax", {"logits": table}),
            Case("Softmax", {"logits": table}),
            Case("SoftmaxCrossEntropyWithLogits", {"features": table, "labels": table}),
            Case("SoftplusGrad", {"gradients": rows, "features": rows}),
            Case("TanhGrad", {"y": rows, "dy": rows}),
        ]  # fmt: skip
    return cases


PLAIN_CASES = [
    *_signals(),
    *_segments(),
    *_images(),
    *_algebra(),
    *_halves(),
]
