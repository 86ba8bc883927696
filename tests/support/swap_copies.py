"""Constants and helpers of the swap ops' tests."""

from __future__ import annotations

import threading
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


def cancelled(step: Any, x: Any, begun: Callable[[], bool], settle_s: float) -> None:
    """Runs a step that does not end, cancels it `settle_s` after it has begun, and sees that it ends so."""
    from tensorflow.python.eager import cancellation

    manager = cancellation.CancellationManager()
    cancelable = manager.get_cancelable_function(step.get_concrete_function(x))
    errors = []

    def run() -> None:
        try:
            cancelable(x)
        except tf.errors.CancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert eventually(begun)
    time.sleep(settle_s)
    assert not errors
    manager.start_cancel()
    thread.join()
    assert len(errors) == 1


def there_and_back(x: Any, shape: Any = None) -> Any:
    """`x` copied to host memory and back."""
    handle = ops.swap_out(x)
    with tf.control_dependencies([ops.release(handle)]):
        tensor, ticket = ops.swap_in(handle, x.dtype, shape)
    return ops.await_copy(tensor, ticket)
