"""The window of a filter, or of a pool, on an image: which rows of the image each row of the result reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, NamedTuple, cast


COLUMNS_BYTES: Final = 1 << 20
"""Columns of a filter's gradient may take as much in any case: with fewer, products are too small to be fast."""
POSITIONS: Final = 64
"""Columns are of a multiple of this many positions, so that the gradients there begin where kernels need it."""


def positions_together(position_bytes: int, largest_bytes: int) -> int:
    """The positions whose columns a filter's gradient takes together: no more than the largest tensor of its slice.

    Args:
        position_bytes: of the columns of one position.
        largest_bytes: of what the slice reads and makes.
    """
    return max(1, max(COLUMNS_BYTES, largest_bytes) // position_bytes // POSITIONS) * POSITIONS


class Window(NamedTuple):
    """How a window moves over an image; each by axis of the image.

    Attributes:
        padding: how much of the window is before the image at its first position.
        positions: how many it has.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The pixels that one position reads."""
        return prod(self.sizes)


def window_of(
    attrs: Mapping[str, object], image: Sequence[int], window: Sequence[int], positions: Sequence[int]
) -> Window:
    """The window of a convolution whose tensors have their channels last.

    Args:
        attrs: of its node, with padding SAME or VALID.
        image: the shape of its images.
        window: the sizes of its filter along an image's axes.
        positions: the shape of its result.
    """
    axes = slice(1, -1)
    strides = tuple(cast("Sequence[int]", attrs["strides"])[axes])
    dilations = tuple(cast("Sequence[int]", attrs.get("dilations", (1,) * len(image)))[axes])
    padding = [0] * len(window)
    if attrs["padding"] == b"SAME":
        read = zip(positions[axes], strides, window, dilations, image[axes], strict=True)
        padding = [max(0, (count - 1) * stride + (k - 1) * by + 1 - size) // 2 for count, stride, k, by, size in read]
    return Window(tuple(window), strides, dilations, tuple(padding), tuple(positions[axes]))
