"""A model from a file can be damaged in any way: what TensorFlow then stumbles over becomes one clear error.

What tfswap reads itself is checked before (validate.py). So an error that its own code raises is a defect of it, and
passes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType

from tfswap.errors import InvalidModel, TfswapError

FOREIGN = frozenset(("google", "keras", "numpy", "tensorflow"))
"""The packages whose errors are about the file."""


@contextlib.contextmanager
def named_as_damage(what: str) -> Iterator[None]:
    """Turn what TensorFlow raises on damaged files into InvalidModel. It raises errors of any type.

    Args:
        what: is read, for the message.
    """
    import tensorflow as tf

    try:
        yield
    except TfswapError:
        raise
    except Exception as error:
        if not isinstance(error, tf.errors.OpError) and not _is_foreign(error.__traceback__):
            raise
        message = " ".join(str(error).split())  # one line
        raise InvalidModel(
            f"{what} is damaged: reading it ended with {type(error).__name__}: {message}. Save it again."
        ) from error


def _is_foreign(trace: TracebackType | None) -> bool:
    """Whether the code that raised an error is TensorFlow's, or of what it is made of. Python's own is its caller's."""
    foreign = False
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        foreign = package in FOREIGN or (foreign and package in sys.stdlib_module_names)
        trace = trace.tb_next
    return foreign
