"""Which int32 inputs a GPU's kernels read in device memory.

Values of int32 are in host memory, but for those of a few kernels (host_memory.py); labels, tokens and the indices of a
gather are read on the device. TensorFlow then copies them there. The tests compare this with the registrations of
TensorFlow's GPU wheel.

Not handled: ops with lists of inputs; TensorFlow 1's variables.
"""

from __future__ import annotations

from tfswap.ir.custom_ops import NAMESPACE

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

_HOSTS_TOO = frozenset({"LoopCond", "Switch", "Merge", "Assert", "Print", "PrintV2"})
"""Ops that read a boolean of the host there."""


def reads_on_device(op: str, position: int, dtype: str) -> bool:
    """Whether the kernel reads an input of such a type, which is in host memory, on the device.

    Integers of 64 bits are taken to be read on the host: they are shapes.
    """
    if op.startswith(NAMESPACE):
        return False
    if dtype == "int32":
        return position in READ_ON_DEVICE.get(op, ())
    if dtype == "bool":
        return op not in _HOSTS_TOO
    return dtype == "uint64"
