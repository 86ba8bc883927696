"""Which inputs a GPU's kernels read in device memory, and which in host memory.

Values of int32 are in host memory, but for those of a few kernels (host_memory.py); labels, tokens and the indices of a
gather are read on the device. Shapes, axes, seeds and bounds are read on the host. TensorFlow copies what is elsewhere.
The tests compare this with the registrations of TensorFlow's GPU wheel.

Not handled: lists of other types than int32; TensorFlow 1's variables.
"""

from __future__ import annotations

from tfswap.ir.custom_ops import NAMESPACE, TO_DEVICE
from tfswap.ir.graph import Node
from tfswap.ir.op_traits import control_flow, is_collective
from tfswap.ir.types import REFERENCES

READ_ON_DEVICE: dict[str, tuple[int, ...]] = {
    "AdjustContrast": (0,),
    "BiasAdd": (0, 1),
    "BiasAddV1": (0, 1),
    "Bincount": (0, 2),
    "Bitcast": (0,),
    "BitwiseAnd": (0, 1),
    "BitwiseOr": (0, 1),
    "BitwiseXor": (0, 1),
    "Bucketize": (0,),
    "Cast": (0,),
    "CheckPinned": (0,),
    "CollectiveAllToAllV2": (0,),
    "CollectiveAllToAllV3": (0,),
    "CollectiveBcastSendV2": (0,),
    "CollectiveGather": (0,),
    "CollectiveGatherV2": (0,),
    "CollectiveReduce": (0,),
    "CollectiveReduceScatterV2": (0,),
    "CollectiveReduceV2": (0,),
    "CollectiveReduceV3": (0,),
    "ConjugateTranspose": (0,),
    "Conv": (0, 1),
    "Conv2D": (0, 1),
    "Conv2DBackpropInput": (1, 2),
    "CropAndResize": (2,),
    "CropAndResizeGradBoxes": (3,),
    "CropAndResizeGradImage": (2,),
    "Cross": (0, 1),
    "Cumprod": (0,),
    "Cumsum": (0,),
    "DataFormatDimMap": (0,),
    "DataFormatVecPermute": (0,),
    "DebugNumericSummaryV2": (0,),
    "DenseBincount": (0, 2),
    "Diag": (0,),
    "DiagPart": (0,),
    "DynamicPartition": (0, 1),
    "Gather": (0, 1),
    "GatherNd": (0, 1),
    "GatherV2": (0, 1),
    "ImageProjectiveTransformV2": (0,),
    "ImageProjectiveTransformV3": (0,),
    "InTopKV2": (1, 2),
    "InplaceAdd": (1,),
    "InplaceSub": (1,),
    "InplaceUpdate": (1,),
    "Invert": (0,),
    "LeftShift": (0, 1),
    "LowerBound": (0, 1),
    "OneHot": (0, 2, 3),
    "OptionalFromValue": (0,),  # what a branch saves for its gradient, one value each
    "PopulationCount": (0,),
    "Prod": (0,),
    "RaggedFillEmptyRows": (1, 3),
    "RaggedFillEmptyRowsGrad": (1,),
    "ResourceGather": (1,),
    "ResourceGatherNd": (1,),
    "ResourceScatterAdd": (1,),
    "ResourceScatterDiv": (1,),
    "ResourceScatterMax": (1,),
    "ResourceScatterMin": (1,),
    "ResourceScatterMul": (1,),
    "ResourceScatterNdAdd": (1,),
    "ResourceScatterNdMax": (1,),
    "ResourceScatterNdMin": (1,),
    "ResourceScatterNdSub": (1,),
    "ResourceScatterNdUpdate": (1,),
    "ResourceScatterSub": (1,),
    "ResourceScatterUpdate": (1,),
    "ResourceSparseApplyAdadelta": (7,),
    "ResourceSparseApplyAdagrad": (4,),
    "ResourceSparseApplyAdagradV2": (5,),
    "ResourceSparseApplyFtrl": (4,),
    "ResourceSparseApplyFtrlV2": (4,),
    "ResourceSparseApplyKerasMomentum": (4,),
    "ResourceSparseApplyProximalAdagrad": (6,),
    "ReverseSequence": (1,),
    "RightShift": (0, 1),
    "Roll": (0,),
    "Round": (0,),
    "ScatterNd": (0,),
    "ScatterNdNonAliasingAdd": (1,),
    "SegmentMax": (1,),
    "SegmentMean": (1,),
    "SegmentMin": (1,),
    "SegmentProd": (1,),
    "SegmentSum": (1,),
    "Select": (1, 2),
    "SelectV2": (1, 2),
    "Snapshot": (0,),
    "SparseFillEmptyRows": (1, 3),
    "SparseFillEmptyRowsGrad": (1,),
    "SparseReorder": (1,),
    "SparseSegmentMean": (1, 2),
    "SparseSegmentMeanGrad": (1, 2),
    "SparseSegmentMeanGradV2": (1, 2),
    "SparseSegmentMeanWithNumSegments": (1, 2),
    "SparseSegmentSqrtN": (1, 2),
    "SparseSegmentSqrtNGrad": (1, 2),
    "SparseSegmentSqrtNGradV2": (1, 2),
    "SparseSegmentSqrtNWithNumSegments": (1, 2),
    "SparseSegmentSum": (1, 2),
    "SparseSegmentSumGrad": (1, 2),
    "SparseSegmentSumGradV2": (1, 2),
    "SparseSegmentSumWithNumSegments": (1, 2),
    "SparseSlice": (1,),
    "SparseSliceGrad": (0,),
    "SparseSoftmaxCrossEntropyWithLogits": (1,),
    "SparseSplit": (2,),
    "SparseTensorDenseMatMul": (0,),
    "SparseToDense": (0, 2),
    "TensorListFromTensor": (0,),
    "TensorListPushBack": (1,),
    "TensorListPushBackBatch": (1,),
    "TensorListScatter": (0,),
    "TensorListScatterIntoExistingList": (1,),
    "TensorListScatterV2": (0,),
    "TensorListSetItem": (2,),
    "TensorListSplit": (0,),
    "TensorScatterAdd": (1,),
    "TensorScatterMax": (1,),
    "TensorScatterMin": (1,),
    "TensorScatterSub": (1,),
    "TensorScatterUpdate": (1,),
    "Tile": (0,),
    "TileGrad": (0,),
    "TopK": (0,),
    "TopKV2": (0,),
    "Transpose": (0,),
    "Unique": (0,),
    "UniqueWithCounts": (0,),
    "UnsortedSegmentMax": (0, 1),
    "UnsortedSegmentMin": (0, 1),
    "UnsortedSegmentProd": (0, 1),
    "UnsortedSegmentSum": (0, 1),
    "UpperBound": (0, 1),
    "_TensorToHashBucketFast": (0,),
}
"""By op, the positions of inputs that its kernel reads on the device though they are of int32."""

LISTS_ON_DEVICE: dict[str, tuple[int, int]] = {
    "DynamicStitch": (1, 2),
    "SparseConcat": (1, 3),
}
"""By op whose inputs are lists of one length: the list of int32 that its kernel reads on the device, and how many lists
there are.
"""

READ_ON_HOST: dict[str, tuple[int, ...]] = {
    "All": (1,),
    "Any": (1,),
    "BatchMatrixBandPart": (1, 2),
    "BatchToSpace": (1,),
    "BatchToSpaceND": (1, 2),
    "BlockLSTM": (0,),
    "BlockLSTMGrad": (0,),
    "BlockLSTMGradV2": (0,),
    "BlockLSTMV2": (0,),
    "BroadcastArgs": (0, 1),
    "BroadcastGradientArgs": (0, 1),
    "BroadcastTo": (1,),
    "CTCLossV2": (1,),
    "ConjugateTranspose": (1,),
    "Conv3DBackpropInputV2": (0,),
    "CudnnRNNBackpropV2": (11,),
    "CudnnRNNBackpropV3": (12,),
    "Cumprod": (1,),
    "Cumsum": (1,),
    "CumulativeLogsumexp": (1,),
    "DenseBincount": (1,),
    "EmptyTensorList": (0,),
    "EuclideanNorm": (1,),
    "ExpandDims": (1,),
    "FakeQuantWithMinMaxVars": (1, 2),
    "FakeQuantWithMinMaxVarsGradient": (2, 3),
    "FakeQuantWithMinMaxVarsPerChannel": (1, 2),
    "FakeQuantWithMinMaxVarsPerChannelGradient": (2, 3),
    "Fill": (0,),
    "GatherV2": (2,),
    "GenerateBoundingBoxProposals": (4, 6),
    "HistogramFixedWidth": (1,),
    "ImageProjectiveTransformV3": (3,),
    "InvertPermutation": (0,),
    "LinSpace": (0, 1, 2),
    "LoopCond": (0,),
    "MatrixBandPart": (1, 2),
    "MatrixDiagPartV2": (2,),
    "MatrixDiagPartV3": (2,),
    "MatrixDiagV2": (4,),
    "MatrixDiagV3": (4,),
    "Max": (1,),
    "Mean": (1,),
    "Min": (1,),
    "MirrorPad": (1,),
    "MirrorPadGrad": (1,),
    "NonMaxSuppressionV2": (3,),
    "NonMaxSuppressionV3": (3, 4),
    "NonMaxSuppressionV4": (3, 4),
    "Pad": (1,),
    "PadV2": (1, 2),
    "ParameterizedTruncatedNormal": (0,),
    "Prod": (1,),
    "Qr": (0,),
    "QuantizeAndDequantizeV2": (1, 2),
    "QuantizeAndDequantizeV3": (1, 2),
    "QuantizeAndDequantizeV4": (1, 2),
    "QuantizeAndDequantizeV4Grad": (2, 3),
    "RaggedFillEmptyRows": (2,),
    "RandomUniformInt": (1, 2),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "ResourceStridedSliceAssign": (1, 2, 3),
    "Reverse": (1,),
    "ReverseV2": (1,),
    "RngReadAndSkip": (2,),
    "RngSkip": (1, 2),
    "Roll": (1, 2),
    "ScatterNd": (2,),
    "Slice": (1, 2),
    "SpaceToBatch": (1,),
    "SpaceToBatchND": (1, 2),
    "SparseFillEmptyRows": (2,),
    "SparseMatrixAdd": (2, 3),
    "SparseMatrixZeros": (0,),
    "SparseReshape": (1, 2),
    "SparseSegmentMeanWithNumSegments": (3,),
    "SparseSegmentSqrtNWithNumSegments": (3,),
    "SparseSegmentSumWithNumSegments": (3,),
    "SparseSlice": (2, 3, 4),
    "SparseSplit": (0, 3),
    "SparseTensorDenseMatMul": (2,),
    "SparseTensorToCSRSparseMatrix": (2,),
    "SparseToDense": (1, 3),
    "SplitV": (1,),
    "StatefulStandardNormalV2": (1, 2),
    "StatefulTruncatedNormal": (1, 2),
    "StatefulUniform": (1, 2),
    "StatefulUniformFullInt": (1, 2),
    "StatefulUniformInt": (1, 2, 3, 4),
    "StatelessMultinomial": (2,),
    "StatelessRandomGammaV2": (0, 1),
    "StatelessRandomGammaV3": (0,),
    "StatelessRandomGetKeyCounter": (0,),
    "StatelessRandomGetKeyCounterAlg": (0,),
    "StatelessRandomNormal": (0, 1),
    "StatelessRandomNormalV2": (0,),
    "StatelessRandomUniform": (0, 1),
    "StatelessRandomUniformFullInt": (0, 1),
    "StatelessRandomUniformFullIntV2": (0,),
    "StatelessRandomUniformInt": (0, 1, 2, 3),
    "StatelessRandomUniformIntV2": (0, 4, 5),
    "StatelessRandomUniformV2": (0,),
    "StatelessTruncatedNormal": (0, 1),
    "StatelessTruncatedNormalV2": (0,),
    "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3),
    "Sum": (1,),
    "Switch": (1,),
    "TensorArraySplitV2": (2,),
    "TensorArraySplitV3": (2,),
    "TensorListConcatV2": (1, 2),
    "TensorListFromTensor": (1,),
    "TensorListGetItem": (2,),
    "TensorListReserve": (0,),
    "TensorListScatter": (2,),
    "TensorListScatterV2": (2,),
    "TensorListSplit": (1, 2),
    "TensorStridedSliceUpdate": (1, 2, 3),
    "Tile": (1,),
    "TopKV2": (1,),
    "Transpose": (1,),
    "UnsortedSegmentMax": (2,),
    "UnsortedSegmentMin": (2,),
    "UnsortedSegmentProd": (2,),
    "UnsortedSegmentSum": (2,),
}
"""By op, the positions of inputs that its kernel reads on the host, of whatever type."""

HOST_SCATTERS = frozenset(
    {
        "ResourceScatterNdAdd",
        "ResourceScatterNdMax",
        "ResourceScatterNdMin",
        "ResourceScatterNdSub",
        "ResourceScatterNdUpdate",
        "ScatterNd",
        "ScatterNdNonAliasingAdd",
        "TensorScatterAdd",
        "TensorScatterMax",
        "TensorScatterMin",
        "TensorScatterSub",
        "TensorScatterUpdate",
    }
)
"""Ops that for values of int32 read everything on the host, also their indices (scatter_nd_op.cc)."""

_HOSTS_TOO = frozenset({"LoopCond", "Switch", "Merge", "Assert", "Print", "PrintV2"})
"""Ops that read a boolean of the host there."""


def reads_on_device(node: Node, position: int, dtype: str) -> bool:
    """Whether the kernel reads an input of such a type, which is in host memory, on the device.

    Integers of 64 bits are taken to be read on the host: they are shapes.
    """
    if node.op.startswith(NAMESPACE) or _is_on_host(node):
        return False
    if dtype == "int32":
        return _reads_int32_on_device(node, position)
    if dtype == "bool":
        return node.op not in _HOSTS_TOO
    return dtype == "uint64"


def reads_on_host(node: Node, position: int, dtype: str) -> bool:
    """Whether the kernel reads an input of such a type on the host, though it may be in device memory.

    The first input of a conditional is its condition; a loop or a conditional has its int32 arguments in host memory.
    """
    op = node.op
    if op == TO_DEVICE:
        return True
    if op.startswith(NAMESPACE) or dtype in REFERENCES or is_collective(op):
        return False
    flow = control_flow(op)
    if op == "Assert" or (flow is not None and position < flow.first_argument) or _is_on_host(node):
        return True
    if dtype == "int32":
        return not _reads_int32_on_device(node, position)
    return position in READ_ON_HOST.get(op, ())


def _reads_int32_on_device(node: Node, position: int) -> bool:
    if node.op in LISTS_ON_DEVICE:
        there, count = LISTS_ON_DEVICE[node.op]
        return position * count // len(node.inputs) == there
    return position in READ_ON_DEVICE.get(node.op, ())


def _is_on_host(node: Node) -> bool:
    """Whether the kernel is one of the CPU for int32."""
    return node.op in HOST_SCATTERS and node.attrs["T"] == "int32"
