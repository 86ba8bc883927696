"""Variables that are at home on the host from the start: a model may be larger than the device, and than host memory.

A variable whose initial value is a callable, as those of Keras are, is made at home, in slices where the value can be
made so (initial_values.py). So it may itself be larger than the device.

A variable that the first trace of a `tf.function` makes, as an optimizer's slots often are, gets its initial value
after that. TensorFlow gives all of them theirs by one function; in a scope they get them one after the other, by that
function where the device has room for the value and in slices where it has not.

Whatever assigns a variable as a whole in a scope, outside of a graph, is followed by the variable's move home: its
creation, `assign`, Keras' `load_weights`, a checkpoint's `restore`. TensorFlow restores all objects of a checkpoint by
one op, so in a scope it restores one after the other. A large variable is read into host memory, and its home is
filled in slices. So it is from a NumPy array or a dataset of an HDF5 file that `assign`, `set_weights` or
`load_weights` are given, of which TensorFlow would make a tensor on the device.

Not handled: assignments inside of a `tf.function`, which leave variables on the device until a step moves them; in
slices, tensors that `assign` is given, and the values of several replicas.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from tfswap.compiler.options import Options
from tfswap.compiler.request import as_spill
from tfswap.device.arena import device_limit_bytes, memory_info
from tfswap.device.variable_buffers import move_home
from tfswap.errors import InfeasibleMemoryLimit, TfswapError
from tfswap.frontends.initial_values import (
    LEAST_BYTES,
    MOST_BYTES,
    SLACK,
    ArrayInSlices,
    InSlices,
    Traced,
    is_array,
    lifted,
    make_at_home,
    peak_bytes,
    traced,
)
from tfswap.ir.devices import within_worker
from tfswap.ir.permits import STATE
from tfswap.support.sizes import format_bytes, is_share, parse_limit


@contextlib.contextmanager
def scope(
    memory_limit: int | str | None = None,
    *,
    host_memory_limit: int | str | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
) -> Iterator[None]:
    """Make and restore variables at home in host memory, one after the other.

        with tfswap.scope():
            model = build()
            optimizer.build(model.trainable_variables)
            model.load_weights("first.weights.h5")  # or tf.train.Checkpoint(...).restore(...), tf.saved_model.load(...)
        train_step = tfswap.optimize(step, memory_limit="1GiB")

    A variable whose initial value is a callable is made in slices, if each element of the value is computed by itself:
    constants, and numbers by a seed that are uniform, normal or truncated normal, as by all initializers of Keras but
    those of orthogonal and identity matrices. The callable is traced, and called again where that is not so. Other
    variables are moved as soon as they have their value. So the device holds one of these at a time, with the temporary
    tensors of its initializer. Everything else reads and writes the variables as before. A step with `"state"` in its
    tactics leaves them there as far as its limit requires; other optimized steps bring them back.

    Args:
        memory_limit: of the device, while variables are made: bytes or a size ("6GiB"). They stay on it as long as its
            bytes in use leave room for another one of the largest size so far. None: none stays, and the limit is the
            arena's size.
        host_memory_limit: of host memory, while variables are made. None: what the machine has.
        spill_dir: the folder of an unnamed file, on a local disk, for the variables that host memory has no room for. A
            GPU's variables can't be there.

    Raises:
        TfswapError: a limit is malformed, or the file can't be made.
        InfeasibleMemoryLimit: a variable can't be made under the limit.
        ResourceExhaustedError: there is too little host memory, and disk space.
    """
    import tensorflow as tf
    from tensorflow.python.framework import op_callbacks

    if memory_limit is not None and is_share(memory_limit):
        raise TfswapError(
            f"memory_limit is {memory_limit!r}: a scope has no step to take a share of. Give bytes or a size."
        )
    host_bytes = None if host_memory_limit is None else parse_limit(host_memory_limit, name="host_memory_limit")
    spill = as_spill(spill_dir, None, host_bytes)
    folder = "" if spill is None else spill.folder
    moves = _MovesHome(None if memory_limit is None else parse_limit(memory_limit), folder)
    _restore_one_by_one()
    _assign_in_slices()
    _initialize_one_by_one()
    _convert_in_slices()
    with _limited(host_bytes, folder):
        op_callbacks.add_op_callback(moves)
        try:
            with tf.variable_creator_scope(moves.create):
                yield
        finally:
            op_callbacks.remove_op_callback(moves)


@contextlib.contextmanager
def _limited(host_bytes: int | None, folder: str) -> Iterator[None]:
    """While active, the process's variables take no more host memory than that. Raises TfswapError where the folder
    allows no file.
    """
    import tfswap.ops

    if host_bytes is None and not folder:
        yield
        return
    owner = secrets.randbits(62)
    try:
        tfswap.ops.register(owner, host_bytes, folder)
    except OSError as error:
        raise TfswapError(str(error)) from error
    try:
        yield
    finally:
        tfswap.ops.unregister(owner)


_OTHERS: Final = (
    "Give it an initial value that is computed element by element (zeros, constants, random numbers by a seed), or a "
    "function that returns a NumPy array: these are made in slices."
)


class _Room(NamedTuple):
    """What a device has left under a limit.

    Attributes:
        limit_bytes: None where nothing is counted.
    """

    limit_bytes: int | None
    in_use_bytes: int = 0
    peak_bytes: int = 0

    @classmethod
    def of(cls, device: str, limit_bytes: int | None) -> _Room:
        """That of a device; without a limit, that of its arena."""
        info = memory_info(device)
        if info is None:
            return cls(None)
        return cls(limit_bytes or device_limit_bytes(device), info.current_bytes, info.peak_bytes)

    @classmethod
    def here(cls, limit_bytes: int | None) -> _Room:
        """That of the device on which tensors are made now."""
        import tensorflow as tf

        return cls.of(within_worker(tf.zeros([]).device), limit_bytes)

    @property
    def is_kept(self) -> bool:
        """Whether the limit has been kept so far."""
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes

    def has(self, nbytes: int) -> bool:
        """Whether there is room for as many more bytes."""
        return self.limit_bytes is None or self.in_use_bytes + nbytes <= self.limit_bytes

    def refusal(self, name: str, nbytes: int, floor_bytes: int, why: str) -> InfeasibleMemoryLimit:
        """The error for a variable that needs more."""
        limit_bytes = self.limit_bytes or 0
        return InfeasibleMemoryLimit(
            f"variable '{name}' of {format_bytes(nbytes)} can't be made within {limit_bytes:,} bytes, of which "
            f"{self.in_use_bytes:,} are in use. It takes at least {floor_bytes:,} {why}",
            floor_bytes=floor_bytes,
            limit_bytes=limit_bytes,
        )


class _MovesHome:
    """Called after each op of this thread; moves variables home once they are assigned. Makes initial values.

    Args:
        limit_bytes: of the device, under which variables stay; None: none stays.
        spill_dir: the folder for what host memory has no room for; "" for none.
    """

    def __init__(self, limit_bytes: int | None, spill_dir: str = ""):
        self._limit_bytes = limit_bytes
        self._spill_dir = spill_dir
        self._largest_bytes = LEAST_BYTES
        self._home: Any = None  # a value that is at home, for a variable that is to be assigned it

    def __call__(
        self, op: Any, inputs: Any, attrs: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> None:
        if op not in ("AssignVariableOp", b"AssignVariableOp") or graph is not None:
            return
        handle, value = inputs
        if not _is_movable(value):
            return
        made, self._home = self._home, None
        is_home = made is not None and (value.dtype, value.shape) == (made.dtype, made.shape)
        self._place(handle, value.dtype.size * value.shape.num_elements(), is_home)

    def _place(self, handle: Any, nbytes: int, is_home: bool) -> None:
        """Move a variable that has been assigned home, or to the device where that has room for it."""
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if is_home and self._has_room(handle, SLACK * nbytes):
            move_home(handle, host=False)
        elif not is_home and not self._has_room(handle):
            move_home(handle, host=True, spill_dir=self._spill_dir)

    def create(self, make_next: Any, **options: Any) -> Any:
        """Make a variable, as of `tf.variable_creator_scope`."""
        from tensorflow.python.trackable.base import CheckpointInitialValueCallable

        _convert_in_slices()  # Keras is loaded by now, if it makes this variable
        make = options.get("initial_value")
        if callable(make) and not isinstance(make, CheckpointInitialValueCallable):
            name = str(options.get("name") or "Variable")
            options["initial_value"] = functools.partial(self._initial_value, make, name)
        return make_next(**options)

    def _initial_value(self, make: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
        """What the callable gives, or the home of its value."""
        import numpy as np
        import tensorflow as tf

        make = functools.partial(make, *args, **options)
        if not tf.executing_eagerly():
            return make()
        value = traced(make)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc" and value.size:
            return self.make(ArrayInSlices(value), name)
        if isinstance(value, Traced) and not value.obstacle:
            return self.make(value, name)
        if isinstance(value, Traced):
            return self._whole(make, name, value.nbytes or 0, value.obstacle)
        return self._whole(make, name, 0, "its callable runs eagerly only.") if value is None else value

    def make(self, value: InSlices, name: str) -> Any:
        """The value, at home, for a variable that is assigned it next."""
        room = _Room.here(self._limit_bytes)
        if not room.has(needed_bytes := peak_bytes(value, LEAST_BYTES)):
            raise room.refusal(name, value.nbytes or 0, room.in_use_bytes + needed_bytes, "even in slices.")
        most_bytes = LEAST_BYTES
        while most_bytes < MOST_BYTES and room.has(peak_bytes(value, 2 * most_bytes)):
            most_bytes *= 2
        self._home = make_at_home(value, most_bytes, self._spill_dir)
        return self._home

    def initialize(self, variable: Any, value: Any, run: Callable[[], Any]) -> None:
        """Give a variable that a trace has made its initial value.

        Args:
            value: a tensor of that trace.
            run: TensorFlow's way to do it: a function that computes the value and assigns it.
        """
        import tensorflow as tf

        if not _is_movable(variable) or tf.compat.v1.is_variable_initialized(variable):
            run()
            return
        made = lifted(value)
        nbytes = made.nbytes or 0
        with tf.device(variable.device):
            if made.obstacle:
                self._whole(run, variable.name, nbytes, made.obstacle)
            elif _Room.here(self._limit_bytes).has(peak_bytes(made, nbytes)):
                run()
            else:
                variable.assign(self.make(made, variable.name), read_value=False)
                return
        self._place(variable.handle, nbytes, False)

    def _whole(self, make: Callable[[], Any], name: str, nbytes: int, obstacle: str) -> Any:
        """What the callable gives, which is made on the device as a whole."""
        import tensorflow as tf

        why = f"as a whole: {obstacle} {_OTHERS}"
        room = _Room.here(self._limit_bytes)
        if not room.has(nbytes):
            raise room.refusal(name, nbytes, room.in_use_bytes + nbytes, why)
        try:
            value = make()
        except tf.errors.ResourceExhaustedError as error:
            raise TfswapError(f"the device has no room for making variable '{name}' {why}") from error
        after = _Room.here(self._limit_bytes)
        if not after.is_kept and room.is_kept:
            raise after.refusal(name, nbytes, after.peak_bytes, why)
        return value

    def _has_room(self, handle: Any, nbytes: int = 0) -> bool:
        """Whether a variable's device has room under the limit for these bytes, and as many as the largest has."""
        if self._limit_bytes is None:
            return False
        return _Room.of(within_worker(handle.device), self._limit_bytes).has(nbytes + self._largest_bytes)


def _is_movable(value: Any) -> bool:
    """Whether a value is of numbers."""
    import tensorflow as tf

    return value.dtype.size > 0 and value.dtype not in (tf.string, tf.resource, tf.variant)


@functools.cache
def _restore_one_by_one() -> None:
    """From now on, have checkpoints restored by an op for each object, in the threads and at the times of a scope."""
    from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver

    restore = MultiDeviceSaver.restore

    @functools.wraps(restore)
    def restore_in_scope(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if (moves := _innermost()) is None:
            return restore(self, file_prefix, options)
        restored: dict[str, Any] = {}
        for part in _parts(self):
            if not _restore_in_slices(part, file_prefix, moves):
                restored |= restore(part, file_prefix, options)
        return restored

    MultiDeviceSaver.restore = restore_in_scope


def _innermost() -> _MovesHome | None:
    """The present scope of this thread, outside of graphs."""
    from tensorflow.python.eager import context

    here = context.context()
    scopes = [each for each in here.op_callbacks if isinstance(each, _MovesHome)]
    return scopes[-1] if scopes and here.executing_eagerly() else None


@functools.cache
def _assign_in_slices() -> None:
    """From now on, have variables that are assigned arrays in a scope filled in slices."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    assign = ResourceVariable.assign  # which the class has besides that of its base class

    @functools.wraps(assign)
    def assign_in_scope(self: Any, value: Any, *args: Any, **options: Any) -> Any:
        return assign(self, _at_home(self, value), *args, **options)

    ResourceVariable.assign = assign_in_scope


@functools.cache
def _initialize_one_by_one() -> None:
    """From now on, have variables that the first trace of a `tf.function` makes in a scope initialized one by one."""
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    initialize = Function._initialize_uninitialized_variables

    @functools.wraps(initialize)
    def initialize_in_scope(self: Any, initializers: Any) -> Any:
        import tensorflow as tf

        with tf.init_scope():
            if (moves := _innermost()) is None:
                return initialize(self, initializers)
            for variable, value in initializers:
                moves.initialize(variable, value, functools.partial(initialize, self, [(variable, value)]))
        return None

    Function._initialize_uninitialized_variables = initialize_in_scope


def scope_of_first_trace(function: Any, options: Options) -> contextlib.AbstractContextManager[None]:
    """A scope for the variables that a `tf.function` makes in its first trace, which other traces make none of.

    Args:
        options: of the step that the function is.
    """
    if STATE not in options.tactics or function._variable_creation_config is not None:
        return contextlib.nullcontext()
    folder = None if options.spill is None else options.spill.folder
    return scope_of_writes(host_memory_limit=options.host_limit_bytes, spill_dir=folder)


def scope_of_writes(**host: Any) -> contextlib.AbstractContextManager[None]:
    """The present scope; a new one where there is none.

    Args:
        host: other arguments of `scope` than the limit.
    """
    return contextlib.nullcontext() if _innermost() is not None else scope(**host)


def _convert_in_slices() -> None:
    """The same for Keras, which makes a tensor of the array before it assigns that."""
    if (core := sys.modules.get("keras.src.backend.tensorflow.core")) is not None:
        _convert_in_slices_of(core.Variable)


@functools.cache
def _convert_in_slices_of(variables: Any) -> None:
    convert = variables._convert_to_tensor

    @functools.wraps(convert)
    def convert_in_scope(self: Any, value: Any, dtype: Any = None) -> Any:
        return convert(self, _at_home(getattr(self, "_value", None), value), dtype)

    variables._convert_to_tensor = convert_in_scope


def _at_home(variable: Any, value: Any) -> Any:
    """A variable's new value: at home, where it is a large array, and the innermost scope can make it so; otherwise as
    it is.
    """
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    if not is_array(value) or (moves := _innermost()) is None or not isinstance(variable, ResourceVariable):
        return value
    if not _is_movable(variable) or tuple(value.shape) != tuple(variable.shape):
        return value  # TensorFlow has an error for that
    if value.dtype != variable.dtype.as_numpy_dtype or value.nbytes <= LEAST_BYTES:
        return value
    with tf.device(variable.device):
        return moves.make(ArrayInSlices(value), variable.name)


def _restore_in_slices(saver: Any, file_prefix: Any, moves: _MovesHome) -> bool:
    """Restore a large variable from a tensor in host memory; false, and nothing is done, for other objects."""
    import tensorflow as tf
    from tensorflow.python.trackable.trackable_utils import extract_local_name

    tensors = [each for all_of_task in saver._shardable_tensors_by_task.values() for each in all_of_task]
    if len(tensors) != 1 or tensors[0].slice_spec:
        return False
    (tensor,) = tensors
    variable = _variable_of(tensor.trackable)
    if variable is None or not _is_movable(variable):
        return False
    if variable.dtype.size * (variable.shape.num_elements() or 0) <= MOST_BYTES:
        return False
    reader, name = tf.train.load_checkpoint(tf.get_static_value(file_prefix)), tensor._tensor_save_spec.name
    if reader.get_variable_to_dtype_map().get(name) != variable.dtype:
        return False  # TensorFlow has an error for that
    with tf.device(variable.device):
        home = moves.make(ArrayInSlices(reader.get_tensor(name)), variable.name)
    saver._keys_to_restore_fn[tensor.checkpoint_key, ""]({extract_local_name(tensor.checkpoint_key): home})
    return True


def _variable_of(owner: Any) -> Any:
    """The variable that an object of a checkpoint restores; None for other objects."""
    from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable

    for attribute in ("obj", "op", "value"):  # of two wrappers of TensorFlow's saver, and of Keras' variables
        if not isinstance(owner, BaseResourceVariable):
            owner = getattr(owner, attribute, owner)
    return owner if isinstance(owner, BaseResourceVariable) else None


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
