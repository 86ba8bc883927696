"""Room for the batches that a data pipeline makes in the step's own arena while the step runs.

A pipeline makes its elements on the host, so that they matter where the step runs there too.

Not handled: what a pipeline holds besides, such as the elements that a `shuffle` keeps, or what a `map` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfswap.device import machine
from tfswap.kernels.alignment import round_up

BATCHES_AHEAD = 2
"""Batches that a pipeline makes while a step runs, once its buffers are full: the next one, and one that is being
handed over."""
ELEMENTS_AHEAD = 3
"""The same of a pipeline that the step itself takes batches from: its buffers are empty when the first step begins."""


def shared_device() -> str | None:
    """The device in whose arena the step runs and batches are made; None where that is not one."""
    device, model = machine.current_device()
    return device if not model.is_gpu and machine.memory_info(device) is not None else None


def batch_sizes(inputs: Sequence[Any]) -> list[int]:
    """The bytes of each argument, as far as they are known."""
    return [t.shape.num_elements() * t.dtype.size for t in inputs if t.shape.is_fully_defined()]


def room_bytes(sizes: Sequence[int]) -> int:
    """What tensors of these sizes take of the arena at most, where others allocate in between.

    A free chunk of less than twice the size that is asked for is handed out whole (bfc_allocator.cc): either the
    tensor gets such a one, or what would have had the chunk that it takes.
    """
    return sum(2 * round_up(nbytes) for nbytes in sizes)
