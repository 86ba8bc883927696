"""Convolutions and their gradients: buffers of columns, padded filters and oneDNN's scratchpads.

Eigen's own packing of convolutions is outside of the arena.
"""

from __future__ import annotations

from math import prod

from tfswap.ir.types import TensorType
from tfswap.kernels.columns import conv3d_columns, most_columns
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.memory_rules import Entry, events_rule, fused
from tfswap.kernels.onednn import onednn, onednn_convolution
from tfswap.kernels.temporaries import (
    OUT0,
    UNKNOWN,
    Events,
    Facts,
    Measured,
    after_output,
    ceil_div,
    element_bytes,
    known_shape,
)

_WORKING_SET_BYTES = 30 << 20  # conv_grad_*_ops: the L3 cache that shards of images are sized for
_THREAD_WORK_BYTES = (
    256 << 10
)  # conv_grad_input_ops.h: the L2 cache; with less work per thread, shards have many images


def conv2d(facts: Facts) -> Events | Measured:
    """conv_ops*.h: Eigen's spatial convolution, whose packing is outside the arena."""
    image, kernel = facts.inputs[0], facts.inputs[1]
    if image.shape and kernel.shape and image.shape[-1] != kernel.shape[2]:  # in groups: all three are copied
        copies = [kind.nbytes or 0 for kind in (image, kernel, facts.outputs[0])]
        return after_output(copies, exact=not facts.device.onednn)
    return onednn_convolution(facts) if facts.device.onednn else ((OUT0,), True)


def conv3d(facts: Facts) -> Events | Measured:
    """conv_ops_3d.cc: Eigen's cuboid convolution, whose packing is outside the arena."""
    return onednn_convolution(facts) if facts.device.onednn else ((OUT0,), True)


def conv2d_backprop_input(facts: Facts) -> Events | Measured:
    """conv_grad_input_ops.h, Conv2DCustomBackpropInputOp: a column buffer for a shard of images."""
    kernel, gradient = known_shape(facts.inputs[1]), known_shape(facts.inputs[2])
    if kernel is None or gradient is None:
        return UNKNOWN
    if _is_onednn_gradient(facts):
        return onednn(facts)
    pixels, window, _ = _image_products(kernel, gradient)
    parallel = gradient[0] == 1 or adds_in_parallel(kernel, gradient, facts.outputs[0], facts.device)
    shard = 1 if parallel else images_of_shard(kernel, gradient, facts.outputs[0])
    return after_output([shard * pixels * window * element_bytes(facts.outputs[0])], exact=not facts.device.onednn)


def conv2d_backprop_filter(facts: Facts) -> Events | Measured:
    """conv_grad_filter_ops.cc, Conv2DCustomBackpropFilterOp: a column buffer, sized for the cache alone."""
    kernel, gradient = known_shape(facts.outputs[0]), known_shape(facts.inputs[2])
    if kernel is None or gradient is None:
        return UNKNOWN
    if _is_onednn_gradient(facts):
        return onednn(facts)
    pixels, window, _ = _image_products(kernel, gradient)
    shard = images_of_shard(kernel, gradient, facts.outputs[0])
    return after_output([shard * pixels * window * element_bytes(facts.outputs[0])], exact=not facts.device.onednn)


def images_of_shard(kernel: tuple[int, ...], gradient: tuple[int, ...], made: TensorType) -> int:
    """conv_grad_*_ops: the images that a gradient's kernel works on together, by the cache alone."""
    return ceil_div(_WORKING_SET_BYTES // element_bytes(made), _image_work(kernel, gradient))


def adds_in_parallel(kernel: tuple[int, ...], gradient: tuple[int, ...], made: TensorType, device: DeviceModel) -> bool:
    """conv_grad_input_ops.h: whether all threads work on one image, however many there are."""
    work = _image_work(kernel, gradient) // device.intra_op_threads
    return work >= _THREAD_WORK_BYTES // element_bytes(made)


def joint_gradients(facts: Facts) -> Events:
    """mkl_conv_grad_filter_ops.cc: the bias gradient is allocated after the filter's."""
    return (OUT0, ("out", 1), *onednn(facts)[0][1:]), False


def conv3d_backprop_input(facts: Facts) -> Events | Measured:
    """conv_grad_ops_3d.cc, Conv3DCustomBackpropInputOp: a column buffer for a shard of images."""
    return _conv3d_backprop(facts, facts.outputs[0], facts.inputs[1], one_by_one=True)


def conv3d_backprop_filter(facts: Facts) -> Events | Measured:
    """conv_grad_ops_3d.cc, Conv3DCustomBackpropFilterOp: a column buffer, except for half precision (Eigen's)."""
    if not _is_onednn_gradient(facts) and facts.outputs[0].dtype not in ("float32", "float64"):
        return (OUT0,), True
    return _conv3d_backprop(facts, facts.inputs[0], facts.outputs[0], one_by_one=False)


def _conv3d_backprop(facts: Facts, volume: TensorType, kernel: TensorType, one_by_one: bool) -> Events | Measured:
    if _is_onednn_gradient(facts):
        return onednn(facts)
    gradient, window = known_shape(facts.inputs[2]), known_shape(kernel)
    if gradient is None or window is None or volume.num_elements is None:
        return UNKNOWN
    size = element_bytes(facts.outputs[0])
    cache = facts.device.l3_cache_bytes
    columns = conv3d_columns(gradient, window, volume.num_elements, (cache or 1) // size, one_by_one=one_by_one)
    if cache is None and columns and not (one_by_one and gradient[0] == 1):
        # A larger cache holds more images than there are.
        most = most_columns(gradient, window, volume.num_elements)
        return after_output([most // columns * columns * size], exact=False)
    return after_output([columns * size] if columns else [])


def _is_onednn_gradient(facts: Facts) -> bool:
    """Whether oneDNN's kernel computes the gradient: not with explicit padding (mkl_layout_pass.cc)."""
    explicit = facts.attrs.get("padding") == b"EXPLICIT"
    return facts.device.onednn and facts.outputs[0].dtype in facts.device.onednn_dtypes and not explicit


def _image_products(filter_shape: tuple[int, ...], gradient_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(pixels of an output image, elements under one filter, output channels)."""
    return gradient_shape[1] * gradient_shape[2], prod(filter_shape[:3]), filter_shape[3]


def _image_work(kernel: tuple[int, ...], gradient: tuple[int, ...]) -> int:
    """The elements of an image's gradient, its columns and the filter."""
    pixels, window, channels = _image_products(kernel, gradient)
    return pixels * channels + window * channels + pixels * window


_PACKET_BYTES = 32  # TensorFlow's wheels are built for AVX


def depthwise(facts: Facts) -> Events:
    """depthwise_conv_op.cc: a padded filter where channels do not fill packets; a patch per shard."""
    kernel = known_shape(facts.inputs[1])
    if kernel is None:
        return UNKNOWN
    if facts.device.is_gpu:
        return (OUT0,), False
    size = element_bytes(facts.outputs[0])
    padded = _depthwise_padded(kernel, size)
    filters = 1 if padded != prod(kernel) * size else 0
    return after_output([padded] * (filters + _depthwise_shards(facts)), exact=False)


def depthwise_backprop_input(facts: Facts) -> Events:
    """depthwise_conv_grad_op.cc: as for the convolution, and a row of input channels per shard."""
    kernel = known_shape(facts.inputs[1])
    if kernel is None:
        return UNKNOWN
    if facts.device.is_gpu:
        return (OUT0,), False
    size = element_bytes(facts.outputs[0])
    padded = _depthwise_padded(kernel, size)
    filters = 1 if padded != prod(kernel) * size else 0
    row = padded // (kernel[0] * kernel[1])
    sizes = [padded] * filters + [padded, row] * _depthwise_shards(facts)
    return after_output(sizes, exact=False)


def depthwise_backprop_filter(facts: Facts) -> Events:
    """depthwise_conv_grad_op.cc: a partial filter gradient per image, then as for the convolution."""
    kernel, image = known_shape(facts.outputs[0]), known_shape(facts.inputs[0])
    if kernel is None or image is None:
        return UNKNOWN
    padded = _depthwise_padded(kernel, element_bytes(facts.outputs[0]))
    return after_output([image[0] * padded, *[padded] * _depthwise_shards(facts)], exact=False)


def _depthwise_padded(kernel: tuple[int, ...], size: int) -> int:
    """Bytes of a filter (or an input patch) whose channels are padded to whole packets."""
    packet = max(1, _PACKET_BYTES // size)
    return kernel[0] * kernel[1] * ceil_div(kernel[2] * kernel[3], packet) * packet * size


def _depthwise_shards(facts: Facts) -> int:
    return max(1, facts.device.intra_op_threads)


RULES: dict[str, Entry] = {
    "_FusedConv2D": Entry(fused(conv2d), attrs=("fused_ops",)),
    "_FusedConv3D": Entry(fused(conv3d), attrs=("fused_ops",)),
    "_FusedDepthwiseConv2dNative": Entry(fused(conv2d), attrs=("fused_ops",)),
    "Conv2D": Entry(events_rule(conv2d)),
    "Conv2DBackpropFilter": Entry(events_rule(conv2d_backprop_filter), attrs=("padding",)),
    "Conv2DBackpropInput": Entry(events_rule(conv2d_backprop_input), attrs=("padding",)),
    "_MklNativeConv2DBackpropFilterWithBias": Entry(events_rule(joint_gradients)),
    "_MklNativeConv2DWithBias": Entry(events_rule(conv2d)),
    "_MklNativeFusedConv2D": Entry(fused(conv2d), attrs=("fused_ops",)),
    "_MklNativePadWithConv2D": Entry(events_rule(conv2d)),
    "_MklNativePadWithFusedConv2D": Entry(fused(conv2d), attrs=("fused_ops",)),
    "DepthwiseConv2dNative": Entry(events_rule(depthwise)),
    "DepthwiseConv2dNativeBackpropFilter": Entry(events_rule(depthwise_backprop_filter)),
    "DepthwiseConv2dNativeBackpropInput": Entry(events_rule(depthwise_backprop_input)),
    "Conv3D": Entry(events_rule(conv3d)),
    "Conv3DBackpropFilterV2": Entry(events_rule(conv3d_backprop_filter)),
    "Conv3DBackpropInputV2": Entry(events_rule(conv3d_backprop_input)),
}
