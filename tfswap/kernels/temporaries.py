"""Types and helpers of all rules: the facts about a node, events, and known shapes.

A function of temporaries follows one source file of TensorFlow 2.21. It gives `Events`: the requests, as in
`KernelMemory.events`, and whether they are exact. They are an upper bound where timing or unknown values decide. A
function of a oneDNN kernel gives `Measured`, which adds the requests that were measured. A kernel whose shapes are
unknown counts as one without temporaries, not exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfswap.ir.types import ELEMENT_BYTES, HALVES, TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.events import Event

Events = tuple[Sequence[Event], bool]
Measured = tuple[Sequence[Event], bool, Sequence[Event]]

OUT0: Event = ("out", 0)
UNKNOWN: Events = ((OUT0,), False)
"""The answer where a shape is unknown."""

TENSOR_ALIGN_BYTES = 64
"""EIGEN_MAX_ALIGN_BYTES of TensorFlow's wheels: a slice that begins at a multiple may share its input's buffer."""


class Facts(NamedTuple):
    """All that a rule may depend on: the arguments of `kernel_memory.kernel_memory`.

    Attributes:
        temporary_bytes: as in `Measured`.
    """

    attrs: Mapping[str, object]
    inputs: Sequence[TensorType]
    outputs: Sequence[TensorType]
    device: DeviceModel
    values: Mapping[int, tuple[int, ...]]
    temporary_bytes: int | None = None


def known_shape(kind: TensorType) -> tuple[int, ...] | None:
    """The shape with every dimension known, or None."""
    shape = kind.shape
    if shape is None or None in shape:
        return None
    return shape  # type: ignore[return-value]


def element_bytes(kind: TensorType) -> int:
    return ELEMENT_BYTES.get(kind.dtype, 0)


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def after_output(sizes: Sequence[int], exact: bool = True) -> Events:
    """The first output, then temporaries of these sizes in bytes."""
    return (OUT0, *(("temp", size) for size in sizes)), exact


def summed_in_float32(facts: Facts, order: Sequence[Event], count: int | None) -> Events:
    """The outputs in this order; 16-bit floats add a temporary of `count` float32."""
    if facts.outputs[0].dtype not in HALVES:
        return order, True
    return (*order, ("temp", 4 * (count or 0))), count is not None
