"""Turns TensorFlow's errors on a damaged file into one clear error.

validate.py checks the parts of a file that tfswap reads itself. An error raised by tfswap's own code is therefore a
defect of tfswap, and is passed on.
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
    """Turn TensorFlow's errors on damaged files, which are of any type, into InvalidModel.

    Args:
        what: the file or its part, for the message.
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
    """Whether a package of FOREIGN raised an error, itself or in a call of Python's standard library."""
    foreign = False
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        foreign = package in FOREIGN or (foreign and package in sys.stdlib_module_names)
        trace = trace.tb_next
    return foreign
