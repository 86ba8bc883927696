"""Turns: optimized steps of a process share an arena, so that they are planned and run one at a time.

A call takes the turn before it reads the arena and ends it when its step has run, so that no other planned step runs
in between. A plan is made in a turn too. A turn belongs to a thread, which may take it again within. A step inside
another `tf.function` takes its turn when it runs (csrc/core/inside_ops.cc). Turns are given in the order in which they
were requested, and end with a call that fails or is interrupted.

Steps whose kernels may wait for other steps (`ir.op_traits.may_wait`: Python functions, collectives, queues) could
deadlock with a step that waits for its turn. So a turn of such a step is waited for ten seconds at most
(csrc/core/turn.h), and a step that it calls by `tf.py_function`, on a thread of TensorFlow's, does not wait at all.

Not handled: allocations of TensorFlow outside of a turn, as for a trace, while another step has one. And whatever runs
between a forward and a backward pass whose gradients are taken outside: each of the two has a turn of its own, since
the caller may wait for other steps in between.
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
"""The longest that a wait stays in C: only Python can be interrupted."""

_planning = threading.RLock()  # for devices without an arena


def held() -> int:
    """The number of nested turns of this thread, for `end`."""
    return _turns().tfswap_turns()


def begin(waits: bool) -> int:
    """Take a turn, which the caller must end by `end`. Not a context manager, which would slow every call down.

    Args:
        waits: whether kernels that run in it may wait for other steps.

    Returns:
        The ticket for `alone`; 0 within another step.
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
        if isinstance(threading.current_thread(), threading._DummyThread):  # TensorFlow's, of a py_function
            _turns().tfswap_admit_turn()


@functools.cache
def _turns() -> Any:
    """The C functions, called with the interpreter's lock held: to release it would take longer than they do."""
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
