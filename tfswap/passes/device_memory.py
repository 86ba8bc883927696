"""Where a tensor lies that goes from one device of a step to another (device_parts.py).

A GPU has small integers and text in host memory (kernels/host_memory.py). A CPU with a limit of its own has all tensors
in its arena, except text, whose contents are on the heap.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from tfswap.analysis.output_bytes import is_of_cpu, is_on_host
from tfswap.ir.graph import Node, Output
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_carriers import FIRST

READ_ON_HOST = ("int32", "string")
"""Types of tensors in host memory that GPUs' kernels read there."""


class Places(NamedTuple):
    """What decides where the tensors of a step lie.

    Attributes:
        planned: the devices whose parts are planned.
        gpu: the model of the GPUs.
        feeds: the arguments of the step, or of a body of it.
        is_body: whether it is a body.
    """

    planned: Collection[str]
    gpu: DeviceModel
    feeds: Collection[Node]
    is_body: bool

    def is_hosted(self, tensor: Output) -> bool:
        """Whether a GPU has the tensor in host memory, if it computes it or gets it as an argument."""
        if tensor.node in self.feeds:
            dtype = tensor.type.dtype
            return dtype in READ_ON_HOST or (dtype != "resource" and is_of_cpu(tensor.node))
        return is_on_host(tensor.node, tensor.index, self.gpu)

    def is_freed(self, home: str, tensor: Output) -> bool:
        """Whether a tensor that a device sends is in its arena, and its plan frees it there."""
        if home not in self.planned:
            return False
        if home == FIRST:
            return tensor.node not in self.feeds and tensor.type.dtype != "string"
        return not self.is_hosted(tensor)

    def is_taken(self, where: str, tensor: Output) -> bool:
        """Whether a device takes a received tensor into its arena."""
        if where not in self.planned:
            return False
        if where == FIRST:
            return tensor.type.dtype != "string"
        return not (tensor.type.dtype in READ_ON_HOST and self.is_hosted(tensor))

    def is_pooled(self, where: str, tensor: Output) -> bool:
        """Whether a tensor on its way to a device is in the pool of host memory: until the copy to its arena has ended.

        Not in bodies, where an unknown number of them may wait.
        """
        return not self.is_body and self.is_taken(where, tensor)
