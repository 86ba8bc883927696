"""The temporaries that GPU kernels request from the arena.

Each function follows one source file of TensorFlow 2.21 and gives (events, exact), as those of temporaries.py. They
are compared with the allocator's record of the steps of seven nets on an H200 (tests/unit/gpu_allocations.json). CUB's
scratch for reductions, a few KiB, is left out.

Not handled: cuDNN's workspace where TensorFlow has no limit for it, and the padded copies of outputs by which
autotuning detects writes past their ends (`device.cudnn.without_redzones`).
"""

from __future__ import annotations

from typing import cast

from tfswap.ir.types import HALVES, TensorType
from tfswap.kernels.cudnn_algorithms import CHANNELS_FIRST
from tfswap.kernels.events import Event, out
from tfswap.kernels.memory_rules import Entry, events_rule
from tfswap.kernels.temporaries import OUT0, Events, Facts, known_shape

SORT_BYTES = 16 << 10
"""CUB's radix sort requests two copies of the keys, a 32nd of a copy, and these bytes."""


def convolution(facts: Facts) -> Events:
    """conv_ops_gpu.h, LaunchConvOpImpl: the filter in cuDNN's layout, and the image where it is padded."""
    image, kernel = facts.inputs[:2]
    result = facts.outputs[0]
    copied = [_bytes(kernel), *_padded(facts, image, kernel, result)]
    return _with_workspace(facts, copied, channels_last=[image, result])


def convolution_input_gradient(facts: Facts) -> Events:
    """conv_grad_input_ops.cc, LaunchConv2DBackpropInputOpImpl: the filter, and the gradient as cuDNN writes it."""
    kernel, gradient = facts.inputs[1:3]
    image = facts.outputs[0]
    copied = [_bytes(kernel), *(_padded(facts, image, kernel, gradient) or [_bytes(image)])]
    return _with_workspace(facts, copied, channels_last=[gradient])


def convolution_filter_gradient(facts: Facts) -> Events:
    """conv_grad_filter_ops.cc, LaunchConv2DBackpropFilterOpImpl: the gradient in cuDNN's layout; a padded image."""
    image, gradient = facts.inputs[0], facts.inputs[2]
    copied = [_bytes(facts.outputs[0]), *_padded(facts, image, facts.outputs[0], gradient)]
    return _with_workspace(facts, copied, channels_last=[image, gradient])


def depthwise_filter_gradient(facts: Facts) -> Events:
    """depthwise_conv_grad_op.cc: computed as a convolution in groups, whose filter gradient is then transposed."""
    return (OUT0, ("temp", _bytes(facts.outputs[0]))), False


def softmax(facts: Facts) -> Events:
    """softmax_op_gpu.cu.cc: each row's largest logit and its sum, in tensors of the result's shape."""
    kind = facts.outputs[0]
    nbytes = _bytes(kind)
    return (OUT0, ("temp", nbytes), ("temp", 2 * nbytes if kind.dtype in HALVES else nbytes)), False


def bias_add_grad(facts: Facts) -> Events:
    """bias_op.cc, ComputeWithReduceSum: with deterministic ops, a copy with channels last."""
    if not facts.device.deterministic or facts.attrs.get("data_format") not in CHANNELS_FIRST:
        return (OUT0,), False
    return (OUT0, ("temp", _bytes(facts.inputs[0]))), False


def unsorted_segment_sum(facts: Facts) -> Events:
    """segment_reduction_ops_gpu.cu.h: with deterministic ops, segments are sorted first."""
    ids, sums = facts.inputs[1], facts.outputs[0]
    if not facts.device.deterministic or not sums.shape:
        return (OUT0,), False
    keys = _bytes(ids)
    segments = (sums.shape[0] or 0) * (keys // (ids.num_elements or 1))
    sizes = [keys, keys, keys, 2 * keys + keys // 32 + SORT_BYTES, segments]
    return (OUT0, *(("temp", size) for size in sizes)), False


def recurrent(facts: Facts) -> Events:
    """cudnn_rnn_ops.cc, CudnnRNNForwardOp: the outputs for the gradient are allocated last."""
    outs = tuple(map(out, range(3)))
    return (*outs, *_recurrent_temporaries(facts), ("out", 3), ("out", 4)), False


def recurrent_gradient(facts: Facts) -> Events:
    """cudnn_rnn_ops.cc, CudnnRNNBackwardOp."""
    return (*map(out, range(4)), *_recurrent_temporaries(facts)), False


def _recurrent_temporaries(facts: Facts) -> list[Event]:
    """The sequences' lengths, and the workspace (compiler/recurrent_sizes.py)."""
    lengths = _bytes(facts.inputs[4]) if len(facts.inputs) > 4 else 0
    return [("temp", lengths), ("temp", facts.temporary_bytes or 0)]


def _padded(facts: Facts, image: TensorType, kernel: TensorType, result: TensorType) -> list[int]:
    """The bytes of the padded image, where the padding is larger at one end than at the other. Empty otherwise.

    cuDNN has one padding for both ends, so TensorFlow copies the image with the difference.
    """
    before, window, after = known_shape(image), known_shape(kernel), known_shape(result)
    if before is None or window is None or after is None or facts.attrs.get("padding") != b"SAME":
        return []
    strides = cast("tuple[int, ...]", facts.attrs["strides"])
    dilations = cast("tuple[int, ...]", facts.attrs.get("dilations") or (1,) * len(before))
    first = 2 if facts.attrs.get("data_format") in CHANNELS_FIRST else 1
    nbytes, uneven = _bytes(image), False
    for axis, length in enumerate(window[:-2], first):
        extent = before[axis]
        covered = (after[axis] - 1) * strides[axis] + (length - 1) * dilations[axis] + 1
        if max(covered - extent, 0) % 2:
            nbytes, uneven = nbytes // extent * (extent + 1), True
    return [nbytes] if uneven else []


def _with_workspace(facts: Facts, always: list[int], channels_last: list[TensorType]) -> Events:
    """The temporaries of a convolution by cuDNN, with the largest workspace allowed as the last one.

    cuDNN picks its algorithm at its first run, by time, among those whose workspace is allowed.

    Args:
        always: bytes of the tensors that are copied in either layout.
        channels_last: tensors that are also copied where the graph has channels last. cuDNN then computes with
            channels first, except for 16-bit floats and TF32 (`ComputeInNhwcEnabled`).
    """
    dtype = facts.outputs[0].dtype
    taken = dtype in HALVES or (dtype == "float32" and facts.device.tf32)
    if taken or facts.attrs.get("data_format") in CHANNELS_FIRST:
        channels_last = []
    sizes = [*always, *map(_bytes, channels_last)]
    if facts.device.workspace_bytes:
        sizes.append(facts.device.workspace_bytes)
    return (OUT0, *(("temp", size) for size in sizes)), False


def _bytes(kind: TensorType) -> int:
    return kind.nbytes or 0


_WINDOW = ("data_format", "dilations", "padding", "strides")
_GPU_CONVOLUTION = Entry(events_rule(convolution), attrs=_WINDOW)
_GPU_INPUT_GRADIENT = Entry(events_rule(convolution_input_gradient), attrs=_WINDOW)
_GPU_FILTER_GRADIENT = Entry(events_rule(convolution_filter_gradient), attrs=_WINDOW)

_GPU_RECURRENT = Entry(events_rule(recurrent))
_GPU_RECURRENT_GRADIENT = Entry(events_rule(recurrent_gradient))

RULES: dict[str, Entry] = {
    "BiasAddGrad": Entry(events_rule(bias_add_grad), attrs=("data_format",)),
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
    "DepthwiseConv2dNativeBackpropFilter": Entry(events_rule(depthwise_filter_gradient)),
    "LogSoftmax": Entry(events_rule(softmax, forward=(0,))),
    "Softmax": Entry(events_rule(softmax, forward=(0,))),
    "UnsortedSegmentSum": Entry(events_rule(unsorted_segment_sum)),
    "_FusedConv2D": _GPU_CONVOLUTION,
    "_FusedConv3D": _GPU_CONVOLUTION,
}
"""Kernels whose temporaries on a GPU differ from those on a CPU."""

COMMON = frozenset({"Einsum", "MirrorPadGrad", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})
"""Ops whose kernels for both devices request by the same code."""
