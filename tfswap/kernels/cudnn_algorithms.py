"""The algorithms by which cuDNN computes a convolution, with the workspace and the time of each.

Workspaces and operations are computed from shapes by published formulas, and are not measured.

- Implicit product (Chetlur et al. 2014, cuDNN): no workspace.
- Winograd (Lavin and Gray 2016): F(m x m, r x r) has (m + r - 1)^2 products for each m x m results. The fused kernel
  stores the transformed filters only (their 16 MiB for 512 x 512 channels), the other one images and results as well.
- FFT (Mathieu et al. 2014, Vasilache et al. 2015): all images, filters and results are transformed, padded to powers of
  two. Real data needs half of each transform. A complex multiply-add counts as 8 operations.

cuDNN's manual gives the limits: tiles of 32 x 32, transforms of up to 256, windows of 3 and 5 for Winograd, and no
fused Winograd kernel for the filter's gradient.

The time of an algorithm is that of its operations at the machine's rate of contractions, and of writing and reading its
workspace once. Only ratios between algorithms of one convolution are meaningful.

Not handled: convolutions over volumes, with strides, dilations or groups, and of other types than float32 have the
implicit product only. IMPLICIT_PRECOMP_GEMM, which is often faster and needs a few KiB of indices, counts as
IMPLICIT_GEMM. Every algorithm is assumed to use the tensor cores. cuDNN may process a batch in parts, with a smaller
workspace: this is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from tfswap.ir.graph import Node
from tfswap.ir.types import TensorType
from tfswap.kernels.hardware import Rates

FLOAT_BYTES, COMPLEX_BYTES = 4, 8
CHANNELS_FIRST = (b"NCHW", b"NCDHW")


class Algorithm(NamedTuple):
    """One way to compute a convolution.

    Attributes:
        name: cuDNN's name for it.
        workspace_bytes: the bytes of its workspace.
        operations: the number of its floating-point operations.
    """

    name: str
    workspace_bytes: int
    operations: float

    def seconds(self, rates: Rates) -> float:
        """The time that it takes on a machine with these rates."""
        return self.operations / rates.flops_per_s + 2 * self.workspace_bytes / rates.memory_bytes_per_s


class _Sizes(NamedTuple):
    """The sizes of a convolution, or of either of its gradients, in elements."""

    images: int
    image: tuple[int, int]
    channels: int
    window: tuple[int, int]
    filters: int
    result: tuple[int, int]


class _Parts(NamedTuple):
    """Positions of the convolution's image, filter and result among an op's inputs. None: the op's output."""

    image: int | None
    window: int | None
    result: int | None
    fused: bool  # whether cuDNN has Winograd's algorithm in one kernel


_OPS: dict[str, _Parts] = {
    "Conv2D": _Parts(0, 1, None, fused=True),
    "Conv2DBackpropFilter": _Parts(0, None, 2, fused=False),
    "Conv2DBackpropInput": _Parts(None, 1, 2, fused=True),
    "Conv3D": _Parts(0, 1, None, fused=False),
    "Conv3DBackpropFilterV2": _Parts(0, None, 2, fused=False),
    "Conv3DBackpropInputV2": _Parts(None, 1, 2, fused=False),
    "_FusedConv2D": _Parts(0, 1, None, fused=True),
}


def is_convolution(node: Node) -> bool:
    """Whether cuDNN computes the node, with an algorithm that depends on the workspace allowed."""
    return node.op in _OPS


def copied_bytes(node: Node) -> int:
    """Bytes of the image and the result that TensorFlow copies between layouts: channels last in the graph, channels
    first for cuDNN.

    0 for other nodes and for 16-bit floats, which tensor cores read in either layout. Filters are copied in both
    layouts, are small, and are not counted.
    """
    parts = _OPS.get(node.op)
    if parts is None or node.attrs.get("data_format") in CHANNELS_FIRST:
        return 0
    kinds = _kind(node, parts.image), _kind(node, parts.result)
    return sum(kind.nbytes or 0 for kind in kinds if kind.dtype in ("float32", "float64"))


def algorithms(node: Node) -> list[Algorithm]:
    """The algorithms for a convolution or a gradient of one. The first needs no workspace.

    Empty for other nodes, where sizes are unknown, and where there is nothing to compute, as of a batch without images:
    TensorFlow runs no algorithm then (conv_ops_impl.h, conv_grad_ops_3d.cc).
    """
    parts = _OPS.get(node.op)
    if parts is None:
        return []
    image, window, result = (_kind(node, where) for where in parts[:3])
    multiply_adds = _multiply_adds(window, result, node.attrs.get("data_format"))
    if not multiply_adds:
        return []
    found = [Algorithm("IMPLICIT_GEMM", 0, 2.0 * multiply_adds)]
    sizes = _plain_sizes(node, image, window, result)
    if sizes is None:
        return found
    for name, applies, laid_out in _OTHERS:
        if (parts.fused or name != FUSED) and applies(sizes):
            found.append(Algorithm(name, *laid_out(sizes)))
    return found


def _kind(node: Node, where: int | None) -> TensorType:
    return node.outputs[0] if where is None else node.inputs[where].type


def _multiply_adds(window: TensorType, result: TensorType, layout: object) -> int | None:
    """One for each element of the result and each element of the window that it is computed from."""
    if window.num_elements is None or result.num_elements is None or not window.shape or not window.shape[-1]:
        return None
    return result.num_elements * (window.num_elements // window.shape[-1])


def _plain_sizes(node: Node, image: TensorType, window: TensorType, result: TensorType) -> _Sizes | None:
    """None where only the implicit product applies: strides, dilations, groups, other types."""
    shapes = image.shape, window.shape, result.shape
    if any(shape is None or len(shape) != 4 or None in shape or 0 in shape for shape in shapes):
        return None
    if result.dtype != "float32" or not all(map(_is_one, (node.attrs.get("strides"), node.attrs.get("dilations", ())))):
        return None
    first = node.attrs.get("data_format") in CHANNELS_FIRST
    images, height, width, channels = _last(image.shape, first)
    _, rows, columns, _ = _last(result.shape, first)
    over, across, depth, filters = window.shape  # type: ignore[misc]
    if depth != channels:
        return None
    return _Sizes(images, (height, width), channels, (over, across), filters, (rows, columns))  # type: ignore[arg-type]


def _is_one(sizes: object) -> bool:
    """Whether strides or dilations are all 1."""
    return isinstance(sizes, tuple) and set(cast("tuple[object, ...]", sizes)) <= {1}


def _last(shape: Sequence[int | None] | None, channels_first: bool) -> tuple[int, int, int, int]:
    """Images, height, width, channels."""
    assert shape is not None
    n, a, b, c = shape
    return (n, b, c, a) if channels_first else (n, a, b, c)  # type: ignore[return-value]


Layout = tuple[int, float]
"""Bytes of a workspace, and operations."""


def _winograd_tiles(sizes: _Sizes, size: int) -> tuple[int, int]:
    """The number of tiles of `size` x `size` results, and the products of one tile and one pair of channels."""
    tiles = sizes.images * math.prod(-(-length // size) for length in sizes.result)
    return tiles, (size + sizes.window[0] - 1) ** 2


def _winograd(sizes: _Sizes) -> Layout:
    tiles, products = _winograd_tiles(sizes, 2)
    pairs = sizes.channels * sizes.filters
    return FLOAT_BYTES * products * pairs, 2.0 * products * tiles * pairs


def _winograd_nonfused(sizes: _Sizes) -> Layout:
    tiles, products = _winograd_tiles(sizes, 4)
    pairs = sizes.channels * sizes.filters
    elements = pairs + tiles * (sizes.channels + sizes.filters)
    return FLOAT_BYTES * products * elements, 2.0 * products * tiles * pairs


def _transformed(sizes: _Sizes, images: int, length: tuple[int, int]) -> Layout:
    """Transforms of this number of images, of the filters, and of as many results. `length`: their height and width."""
    frequencies = length[0] * (length[1] // 2 + 1)
    maps = images * (sizes.channels + sizes.filters) + sizes.channels * sizes.filters
    products = 8.0 * frequencies * images * sizes.channels * sizes.filters
    transforms = 2.5 * math.prod(length) * math.log2(math.prod(length)) * maps
    return COMPLEX_BYTES * frequencies * maps, products + transforms


def _fft_lengths(sizes: _Sizes) -> tuple[int, int]:
    """The smallest powers of two in which the convolution does not wrap around."""
    needed = (
        max(image, result + window - 1)
        for image, result, window in zip(sizes.image, sizes.result, sizes.window, strict=True)
    )
    height, width = (1 << (length - 1).bit_length() for length in needed)
    return height, width


def _fft(sizes: _Sizes) -> Layout:
    return _transformed(sizes, sizes.images, _fft_lengths(sizes))


TILE, LARGEST_FFT = 32, 256


def _fft_tiling(sizes: _Sizes) -> Layout:
    results = (TILE - window + 1 for window in sizes.window)
    tiles = math.prod(-(-length // own) for length, own in zip(sizes.result, results, strict=True))
    return _transformed(sizes, sizes.images * tiles, (TILE, TILE))


FUSED = "WINOGRAD"
_OTHERS: tuple[tuple[str, Callable[[_Sizes], bool], Callable[[_Sizes], Layout]], ...] = (
    (FUSED, lambda sizes: sizes.window == (3, 3), _winograd),
    ("WINOGRAD_NONFUSED", lambda sizes: sizes.window in ((3, 3), (5, 5)), _winograd_nonfused),
    ("FFT", lambda sizes: sizes.window != (1, 1) and max(_fft_lengths(sizes)) <= LARGEST_FFT, _fft),
    ("FFT_TILING", lambda sizes: sizes.window != (1, 1) and max(sizes.window) <= TILE, _fft_tiling),
)
