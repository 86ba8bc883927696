"""The device that this process runs its steps on, and its allocator, which each call of a step looks at twice."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.device import machine

if TYPE_CHECKING:
    from tfswap.kernels.device import DeviceModel
    from tfswap.native.load import CLook


@functools.cache
def live_device() -> tuple[str, DeviceModel]:
    """Its name and model, as of `machine.current_device`."""
    return machine.current_device(live=True)


@functools.cache
def has_arena() -> bool:
    """Whether the device has an arena that can be looked at."""
    return machine.memory_info(live_device()[0]) is not None


@functools.cache
def _looked_at() -> tuple[Callable[[int, bool], CLook], int]:
    """What looks at the device's allocator, and that."""
    import tfswap.ops

    return tfswap.ops.looker(), machine.allocator(live_device()[0]) if has_arena() else 0


def look(*, before: bool) -> CLook:
    """What the allocator tells now.

    Args:
        before: a step comes next, which finds the arena in the layout that is told.
    """
    looker, allocator = _looked_at()
    return looker(allocator, before)


def runs_at_once() -> bool:
    """Whether what is called now runs now: it is not traced into a function around it."""
    import tensorflow as tf

    return tf.executing_eagerly()


def is_live(inputs: Sequence[Any]) -> bool:
    """Whether a call with these inputs runs at once, in an arena that can be looked at."""
    import tensorflow as tf

    return has_arena() and runs_at_once() and not any(tf.is_symbolic_tensor(t) for t in inputs)


@contextlib.contextmanager
def peak_kept(device: str) -> Iterator[None]:
    """What happens here does not show in the arena's peak, the user's own statistics, which is as it was before."""
    import tensorflow as tf

    before = machine.memory_info(device)
    if before is not None:
        tf.config.experimental.reset_memory_stats(device)
    try:
        yield
    finally:
        if before is not None:
            tf.config.experimental.reset_memory_stats(device)
            _raise_peak(before.peak_bytes, device)


def _raise_peak(peak_bytes: int, device: str) -> None:
    """Bring the arena's peak back to what it has been.

    Each request is for half of what is missing, since the chunk that it is given can be almost twice as large.
    """
    import tensorflow as tf

    held: list[Any] = []
    while (info := machine.memory_info(device)) is not None and info.peak_bytes < peak_bytes:
        half = (peak_bytes - info.current_bytes) // 2
        try:
            held.append(tf.raw_ops.Empty(shape=[half], dtype=tf.uint8))
        except tf.errors.ResourceExhaustedError:
            return


def free_functions() -> None:
    """Let go of functions that nobody refers to: their captures and kernels hold constants in the arena."""
    gc.collect()  # a function's graph is full of cycles
