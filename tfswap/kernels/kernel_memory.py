"""What each TensorFlow kernel does to the allocator: which buffers it takes over, shares, asks for and frees.

The rules are of TensorFlow 2.21's CPU kernels, read in their sources and then checked against the
allocator's own log, request by request (benchmarks/kernel_memory.py). Sizes are requests, unrounded.

Invariant: `kernel_memory` is a pure function of its arguments, and what it says it knows exactly
(`exact`) is what the allocator's log shows, order included. Where a kernel's requests depend on timing or
on input values that the caller does not know, the answer is an upper bound with `exact` False.

What makes this small: Eigen's own scratch (the packed blocks of contractions, thread-local buffers) is not
in the arena. The CPU device's Eigen allocator is null unless NUMA affinity is on
(common_runtime/local_device.cc), so that memory comes from malloc. Only `allocate_output`,
`allocate_temp` and `forward_input*` reach the arena.

On a GPU the same rules stand in, without temporaries that only CPU kernels take and never as exact; what
cuDNN, cuBLAS and CUB take besides is not modelled.

Not handled: the insides of functions that control-flow ops call (they are graphs of their own, to be
simulated like any other); string and variant payloads, which live on the heap; cuDNN's workspaces,
which autotuning picks at run time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from tfswap.ir.custom_ops import KERNEL, TEMPORARY_BYTES, TOGETHER
from tfswap.ir.types import TensorType
from tfswap.kernels import gpu_temporaries, recurrent_cells, ring_collectives, temporaries
from tfswap.kernels import memory_rules as rules
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.einsum import einsum
from tfswap.kernels.memory_rules import KernelMemory
from tfswap.kernels.temporaries import Event

__all__ = ["Event", "KernelMemory", "kernel_memory"]


class _Entry(NamedTuple):
    rule: rules.Rule
    attrs: tuple[str, ...] = ()  # the attributes that the rule reads
    values: tuple[int, ...] = ()  # the inputs whose values, where known, the rule reads


# --- the table: one op per line ---------------------------------------------------------------------------
# An op that is not here allocates its outputs, in order, and nothing else: true of most kernels.

_UNARY = _Entry(rules.forwarding(0))
_BINARY = _Entry(rules.forwarding(0, 1))
_CHOICE = _Entry(rules.forwarding(1, 2))
_FRESH = _Entry(rules.fresh)
_VIEW = _Entry(rules.alias_first)
_FREE = _Entry(rules.nothing)
_IN_PLACE = _Entry(rules.writes_first)

_RULES: dict[str, _Entry] = {
    # Hand their input on (identity_op.h, reshape_op.h, shape_ops.h, bitcast_op.cc).
    "Bitcast": _Entry(rules.bitcast),
    "CheckNumerics": _VIEW,
    "DestroyTemporaryVariable": _VIEW,
    "EnsureShape": _VIEW,
    "ExpandDims": _VIEW,
    "Identity": _VIEW,
    "IdentityN": _Entry(rules.alias_each),
    "PlaceholderWithDefault": _VIEW,
    "PreventGradient": _VIEW,
    "Reshape": _VIEW,
    "Squeeze": _VIEW,
    "StopGradient": _VIEW,
    "Tfswap>Defer": _VIEW,  # ops/csrc/core/arena_ops.cc
    "_EagerConst": _VIEW,
    # Write over their first input, whoever else holds it (inplace_ops.cc, assign_op.h, dense_update_ops.cc).
    "Assign": _IN_PLACE,
    "AssignAdd": _IN_PLACE,
    "AssignSub": _IN_PLACE,
    "InplaceAdd": _IN_PLACE,
    "InplaceSub": _IN_PLACE,
    "InplaceUpdate": _IN_PLACE,
    # Produced once, or by the caller: nothing is allocated in the step (constant_op.cc keeps its tensor).
    "Const": _FREE,
    "HostConst": _FREE,
    "NoOp": _FREE,
    "Placeholder": _FREE,
    "VarHandleOp": _FREE,
    "_Arg": _FREE,
    "_DeviceArg": _FREE,
    "_Retval": _FREE,
    "_DeviceRetval": _FREE,
    # Element by element, one input (cwise_ops_common.h, UnaryOp; relu_op.h, UnaryElementWiseOp).
    "Abs": _UNARY,
    "Acos": _UNARY,
    "Acosh": _UNARY,
    "Asin": _UNARY,
    "Asinh": _UNARY,
    "Atan": _UNARY,
    "Atanh": _UNARY,
    "BesselI0": _UNARY,
    "BesselI0e": _UNARY,
    "BesselI1": _UNARY,
    "BesselI1e": _UNARY,
    "BesselJ0": _UNARY,
    "BesselJ1": _UNARY,
    "BesselK0": _UNARY,
    "BesselK0e": _UNARY,
    "BesselK1": _UNARY,
    "BesselK1e": _UNARY,
    "BesselY0": _UNARY,
    "BesselY1": _UNARY,
    "Ceil": _UNARY,
    "Conj": _UNARY,
    "Cos": _UNARY,
    "Cosh": _UNARY,
    "Dawsn": _UNARY,
    "Digamma": _UNARY,
    "Elu": _UNARY,
    "Erf": _UNARY,
    "Erfc": _UNARY,
    "Erfinv": _UNARY,
    "Exp": _UNARY,
    "Expint": _UNARY,
    "Expm1": _UNARY,
    "Floor": _UNARY,
    "FresnelCos": _UNARY,
    "FresnelSin": _UNARY,
    "Inv": _UNARY,
    "Invert": _UNARY,
    "LeakyRelu": _UNARY,
    "Lgamma": _UNARY,
    "Log": _UNARY,
    "Log1p": _UNARY,
    "LogicalNot": _UNARY,
    "Ndtri": _UNARY,
    "Neg": _UNARY,
    "OnesLike": _UNARY,
    "Reciprocal": _UNARY,
    "Relu": _UNARY,
    "Relu6": _UNARY,
    "Rint": _UNARY,
    "Round": _UNARY,
    "Rsqrt": _UNARY,
    "Selu": _UNARY,
    "Sigmoid": _UNARY,
    "Sign": _UNARY,
    "Sin": _UNARY,
    "Sinh": _UNARY,
    "Softplus": _UNARY,
    "Softsign": _UNARY,
    "Spence": _UNARY,
    "Sqrt": _UNARY,
    "Square": _UNARY,
    "Tan": _UNARY,
    "Tanh": _UNARY,
    "ZerosLike": _UNARY,
    # Element by element, two inputs (cwise_ops_common.h, BinaryOp; relu_op.h, BinaryElementWiseOp).
    "Add": _BINARY,
    "AddV2": _BINARY,
    "Atan2": _BINARY,
    "BitwiseAnd": _BINARY,
    "BitwiseOr": _BINARY,
    "BitwiseXor": _BINARY,
    "Div": _BINARY,
    "DivNoNan": _BINARY,
    "EluGrad": _BINARY,
    "Equal": _BINARY,
    "FloorDiv": _BINARY,
    "FloorMod": _BINARY,
    "Greater": _BINARY,
    "GreaterEqual": _BINARY,
    "Igamma": _BINARY,
    "IgammaGradA": _BINARY,
    "Igammac": _BINARY,
    "InvGrad": _BINARY,
    "LeakyReluGrad": _BINARY,
    "LeftShift": _BINARY,
    "Less": _BINARY,
    "LessEqual": _BINARY,
    "LogicalAnd": _BINARY,
    "LogicalOr": _BINARY,
    "Maximum": _BINARY,
    "Minimum": _BINARY,
    "Mod": _BINARY,
    "Mul": _BINARY,
    "MulNoNan": _BINARY,
    "NextAfter": _BINARY,
    "NotEqual": _BINARY,
    "Polygamma": _BINARY,
    "Pow": _BINARY,
    "RandomGammaGrad": _BINARY,
    "RealDiv": _BINARY,
    "ReciprocalGrad": _BINARY,
    "Relu6Grad": _BINARY,
    "ReluGrad": _BINARY,
    "RightShift": _BINARY,
    "RsqrtGrad": _BINARY,
    "SeluGrad": _BINARY,
    "SigmoidGrad": _BINARY,
    "SoftplusGrad": _BINARY,
    "SoftsignGrad": _BINARY,
    "SqrtGrad": _BINARY,
    "SquaredDifference": _BINARY,
    "Sub": _BINARY,
    "TanhGrad": _BINARY,
    "TruncateDiv": _BINARY,
    "TruncateMod": _BINARY,
    "Xdivy": _BINARY,
    "Xlog1py": _BINARY,
    "Xlogy": _BINARY,
    "Zeta": _BINARY,
    # Other kernels that may write over an input.
    "AddN": _Entry(rules.add_n, attrs=(KERNEL,)),
    "AdjustHue": _UNARY,
    "BiasAdd": _UNARY,
    "BiasAddV1": _UNARY,
    "ClipByValue": _UNARY,
    "FakeQuantWithMinMaxArgs": _UNARY,
    "FakeQuantWithMinMaxArgsGradient": _BINARY,
    "_FusedConv2D": _Entry(rules.fused(temporaries.conv2d), attrs=("fused_ops",)),
    "_FusedConv3D": _Entry(rules.fused(temporaries.conv3d), attrs=("fused_ops",)),
    "_FusedDepthwiseConv2dNative": _Entry(rules.fused(temporaries.conv2d), attrs=("fused_ops",)),
    "_FusedMatMul": _Entry(rules.fused(temporaries.matmul), attrs=("fused_ops",)),
    "_FusedBatchNormEx": _Entry(rules.fused_batch_norm),
    "_FusedBatchNormGradEx": _Entry(rules.events_rule(temporaries.fused_batch_norm_grad), attrs=("is_training",)),
    "_MklFusedBatchMatMulV2": _Entry(rules.events_rule(temporaries.batch_matmul), attrs=("adj_x", "adj_y")),
    "_MklFusedInstanceNorm": _Entry(rules.events_rule(temporaries.onednn)),
    "_MklFusedMish": _Entry(rules.events_rule(temporaries.onednn)),
    "_MklLayerNorm": _Entry(rules.events_rule(temporaries.onednn)),
    "_MklSwish": _Entry(rules.events_rule(temporaries.onednn)),
    "_UnaryOpsComposition": _UNARY,
    "LogSoftmax": _UNARY,
    "MatrixBandPart": _UNARY,
    "MatrixSetDiag": _UNARY,
    "MatrixSetDiagV2": _UNARY,
    "MatrixSetDiagV3": _UNARY,
    "MaxPoolGradWithArgmax": _UNARY,
    "ScatterNdNonAliasingAdd": _UNARY,
    "Select": _CHOICE,
    "SelectV2": _CHOICE,
    "Snapshot": _UNARY,
    "Softmax": _UNARY,
    "TensorStridedSliceUpdate": _UNARY,
    # Matrix by matrix (linalg_ops_common.cc); solvers and determinants write over nothing.
    "Cholesky": _Entry(rules.linear_algebra),
    "CholeskyGrad": _Entry(rules.linear_algebra),
    "Lu": _Entry(rules.linear_algebra),
    "MatrixInverse": _Entry(rules.linear_algebra),
    "MatrixLogarithm": _Entry(rules.linear_algebra),
    "MatrixSquareRoot": _Entry(rules.linear_algebra),
    "Qr": _Entry(rules.linear_algebra),
    "SelfAdjointEigV2": _Entry(rules.linear_algebra),
    "Svd": _Entry(rules.linear_algebra),
    # Views where shapes and alignment allow, else copies.
    "BroadcastTo": _Entry(rules.view_or_fresh(temporaries.is_same_shape_view), attrs=(KERNEL,)),
    "Cast": _Entry(rules.view_or_fresh(temporaries.is_same_dtype_view)),
    "ConjugateTranspose": _Entry(rules.view_or_fresh(temporaries.is_transpose_view), values=(1,)),
    "Pack": _Entry(rules.pack),
    "Slice": _Entry(rules.view_or_fresh(temporaries.is_first_dim_view), attrs=(KERNEL,), values=(1,)),
    "Split": _Entry(rules.view_or_fresh(temporaries.is_split_view, source=1)),
    "SplitV": _Entry(rules.view_or_fresh(temporaries.is_split_view)),
    "StridedSlice": _Entry(rules.view_or_fresh(temporaries.is_first_dim_view), attrs=(KERNEL,), values=(1, 3)),
    "Tile": _Entry(rules.view_or_fresh(temporaries.is_same_shape_view), attrs=(KERNEL,)),
    "Transpose": _Entry(rules.view_or_fresh(temporaries.is_transpose_view), values=(1,)),
    "Unpack": _Entry(rules.view_or_fresh(temporaries.is_unpack_view), attrs=("axis", KERNEL)),
    # Reductions (reduction_ops_common.h).
    "All": _Entry(rules.reduction, values=(1,)),
    "Any": _Entry(rules.reduction, values=(1,)),
    "Max": _Entry(rules.reduction, values=(1,)),
    "Mean": _Entry(rules.reduction, values=(1,)),
    "Min": _Entry(rules.reduction, values=(1,)),
    "Prod": _Entry(rules.reduction, values=(1,)),
    "Sum": _Entry(rules.reduction, values=(1,)),
    "EuclideanNorm": _Entry(rules.events_rule(temporaries.reduction), values=(1,)),
    "BiasAddGrad": _Entry(rules.events_rule(temporaries.bias_add_grad), attrs=("data_format",)),
    # Kernels with temporaries: see temporaries.py.
    "BatchMatMul": _Entry(rules.events_rule(temporaries.batch_matmul), attrs=("adj_x", "adj_y")),
    "BatchMatMulV2": _Entry(rules.events_rule(temporaries.batch_matmul), attrs=("adj_x", "adj_y")),
    "BatchMatMulV3": _Entry(rules.events_rule(temporaries.batch_matmul), attrs=("adj_x", "adj_y")),
    "Conv2D": _Entry(rules.events_rule(temporaries.conv2d)),
    "Conv2DBackpropFilter": _Entry(rules.events_rule(temporaries.conv2d_backprop_filter), attrs=("padding",)),
    "Conv2DBackpropInput": _Entry(rules.events_rule(temporaries.conv2d_backprop_input), attrs=("padding",)),
    "_MklNativeConv2DBackpropFilterWithBias": _Entry(rules.events_rule(temporaries.joint_gradients)),
    "_MklNativeConv2DWithBias": _Entry(rules.events_rule(temporaries.conv2d)),
    "_MklNativeFusedConv2D": _Entry(rules.fused(temporaries.conv2d), attrs=("fused_ops",)),
    "_MklNativePadWithConv2D": _Entry(rules.events_rule(temporaries.conv2d)),
    "_MklNativePadWithFusedConv2D": _Entry(rules.fused(temporaries.conv2d), attrs=("fused_ops",)),
    "_MklNativeMaxPool": _Entry(rules.events_rule(temporaries.max_pool_with_places)),
    "_MklNativeMaxPool3D": _Entry(rules.events_rule(temporaries.max_pool_with_places)),
    "_MklNativeMaxPool3DGrad": _Entry(rules.events_rule(temporaries.max_pool_grad_from_places)),
    "_MklNativeMaxPoolGrad": _Entry(rules.events_rule(temporaries.max_pool_grad_from_places)),
    "DepthwiseConv2dNative": _Entry(rules.events_rule(temporaries.depthwise)),
    "DepthwiseConv2dNativeBackpropFilter": _Entry(rules.events_rule(temporaries.depthwise_backprop_filter)),
    "DepthwiseConv2dNativeBackpropInput": _Entry(rules.events_rule(temporaries.depthwise_backprop_input)),
    "AdjustContrastv2": _Entry(rules.events_rule(temporaries.adjust_contrast)),
    "Bincount": _Entry(rules.events_rule(temporaries.bincount)),
    "DenseBincount": _Entry(rules.events_rule(temporaries.dense_bincount), attrs=("binary_output",)),
    "Einsum": _Entry(einsum, attrs=("equation",)),
    "FusedBatchNorm": _Entry(rules.fused_batch_norm),
    "FusedBatchNormGrad": _Entry(rules.events_rule(temporaries.fused_batch_norm_grad), attrs=("is_training",)),
    "FusedBatchNormGradV2": _Entry(rules.events_rule(temporaries.fused_batch_norm_grad), attrs=("is_training",)),
    "FusedBatchNormGradV3": _Entry(rules.events_rule(temporaries.fused_batch_norm_grad), attrs=("is_training",)),
    "FusedBatchNormV2": _Entry(rules.fused_batch_norm),
    "FusedBatchNormV3": _Entry(rules.fused_batch_norm),
    "GatherNd": _Entry(rules.gather_nd),
    "ResourceGatherNd": _Entry(rules.gather_nd),
    "BlockLSTM": _Entry(recurrent_cells.block_lstm, values=(0,)),
    "BlockLSTMGrad": _Entry(recurrent_cells.block_lstm_grad, values=(0,)),
    "BlockLSTMGradV2": _Entry(recurrent_cells.block_lstm_grad, values=(0,)),
    "BlockLSTMV2": _Entry(recurrent_cells.block_lstm, values=(0,)),
    "GRUBlockCell": _Entry(recurrent_cells.gru_cell),
    "GRUBlockCellGrad": _Entry(recurrent_cells.gru_cell_grad),
    "LSTMBlockCell": _Entry(recurrent_cells.lstm_cell),
    "LSTMBlockCellGrad": _Entry(recurrent_cells.lstm_cell_grad),
    "CollectiveReduce": _Entry(ring_collectives.reduce, attrs=("group_size",)),
    "CollectiveReduceV2": _Entry(ring_collectives.reduce, values=(1,)),
    "CollectiveReduceV3": _Entry(ring_collectives.reduce),
    "MatMul": _Entry(rules.events_rule(temporaries.matmul)),
    "Conv3D": _Entry(rules.events_rule(temporaries.conv3d)),
    "Conv3DBackpropFilterV2": _Entry(rules.events_rule(temporaries.conv3d_backprop_filter)),
    "Conv3DBackpropInputV2": _Entry(rules.events_rule(temporaries.conv3d_backprop_input)),
    "MaxPool": _Entry(rules.events_rule(temporaries.max_pool)),
    "MaxPool3D": _Entry(rules.events_rule(temporaries.max_pool)),
    "MaxPoolGrad": _Entry(rules.max_pool_grad),
    "MaxPoolGradV2": _Entry(rules.max_pool_grad),
    "MirrorPadGrad": _Entry(rules.events_rule(temporaries.mirror_pad_grad)),
    "Multinomial": _Entry(rules.events_rule(temporaries.multinomial)),
    "Pad": _Entry(rules.pad),
    "PadV2": _Entry(rules.pad),
    "QuantizeAndDequantizeV2": _Entry(rules.events_rule(temporaries.quantize), attrs=("axis", "range_given")),
    "QuantizeAndDequantizeV3": _Entry(rules.events_rule(temporaries.quantize), attrs=("axis", "range_given")),
    "QuantizeAndDequantizeV4": _Entry(rules.events_rule(temporaries.quantize), attrs=("axis", "range_given")),
    "ResizeBilinearGrad": _Entry(rules.events_rule(temporaries.resize_grad)),
    "SparseReshape": _Entry(rules.in_order(1)),
    "RGBToHSV": _Entry(rules.events_rule(temporaries.rgb_to_hsv)),
    "ScaleAndTranslate": _Entry(rules.events_rule(temporaries.scale_and_translate)),
    "ScaleAndTranslateGrad": _Entry(rules.events_rule(temporaries.scale_and_translate_grad)),
    "SoftmaxCrossEntropyWithLogits": _Entry(rules.cross_entropy),
    "CTCGreedyDecoder": _Entry(rules.in_order(3)),
    "CombinedNonMaxSuppression": _Entry(rules.in_order(3)),
    "HistogramFixedWidth": _Entry(rules.events_rule(temporaries.histogram)),
    "SparseAdd": _Entry(rules.sparse_add),
    "SparseConcat": _Entry(rules.events_rule(temporaries.sparse_concat)),
    "SparseDenseCwiseAdd": _Entry(rules.events_rule(temporaries.sparse_dense)),
    "SparseDenseCwiseDiv": _Entry(rules.events_rule(temporaries.sparse_dense)),
    "SparseDenseCwiseMul": _Entry(rules.events_rule(temporaries.sparse_dense)),
    "SparseFillEmptyRows": _Entry(rules.sparse_fill, attrs=(KERNEL,)),
    "SparseFillEmptyRowsGrad": _Entry(rules.events_rule(temporaries.sparse_filled_grad)),
    "SparseReduceMax": _Entry(rules.events_rule(temporaries.sparse_copied)),
    "SparseSegmentMean": _Entry(rules.events_rule(temporaries.sparse_segment)),
    "SparseSegmentMeanGrad": _Entry(rules.events_rule(temporaries.sparse_segment_grad)),
    "SparseSegmentMeanGradV2": _Entry(rules.events_rule(temporaries.sparse_segment_grad)),
    "SparseSegmentMeanWithNumSegments": _Entry(rules.events_rule(temporaries.sparse_segment)),
    "SparseSegmentSqrtN": _Entry(rules.events_rule(temporaries.sparse_segment)),
    "SparseSegmentSqrtNGrad": _Entry(rules.events_rule(temporaries.sparse_segment_grad)),
    "SparseSegmentSqrtNGradV2": _Entry(rules.events_rule(temporaries.sparse_segment_grad)),
    "SparseSegmentSqrtNWithNumSegments": _Entry(rules.events_rule(temporaries.sparse_segment)),
    "SparseSegmentSum": _Entry(rules.events_rule(temporaries.sparse_segment)),
    "SparseSegmentSumGrad": _Entry(rules.events_rule(temporaries.sparse_segment_grad)),
    "SparseSegmentSumGradV2": _Entry(rules.events_rule(temporaries.sparse_segment_grad)),
    "SparseSegmentSumWithNumSegments": _Entry(rules.events_rule(temporaries.sparse_segment)),
    "SparseSlice": _Entry(rules.in_order(1)),
    "SparseReduceSum": _Entry(rules.events_rule(temporaries.sparse_copied)),
    "SparseSoftmax": _Entry(rules.events_rule(temporaries.sparse_copied)),
    "SparseToDense": _Entry(rules.events_rule(temporaries.sparse_to_dense)),
    "SparseSoftmaxCrossEntropyWithLogits": _Entry(rules.cross_entropy),
    "StatelessMultinomial": _Entry(rules.events_rule(temporaries.multinomial)),
    "UnravelIndex": _Entry(rules.events_rule(temporaries.unravel_index)),
    "Unique": _Entry(rules.in_order(1)),
    "UniqueV2": _Entry(rules.in_order(1)),
    "UniqueWithCounts": _Entry(rules.in_order(1)),
    "UniqueWithCountsV2": _Entry(rules.in_order(1)),
    # Variables (resource_variable_ops.cc, training_ops.cc). Reads share the variable's buffer.
    "Tfswap>AssignInPlace": _Entry(rules.update(0)),  # ops/csrc/core/variable_ops.cc
    "Tfswap>HandOver": _Entry(rules.hand_over, attrs=("slots",)),  # ops/csrc/core/arena_ops.cc
    "Tfswap>Outside": _Entry(rules.outside, attrs=("room",)),
    "AssignVariableOp": _Entry(rules.assign),
    "ReadVariableOp": _VIEW,
    "_ReadVariablesOp": _Entry(rules.alias_each),
    "DisableCopyOnRead": _Entry(rules.nothing),
    "AssignAddVariableOp": _Entry(rules.update(0)),
    "AssignSubVariableOp": _Entry(rules.update(0)),
    "ResourceScatterAdd": _Entry(rules.update(0)),
    "ResourceScatterDiv": _Entry(rules.update(0)),
    "ResourceScatterMax": _Entry(rules.update(0)),
    "ResourceScatterMin": _Entry(rules.update(0)),
    "ResourceScatterMul": _Entry(rules.update(0)),
    "ResourceScatterSub": _Entry(rules.update(0)),
    "ResourceScatterUpdate": _Entry(rules.update(0)),
    "ResourceScatterNdAdd": _Entry(rules.update(0)),
    "ResourceScatterNdMax": _Entry(rules.update(0)),
    "ResourceScatterNdMin": _Entry(rules.update(0)),
    "ResourceScatterNdSub": _Entry(rules.update(0)),
    "ResourceScatterNdUpdate": _Entry(rules.update(0)),
    "ResourceSparseApplyProximalGradientDescent": _Entry(rules.update(0)),
    "ResourceApplyGradientDescent": _Entry(rules.update(0)),
    "ResourceApplyProximalGradientDescent": _Entry(rules.update(0)),
    "ResourceStridedSliceAssign": _Entry(rules.update(0)),
    "ResourceApplyMomentum": _Entry(rules.update(0, 1)),
    "ResourceApplyKerasMomentum": _Entry(rules.update(0, 1)),
    "ResourceSparseApplyMomentum": _Entry(rules.update(0, 1)),
    "ResourceSparseApplyKerasMomentum": _Entry(rules.update(0, 1)),
    "ResourceApplyAdagrad": _Entry(rules.update(0, 1)),
    "ResourceApplyAdagradV2": _Entry(rules.update(0, 1)),
    "ResourceSparseApplyAdagrad": _Entry(rules.update(0, 1)),
    "ResourceSparseApplyProximalAdagrad": _Entry(rules.update(0, 1)),
    "ResourceSparseApplyAdagradV2": _Entry(rules.update(0, 1)),
    "ResourceApplyAddSign": _Entry(rules.update(0, 1)),
    "ResourceApplyPowerSign": _Entry(rules.update(0, 1)),
    "ResourceApplyAdam": _Entry(rules.update(0, 1, 2)),
    "ResourceApplyAdaMax": _Entry(rules.update(0, 1, 2)),
    "ResourceApplyAdadelta": _Entry(rules.update(0, 1, 2)),
    "ResourceApplyFtrl": _Entry(rules.update(0, 1, 2)),
    "ResourceApplyFtrlV2": _Entry(rules.update(0, 1, 2)),
    "ResourceApplyRMSProp": _Entry(rules.update(0, 1, 2)),
    "ResourceSparseApplyFtrl": _Entry(rules.update(0, 1, 2)),
    "ResourceSparseApplyFtrlV2": _Entry(rules.update(0, 1, 2)),
    "ResourceSparseApplyRMSProp": _Entry(rules.update(0, 1, 2)),
    "ResourceSparseApplyAdadelta": _Entry(rules.update(0, 1, 2)),
    "ResourceApplyAdamWithAmsgrad": _Entry(rules.update(0, 1, 2, 3)),
    "ResourceApplyCenteredRMSProp": _Entry(rules.update(0, 1, 2, 3)),
    "ResourceSparseApplyCenteredRMSProp": _Entry(rules.update(0, 1, 2, 3)),
    # Tensor lists (list_kernels.h): their elements are analysis/tensor_lists.py's; here, the list that is made.
    "AdjustSaturation": _FRESH,
    "Angle": _FRESH,
    "BandedTriangularSolve": _FRESH,
    "Betainc": _FRESH,
    "CTCLoss": _FRESH,
    "Complex": _FRESH,
    "ComplexAbs": _FRESH,
    "CropAndResize": _FRESH,
    "CropAndResizeGradBoxes": _FRESH,
    "CropAndResizeGradImage": _FRESH,
    "Cross": _FRESH,
    "CumulativeLogsumexp": _FRESH,
    "Diag": _FRESH,
    "DiagPart": _FRESH,
    "Dilation2D": _FRESH,
    "Dilation2DBackpropFilter": _FRESH,
    "Dilation2DBackpropInput": _FRESH,
    "DynamicPartition": _FRESH,
    "DynamicStitch": _FRESH,
    "Eig": _FRESH,
    "EmptyTensorList": _FRESH,
    "ExtractVolumePatches": _FRESH,
    "FFT": _FRESH,
    "FFT2D": _FRESH,
    "FFT3D": _FRESH,
    "FakeQuantWithMinMaxVars": _FRESH,
    "FakeQuantWithMinMaxVarsPerChannel": _FRESH,
    "HSVToRGB": _FRESH,
    "IFFT": _FRESH,
    "IFFT2D": _FRESH,
    "IFFT3D": _FRESH,
    "IRFFT": _FRESH,
    "IRFFT2D": _FRESH,
    "IRFFT3D": _FRESH,
    "Imag": _FRESH,
    "ImageProjectiveTransformV2": _FRESH,
    "ImageProjectiveTransformV3": _FRESH,
    "LogMatrixDeterminant": _FRESH,
    "MatrixDeterminant": _FRESH,
    "MatrixDiag": _FRESH,
    "MatrixDiagPart": _FRESH,
    "MatrixDiagPartV3": _FRESH,
    "MatrixSolve": _FRESH,
    "MatrixSolveLs": _FRESH,
    "MatrixTriangularSolve": _FRESH,
    "OptionalFromValue": _FRESH,
    "OptionalNone": _FRESH,
    "ParallelDynamicStitch": _FRESH,
    "RFFT": _FRESH,
    "RFFT2D": _FRESH,
    "RFFT3D": _FRESH,
    "Real": _FRESH,
    "ResizeArea": _FRESH,
    "ResizeBicubicGrad": _FRESH,
    "SegmentMax": _FRESH,
    "SegmentMean": _FRESH,
    "SegmentMin": _FRESH,
    "SegmentProd": _FRESH,
    "SparseReorder": _FRESH,
    "SparseTensorDenseAdd": _FRESH,
    "SparseTensorDenseMatMul": _FRESH,
    "TensorListFromTensor": _FRESH,
    "TensorListPopBack": _UNARY,
    "TensorListPushBack": _UNARY,
    "TensorListPushBackBatch": _UNARY,
    "TensorListReserve": _FRESH,
    "TensorListResize": _UNARY,
    "TensorListScatterIntoExistingList": _UNARY,
    "TensorListSetItem": _UNARY,
    "TensorListElementShape": _FRESH,
    "TensorListLength": _FRESH,
    "TensorListStack": _FRESH,
    # Known to allocate their outputs only (measured), or kilobytes besides.
    "ApproximateEqual": _FRESH,
    "ArgMax": _FRESH,
    "ArgMin": _FRESH,
    "AvgPool": _FRESH,
    "AvgPool3D": _FRESH,
    "AvgPool3DGrad": _FRESH,
    "AvgPoolGrad": _FRESH,
    "BatchToSpaceND": _FRESH,
    "BroadcastGradientArgs": _FRESH,
    "Bucketize": _FRESH,
    "Concat": _FRESH,
    "ConcatOffset": _FRESH,
    "ConcatV2": _FRESH,
    "Cumprod": _FRESH,
    "Cumsum": _FRESH,
    "DeepCopy": _FRESH,
    "DepthToSpace": _FRESH,
    "ExtractImagePatches": _FRESH,
    "Fill": _FRESH,
    "Gather": _FRESH,
    "GatherV2": _FRESH,
    "InTopKV2": _FRESH,
    "InvertPermutation": _FRESH,
    "IsFinite": _FRESH,
    "IsInf": _FRESH,
    "IsNan": _FRESH,
    "L2Loss": _FRESH,
    "LRN": _FRESH,
    "LRNGrad": _FRESH,
    "LinSpace": _FRESH,
    "MatrixDiagV3": _FRESH,
    "MaxPool3DGrad": _FRESH,
    "MaxPoolGradGrad": _FRESH,
    "MaxPoolWithArgmax": _FRESH,
    "MirrorPad": _FRESH,
    "OneHot": _FRESH,
    "RandomStandardNormal": _FRESH,
    "RandomUniform": _FRESH,
    "RandomUniformInt": _FRESH,
    "Range": _FRESH,
    "Rank": _FRESH,
    "ResizeBicubic": _FRESH,
    "ResizeBilinear": _FRESH,
    "ResizeNearestNeighbor": _FRESH,
    "ResizeNearestNeighborGrad": _FRESH,
    "ResourceGather": _FRESH,
    "ReverseSequence": _FRESH,
    "ReverseV2": _FRESH,
    "Roll": _FRESH,
    "ScatterNd": _FRESH,
    "SegmentSum": _FRESH,
    "Shape": _FRESH,
    "ShapeN": _FRESH,
    "Size": _FRESH,
    "SpaceToBatchND": _FRESH,
    "SpaceToDepth": _FRESH,
    "StatelessRandomGetKeyCounter": _FRESH,
    "StatelessRandomNormal": _FRESH,
    "StatelessRandomNormalV2": _FRESH,
    "StatelessRandomUniform": _FRESH,
    "StatelessRandomUniformInt": _FRESH,
    "StatelessRandomUniformIntV2": _FRESH,
    "StatelessRandomUniformV2": _FRESH,
    "StatelessTruncatedNormal": _FRESH,
    "StatelessTruncatedNormalV2": _FRESH,
    "StridedSliceGrad": _FRESH,
    "TensorScatterAdd": _FRESH,
    "TensorScatterMax": _FRESH,
    "TensorScatterMin": _FRESH,
    "TensorScatterSub": _FRESH,
    "TensorScatterUpdate": _FRESH,
    "TopKV2": _FRESH,
    "TruncatedNormal": _FRESH,
    "UnsortedSegmentMax": _FRESH,
    "UnsortedSegmentMin": _FRESH,
    "UnsortedSegmentProd": _FRESH,
    "UnsortedSegmentSum": _FRESH,
    "VariableShape": _FRESH,
    "Where": _FRESH,
    # Calls of functions that XLA compiles, of which it was measured (runtime/xla_calls.py).
    "PartitionedCall": _Entry(rules.compiled, (TEMPORARY_BYTES,)),
    "StatefulPartitionedCall": _Entry(rules.compiled, (TEMPORARY_BYTES,)),
    # tfswap's codecs (ops/csrc/codecs/*_ops.cc).
    "Tfswap>DecodeFloats": _FRESH,
    "Tfswap>DecodeGroups": _FRESH,
    "Tfswap>DecodeIntegers": _FRESH,
    "Tfswap>DecodeMask": _FRESH,
    "Tfswap>DecodeSparse": _FRESH,
    "Tfswap>EncodeFloats": _FRESH,
    "Tfswap>EncodeGroups": _FRESH,
    "Tfswap>EncodeIntegers": _FRESH,
    "Tfswap>EncodeMask": _FRESH,
    "Tfswap>EncodeMaxPool": _FRESH,
    "Tfswap>EncodeSparse": _Entry(rules.encode_sparse),
    "Tfswap>LeakyReluGradFromMask": _UNARY,
    "Tfswap>MaxPoolGradFromPositions": _FRESH,
    "Tfswap>MultiplyByMask": _UNARY,
    "Tfswap>SelectByMask": _Entry(rules.forwarding(1, 2)),
}

_Member = tuple[str, str, Mapping[str, object], str, int, int]
"""One of the kernels that `TOGETHER` stands for: name, op, attributes, device, how many inputs and outputs it has."""

_DEFAULT = _Entry(rules.fresh)
_cache: dict[object, KernelMemory] = {}
_NO_VALUES: Mapping[int, tuple[int, ...]] = {}


_WINDOW = ("data_format", "dilations", "padding", "strides")
_GPU_CONVOLUTION = _Entry(rules.events_rule(gpu_temporaries.convolution), attrs=_WINDOW)
_GPU_INPUT_GRADIENT = _Entry(rules.events_rule(gpu_temporaries.convolution_input_gradient), attrs=_WINDOW)
_GPU_FILTER_GRADIENT = _Entry(rules.events_rule(gpu_temporaries.convolution_filter_gradient), attrs=_WINDOW)

_GPU_RECURRENT = _Entry(rules.events_rule(gpu_temporaries.recurrent), attrs=(TEMPORARY_BYTES,))
_GPU_RECURRENT_GRADIENT = _Entry(rules.events_rule(gpu_temporaries.recurrent_gradient), attrs=(TEMPORARY_BYTES,))

_GPU_RULES = {
    "BiasAddGrad": _Entry(rules.events_rule(gpu_temporaries.bias_add_grad), attrs=("data_format",)),
    "Conv2D": _GPU_CONVOLUTION,
    "Conv2DBackpropFilter": _GPU_FILTER_GRADIENT,
    "Conv2DBackpropInput": _GPU_INPUT_GRADIENT,
    "Conv3D": _GPU_CONVOLUTION,
    "Conv3DBackpropFilterV2": _GPU_FILTER_GRADIENT,
    "Conv3DBackpropInputV2": _GPU_INPUT_GRADIENT,
    "CudnnRNNBackpropV2": _GPU_RECURRENT_GRADIENT,
    "CudnnRNNBackpropV3": _GPU_RECURRENT_GRADIENT,
    "CudnnRNNV2": _GPU_RECURRENT,
    "CudnnRNNV3": _GPU_RECURRENT,
    "DepthwiseConv2dNativeBackpropFilter": _Entry(rules.events_rule(gpu_temporaries.depthwise_filter_gradient)),
    "LogSoftmax": _Entry(rules.events_rule(gpu_temporaries.softmax, forward=(0,))),
    "Softmax": _Entry(rules.events_rule(gpu_temporaries.softmax, forward=(0,))),
    "UnsortedSegmentSum": _Entry(rules.events_rule(gpu_temporaries.unsorted_segment_sum)),
    "_FusedConv2D": _GPU_CONVOLUTION,
    "_FusedConv3D": _GPU_CONVOLUTION,
}
"""Kernels that take other temporaries on a GPU than on a CPU."""


def no_larger_inputs(op: str) -> tuple[int, ...]:
    """Positions of the inputs that are, axis by axis, no larger than the op's result: what it computes element by
    element, as its kernel may write over them.
    """
    entry = _RULES.get(op)
    return (0,) if entry is _UNARY else (0, 1) if entry is _BINARY else ()


def chosen_inputs(op: str) -> tuple[int, ...]:
    """Positions of the inputs among which the op chooses, element by element: these are no larger than its result."""
    return (1, 2) if _RULES.get(op) is _CHOICE else ()


def kernel_memory(
    op: str,
    attrs: Mapping[str, object],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    device: DeviceModel,
    values: Mapping[int, tuple[int, ...]] = _NO_VALUES,
) -> KernelMemory:
    """What one kernel does to the allocator. Memoised on what its rule looks at.

    Args:
        op: the op's type.
        attrs: its attributes as plain Python values.
        inputs: the types of its data inputs, in order.
        outputs: the types of its outputs, in order.
        device: where it runs.
        values: the flat integer values of inputs that are constants, by position. Optional: it settles
            what shapes leave open (a transposition's permutation, a reduction's axes, a slice's start).
    """
    if op == TOGETHER:
        return _together(attrs, inputs, outputs, device, values)
    entry = _RULES.get(op, _DEFAULT)
    if device.kind == "gpu":
        entry = _GPU_RULES.get(op, entry)
    key = (
        entry.rule,
        tuple(inputs),
        tuple(outputs),
        device,
        tuple([attrs.get(name) for name in entry.attrs]),
        tuple([values.get(position) for position in entry.values]),
    )
    found = _cache.get(key)
    if found is None:
        found = entry.rule(rules.Facts(attrs, inputs, outputs, device.running((*inputs, *outputs)), values))
        if device.kind == "gpu" and found.events:  # those of few GPU kernels have been measured
            found = found._replace(exact=False)
        _cache[key] = found
    return found


def _together(
    attrs: Mapping[str, object],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    device: DeviceModel,
    values: Mapping[int, tuple[int, ...]],
) -> KernelMemory:
    """What kernels that run at once do: who comes first is not known, what they take together is."""
    events: list[Event] = []
    usual: list[Event] = []
    forward: list[tuple[int, tuple[int, ...]]] = []
    exact, measured = True, False
    first_in = first_out = 0
    for _, op, own, _, reads, gives in cast("Sequence[_Member]", attrs["members"]):
        last_in, last_out = first_in + reads, first_out + gives
        known = {p - first_in: v for p, v in values.items() if first_in <= p < last_in}
        memory = kernel_memory(op, own, inputs[first_in:last_in], outputs[first_out:last_out], device, known)
        own_usual = memory.events if memory.exact else memory.usual or [e for e in memory.events if e[0] == "out"]
        for found, its in ((events, memory.events), (usual, own_usual)):
            found += [(kind, n + first_out if kind == "out" else n) for kind, n in its]
        forward += [(o + first_out, tuple(i + first_in for i in candidates)) for o, candidates in memory.forward]
        exact, measured = exact and memory.exact, measured or memory.usual is not None
        first_in, first_out = last_in, last_out
    told = tuple(usual) if measured else None
    return KernelMemory(forward=tuple(forward), events=tuple(events), exact=exact, usual=told)
