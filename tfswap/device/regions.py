"""Adds regions to an arena that may grow, before a step.

Such an arena adds a region whenever a request finds no room, and no tensor fits across two. Several small regions need
more bytes than a plan has, as a rule, and a tensor may find no room though enough bytes are free. Where the system puts
a region is known once it is there: of two free chunks of one size a request gets the one with the lower address, and
what is left decides what later requests find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

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
    largest = max((size for _, size, used in snapshot.chunks if not used), default=0)
    if largest >= wanted or snapshot.limit_bytes is None or wanted > snapshot.limit_bytes - _arena_bytes(device):
        return
    with peak_kept(device), tf.init_scope(), tf.device(device), contextlib.suppress(tf.errors.ResourceExhaustedError):
        tf.raw_ops.Empty(shape=[wanted], dtype=tf.uint8)


def add_regions(device: str, sizes: Sequence[int]) -> None:
    """Add regions of these bytes to a device's arena, in which a step would add them."""
    import tensorflow as tf

    with peak_kept(device), tf.init_scope(), tf.device(device), contextlib.suppress(tf.errors.ResourceExhaustedError):
        for nbytes in sizes:
            _add_region(device, nbytes)


def _add_region(device: str, nbytes: int) -> None:
    import tensorflow as tf

    held, before = [], _arena_bytes(device)
    while _arena_bytes(device) == before:  # free chunks may be as large
        held.append(tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8))


def _arena_bytes(device: str) -> int:
    return sum(size for _, size, _ in arena.snapshot(device).chunks)
