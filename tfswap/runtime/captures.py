"""A trace's captures, some of which TensorFlow computes for each call.

They are keys of collectives. Each call takes a key for each of its collectives, by which they are matched on all
workers. A worker that takes more keys than the others waits for ever. So a call computes its captures once, whatever is
planned and made during it, and a step that is made and not run gets placeholders.
"""

from __future__ import annotations

from typing import Any

from tfswap.importers.shapes import HANDLES


def captured(concrete: Any) -> list[Any] | None:
    """The captures of a call that begins now; None where they are the same at each call."""
    return concrete.captured_inputs if _has_computed(concrete) else None


def _has_computed(concrete: Any) -> bool:
    return any(map(callable, concrete._captured_inputs))  # in every call


def deferred(concrete: Any) -> list[bool]:
    """For each input of the trace, captures included, whether only a call may compute it."""
    late = [callable(capture) for capture in concrete._captured_inputs]
    return [False] * (len(concrete.inputs) - len(late)) + late


def with_placeholders(concrete: Any) -> list[Any]:
    """The trace's captures, with zeros for those that only a call may compute."""
    import tensorflow as tf

    if not _has_computed(concrete):
        return concrete.captured_inputs
    made: list[Any] = []
    placeholders = concrete.inputs[-len(concrete._captured_inputs) :]
    for capture, placeholder in zip(concrete._captured_inputs, placeholders, strict=True):
        if not callable(capture):
            made.append(capture)
        elif placeholder.dtype.name in HANDLES or not placeholder.shape.is_fully_defined():
            made.append(capture())  # no key
        else:
            with tf.device("CPU:0"):  # where TensorFlow makes keys, on any device
                made.append(tf.zeros(placeholder.shape, placeholder.dtype))
    return made
