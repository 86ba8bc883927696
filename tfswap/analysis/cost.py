"""How long a kernel takes: an analytic model, the larger of its arithmetic and its memory traffic.

Only ratios matter to a planner: which copy hides behind which kernels. Rates describe a kind of machine, so
that the same graph and limit give the same plan everywhere; profiled times can stand in for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tfswap.analysis.device import DeviceModel
from tfswap.ir.graph import Node
from tfswap.ir.types import TensorType


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        flops_per_s: sustained multiply-adds count as two.
        memory_bytes_per_s: what element-wise kernels read and write.
        out_bytes_per_s: copies to host memory.
        in_bytes_per_s: copies from host memory.
        launch_s: the least that a kernel takes.
        copy_share: of the time of a copy, what kernels lose to it: none where engines of their own make it.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    launch_s: float
    copy_share: float = 0.0


# A server core at AVX-512 width sustains about 80 GFLOP/s in TensorFlow's contractions, and shares its memory
# bandwidth with the copies; measured on two cores. The GPU row is an A100 on PCIe 4.
CPU_CORE_FLOPS_PER_S = 80e9
CPU_CORE_MEMORY_BYTES_PER_S = 5e9
CPU_COPY_BYTES_PER_S = 4e9
GPU = Rates(15e12, 1.2e12, 20e9, 20e9, 5e-6)


def default_rates(device: DeviceModel) -> Rates:
    if device.kind == "gpu":
        return GPU
    threads = max(1, device.intra_op_threads)
    return Rates(
        CPU_CORE_FLOPS_PER_S * threads,
        CPU_CORE_MEMORY_BYTES_PER_S * min(threads, 8),
        CPU_COPY_BYTES_PER_S,
        CPU_COPY_BYTES_PER_S,
        3e-6,
        # A copy takes one of the cores that kernels run on.
        1 / min(threads, 8),
    )


def _matmul(node: Node, inputs: Sequence[TensorType]) -> float:
    """2 m n k: the contracted dimension is the one that the transposition leaves."""
    left = inputs[0].shape
    transposed = node.attrs.get("transpose_a") or node.attrs.get("adj_x")
    if not left or len(left) < 2:
        return 0.0
    return 2.0 * _elements(node.outputs[0]) * (left[-2 if transposed else -1] or 1)


def _per_output(filter_index: int) -> Callable[[Node, Sequence[TensorType]], float]:
    """A convolution: each output element takes a multiply-add per filter element of its channel."""

    def flops(node: Node, inputs: Sequence[TensorType]) -> float:
        shape = inputs[filter_index].shape or (1,)
        return 2.0 * _elements(node.outputs[0]) * math.prod(d or 1 for d in shape[:-1])

    return flops


def _conv_gradient(filter_index: int | None, gradient_index: int) -> Callable[[Node, Sequence[TensorType]], float]:
    """As many multiply-adds as the forward convolution: the gradient's elements times the filter's window."""

    def flops(node: Node, inputs: Sequence[TensorType]) -> float:
        shape = (node.outputs[0] if filter_index is None else inputs[filter_index]).shape or (1,)
        return 2.0 * _elements(inputs[gradient_index]) * math.prod(d or 1 for d in shape[:-1])

    return flops


def _depthwise(gradient_index: int | None, filter_index: int) -> Callable[[Node, Sequence[TensorType]], float]:
    def flops(node: Node, inputs: Sequence[TensorType]) -> float:
        window = (inputs[filter_index] if filter_index < len(inputs) else node.outputs[0]).shape or (1, 1)
        maps = node.outputs[0] if gradient_index is None else inputs[gradient_index]
        # One multiply-add at a time: depthwise kernels reach a small part of a contraction's rate.
        return 8.0 * _elements(maps) * math.prod(d or 1 for d in window[:2])

    return flops


# Ops whose arithmetic can outweigh their memory traffic.
_FLOPS: dict[str, Callable[[Node, Sequence[TensorType]], float]] = {
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Conv2D": _per_output(1),
    "Conv2DBackpropFilter": _conv_gradient(None, 2),
    "Conv2DBackpropInput": _conv_gradient(1, 2),
    "Conv3D": _per_output(1),
    "Conv3DBackpropFilterV2": _conv_gradient(None, 2),
    "Conv3DBackpropInputV2": _conv_gradient(1, 2),
    "DepthwiseConv2dNative": _depthwise(None, 1),
    "DepthwiseConv2dNativeBackpropFilter": _depthwise(2, 3),
    "DepthwiseConv2dNativeBackpropInput": _depthwise(2, 1),
    "MatMul": _matmul,
}


def _elements(kind: TensorType) -> int:
    return kind.num_elements or 0


def kernel_seconds(node: Node, rates: Rates) -> float:
    """Seconds that one run of `node` takes on a device with these rates."""
    inputs = [t.type for t in node.inputs]
    traffic = sum(t.nbytes or 0 for t in (*inputs, *node.outputs))
    rule = _FLOPS.get(node.op)
    flops = rule(node, inputs) if rule else 0.0
    return max(rates.launch_s, flops / rates.flops_per_s, traffic / rates.memory_bytes_per_s)
