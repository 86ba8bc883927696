"""The device that this process runs its steps on, and its allocator, which each call of a step looks at twice."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfswap.frontends import machine

if TYPE_CHECKING:
    from tfswap.analysis.device import DeviceModel
    from tfswap.oplib.load import CLook


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


def free_functions() -> None:
    """Let go of functions that nobody refers to: their captures and kernels hold constants in the arena."""
    gc.collect()  # a function's graph is full of cycles
