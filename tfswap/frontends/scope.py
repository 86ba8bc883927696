"""Variables that are at home in host memory from the start: a model may be larger than the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tfswap.device.arena import memory_info
from tfswap.device.variable_buffers import move_home
from tfswap.errors import TfswapError
from tfswap.support.sizes import is_share, parse_limit


@contextlib.contextmanager
def scope(memory_limit: int | str | None = None) -> Iterator[None]:
    """Make variables that are at home in host memory, one after the other.

        with tfswap.scope():
            model = build()
            optimizer.build(model.trainable_variables)
        train_step = tfswap.optimize(step, memory_limit="1GiB", tactics=("swap", "recompute", "encode", "state"))

    Each variable is moved as soon as it has its value. So the device holds one variable at a time, with the temporary
    tensors of its initializer. Everything else reads and writes the variables as before. A step with `"state"` in its
    tactics leaves them there as far as its limit requires; other optimized steps bring them back.

    Args:
        memory_limit: variables stay on the device as long as its bytes in use leave room under this limit for another
            one of the largest size so far: bytes or a size ("6GiB"). None: none stays.

    Raises:
        TfswapError: the limit is malformed.
        ResourceExhaustedError: there is too little host memory.
    """
    import tensorflow as tf

    if memory_limit is not None and is_share(memory_limit):
        raise TfswapError(
            f"memory_limit is {memory_limit!r}: a scope has no step to take a share of. Give bytes or a size."
        )
    limit_bytes = None if memory_limit is None else parse_limit(memory_limit)
    largest_bytes = 0

    def made(next_creator: Any, **kwargs: Any) -> Any:
        nonlocal largest_bytes
        variable = next_creator(**kwargs)
        for each in getattr(variable, "values", (variable,)):
            if _is_movable(each):
                nbytes = each.dtype.size * each.shape.num_elements()
                largest_bytes = max(largest_bytes, nbytes)
                if not _has_room(each.handle, limit_bytes, largest_bytes):
                    move_home(each.handle, host=True)
        return variable

    with tf.variable_creator_scope(made):
        yield


def _is_movable(variable: Any) -> bool:
    """Whether it is a variable of numbers with a value. One that a traced function makes gets its value later."""
    import tensorflow as tf

    handle = getattr(variable, "handle", None)
    if handle is None or tf.is_symbolic_tensor(handle) or variable.dtype.size == 0:
        return False
    return variable.shape.num_elements() is not None and variable.dtype not in (tf.string, tf.resource, tf.variant)


def _has_room(handle: Any, limit_bytes: int | None, nbytes: int) -> bool:
    """Whether the device of a variable has room for as many more bytes under the limit."""
    if limit_bytes is None:
        return False
    info = memory_info(handle.device.rpartition("/device:")[2])
    return info is None or info.current_bytes + nbytes <= limit_bytes
