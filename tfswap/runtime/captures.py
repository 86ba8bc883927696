"""What a trace captures, some of which TensorFlow asks for anew at each call.

Collectives are the reason: each call takes a key for each of its collectives, by which they find each other on all
workers. Who takes more keys than the others waits for ever. So a call asks once, whatever is planned and made in the
course of it; and a step that is made and not run is given stand-ins.
"""

from __future__ import annotations

from typing import Any

from tfswap.importers.shapes import HANDLES


def captured(concrete: Any) -> list[Any] | None:
    """What a call captures that begins now; None where it is the same at each call."""
    return concrete.captured_inputs if _asks(concrete) else None


def _asks(concrete: Any) -> bool:
    return any(map(callable, concrete._captured_inputs))  # in every call


def deferred(concrete: Any) -> list[bool]:
    """Of each input of the trace, captures included, whether only a call may ask for it."""
    late = [callable(capture) for capture in concrete._captured_inputs]
    return [False] * (len(concrete.inputs) - len(late)) + late


def without_asking(concrete: Any) -> list[Any]:
    """What the trace captures, with zeros for what only a call may ask for."""
    import tensorflow as tf

    if not _asks(concrete):
        return concrete.captured_inputs
    made: list[Any] = []
    placeholders = concrete.inputs[-len(concrete._captured_inputs) :]
    for capture, placeholder in zip(concrete._captured_inputs, placeholders, strict=True):
        if not callable(capture):
            made.append(capture)
        elif placeholder.dtype.name in HANDLES or not placeholder.shape.is_fully_defined():
            made.append(capture())  # no key
        else:
            with tf.device("CPU:0"):  # where TensorFlow makes keys, whatever the collective's device
                made.append(tf.zeros(placeholder.shape, placeholder.dtype))
    return made
