"""Kernels that move elements, and views."""

from __future__ import annotations

from kernel_cases.case import Case, floats, integers, number


def layout() -> list[Case]:
    return [*_joined(), *_slices(), *_padded(), *_indexed(), *_rearranged()]


def _joined() -> list[Case]:
    """Transposed, joined and split."""
    x = floats(16, 128, 4, 64)
    return [
        Case("Transpose", {"x": x, "perm": integers([0, 2, 1, 3])}),
        Case("Transpose", {"x": x, "perm": integers([0, 1, 2, 3])}),
        Case("Transpose", {"x": floats(64, 1, 100, 64), "perm": integers([1, 0, 2, 3])}),
        Case("ConjugateTranspose", {"x": x, "perm": integers([0, 2, 1, 3])}),
        Case("ConcatV2", {"values": [floats(64, 256), floats(64, 256)], "axis": integers(1)}),
        Case("ConcatV2", {"values": [floats(64, 256), floats(0, 256)], "axis": integers(0)}),
        Case("Pack", {"values": [floats(64, 256)]}, {"axis": 0}),
        Case("Pack", {"values": [floats(64, 256), floats(64, 256)]}, {"axis": 1}),
        Case("Unpack", {"value": floats(2, 64, 256)}, {"num": 2, "axis": 0}),
        Case("Unpack", {"value": floats(64, 2, 256)}, {"num": 2, "axis": 1}),
        Case("Unpack", {"value": floats(1, 64, 256)}, {"num": 1, "axis": 0}),
        Case("Split", {"axis": integers(1), "value": floats(64, 1024)}, {"num_split": 4}),
        Case("Split", {"axis": integers(0), "value": floats(64, 1024)}, {"num_split": 4}),
        Case("Split", {"axis": integers(0), "value": floats(64, 1024)}, {"num_split": 1}),
        Case(
            "SplitV",
            {"value": floats(64, 1024), "size_splits": integers([256, 768]), "axis": integers(1)},
            {"num_split": 2},
        ),
        Case(
            "SplitV",
            {"value": floats(64, 1024), "size_splits": integers([16, 48]), "axis": integers(0)},
            {"num_split": 2},
        ),
    ]


def _slices() -> list[Case]:
    """Parts of a tensor."""
    return [
        Case(
            "Slice",
            {"input": floats(32, 49, 49, 96), "begin": integers([0, 0, 0, 0]), "size": integers([32, 48, 48, 96])},
        ),
        Case("Slice", {"input": floats(32, 49, 96), "begin": integers([0, 0, 0]), "size": integers([32, 49, 96])}),
        Case("Slice", {"input": floats(32, 49, 96), "begin": integers([8, 0, 0]), "size": integers([16, 49, 96])}),
        Case(
            "StridedSlice",
            {"input": floats(100, 64, 256), "begin": integers([-1]), "end": integers([0]), "strides": integers([1])},
            {"shrink_axis_mask": 1, "end_mask": 1},
        ),
        Case(
            "StridedSlice",
            {"input": floats(100, 64, 256), "begin": integers([3]), "end": integers([4]), "strides": integers([1])},
            {"shrink_axis_mask": 1},
        ),
        Case(
            "StridedSlice",
            {"input": floats(100, 64, 256), "begin": integers([2]), "end": integers([10]), "strides": integers([1])},
        ),
        Case(
            "StridedSlice",
            {
                "input": floats(100, 64, 256),
                "begin": integers([0, 2]),
                "end": integers([100, 10]),
                "strides": integers([1, 1]),
            },
        ),
        Case(
            "StridedSlice",
            {"input": floats(100, 64, 256), "begin": integers([0]), "end": integers([100]), "strides": integers([1])},
        ),
        Case(
            "StridedSlice",
            {"input": floats(64, 255), "begin": integers([3]), "end": integers([10]), "strides": integers([1])},
        ),
        Case(
            "StridedSlice",  # x[:, None] of rows that are not aligned: all of it, and so handed on
            {"input": floats(64, 255), "begin": integers([0, 0]), "end": integers([0, 0]), "strides": integers([1, 1])},
            {"begin_mask": 3, "end_mask": 3, "new_axis_mask": 2},
        ),
        Case(
            "StridedSlice",  # x[::-1]
            {"input": floats(64, 256), "begin": integers([0]), "end": integers([0]), "strides": integers([-1])},
            {"begin_mask": 1, "end_mask": 1},
        ),
    ]


def _padded() -> list[Case]:
    """Put into zeros, padded, repeated and filled."""
    return [
        Case(
            "StridedSliceGrad",
            {
                "shape": integers([100, 64, 256]),
                "begin": integers([3]),
                "end": integers([4]),
                "strides": integers([1]),
                "dy": floats(64, 256),
            },
            {"shrink_axis_mask": 1},
        ),
        Case("Pad", {"input": floats(32, 48, 48, 96), "paddings": integers([[0, 0], [0, 1], [0, 1], [0, 0]])}),
        Case("Pad", {"input": floats(32, 48, 96), "paddings": integers([[0, 0], [0, 0], [0, 0]])}),
        Case(
            "PadV2",
            {
                "input": floats(32, 48, 48, 96),
                "paddings": integers([[0, 0], [0, 1], [0, 1], [0, 0]]),
                "constant_values": number(1.0),
            },
        ),
        Case(
            "MirrorPad",
            {"input": floats(32, 48, 48, 96), "paddings": integers([[0, 0], [1, 1], [1, 1], [0, 0]])},
            {"mode": "REFLECT"},
        ),
        Case(
            "MirrorPadGrad",
            {"input": floats(32, 50, 50, 96), "paddings": integers([[0, 0], [1, 1], [1, 1], [0, 0]])},
            {"mode": "REFLECT"},
        ),
        Case("Tile", {"input": floats(1, 1, 1, 96), "multiples": integers([32, 48, 48, 1])}),
        Case("Tile", {"input": floats(32, 48, 96), "multiples": integers([1, 1, 1])}),
        Case("BroadcastTo", {"input": floats(1, 1, 96), "shape": integers([32, 48, 96])}),
        Case("BroadcastTo", {"input": floats(32, 48, 96), "shape": integers([32, 48, 96])}),
        Case("Fill", {"dims": integers([64, 256]), "value": floats()}),
        Case("Range", {"start": ["int32", []], "limit": integers(1000), "delta": integers(1)}),
    ]


def _indexed() -> list[Case]:
    """By indices."""
    return [
        Case(
            "OneHot",
            {"indices": ["int32", [2048]], "depth": integers(1000), "on_value": number(1.0), "off_value": number(0.0)},
        ),
        Case("GatherV2", {"params": floats(2000, 256), "indices": ["int32", [16, 128]], "axis": integers(0)}),
        Case("GatherV2", {"params": floats(64, 2000), "indices": ["int32", [128]], "axis": integers(1)}),
        Case(
            "GatherV2",
            {"params": floats(16, 200, 64), "indices": ["int32", [16, 128]], "axis": integers(1)},
            {"batch_dims": 1},
        ),
        Case("Gather", {"params": floats(2000, 256), "indices": ["int32", [16, 128]]}),
        Case("GatherNd", {"params": floats(200, 256), "indices": ["int32", [128, 1]]}),
        Case("ScatterNd", {"indices": ["int32", [128, 1]], "updates": floats(128, 256), "shape": integers([200, 256])}),
        Case(
            "TensorScatterUpdate",
            {"tensor": floats(200, 256), "indices": ["int32", [128, 1]], "updates": floats(128, 256)},
        ),
        Case(
            "TensorScatterAdd",
            {"tensor": floats(200, 256), "indices": ["int32", [128, 1]], "updates": floats(128, 256)},
        ),
        Case(
            "UnsortedSegmentSum",
            {"data": floats(2048, 256), "segment_ids": ["int32", [2048]], "num_segments": integers(2000)},
        ),
        Case(
            "UnsortedSegmentMax",
            {"data": floats(2048, 256), "segment_ids": ["int32", [2048]], "num_segments": integers(2000)},
        ),
        Case(
            "SegmentSum",
            {"data": floats(2048, 256), "segment_ids": {"const": list(range(2048)), "dtype": "int32"}},
        ),
    ]


def _rearranged() -> list[Case]:
    """Reversed, resized, and by block or diagonal."""
    return [
        Case("ReverseV2", {"tensor": floats(64, 100, 64), "axis": integers([1])}),
        Case("ReverseV2", {"tensor": floats(64, 100, 64), "axis": integers([])}),
        Case("ReverseSequence", {"input": floats(64, 100, 64), "seq_lengths": ["int32", [64]]}, {"seq_dim": 1}),
        Case("Roll", {"input": floats(64, 100, 64), "shift": integers(2), "axis": integers(1)}),
        Case(
            "SpaceToBatchND",
            {"input": floats(8, 32, 32, 16), "block_shape": integers([2, 2]), "paddings": integers([[0, 0], [0, 0]])},
        ),
        Case(
            "BatchToSpaceND",
            {"input": floats(8, 32, 32, 16), "block_shape": integers([2, 2]), "crops": integers([[0, 0], [0, 0]])},
        ),
        Case("SpaceToDepth", {"input": floats(8, 32, 32, 16)}, {"block_size": 2}),
        Case("DepthToSpace", {"input": floats(8, 32, 32, 16)}, {"block_size": 2}),
        Case("ResizeBilinear", {"images": floats(8, 32, 32, 16), "size": integers([64, 64])}),
        Case("ResizeBilinear", {"images": floats(8, 32, 32, 16), "size": integers([32, 32])}),
        Case("ResizeBilinearGrad", {"grads": floats(8, 64, 64, 16), "original_image": floats(8, 32, 32, 16)}),
        Case("ResizeNearestNeighbor", {"images": floats(8, 32, 32, 16), "size": integers([64, 64])}),
        Case("ResizeNearestNeighborGrad", {"grads": floats(8, 64, 64, 16), "size": integers([32, 32])}),
        Case("ResizeBicubic", {"images": floats(8, 32, 32, 16), "size": integers([64, 64])}),
        Case(
            "ExtractImagePatches",
            {"images": floats(8, 32, 32, 16)},
            {"ksizes": [1, 3, 3, 1], "strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"},
        ),
        Case("MatrixBandPart", {"input": floats(16, 128, 128), "num_lower": integers(-1), "num_upper": integers(0)}),
        Case(
            "MatrixDiagV3",
            {
                "diagonal": floats(16, 128),
                "k": integers(0),
                "num_rows": integers(-1),
                "num_cols": integers(-1),
                "padding_value": number(0.0),
            },
        ),
        Case("Where", {"condition": ["bool", [64, 512]]}),
    ]


def views() -> list[Case]:
    """Pieces of the first dimension: shared where they are aligned, copied where not."""

    def piece(shape: list[int], begin: list[int], size: list[int]) -> Case:
        return Case("Slice", {"input": floats(*shape), "begin": integers(begin), "size": integers(size)})

    def stride(shape: list[int], begin: list[int], end: list[int], strides: list[int], **masks: int) -> Case:
        inputs = {"input": floats(*shape), "begin": integers(begin), "end": integers(end), "strides": integers(strides)}
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
        Case("Split", {"axis": integers(0), "value": floats(64, 8)}, {"num_split": 4}),
        Case("Split", {"axis": integers(0), "value": floats(64, 4)}, {"num_split": 4}),
        Case("Split", {"axis": integers(0), "value": floats(64, 3)}, {"num_split": 4}),
        Case("Unpack", {"value": floats(16, 8)}, {"num": 16, "axis": 0}),
        Case("Unpack", {"value": floats(16, 4)}, {"num": 16, "axis": 0}),
        Case("Unpack", {"value": floats(16, 16)}, {"num": 16, "axis": 1}),
        Case(
            "SplitV",
            {"value": floats(64, 64), "size_splits": integers([32, 32]), "axis": integers(1)},
            {"num_split": 2},
        ),
        Case(
            "SplitV", {"value": floats(64, 4), "size_splits": integers([16, 48]), "axis": integers(0)}, {"num_split": 2}
        ),
        Case(
            "SplitV",
            {"value": floats(4096), "size_splits": integers([1024, 3072]), "axis": integers(0)},
            {"num_split": 2},
        ),
        Case(
            "SplitV",
            {"value": floats(4096), "size_splits": integers([1023, 3073]), "axis": integers(0)},
            {"num_split": 2},
        ),
        Case("Split", {"axis": integers(0), "value": floats(4096)}, {"num_split": 2}),
        Case("Transpose", {"x": floats(16, 4, 128, 128), "perm": integers([0, 1, 3, 2])}),
        Case("Transpose", {"x": floats(16, 4, 128, 128), "perm": integers([0, 1, 2, 3])}),
        Case("ConcatOffset", {"concat_dim": integers(1), "shape": [["int32", [2]], ["int32", [2]]]}),
    ]
