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

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tfswap.analysis import workspace
from tfswap.analysis.device import DeviceModel
from tfswap.analysis.workspace import Event, Facts
from tfswap.ir.types import TensorType

ALLOCATOR_GRANULE_BYTES = 256
"""The BFC allocator rounds every request up to this."""


class KernelMemory(NamedTuple):
    """One kernel's dealings with the allocator.

    Attributes:
        alias: (output, input) pairs: the output keeps the input's buffer alive, always; nothing is
            allocated for it unless `events` also has that output. An output may hold several inputs
            (a tensor list).
        forward: (output, candidates): the output takes over the buffer of the first candidate that nobody
            else holds when the kernel runs, and asks for a new one (its "out" event) only if there is none.
            Candidates already have the output's dtype and number of elements.
        events: what the kernel asks for, in order: ("out", index) allocates an output, ("temp", bytes) a
            temporary, ("free", k) releases the k-th temporary, ("hold", bytes) allocates what output 0 (a
            tensor list) owns from then on. Temporaries left at the end are released when the kernel
            returns, in reverse order. Outputs of zero bytes never reach the allocator.
        workspace_bytes: temporaries alive at the worst moment, each rounded to the allocator's granule.
        retains: inputs whose buffers live on after the step's own references end: a variable adopts them
            and drops the buffer that it had.
        updates: resource inputs whose variable is written in place; if a read of it is still held, or if
            its copy-on-read mode is on (ops.turns_on_copy_on_read), the kernel first allocates a copy of
            the variable's size, and drops the old buffer, which a held read keeps.
        exact: False where the above is an upper bound.
        temp_forward: (k, candidates), as `forward`, for the k-th temporary of `events`: it takes over the
            buffer of a dying input, and then there is no "temp" event for it.
    """

    alias: tuple[tuple[int, int], ...] = ()
    forward: tuple[tuple[int, tuple[int, ...]], ...] = ()
    events: tuple[Event, ...] = ()
    workspace_bytes: int = 0
    retains: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    exact: bool = True
    temp_forward: tuple[tuple[int, tuple[int, ...]], ...] = ()


Rule = Callable[[Facts], KernelMemory]


class _Entry(NamedTuple):
    rule: Rule
    attrs: tuple[str, ...] = ()  # the attributes that the rule reads
    values: tuple[int, ...] = ()  # the inputs whose values, where known, the rule reads


# --- building blocks ---------------------------------------------------------------------------------


def _outs(count: int) -> tuple[Event, ...]:
    return tuple(("out", index) for index in range(count))


def _same_size(output: TensorType, candidate: TensorType) -> bool:
    """What OpKernelContext::forward_input requires: dtype and element count; the shape may differ."""
    if output.dtype != candidate.dtype:
        return False
    if output.shape == candidate.shape:
        return output.shape is not None and None not in output.shape
    count = output.num_elements
    return count is not None and count == candidate.num_elements


def _candidates(facts: Facts, output: int, inputs: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    kind = facts.outputs[output]
    fitting = tuple(i for i in inputs if i < len(facts.inputs) and _same_size(kind, facts.inputs[i]))
    return ((output, fitting),) if fitting else ()


def _peak(events: Sequence[Event]) -> int:
    """The most bytes of temporaries alive at once, rounded as the allocator rounds."""
    sizes: list[int] = []
    alive = peak = 0
    for kind, value in events:
        if kind == "temp":
            rounded = -(-value // ALLOCATOR_GRANULE_BYTES) * ALLOCATOR_GRANULE_BYTES
            sizes.append(rounded)
            alive += rounded
            peak = max(peak, alive)
        elif kind == "free":
            alive -= sizes[value]
    return peak


def _with_events(
    events: Sequence[Event],
    *,
    alias: tuple[tuple[int, int], ...] = (),
    forward: tuple[tuple[int, tuple[int, ...]], ...] = (),
    exact: bool = True,
) -> KernelMemory:
    return KernelMemory(alias, forward, tuple(events), _peak(events), (), (), exact)


def _fresh(facts: Facts) -> KernelMemory:
    """Every output allocated, in order; nothing else. Also the default for unknown ops."""
    return KernelMemory(events=_outs(len(facts.outputs)))


def _alias_first(facts: Facts) -> KernelMemory:
    return KernelMemory(alias=((0, 0),))


def _bitcast(facts: Facts) -> KernelMemory:
    """bitcast_op.cc makes an empty tensor first, which asks for one element."""
    return _with_events((("temp", 4),), alias=((0, 0),))


def _alias_each(facts: Facts) -> KernelMemory:
    return KernelMemory(alias=tuple((i, i) for i in range(len(facts.outputs))))


def _nothing(facts: Facts) -> KernelMemory:
    """Outputs, if any, are kept by the kernel or by the runtime and cost nothing per step."""
    return KernelMemory()


def _forwarding(*inputs: int) -> Rule:
    """`forward_input_or_allocate_output(inputs, 0)`."""

    def rule(facts: Facts) -> KernelMemory:
        return KernelMemory(forward=_candidates(facts, 0, inputs), events=(("out", 0),))

    return rule


def _events_rule(
    compute: Callable[[Facts], tuple[Sequence[Event], bool]], forward: tuple[int, ...] = ()
) -> Rule:
    """A rule from a function of `workspace` that gives (events, exact)."""

    def rule(facts: Facts) -> KernelMemory:
        events, exact = compute(facts)
        return _with_events(events, forward=_candidates(facts, 0, forward) if forward else (), exact=exact)

    return rule


def _view_or_fresh(decide: Callable[[Facts], tuple[bool, bool]], source: int = 0) -> Rule:
    """A kernel that hands its input on where it can (decide gives (is a view, exact)), else copies."""

    def rule(facts: Facts) -> KernelMemory:
        view, exact = decide(facts)
        count = len(facts.outputs)
        if view:
            return KernelMemory(alias=tuple((i, source) for i in range(count)), exact=exact)
        return KernelMemory(events=_outs(count), exact=exact)

    return rule


def _add_n(facts: Facts) -> KernelMemory:
    """aggregate_ops.h: one input is handed on; else the first input that can be reused is the sum."""
    if len(facts.inputs) == 1:
        return KernelMemory(alias=((0, 0),))
    return KernelMemory(forward=_candidates(facts, 0, range(len(facts.inputs))), events=(("out", 0),))


def _reduction(facts: Facts) -> KernelMemory:
    """reduction_ops_common.h: nothing to reduce hands the input on; four or more runs transpose it first."""
    if facts.inputs[0].num_elements == facts.outputs[0].num_elements != None:  # noqa: E711 (a chain)
        return KernelMemory(alias=((0, 0),))
    events, exact = workspace.reduction(facts)
    return _with_events(events, exact=exact)


def _pad(facts: Facts) -> KernelMemory:
    """pad_op.cc: no padding hands the input on; else the paddings are copied as they are checked."""
    if facts.inputs[0].shape == facts.outputs[0].shape is not None:
        return KernelMemory(alias=((0, 0),))
    rank = len(facts.outputs[0].shape or ())
    paddings = facts.inputs[1]
    return _with_events((("temp", 2 * rank * (8 if paddings.dtype == "int64" else 4)), ("out", 0)))


def _assign(facts: Facts) -> KernelMemory:
    """resource_variable_ops.cc: the variable adopts the value's buffer and drops its own."""
    return KernelMemory(retains=(1,))


def _update(*resources: int) -> Rule:
    def rule(facts: Facts) -> KernelMemory:
        return KernelMemory(updates=resources)

    return rule


def _list_holding(*inputs: int) -> Rule:
    """A tensor list that keeps its inputs' buffers; the list itself lives on the heap."""

    def rule(facts: Facts) -> KernelMemory:
        return KernelMemory(alias=tuple((o, i) for o in range(len(facts.outputs)) for i in inputs))

    return rule


def _pack(facts: Facts) -> KernelMemory:
    """pack_op.cc: one value is only reshaped."""
    return KernelMemory(alias=((0, 0),)) if len(facts.inputs) == 1 else _fresh(facts)


def _cross_entropy(facts: Facts) -> KernelMemory:
    """The gradient (output 1) may be written over the logits (input 0)."""
    events, exact = workspace.softmax_cross_entropy(facts)
    return _with_events(events, forward=_candidates(facts, 1, (0,)), exact=exact)


def _fused_batch_norm(facts: Facts) -> KernelMemory:
    """fused_batch_norm_op.cc: the batch's mean and variance may be written over the running ones."""
    if facts.device.onednn and facts.inputs[0].dtype != "float16":
        row = facts.outputs[1].nbytes or 0
        return _with_events((*_outs(len(facts.outputs)), ("temp", row), ("temp", row)), exact=False)
    forward = (*_candidates(facts, 1, (3,)), *_candidates(facts, 2, (4,)))
    return KernelMemory(forward=forward, events=_outs(len(facts.outputs)))


def _max_pool_grad(facts: Facts) -> KernelMemory:
    """maxpooling_op.cc: pools again into the buffer of the pooled input, and writes over the image."""
    events, exact = workspace.max_pool_grad(facts)
    memory = _with_events(events, forward=_candidates(facts, 0, (0,)), exact=exact)
    return memory._replace(temp_forward=((0, (1,)),) if memory.workspace_bytes else ())


def _lstm_block_cell(facts: Facts) -> KernelMemory:
    """The old states are written over; by which outputs is not sure, but all have one size."""
    events, _ = workspace.lstm_block_cell(facts)
    forward = (*_candidates(facts, 0, (1,)), *_candidates(facts, 1, (2,)))
    return _with_events(events, forward=forward, exact=False)


def _gather_nd(facts: Facts) -> KernelMemory:
    """gather_nd_op_cpu_impl.h: a number to report a bad index by."""
    return _with_events((("out", 0), ("temp", 4)))


_VARIANT_BYTES = 64


def _list(facts: Facts) -> KernelMemory:
    """list_kernels.cc: a variant, whose elements come later."""
    return KernelMemory(events=(("hold", _VARIANT_BYTES),))


def _list_from_tensor(facts: Facts) -> KernelMemory:
    events, exact = workspace.list_from_tensor(facts)
    return _with_events(events, exact=exact)


# --- the table: one op per line ---------------------------------------------------------------------------
# An op that is not here allocates its outputs, in order, and nothing else: true of most kernels.

_UNARY = _Entry(_forwarding(0))
_BINARY = _Entry(_forwarding(0, 1))
_FRESH = _Entry(_fresh)
_VIEW = _Entry(_alias_first)
_FREE = _Entry(_nothing)
_LIST = _Entry(_list)

_RULES: dict[str, _Entry] = {
    # Hand their input on (identity_op.h, reshape_op.h, shape_ops.h, bitcast_op.cc).
    "Bitcast": _Entry(_bitcast),
    "CheckNumerics": _VIEW,
    "EnsureShape": _VIEW,
    "ExpandDims": _VIEW,
    "Identity": _VIEW,
    "IdentityN": _Entry(_alias_each),
    "PlaceholderWithDefault": _VIEW,
    "PreventGradient": _VIEW,
    "Reshape": _VIEW,
    "Squeeze": _VIEW,
    "StopGradient": _VIEW,
    "_EagerConst": _VIEW,
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
    "Ceil": _UNARY,
    "Cos": _UNARY,
    "Cosh": _UNARY,
    "Digamma": _UNARY,
    "Elu": _UNARY,
    "Erf": _UNARY,
    "Erfc": _UNARY,
    "Erfinv": _UNARY,
    "Exp": _UNARY,
    "Expm1": _UNARY,
    "Floor": _UNARY,
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
    "Pow": _BINARY,
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
    "AddN": _Entry(_add_n),
    "BiasAdd": _UNARY,
    "BiasAddV1": _UNARY,
    "ClipByValue": _UNARY,
    "_FusedConv2D": _Entry(_events_rule(workspace.conv2d)),
    "_FusedMatMul": _Entry(_events_rule(workspace.matmul)),
    "_UnaryOpsComposition": _UNARY,
    "LogSoftmax": _UNARY,
    "MatrixBandPart": _UNARY,
    "MatrixSetDiagV3": _UNARY,
    "MaxPoolGradWithArgmax": _UNARY,
    "Select": _Entry(_forwarding(1, 2)),
    "SelectV2": _Entry(_forwarding(1, 2)),
    "Snapshot": _UNARY,
    "Softmax": _UNARY,
    # Views where shapes and alignment allow, else copies.
    "BroadcastTo": _Entry(_view_or_fresh(workspace.is_same_shape_view)),
    "Cast": _Entry(_view_or_fresh(workspace.is_same_dtype_view)),
    "ConjugateTranspose": _Entry(_view_or_fresh(workspace.is_transpose_view), values=(1,)),
    "Pack": _Entry(_pack),
    "Slice": _Entry(_view_or_fresh(workspace.is_first_dim_view), values=(1,)),
    "Split": _Entry(_view_or_fresh(workspace.is_split_view, source=1)),
    "SplitV": _Entry(_view_or_fresh(workspace.is_split_view)),
    "StridedSlice": _Entry(_view_or_fresh(workspace.is_first_dim_view), values=(1, 3)),
    "Tile": _Entry(_view_or_fresh(workspace.is_same_shape_view)),
    "Transpose": _Entry(_view_or_fresh(workspace.is_transpose_view), values=(1,)),
    "Unpack": _Entry(_view_or_fresh(workspace.is_unpack_view), attrs=("axis",)),
    # Reductions (reduction_ops_common.h).
    "All": _Entry(_reduction, values=(1,)),
    "Any": _Entry(_reduction, values=(1,)),
    "Max": _Entry(_reduction, values=(1,)),
    "Mean": _Entry(_reduction, values=(1,)),
    "Min": _Entry(_reduction, values=(1,)),
    "Prod": _Entry(_reduction, values=(1,)),
    "Sum": _Entry(_reduction, values=(1,)),
    "EuclideanNorm": _Entry(_events_rule(workspace.reduction), values=(1,)),
    "BiasAddGrad": _Entry(_events_rule(workspace.bias_add_grad), attrs=("data_format",)),
    # Kernels with temporaries: see workspace.py.
    "BatchMatMul": _Entry(_events_rule(workspace.matmul)),
    "BatchMatMulV2": _Entry(_events_rule(workspace.matmul)),
    "BatchMatMulV3": _Entry(_events_rule(workspace.matmul)),
    "Conv2D": _Entry(_events_rule(workspace.conv2d)),
    "Conv2DBackpropFilter": _Entry(_events_rule(workspace.conv2d_backprop_filter)),
    "Conv2DBackpropInput": _Entry(_events_rule(workspace.conv2d_backprop_input)),
    "DepthwiseConv2dNative": _Entry(_events_rule(workspace.depthwise)),
    "DepthwiseConv2dNativeBackpropFilter": _Entry(_events_rule(workspace.depthwise_backprop_filter)),
    "DepthwiseConv2dNativeBackpropInput": _Entry(_events_rule(workspace.depthwise_backprop_input)),
    "Einsum": _Entry(_events_rule(workspace.einsum), attrs=("equation",)),
    "FusedBatchNorm": _Entry(_fused_batch_norm),
    "FusedBatchNormGrad": _Entry(_events_rule(workspace.fused_batch_norm_grad), attrs=("is_training",)),
    "FusedBatchNormGradV2": _Entry(_events_rule(workspace.fused_batch_norm_grad), attrs=("is_training",)),
    "FusedBatchNormGradV3": _Entry(_events_rule(workspace.fused_batch_norm_grad), attrs=("is_training",)),
    "FusedBatchNormV2": _Entry(_fused_batch_norm),
    "FusedBatchNormV3": _Entry(_fused_batch_norm),
    "GatherNd": _Entry(_gather_nd),
    "GRUBlockCell": _Entry(_events_rule(workspace.gru_block_cell, forward=(1,))),
    "LSTMBlockCell": _Entry(_lstm_block_cell),
    "MatMul": _Entry(_events_rule(workspace.matmul)),
    "Conv3D": _Entry(_events_rule(workspace.conv3d)),
    "MaxPool": _Entry(_events_rule(workspace.max_pool)),
    "MaxPool3D": _Entry(_events_rule(workspace.max_pool)),
    "MaxPoolGrad": _Entry(_max_pool_grad),
    "MirrorPadGrad": _Entry(_events_rule(workspace.mirror_pad_grad)),
    "Pad": _Entry(_pad),
    "PadV2": _Entry(_pad),
    "SoftmaxCrossEntropyWithLogits": _Entry(_cross_entropy),
    "SparseSoftmaxCrossEntropyWithLogits": _Entry(_cross_entropy),
    # Variables (resource_variable_ops.cc, training_ops.cc). Reads share the variable's buffer.
    "AssignVariableOp": _Entry(_assign),
    "ReadVariableOp": _VIEW,
    "_ReadVariablesOp": _Entry(_alias_each),
    "AssignAddVariableOp": _Entry(_update(0)),
    "AssignSubVariableOp": _Entry(_update(0)),
    "ResourceScatterAdd": _Entry(_update(0)),
    "ResourceScatterDiv": _Entry(_update(0)),
    "ResourceScatterMax": _Entry(_update(0)),
    "ResourceScatterMin": _Entry(_update(0)),
    "ResourceScatterMul": _Entry(_update(0)),
    "ResourceScatterSub": _Entry(_update(0)),
    "ResourceScatterUpdate": _Entry(_update(0)),
    "ResourceApplyGradientDescent": _Entry(_update(0)),
    "ResourceApplyProximalGradientDescent": _Entry(_update(0)),
    "ResourceStridedSliceAssign": _Entry(_update(0)),
    "ResourceApplyMomentum": _Entry(_update(0, 1)),
    "ResourceApplyKerasMomentum": _Entry(_update(0, 1)),
    "ResourceSparseApplyMomentum": _Entry(_update(0, 1)),
    "ResourceSparseApplyKerasMomentum": _Entry(_update(0, 1)),
    "ResourceApplyAdagrad": _Entry(_update(0, 1)),
    "ResourceApplyAdagradV2": _Entry(_update(0, 1)),
    "ResourceSparseApplyAdagrad": _Entry(_update(0, 1)),
    "ResourceSparseApplyAdagradV2": _Entry(_update(0, 1)),
    "ResourceApplyAddSign": _Entry(_update(0, 1)),
    "ResourceApplyPowerSign": _Entry(_update(0, 1)),
    "ResourceApplyAdam": _Entry(_update(0, 1, 2)),
    "ResourceApplyAdaMax": _Entry(_update(0, 1, 2)),
    "ResourceApplyAdadelta": _Entry(_update(0, 1, 2)),
    "ResourceApplyFtrl": _Entry(_update(0, 1, 2)),
    "ResourceApplyFtrlV2": _Entry(_update(0, 1, 2)),
    "ResourceApplyRMSProp": _Entry(_update(0, 1, 2)),
    "ResourceSparseApplyRMSProp": _Entry(_update(0, 1, 2)),
    "ResourceSparseApplyAdadelta": _Entry(_update(0, 1, 2)),
    "ResourceApplyAdamWithAmsgrad": _Entry(_update(0, 1, 2, 3)),
    "ResourceApplyCenteredRMSProp": _Entry(_update(0, 1, 2, 3)),
    # Tensor lists (list_kernels.h): the list holds its elements' buffers.
    "TensorListFromTensor": _Entry(_list_from_tensor),
    "TensorListGetItem": _Entry(_list_holding(0)),
    "TensorListPopBack": _Entry(_list_holding(0)),
    "TensorListPushBack": _Entry(_list_holding(0, 1)),
    "TensorListSetItem": _Entry(_list_holding(0, 2)),
    "TensorListElementShape": _FRESH,
    "TensorListLength": _FRESH,
    "TensorListReserve": _LIST,
    "EmptyTensorList": _LIST,
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
    "Conv3DBackpropFilterV2": _FRESH,
    "Conv3DBackpropInputV2": _FRESH,
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
    "ResizeBilinearGrad": _FRESH,
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
    "TopKV2": _FRESH,
    "TruncatedNormal": _FRESH,
    "UnsortedSegmentMax": _FRESH,
    "UnsortedSegmentSum": _FRESH,
    "VariableShape": _FRESH,
    "Where": _FRESH,
}

_DEFAULT = _Entry(_fresh)
_cache: dict[object, KernelMemory] = {}
_NO_VALUES: Mapping[int, tuple[int, ...]] = {}


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
    entry = _RULES.get(op, _DEFAULT)
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
        found = entry.rule(Facts(attrs, inputs, outputs, device, values))
        if device.kind == "gpu" and found.events:  # measured on CPUs only; GPU kernels may take scratch
            found = found._replace(exact=False)
        _cache[key] = found
    return found


def unmodelled(op: str) -> bool:
    """Whether nothing is known of the op's kernel, so that the default stands in for it."""
    return op not in _RULES
