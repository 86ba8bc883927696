"""The forms of a sum of products, and of an image's gradient, that need only a part of a convolution's columns
(bounded_gradients.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfswap.kernels.temporaries import ceil_div
from tfswap.kernels.windows import Window


class Shard(NamedTuple):
    """How some rows are added up: in parts, each block after block, as of `contraction_order.Order`."""

    rows: int
    part: int
    block: int
    last_block: int

    @property
    def parts(self) -> int:
        return ceil_div(self.rows, self.part)

    @property
    def depths(self) -> set[int]:
        """The depths of its blocks."""
        last = self.rows - self.part * (self.parts - 1)
        parts = [(last, self.last_block), *([(self.part, self.block)] if self.parts > 1 else [])]
        return {depth for rows, block in parts for depth in (min(rows, block), rows % block or block)}


class Products(NamedTuple):
    """A sum of products by Tfswap>AddProducts.

    Attributes:
        rows: how many rows are added up.
        shard, last_shard: how those of a shard are, and of the last one.
        chunk: how many elements of a patch are multiplied at a time.
        window: of a filter; None for rows of a matrix.
    """

    rows: int
    shard: Shard
    last_shard: Shard
    chunk: int
    window: Window | None = None

    def state_elements(self, width: int, made: int) -> int:
        """Elements that a slice passes on in addition to the sum of `width` by `made`."""
        return slots_of(self.rows, self.shard, self.last_shard) * width * made + self.depth * (width + made)

    @property
    def unit(self) -> int:
        """The rows after which nothing but the sum is kept, if they are a block: of a sum of one part."""
        return 0 if slots_of(self.rows, self.shard, self.last_shard) else self.shard.block

    @property
    def depth(self) -> int:
        """The rows of the largest block."""
        return max(size for shard in (self.shard, self.last_shard) for size in shard[2:])


def slots_of(rows: int, shard: Sequence[int], last_shard: Sequence[int]) -> int:
    """The sums of parts that Tfswap>AddProducts has, in addition to its result (ops/csrc/core/product_ops.cc)."""
    parts = max(Shard(*shard).parts, Shard(*last_shard).parts)
    return parts - (1 if rows <= shard[0] else 0)


class Patches(NamedTuple):
    """An image's gradient by Tfswap>ImageGradient.

    Attributes:
        chunk: how many positions are multiplied at a time.
    """

    window: Window
    chunk: int
