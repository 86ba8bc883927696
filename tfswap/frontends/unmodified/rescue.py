"""Rescue: a trace runs as it is until the device's memory is exhausted, and is then planned for what the device has.

Before a call that is not known to fit, the variables that the trace writes are copied to the host's own memory. A call
that fails with ResourceExhaustedError may have written some of them: those get their former bits, and the planned step
runs from there, with the same arguments. So the program sees the values of a run that never failed.

Known to fit: the bytes in use, with what a call of this trace for arguments of these shapes has added, and a margin for
fragmentation, are within the allocator's limit. What a call has added is bounded by the allocator's peak after it.

Random numbers: generators that are variables are put back as all variables are. Ops that keep their generator's state
in their kernel have other kernels in the planned step, which first draw what all earlier calls have drawn
(`earlier_draws.py`). Where that is not known, they repeat the numbers of the first calls, with a warning.

Not handled, so that the error reaches the program: traces with other effects, as on iterators, tables and queues; a
call that was known to fit; a step that can't be planned for the device. Prints and Python functions run twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfswap.device import arena
from tfswap.device.placement import step_devices
from tfswap.errors import TfswapError
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.earlier_draws import continue_draws
from tfswap.frontends.unmodified.traces import effects, variable_type
from tfswap.runtime.shapes import Shapes, shapes_of

log = logging.getLogger("tfswap")

MARGIN = 8
"""A call must leave free one part in this number of what it adds: an arena in pieces needs more than the bytes."""


class Rescued:
    """A trace that runs as it is, and is planned once it has failed for lack of memory.

    Args:
        concrete: the trace.
        plain: TensorFlow's own `ConcreteFunction._call_flat`.
        planned: makes what runs it under the limit of the device, from its flat arguments.
        owner: of the random states of what `planned` makes.
    """

    def __init__(self, concrete: Any, plain: Callable[..., Any], planned: Callable[[], Callable[..., Any]], owner: int):
        self.concrete = concrete
        self.__name__ = concrete.graph.name
        self._plain = plain
        self._planned = planned
        self._owner = owner
        self._calls: Counter[Shapes] = Counter()  # that have not failed
        # By the arguments' shapes and by device, the least bound of the bytes that a call adds.
        self._added: dict[Shapes, dict[str, int]] = {}
        self._step: Callable[..., Any] | None = None
        self._draws, self._written = effects(concrete)

    def run(self, inputs: Sequence[Any], captures: Sequence[Any]) -> Any:
        """The results of a call with these flat arguments and captures."""
        import tensorflow as tf

        if self._step is not None:
            return self._step(inputs)
        before, shapes = _in_use(), shapes_of(inputs)
        kept = None if self.fits(shapes, before) else self._kept([*inputs, *captures])
        try:
            result = self._plain(self.concrete, inputs, captures)
        except tf.errors.ResourceExhaustedError as error:
            if kept is None:
                raise
            failed = error.with_traceback(None)  # its frames hold tensors
        else:
            self._note(shapes, before)
            return result
        return self._again(inputs, kept, failed)

    def _again(self, inputs: Sequence[Any], kept: Sequence[tuple[Any, Any]], failed: Exception) -> Any:
        """Run the call that failed under the device's limit. Raises its error where no plan is found."""
        _put_back(kept)
        step = self._planned()
        if self._draws and self._calls and not continue_draws(self.concrete, self._owner, self._calls):
            log.warning("tfswap: %s: its random ops begin at their seeds again, since they are planned", self.__name__)
        try:
            result = step(inputs)
        except TfswapError as error:
            summary.note_as_it_was(self.__name__, f"it needs more memory than the device has, and {error}")
            raise failed from error
        log.warning("tfswap: %s: ran out of memory; planned for what the device has, and run again", self.__name__)
        self._step = step
        return result

    def fits(self, shapes: Shapes, in_use: Mapping[str, tuple[int, int]]) -> bool:
        """Whether a call is known to fit, or can't be rescued.

        Args:
            shapes: of its arguments.
            in_use: by device, the bytes in use and the limit.
        """
        if self._written is None:  # it can't be rescued
            return True
        for device, (used_bytes, limit_bytes) in in_use.items():
            added = self._added.get(shapes, {}).get(device)
            if added is None or used_bytes + added + added // MARGIN > limit_bytes:
                return False
        return True

    def _note(self, shapes: Shapes, before: Mapping[str, tuple[int, int]]) -> None:
        """A call has run as it is."""
        self._calls[shapes] += 1
        added = self._added.setdefault(shapes, {})
        for device, (used_bytes, _) in before.items():
            info = arena.memory_info(device)
            if info is not None:
                bound = max(0, info.peak_bytes - used_bytes)
                added[device] = min(bound, added.get(device, bound))

    def _kept(self, given: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The handles of variables that the trace may write, with copies in the host's own memory."""
        assert self._written is not None, "it can be rescued"
        return [(given[place], _read(given[place])) for place in self._written]


def _in_use() -> dict[str, tuple[int, int]]:
    """The bytes in use and the limit of each device that has an arena with one."""
    found = {}
    for device in step_devices():
        info, limit = arena.memory_info(device), arena.device_limit_bytes(device)
        if info is not None and limit is not None:
            found[device] = info.current_bytes, limit
    return found


def _read(handle: Any) -> Any:
    """The bits of a variable; None where it has no value yet."""
    from tensorflow.python.ops import gen_resource_variable_ops as ops

    if not ops.var_is_initialized_op(handle):
        return None
    return np.array(ops.read_variable_op(handle, variable_type(handle)).numpy())


def _put_back(kept: Sequence[tuple[Any, Any]]) -> None:
    """Give variables their former bits, where they have others."""
    import tensorflow as tf
    from tensorflow.python.ops import gen_resource_variable_ops as ops

    for handle, value in kept:
        if value is None or _same_bits(value, _read(handle)):
            continue
        with tf.device(handle.device):
            ops.assign_variable_op(handle, tf.constant(value, variable_type(handle)))


def _same_bits(one: Any, other: Any) -> bool:
    if one.dtype == object:  # texts
        return bool((one == other).all())
    return one.shape == other.shape and np.array_equal(*(each.reshape(-1).view(np.uint8) for each in (one, other)))
