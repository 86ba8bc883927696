"""Makes reserved slots for small tensors in the arena of this process; planner/small_slots.py chooses them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tfswap.device import arena
from tfswap.planner.small_slots import cut

ALIGNED_BYTES = 64
"""TensorFlow's kernels rely on this alignment."""


def make_slots_in_arena(device: str, slots: Sequence[int], limit_bytes: int) -> list[Any]:
    """Make free chunks of these sizes in a device's arena, each between two that are in use.

    Args:
        device: as in "CPU:0".
        slots: bytes of each.
        limit_bytes: the most bytes in use while they are made, present ones included.

    Returns the tensors between the slots, which must live as long as these; none where there is no room.
    """
    import tensorflow as tf

    found = arena.snapshot(device).arena()
    requests = cut(slots, found)
    if found.peak_bytes > limit_bytes:
        return []
    with tf.init_scope(), tf.device(device), contextlib.suppress(tf.errors.ResourceExhaustedError):
        shapes = _outside_of_the_arena([nbytes // 4 for nbytes, _ in requests])
        made = [tf.raw_ops.Empty(shape=shape, dtype=tf.float32) for shape in shapes]
        return [tensor for tensor, (_, stays) in zip(made, requests, strict=True) if stays]
    return []


def _outside_of_the_arena(elements: Sequence[int]) -> list[Any]:
    """Shapes of one dimension, outside of the arena. Eager code would allocate each in the arena, between a slot and
    the tensor after it.
    """
    import numpy as np
    import tensorflow as tf

    numbers = ALIGNED_BYTES // 4  # an array's share of `memory`, aligned
    memory = np.empty((len(elements) + 1) * numbers, np.int32)
    first = -memory.ctypes.data % ALIGNED_BYTES // 4
    places = memory[first : first + len(elements) * numbers].reshape(-1, numbers)
    places[:, 0] = elements
    return [tf.experimental.dlpack.from_dlpack(place[:1].__dlpack__()) for place in places]
