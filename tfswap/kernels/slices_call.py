"""What the lines of `slice_lines.py` and `close_lines.py` are made of: rules from a kernel's sizes to its slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

from tfswap.ir.graph import Node
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.slices import Slicing
from tfswap.kernels.temporaries import known_shape


class Call(NamedTuple):
    """A kernel of which all sizes are known.

    Attributes:
        constants: the values of small constants.
    """

    node: Node
    device: DeviceModel
    constants: Mapping[Node, tuple[int, ...]]

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return known_shape(self.node.outputs[0]) or ()

    def input(self, position: int) -> tuple[int, ...]:
        """The shape of an input."""
        return known_shape(self.node.inputs[position].type) or ()

    def integers(self, position: int) -> tuple[int, ...] | None:
        """The values of an input, if they are known."""
        return self.constants.get(self.node.inputs[position].node)

    def axis(self, rank: int) -> int:
        """The attribute `axis`, of a tensor of `rank` axes."""
        return cast("int", self.node.attrs.get("axis", 0)) % rank


Rule = Callable[[Call], "Slicing | None"]


class Line(NamedTuple):
    """An op's line.

    Attributes:
        onednn: whether the rule is proven for the kernels of oneDNN, which replace those of Eigen.
        any_type: whether it holds for numbers of each type.
    """

    rule: Rule
    onednn: bool = False
    any_type: bool = False


def rows_of_inputs(*rows: int, shape: int | None = None) -> Rule:
    """Each row of the output is computed from the same rows of these inputs, by itself."""
    return lambda _: Slicing(rows, shape=shape)


def rows_of_images(*rows: int, shape: int | None = None) -> Rule:
    """Images by themselves, as of `rows_of_inputs`; rows of one image, where windows of a pool are apart."""

    def rule(call: Call) -> Slicing | None:
        if call.output[0] > 1:
            return Slicing(rows, shape=shape)
        heights = [call.output[1], *(call.input(position)[1] for position in rows)]
        stride = cast("Sequence[int]", call.node.attrs["strides"])[1]
        apart = cast("Sequence[int]", call.node.attrs["ksize"])[1] == stride and min(heights) * stride == max(heights)
        return Slicing(rows, axes=2, shape=shape, image=True) if apart else None

    return rule
