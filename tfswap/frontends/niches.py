"""Places for small tensors, made in the arena of this process; planner/niches.py tells which."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tfswap.frontends import machine
from tfswap.planner.allocator import ALIGNMENT_BYTES
from tfswap.planner.niches import smaller_chunks, uncut_bytes


def make_niches(device: str, niches: Sequence[int], limit_bytes: int) -> list[Any]:
    """Make free chunks of these sizes in a device's arena, each between two that are in use.

    Args:
        device: as in "CPU:0".
        niches: bytes of each, the largest first.
        limit_bytes: as much may be in use on the way, what is there counted.

    Returns what parts them, to be kept for as long as they are to be there; nothing where there is no room.
    """
    import tensorflow as tf

    def take(sizes: Sequence[int]) -> list[Any]:
        return [tf.raw_ops.Empty(shape=[size // 4], dtype=tf.float32) for size in sizes]

    uncut = uncut_bytes(niches)
    parts = [part for niche in niches for part in (niche, ALIGNMENT_BYTES)]
    arena = machine.resident(device).arena()
    arena.free(arena.allocate(uncut))  # such a chunk is there then
    smaller = smaller_chunks(arena.chunks, uncut)
    for size in (*smaller, *parts):
        arena.allocate(size)
    if not niches or arena.peak_bytes > limit_bytes:
        return []
    with tf.init_scope(), tf.device(device), contextlib.suppress(tf.errors.ResourceExhaustedError):
        take([uncut])
        meanwhile = take(smaller)
        made = take(parts)
        del meanwhile
        return made[1::2]
    return []
