"""One region for a step in an arena that may grow.

Such an arena adds a region whenever a request finds no room, and no tensor fits across two. Several small regions need
more bytes than a plan has, as a rule, and a tensor may find no room though enough bytes are free.
"""

from __future__ import annotations

import contextlib

from tfswap.device import arena
from tfswap.device.live import peak_kept
from tfswap.kernels.alignment import ALIGNMENT_BYTES


def make_one_region(device: str, limit_bytes: int) -> None:
    """Add one region to a device's arena with the bytes of this limit that are not in use yet. Does nothing where the
    device has no arena, where one free chunk is as large, and where the arena may not grow by so much.
    """
    import tensorflow as tf

    snapshot = arena.snapshot(device)
    if not snapshot.chunks and snapshot.limit_bytes is None:
        return
    wanted = (limit_bytes - snapshot.total_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    arena_bytes = sum(size for _, size, _ in snapshot.chunks)
    largest = max((size for _, size, used in snapshot.chunks if not used), default=0)
    if largest >= wanted or snapshot.limit_bytes is None or wanted > snapshot.limit_bytes - arena_bytes:
        return
    with peak_kept(device), tf.init_scope(), tf.device(device), contextlib.suppress(tf.errors.ResourceExhaustedError):
        tf.raw_ops.Empty(shape=[wanted], dtype=tf.uint8)
