"""Rescue: a step runs as it is until the device's memory is exhausted, and is then planned for what the device has.

Before a call that is not known to fit (`room.py`), the variables that the step writes are copied to the host's own
memory. A call that fails with ResourceExhaustedError may have written some of them: those get their former bits, and
the planned step runs from there, with the same arguments. So the program sees the values of a run that never failed.

Random numbers: generators that are variables are put back as all variables are. Ops that keep their generator's state
in their kernel have other kernels in the planned step, which first draw what all earlier calls have drawn
(`earlier_draws.py`). Where that is not known, they repeat the numbers of the first calls, with a warning.

Traces of functions are rescued by `rescued_traces.py`, runs of sessions by `rescued_runs.py`.

Not handled, so that the error reaches the program: steps with other effects, as on iterators, tables and queues; a call
that was known to fit; a step that can't be planned for the device. Prints and Python functions run twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tfswap.errors import TfswapError
from tfswap.frontends.unmodified import summary
from tfswap.frontends.unmodified.room import KnownRoom
from tfswap.runtime.shapes import Shapes

log = logging.getLogger("tfswap")


class Call(Protocol):
    """A call of a step."""

    @property
    def shapes(self) -> Shapes:
        """Of its arguments."""
        ...

    def run(self) -> Any:
        """The results of the step as it is."""
        ...

    def values(self) -> Sequence[Any]:
        """Copies, in the host's own memory, of the variables that it may write; None for one without a value."""
        ...

    def put_back(self, kept: Sequence[Any]) -> None:
        """Give these variables such values again."""
        ...

    def run_planned(self) -> Any:
        """The results under the limit of the device. Raises TfswapError where no plan is found."""
        ...


class Rescue:
    """A step that runs as it is, and is planned once it has failed for lack of memory.

    Args:
        name: the step's in messages.
        possible: whether it has no effects other than on variables and random state.

    Attributes:
        calls: by the shapes of the arguments, how many calls as it is have not failed.
        is_planned: whether it runs under the limit of the device.
    """

    def __init__(self, name: str, *, possible: bool):
        self._name = name
        self._possible = possible
        self._room = KnownRoom()
        self.calls: Counter[Shapes] = Counter()
        self.is_planned = False

    def knows(self, shapes: Shapes) -> bool:
        """Whether a call for arguments of these shapes runs as it is, and is known to fit."""
        return not self.is_planned and self._room.fits(shapes)

    def run(self, call: Call) -> Any:
        """The results of a call that is not known to fit."""
        if self.is_planned:
            return call.run_planned()
        shapes = call.shapes
        if not self._possible or not (before := self._room.in_use()):
            result = call.run()
        else:
            kept = call.values()
            result, failed = self._tried(call)
            if failed is not None:
                return self._again(call, kept, failed)
            self._room.note(shapes, before)
        self.calls[shapes] += 1
        return result

    @staticmethod
    def _tried(call: Call) -> tuple[Any, Exception | None]:
        """The results of the step as it is, or the error of a lack of memory."""
        import tensorflow as tf

        try:
            return call.run(), None
        except tf.errors.ResourceExhaustedError as error:
            return None, error.with_traceback(None)  # its frames hold tensors

    def _again(self, call: Call, kept: Sequence[Any], failed: Exception) -> Any:
        """Run a call that has failed under the device's limit. Raises its error where no plan is found."""
        call.put_back(kept)
        try:
            result = call.run_planned()
        except TfswapError as error:
            summary.note_as_it_was(self._name, f"it needs more memory than the device has, and {error}")
            raise failed from error
        log.warning("tfswap: %s: ran out of memory; planned for what the device has, and run again", self._name)
        self.is_planned = True
        return result


def warn_of_draws(name: str) -> None:
    """The random ops of a planned step repeat numbers."""
    log.warning("tfswap: %s: its random ops begin at their seeds again, since they are planned", name)


def same_bits(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two values of one variable have the same bits."""
    if one.dtype == object:  # texts
        return bool((one == other).all())
    bits, others = (each.reshape(-1).view(np.uint8) for each in (one, other))
    return one.shape == other.shape and np.array_equal(bits, others)
