"""The arena's peak of a call, for programs of tests. TensorFlow is imported where something is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def measuring(peaks: list[int], device: str = "CPU:0") -> Iterator[None]:
    """Appends to `peaks` the most bytes that are allocated in the device's arena meanwhile."""
    import tensorflow as tf

    tf.config.experimental.reset_memory_stats(device)
    yield
    peaks.append(tf.config.experimental.get_memory_info(device)["peak"])
