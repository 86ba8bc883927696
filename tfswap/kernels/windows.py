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

    @property
    def halo(self) -> tuple[int, int]:
        """How many more rows of an image a range of positions reads, before and after as many as its stride."""
        reach = (self.sizes[0] - 1) * self.dilations[0]
        return self.padding[0], max(0, reach - self.padding[0] - self.strides[0] + 1)

    @property
    def keeps_sizes(self) -> bool:
        """Whether each position is at a pixel of its own, in the middle of the window."""
        same = all(2 * pad == (k - 1) * by for pad, k, by in zip(self.padding, self.sizes, self.dilations, strict=True))
        return same and set(self.strides) == {1}

    @property
    def is_apart(self) -> bool:
        """Whether no two positions read the same rows, and none is before the image."""
        return self.sizes[0] == self.strides[0] and self.dilations[0] == 1 and not self.padding[0]

    def in_rows(self, rows: int, before: int) -> Window:
        """The window on some rows of an image.

        Args:
            rows: the rows of positions.
            before: how many rows are there of those that the first position reads before its own.
        """
        padding = self.padding[0] - before
        return self._replace(padding=(padding, *self.padding[1:]), positions=(rows, *self.positions[1:]))


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
