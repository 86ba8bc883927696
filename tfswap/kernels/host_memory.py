"""Which results of a GPU's kernels are in host memory, outside of the device's arena.

Shapes, small integers and the handles of lists are in host memory, where TensorFlow computes on them. It registers
kernels of int32 with `HostMemory`, except those for data. The tests compare these tables with the registrations of
TensorFlow's GPU wheel.

Not handled: a variable's handle, whose size here is the variable's; a function that returns an int32 in device memory,
which counts as one in host memory.
"""

from __future__ import annotations

from tfswap.ir.custom_ops import NAMESPACE, RECEIVE, SIGNAL, TO_HOST
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel

HOST_INPUTS, HOST_OUTPUTS = "_input_hostmem", "_output_hostmem"
"""Attributes with the positions of a node's inputs and outputs that are in host memory besides those by its kernel's
registration (`MemoryTypesForNode`).
"""

OBJECTS = frozenset({"string", "variant"})
"""Types whose values are objects on the host's heap, such as lists."""

ON_HOST = frozenset(
    {
        "Shape",  # of each integer type
        "ShapeN",
        "Size",
        "StatelessRandomGetKeyCounter",  # uint64: the seeds of the kernels of random numbers
        "StatelessRandomGetKeyCounterAlg",
        "TensorListElementShape",
        TO_HOST,
        SIGNAL,
        RECEIVE,
    }
)
"""Ops whose results are on the host, whatever their type."""

PARTLY_ON_HOST = frozenset(
    {
        "BroadcastArgs",
        "BroadcastGradientArgs",
        "CSRSparseMatrixToSparseTensor",
        "ConcatOffset",
        "CudnnRNNV2",
        "CudnnRNNV3",
        "DataFormatDimMap",
        "DataFormatVecPermute",
        "DeserializeSparse",
        "EnsureShape",
        "InvertPermutation",
        "LinSpace",
        "LoopCond",
        "OptionalHasValue",
        "ParallelDynamicStitch",
        "Qr",
        "RaggedTensorFromVariant",
        "SparseConcat",
        "SparseReshape",
        "SparseSlice",
        "SparseSplit",
        "TensorArrayConcatV2",
        "TensorArrayConcatV3",
        "TensorListConcat",
        "TensorListConcatV2",
        "Unique",
        "Unpack",
        "VarIsInitializedOp",
        "VariableShape",
        "Where",
    }
)
"""Ops of which some results, other than int32, are or may be on the host, and are counted as the device's."""

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
"""Ops whose bool results are in host memory where their inputs are int32."""

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
        "CollectiveAllToAllV2",
        "CollectiveAllToAllV3",
        "CollectiveBcastRecvV2",
        "CollectiveBcastSendV2",
        "CollectiveGather",
        "CollectiveGatherV2",
        "CollectiveReduce",
        "CollectiveReduceScatterV2",
        "CollectiveReduceV2",
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
        "OptionalGetValue",
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
"""Ops whose int32 results are in device memory, as those of any other type."""


def on_host(op: str, first: TensorType | None, output: TensorType, device: DeviceModel) -> bool:
    """Whether the kernel stores this result in host memory, outside the arena.

    Args:
        first: the type of its first input.
    """
    if not device.is_gpu:
        return op == TO_HOST
    if output.dtype in OBJECTS or op in ON_HOST:
        return True
    if output.dtype == "int32":
        return op not in INT32_ON_DEVICE and not op.startswith(NAMESPACE)
    return op in HOST_COMPARISONS and first is not None and first.dtype == "int32"
