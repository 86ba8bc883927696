"""Variables that are at home in host memory from the start: a model may be larger than the device.

Whatever assigns a variable as a whole in a scope, outside of a graph, is followed by the variable's move home: its
creation, `assign`, Keras' `load_weights`, a checkpoint's `restore`. TensorFlow restores all objects of a checkpoint by
one op, so in a scope it restores one after the other.

Not handled: assignments inside of a `tf.function`, which leave variables on the device until a step moves them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

from tfswap.device.arena import memory_info
from tfswap.device.variable_buffers import move_home
from tfswap.errors import TfswapError
from tfswap.support.sizes import is_share, parse_limit


@contextlib.contextmanager
def scope(memory_limit: int | str | None = None) -> Iterator[None]:
    """Make and restore variables at home in host memory, one after the other.

        with tfswap.scope():
            model = build()
            optimizer.build(model.trainable_variables)
            model.load_weights("first.weights.h5")  # or tf.train.Checkpoint(...).restore(...), tf.saved_model.load(...)
        train_step = tfswap.optimize(step, memory_limit="1GiB")

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
    from tensorflow.python.framework import op_callbacks

    if memory_limit is not None and is_share(memory_limit):
        raise TfswapError(
            f"memory_limit is {memory_limit!r}: a scope has no step to take a share of. Give bytes or a size."
        )
    moves = _MovesHome(None if memory_limit is None else parse_limit(memory_limit))
    _restore_one_by_one()
    op_callbacks.add_op_callback(moves)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(moves)


class _MovesHome:
    """Called after each op of this thread; moves variables home once they are assigned.

    Args:
        limit_bytes: of the device, under which variables stay; None: none stays.
    """

    def __init__(self, limit_bytes: int | None):
        self._limit_bytes = limit_bytes
        self._largest_bytes = 0

    def __call__(
        self, op: Any, inputs: Any, attrs: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> None:
        if op not in ("AssignVariableOp", b"AssignVariableOp") or graph is not None:
            return
        handle, value = inputs
        if not _is_movable(value):
            return
        nbytes = value.dtype.size * value.shape.num_elements()
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if not self._has_room(handle):
            move_home(handle, host=True)

    def _has_room(self, handle: Any) -> bool:
        """Whether the device of a variable has room for as many more bytes under the limit."""
        if self._limit_bytes is None:
            return False
        info = memory_info(handle.device.rpartition("/device:")[2])
        return info is None or info.current_bytes + self._largest_bytes <= self._limit_bytes


def _is_movable(value: Any) -> bool:
    """Whether a value is of numbers."""
    import tensorflow as tf

    return value.dtype.size > 0 and value.dtype not in (tf.string, tf.resource, tf.variant)


@functools.cache
def _restore_one_by_one() -> None:
    """From now on, have checkpoints restored by an op for each object, in the threads and at the times of a scope."""
    from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver
    from tensorflow.python.eager import context

    restore = MultiDeviceSaver.restore

    @functools.wraps(restore)
    def restore_in_scope(self: Any, file_prefix: Any, options: Any = None) -> Any:
        here = context.context()
        if not here.executing_eagerly() or not any(isinstance(each, _MovesHome) for each in here.op_callbacks):
            return restore(self, file_prefix, options)
        restored: dict[str, Any] = {}
        for part in _parts(self):
            restored |= restore(part, file_prefix, options)
        return restored

    MultiDeviceSaver.restore = restore_in_scope


def _parts(saver: Any) -> Iterator[Any]:
    """For each object of a checkpoint, a saver of that object alone; the last has those with savers of their own."""
    tensors: dict[Any, dict[Any, list[Any]]] = {function: {} for function in saver._restore_fn_to_keys}
    for task, all_of_task in saver._shardable_tensors_by_task.items():
        for each in all_of_task:
            function = saver._keys_to_restore_fn[each.checkpoint_key, each.slice_spec]
            tensors[function].setdefault(task, []).append(each)
    for function, by_task in tensors.items():
        part = copy.copy(saver)
        part._restore_fn_to_keys = {function: saver._restore_fn_to_keys[function]}
        part._shardable_tensors_by_task = by_task
        part._num_unique_tasks = len(by_task)
        part._registered_savers = {}
        yield part
    rest = copy.copy(saver)
    rest._restore_fn_to_keys = rest._shardable_tensors_by_task = {}
    yield rest
