"""The column buffer of gradients of 3-D convolutions on a CPU (conv_grad_ops_3d.cc): whether there is one, how large.

Each image's patches are laid out as columns, as many images at a time as the last-level cache holds.
"""

from __future__ import annotations

import math

MOST_COLUMNS = 25
"""conv_grad_ops_3d.cc, kMaxTempAllocationOverhead: the column buffer is at most this multiple of inputs and output."""


def most_columns(gradient: tuple[int, ...], window: tuple[int, ...], volume: int) -> int:
    """Elements of the largest column buffer that a gradient takes. Arguments as of `conv3d_columns`."""
    return (MOST_COLUMNS + 1) * (volume + math.prod(window) + math.prod(gradient)) - 1


def conv3d_columns(
    gradient: tuple[int, ...], window: tuple[int, ...], volume: int, cache: int, *, one_by_one: bool
) -> int:
    """Elements of the column buffer of a 3-D convolution's gradient; 0 where Eigen's kernel, which has none, runs.

    Args:
        gradient: shape of the incoming gradient, channels last.
        window: shape of the filter.
        volume: elements of the image.
        cache: elements that the last-level cache holds.
        one_by_one: whether a batch of one has a buffer of one image, as the image's gradient has.
    """
    pixels, under, channels = math.prod(gradient[1:4]), math.prod(window[:4]), window[4]
    work = pixels * channels + under * channels + pixels * under
    columns, most = pixels * under, most_columns(gradient, window, volume)
    if not work or columns > most:
        return 0
    if one_by_one and gradient[0] == 1:
        return columns
    columns *= -(-cache // work)
    return columns if columns <= most else 0
