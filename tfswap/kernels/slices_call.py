"""What the lines of `slice_lines.py` and `close_lines.py` are made of: rules from a kernel's sizes to its slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

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
