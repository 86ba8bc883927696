"""A model from a file can be damaged in any way: what TensorFlow then stumbles over becomes one clear error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfswap.errors import InvalidModel


@contextlib.contextmanager
def named_as_damage(what: str) -> Iterator[None]:
    """Turn what reading raises on names, positions and values that are not there into InvalidModel.

    Args:
        what: is read, for the message.
    """
    import tensorflow as tf

    try:
        yield
    except (LookupError, ValueError, TypeError, tf.errors.OpError) as error:
        raise InvalidModel(
            f"{what} is damaged: reading it ended with {type(error).__name__}: {error}. Save it anew."
        ) from error
