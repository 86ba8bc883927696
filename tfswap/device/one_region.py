"""One region for a step in an arena that may grow.

Such an arena adds a region whenever a request finds no room, and no tensor fits across two. What several small regions
hold is more than a plan takes as a rule, and in the end a tensor may find no room though enough is free.
"""

from __future__ import annotations

import contextlib

from tfswap.device import machine
from tfswap.device.live import peak_kept
from tfswap.kernels.alignment import ALIGNMENT_BYTES


def make_one_region(device: str, limit_bytes: int) -> None:
    """Let a device's arena have what a step of this limit may take in addition to its contents, in one piece.

    Does nothing where the device has no arena, where that piece is there, and where the arena may not grow by so much.
    """
    import tensorflow as tf

    snapshot = machine.snapshot(device)
    if not snapshot.chunks and snapshot.limit_bytes is None:
        return
    wanted = (limit_bytes - snapshot.total_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    arena_bytes = sum(size for _, size, _ in snapshot.chunks)
    largest = max((size for _, size, used in snapshot.chunks if not used), default=0)
    if largest >= wanted or snapshot.limit_bytes is None or wanted > snapshot.limit_bytes - arena_bytes:
        return
    with peak_kept(device), tf.init_scope(), tf.device(device), contextlib.suppress(tf.errors.ResourceExhaustedError):
        tf.raw_ops.Empty(shape=[wanted], dtype=tf.uint8)
