"""Finds kernels that can read an encoding in place of a tensor: a predicate of its values, or positions of maxima.

ReluGrad needs only the signs of its features, and MaxPoolGrad only the position of the maximum in each window. Each has
a twin, an op that reads the encoding and gives the same bits (docs/encodings.md; Jain et al., *Gist*, ISCA 2018).

Invariant: pure functions of the graph and the device. Encodings give the same bits wherever they are used. Bodies of
loops and conditionals are graphs of their own (analysis/body_encodings.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

from tfswap.analysis.constants import constant_nodes
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.ir.views import passed_on
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Rates

FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
LONG_WAIT = 8.0
"""An encoding pays where the tensor waits at least this multiple of the encoding's time."""
SMALL_WINDOW, LARGEST_WINDOW = 16, 256
"""The most elements of pooling windows with positions of four and of eight bits (csrc/codecs/max_pool_ops.cc)."""


class Codec(NamedTuple):
    """The encoding for a type of kernel.

    Attributes:
        source: the position of the input that is encoded.
        kept: the positions of inputs that the twin reads unchanged, in order.
        encode: the op that encodes the source.
        take: the twin, the op that reads the encoding.
        predicate: the predicate of EncodeMask; "" for other encodings.
        copied: names of the kernel's attributes that the twin has too.
        encode_copied: names of the kernel's attributes that the encoding op has too.
        encoding_first: whether the twin reads the encoding before the kept inputs, and not after them.
        takes_shape: whether the twin reads the source's shape as its last input.
        gpu: whether the twin also has the bits of TensorFlow's GPU kernel.
    """

    source: int
    kept: tuple[int, ...]
    encode: str
    take: str
    predicate: str = ""
    copied: tuple[str, ...] = ("T",)
    encode_copied: tuple[str, ...] = ()
    encoding_first: bool = False
    takes_shape: bool = False
    gpu: bool = False


class Encoding(NamedTuple):
    """One kernel that can read an encoding.

    Attributes:
        kernel: the kernel.
        tensor: the tensor that it reads, without aliases.
        codec: the encoding and its ops.
        encoded: the type of the encoding.
    """

    kernel: Node
    tensor: Output
    codec: Codec
    encoded: TensorType

    @property
    def dropped(self) -> tuple[Output, ...]:
        """The inputs of the kernel that its twin does not read."""
        return tuple(t for position, t in enumerate(self.kernel.inputs) if position not in self.codec.kept)


_SELECT = Codec(
    0,
    (1, 2),
    custom_ops.ENCODE_MASK,
    custom_ops.SELECT_BY_MASK,
    "true",
    encoding_first=True,
    takes_shape=True,
    gpu=True,  # a choice, not a product
)
_WINDOW = ("ksize", "strides", "padding", "explicit_paddings")

_POOL = Codec(
    0,
    (2,),
    custom_ops.ENCODE_MAX_POOL,
    custom_ops.MAX_POOL_GRAD_FROM_POSITIONS,
    copied=("T", *_WINDOW),
    encode_copied=_WINDOW,
    takes_shape=True,
)

# Products and pooling are not for GPUs: their kernels may flush denormals or break ties differently. Not compared yet.
_CODECS: dict[str, Codec] = {
    "_MklNativeMaxPoolGrad": _POOL,
    "LeakyReluGrad": Codec(
        1, (0,), custom_ops.ENCODE_MASK, custom_ops.LEAKY_RELU_GRAD_FROM_MASK, "positive", ("T", "alpha")
    ),
    "MaxPoolGrad": _POOL,
    "Relu6Grad": Codec(1, (0,), custom_ops.ENCODE_MASK, custom_ops.MULTIPLY_BY_MASK, "relu6"),
    "ReluGrad": Codec(1, (0,), custom_ops.ENCODE_MASK, custom_ops.MULTIPLY_BY_MASK, "positive"),
    "Select": _SELECT,
    "SelectV2": _SELECT,
}


def waits_long(seconds: float, nbytes: int, rates: Rates) -> bool:
    """Whether it pays to encode a tensor that waits this many seconds between two uses."""
    return seconds >= LONG_WAIT * nbytes / rates.memory_bytes_per_s


def find_encodings(graph: Graph, device: DeviceModel, *, same_bits: bool = True) -> list[Encoding]:
    """Every kernel of `graph` that runs in the step and can read an encoding, in the graph's order.

    Args:
        same_bits: only encodings whose result has the bits of the device's own kernel. Otherwise a gradient may differ
            in its last bits, and in the choice among equal maxima.
    """
    found: list[Encoding] = []
    constants = constant_nodes(graph, graph.topological())
    for node in graph:
        codec = _CODECS.get(node.op)
        if codec is None or node in constants or (same_bits and device.is_gpu and not codec.gpu):
            continue
        encoded = _ENCODED[codec.encode](node, codec, same_bits and device.onednn)
        if encoded is not None:
            # Kernels that read aliases of one tensor share an encoding.
            found.append(Encoding(node, passed_on(node.inputs[codec.source]), codec, encoded))
    return found


def _mask(node: Node, codec: Codec, apart: bool) -> TensorType | None:
    """A bit for each value, of a tensor of the result's shape."""
    source, result = node.inputs[codec.source].type, node.outputs[0]
    count = source.num_elements
    if result.dtype not in FLOATS or count is None or source.shape != result.shape:
        return None
    for position in codec.kept:
        kept = node.inputs[position].type
        if kept.shape != result.shape and not (codec.encoding_first and kept.shape == ()):
            return None
    return TensorType("uint8", (-(-count // 8),))


def _positions(node: Node, codec: Codec, apart: bool) -> TensorType | None:
    """The position of each maximum in its window: half a byte, or one.

    Args:
        apart: exclude overlapping windows. oneDNN adds the gradients of an element in several windows in another order.
    """
    pooled = node.inputs[1].type
    window, strides = _spatial(node, "ksize"), _spatial(node, "strides")
    if pooled.dtype not in FLOATS or window is None or strides is None or node.attrs.get("data_format") != b"NHWC":
        return None
    if pooled.shape is None or len(pooled.shape) != 4 or None in pooled.shape or pooled.num_elements is None:
        return None
    paddings = _integers(node, "explicit_paddings") or (0,) * 8
    if max(paddings[2:4]) >= window[0] or max(paddings[4:6]) >= window[1]:
        return None  # a window can be within the padding
    if apart and any(stride < size for size, stride in zip(window, strides, strict=True)):
        return None
    elements = math.prod(window)
    if elements > LARGEST_WINDOW:
        return None
    depth = pooled.shape[3] or 0
    pixel_bytes = -(-depth // 2) if elements <= SMALL_WINDOW else depth
    pixels = pooled.num_elements // depth if depth else 0
    return TensorType("uint8", (pixels * pixel_bytes,))


def _spatial(node: Node, attribute: str) -> tuple[int, int] | None:
    """Rows and columns of a window's attribute; None where the window also spans images or channels."""
    value = _integers(node, attribute)
    return (value[1], value[2]) if len(value) == 4 and value[0] == value[3] == 1 else None


def _integers(node: Node, attribute: str) -> tuple[int, ...]:
    value = node.attrs.get(attribute)
    return cast("tuple[int, ...]", value) if isinstance(value, tuple) else ()


_ENCODED: dict[str, Callable[[Node, Codec, bool], TensorType | None]] = {
    custom_ops.ENCODE_MASK: _mask,
    custom_ops.ENCODE_MAX_POOL: _positions,
}
"""For each encoding op, a function that gives the type of the encoding, or None where the kernel can't read one."""
