"""Which results of a GPU's kernels are in host memory, outside of the device's arena.

Shapes, small integers and the handles of lists are the host's: TensorFlow computes on them there, and registers the
kernels of int32 for it (`HostMemory`), except where data is of that type. The tests compare this with the
registrations of TensorFlow's GPU wheel.

Not handled: a variable's handle, whose size here is the variable's; a function that returns an int32 of the device's,
which is taken for one of the host's.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfswap.ir.custom_ops import NAMESPACE
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel

OBJECTS = frozenset({"string", "variant"})
"""Types whose values are objects of the host: lists, say."""

ON_HOST = frozenset(
    {
        "Shape",  # of each integer type
        "ShapeN",
        "Size",
        "StatelessRandomGetKeyCounter",  # uint64: what the kernels of random numbers are given
        "StatelessRandomGetKeyCounterAlg",
        "TensorListElementShape",
    }
)
"""Ops whose results are on the host, whatever their type."""

HOST_COMPARISONS = frozenset(
    {
        "Equal",
        "Greater",
        "GreaterEqual",
        "Less",
        "LessEqual",
        "NotEqual",
    }
)
"""Of int32, which is on the host, their results are there too."""

INT32_ON_DEVICE = frozenset(
    {
        "ApproxTopK",
        "ArgMax",
        "ArgMin",
        "BiasAdd",
        "BiasAddV1",
        "Bincount",
        "Bitcast",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "Bucketize",
        "CSRSparseMatrixComponents",
        "Cast",
        "CheckPinned",
        "CollectiveAllToAllV3",
        "CollectiveGather",
        "CollectiveReduce",
        "CollectiveReduceV3",
        "ConjugateTranspose",
        "Conv",
        "Conv2D",
        "Conv2DBackpropInput",
        "Cross",
        "Cumprod",
        "Cumsum",
        "DataFormatDimMap",
        "DataFormatVecPermute",
        "DenseBincount",
        "Diag",
        "DiagPart",
        "DynamicPartition",
        "DynamicStitch",
        "Empty",
        "Gather",
        "GatherNd",
        "GatherV2",
        "HistogramFixedWidth",
        "ImageProjectiveTransformV2",
        "ImageProjectiveTransformV3",
        "Invert",
        "LeftShift",
        "LowerBound",
        "Lu",
        "Multinomial",
        "NonMaxSuppressionV2",
        "NonMaxSuppressionV3",
        "NonMaxSuppressionV4",
        "OneHot",
        "Prod",
        "RaggedFillEmptyRows",
        "RaggedFillEmptyRowsGrad",
        "RandomUniformInt",
        "RightShift",
        "Roll",
        "Round",
        "Select",
        "SelectV2",
        "Snapshot",
        "SparseConcat",
        "SparseFillEmptyRows",
        "SparseFillEmptyRowsGrad",
        "SparseReorder",
        "SparseSegmentMeanGradV2",
        "SparseSegmentSqrtNGradV2",
        "SparseSegmentSumGradV2",
        "SparseSlice",
        "SparseSliceGrad",
        "SparseSplit",
        "SparseToDense",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
        "StatelessMultinomial",
        "StatelessRandomUniformFullInt",
        "StatelessRandomUniformFullIntV2",
        "StatelessRandomUniformInt",
        "StatelessRandomUniformIntV2",
        "StochasticCastToInt",
        "TensorArrayConcat",
        "TensorArrayConcatV2",
        "TensorArrayConcatV3",
        "TensorArrayGather",
        "TensorArrayGatherV2",
        "TensorArrayGatherV3",
        "TensorListConcat",
        "TensorListConcatV2",
        "TensorListGather",
        "TensorListGetItem",
        "TensorListPopBack",
        "TensorListStack",
        "Tile",
        "TileGrad",
        "TopK",
        "TopKV2",
        "Transpose",
        "Unique",
        "UniqueWithCounts",
        "UnsortedSegmentMax",
        "UnsortedSegmentMin",
        "UnsortedSegmentProd",
        "UnsortedSegmentSum",
        "UpperBound",
    }
)
"""Ops whose results of int32 are the device's, as those of any other type."""


def on_host(op: str, inputs: Sequence[TensorType], output: TensorType, device: DeviceModel) -> bool:
    """Whether the kernel has this result in host memory, outside of the arena."""
    if not device.is_gpu:
        return False
    if output.dtype in OBJECTS or op in ON_HOST:
        return True
    if output.dtype == "int32":
        return op not in INT32_ON_DEVICE and not op.startswith(NAMESPACE)
    return op in HOST_COMPARISONS and inputs[0].dtype == "int32"
