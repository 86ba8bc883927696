"""Whose turn it is: optimized steps of a process share an arena, so that they are planned and run one at a time.

A call takes the turn before it looks at the arena and ends it when its step has run, so that nothing that is planned
comes in between; a plan is made in one too. It is the thread's: what runs within asks again and gets it. A step inside
another `tf.function` takes its turn when it runs, and Python runs it in that (csrc/core/inside_ops.cc). Turns are
handed over in the order in which they were asked for, and end with a call that fails or is interrupted.

Steps whose kernels may wait for others (`ir.ops.may_wait`: Python functions, collectives, queues) may wait for the step
that waits for them: nobody waits for such a one longer than ten seconds (csrc/core/turn.h), and what it calls by
`tf.py_function`, on a thread of TensorFlow's, does not wait at all.

Not handled: what TensorFlow allocates outside of a turn, while another step may have one, as for a trace. And what
runs between a forward and a backward pass whose gradients are taken outside: each of the two has a turn of its own,
since what a caller does in between may wait for other steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

from tfswap.device.live import LiveDevice

SLICE_US = 100_000
"""A wait returns so often to Python, which can be interrupted only there."""

_planning = threading.RLock()  # where there is no arena to look at


def held() -> int:
    """How many turns this thread has, one within the other; which `end` returns to."""
    return _turns().tfswap_turns()


def begin(waits: bool) -> int:
    """Take a turn, to be ended by `end` whatever becomes of it. No context manager: every call of every step is one.

    Args:
        waits: whether what runs in it may wait for others.

    Returns:
        What `alone` takes; 0 within another step.
    """
    turns = _turns()
    outermost = turns.tfswap_turns() == 0
    if not turns.tfswap_begin_turn(waits):
        _await()
    return 1 + turns.tfswap_admitted_turns() if outermost and turns.tfswap_has_turn() else 0


def end(before: int) -> None:
    """End all turns that this thread has taken since it `held` that many."""
    _turns().tfswap_end_turns(before)


def alone(ticket: int) -> bool:
    """Whether no other step has run in the turn that gave this ticket."""
    return ticket == 1 + _turns().tfswap_admitted_turns()


@contextlib.contextmanager
def planning(device: LiveDevice) -> Iterator[None]:
    """A turn for planning: the device's arena is at rest."""
    from tensorflow.python.eager import context

    if not device.has_arena:
        with _planning:
            yield
        return
    context.async_wait()  # for steps that were called before, where calls are asynchronous
    before = held()
    try:
        begin(waits=False)
        yield
    finally:
        end(before)


def _await() -> None:
    from tfswap.native.load import load

    wait = load().c.tfswap_await_turn  # without the interpreter's lock
    while not wait(SLICE_US):
        if isinstance(threading.current_thread(), threading._DummyThread):  # TensorFlow's, which runs a Python function
            _turns().tfswap_admit_turn()


@functools.cache
def _turns() -> Any:
    """The functions that keep the interpreter's lock: they take no longer than to give it away and get it back."""
    from tfswap.native.load import load

    turns = ctypes.PyDLL(str(load().path))
    for returns_count in (turns.tfswap_turns, turns.tfswap_admitted_turns):
        returns_count.restype = ctypes.c_uint64
    turns.tfswap_begin_turn.argtypes = [ctypes.c_bool]
    for answers in (turns.tfswap_begin_turn, turns.tfswap_has_turn):
        answers.restype = ctypes.c_bool
    turns.tfswap_admit_turn.restype = None
    turns.tfswap_end_turns.argtypes = [ctypes.c_uint64]
    turns.tfswap_end_turns.restype = None
    return turns
