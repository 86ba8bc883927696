"""Room for the batches that a data pipeline makes in the step's own arenas while the step runs.

A pipeline makes its elements on the host, so that they share the arena of a step that runs on the CPU. The iterator of
a distributed dataset copies each replica's next batch to its GPU, as does `tf.data.experimental.prefetch_to_device`
(multi_device_iterator_ops.py, prefetching_ops.py). The iterator of a batch that a function gets is found by its specs.

Not handled: other tensors of a pipeline, such as the elements that a `shuffle` keeps, or those that a `map` computes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfswap.device import arena, machine
from tfswap.kernels.alignment import round_up

BATCHES_AHEAD = 2
"""Batches that a pipeline makes while a step runs, once its buffers are full: the next one, and one in transit."""
COPIES_AHEAD = 1
"""The same of a pipeline that copies its batches to a device, whose buffer on the device is full: the next one."""
ELEMENTS_AHEAD = 3
"""The same of a pipeline that the step itself takes batches from: its buffers are empty when the first step begins."""
ELEMENT_COPIES_AHEAD = 2
"""The same where that pipeline copies its batches to the device."""


def shared_device() -> str | None:
    """The device in whose arena both the step runs and batches are made; None where these differ."""
    device, model = machine.current_device()
    return device if not model.host_is_separate and arena.memory_info(device) is not None else None


def batches_ahead(batch: Iterable[Any]) -> Mapping[str, int]:
    """How many batches a pipeline makes during a step, by device with an arena that has tensors of this batch."""
    places = dict.fromkeys(machine.local_name(each.backing_device) for each in batch if hasattr(each, "backing_device"))
    with_arenas = [device for device in places if arena.memory_info(device) is not None]
    return {device: BATCHES_AHEAD if device.startswith("CPU") else COPIES_AHEAD for device in with_arenas}


def copies_ahead(arguments: Any) -> Mapping[str, int]:
    """As `batches_ahead`, for a call whose arguments are batches of a distributed dataset's iterator, on GPUs.

    Values that are distributed by hand have no iterator, and no next batch.
    """
    import tensorflow as tf
    from tensorflow.python.distribute import values

    batches = [each for each in tf.nest.flatten(arguments) if isinstance(each, values.PerReplica)]
    return copies_of_iterators([tensor for each in batches for tensor in each.values])


def copies_of_iterators(tensors: Sequence[Any]) -> Mapping[str, int]:
    """As `copies_ahead`, for tensors, of which those may be of batches that a distributed dataset's iterator gives."""
    if not tensors:
        return {}
    import tensorflow as tf
    from tensorflow.python.distribute import input_lib

    base = input_lib.DistributedIteratorBase
    found = [each.element_spec for each in gc.get_objects() if issubclass(type(each), base)]  # those that are in use
    specs = tf.nest.flatten(found, expand_composites=True)
    ahead = batches_ahead(tensor for tensor in tensors if any(spec.is_compatible_with(tensor) for spec in specs))
    return {device: count for device, count in ahead.items() if not device.startswith("CPU")}


def batch_sizes(inputs: Sequence[Any]) -> list[int]:
    """The bytes of each argument, as far as they are known."""
    return [t.shape.num_elements() * t.dtype.size for t in inputs if t.shape.is_fully_defined()]


def room_bytes(sizes: Sequence[int]) -> int:
    """The most bytes of the arena that tensors of these sizes need, where others allocate in between.

    A free chunk of less than twice the requested size is handed out whole (bfc_allocator.cc): to the tensor, or to
    another request whose chunk the tensor gets.
    """
    return sum(2 * round_up(nbytes) for nbytes in sizes)
