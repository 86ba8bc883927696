"""Constants and helpers of the swap ops' tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import tfswap.ops as ops

MIB = 2**20

STUCK_BYTES_PER_S = 1000.0
"""At this rate a copy of one chunk takes more than half an hour: for a test, for ever."""

ends_by_itself = pytest.mark.timeout(300, method="thread")
"""A step that never ends keeps Python's signal handlers from running; a thread ends the process."""


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def there_and_back(x: Any, shape: Any = None) -> Any:
    """`x` copied to host memory and back."""
    handle = ops.swap_out(x)
    with tf.control_dependencies([ops.release(handle)]):
        tensor, ticket = ops.swap_in(handle, x.dtype, shape)
    return ops.await_copy(tensor, ticket)
