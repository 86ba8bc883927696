"""Initial values of variables in slices: a variable that is larger than the device is made at home on the host.

A callable that makes an initial value is traced into a graph. What computes the whole value there (constants, random
numbers, reads of other variables, elementwise kernels) runs once for each slice of elements, and all else (shapes,
seeds) once. Each op runs by itself, as TensorFlow runs it eagerly, so no optimizer changes the bits; and a slice has
those of the whole, as in passes/tactics/update_groups.py and ir/philox.py.

Not handled: values of which an element depends on several others (orthogonal matrices), kernels that keep a
generator's state (`tf.random.uniform`), callables that only run eagerly. They are called again, and make their value
whole.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, Protocol

from tfswap.ir import philox
from tfswap.ir.custom_ops import DRAWS
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    calls_functions,
    is_const,
    is_elementwise,
    is_feed,
    is_known,
    passes_on,
    runs_python,
    writes_variable,
)
from tfswap.kernels.alignment import ALIGNMENT_BYTES, round_up
from tfswap.kernels.slices import ELEMENTS
from tfswap.native.load import load
from tfswap.support.reach import reach

MOST_BYTES: Final = 4 << 20
"""Of a slice. Larger ones take no less time."""
LEAST_BYTES: Final = 16 << 10
"""Of a slice. Smaller ones would take much time."""
SLACK: Final = 2
"""The allocator may give a request a free chunk of up to twice its size (BFCAllocator::FindChunkPtr)."""


class InSlices(Protocol):
    """A value whose elements can be made slice by slice.

    Attributes:
        shape: of the value.
        dtype: TensorFlow's.
        live_bytes: of the tensors that exist at one time, per element of a slice.
        rest_bytes: of the small tensors that exist in addition, and what requests are rounded up by.
        nbytes: of the value.
    """

    shape: tuple[int, ...]
    dtype: Any
    live_bytes: int
    rest_bytes: int
    nbytes: int | None

    def elements(self, begin: int, count: int) -> Any:
        """Elements from `begin` on, in row-major order: a vector. `begin` is a multiple of `ELEMENTS`."""
        ...


def peak_bytes(value: InSlices, most_bytes: int) -> int:
    """A bound on what making the value in slices of at most that many bytes takes of the arena."""
    return SLACK * (value.live_bytes * min(prod(value.shape), _elements(value, most_bytes)) + value.rest_bytes)


def _elements(value: InSlices, most_bytes: int) -> int:
    return max(1, most_bytes // value.dtype.size // ELEMENTS) * ELEMENTS


def make_at_home(value: InSlices, most_bytes: int, spill_dir: str = "") -> Any:
    """The value, in slices of at most that many bytes: an eager tensor that is the home of a variable.

    Args:
        spill_dir: the folder for what has no room in host memory; "" for none.

    Raises ResourceExhaustedError where there is too little host memory, and disk space.
    """
    import tensorflow as tf

    ops, count, step = load().ops, prod(value.shape), _elements(value, most_bytes)
    shape = tf.constant(value.shape, tf.int64, [len(value.shape)])
    home = ops.tfswap_make_home(shape=shape, dtype=value.dtype, spill_dir=os.fsencode(spill_dir))
    for begin in range(0, count, step):
        made = value.elements(begin, min(step, count - begin))
        ops.tfswap_fill_home(home=home, value=made, begin=tf.constant(begin, tf.int64))
        del made
    return home


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, or a dataset of an HDF5 file."""
    import numpy as np

    h5py = sys.modules.get("h5py")
    return isinstance(value, np.ndarray) or (h5py is not None and isinstance(value, h5py.Dataset))


class ArrayInSlices:
    """A NumPy array, or a dataset of an HDF5 file, which is read slice by slice."""

    def __init__(self, array: Any):
        import tensorflow as tf

        self._array = array
        self._inner = prod(array.shape[1:])
        self.shape = tuple(array.shape)
        self.dtype = tf.as_dtype(array.dtype)
        self.live_bytes = array.dtype.itemsize
        self.rest_bytes = ALIGNMENT_BYTES
        self.nbytes = array.nbytes

    def elements(self, begin: int, count: int) -> Any:
        import numpy as np
        import tensorflow as tf

        if not self.shape:
            return tf.constant(np.reshape(self._array, [1]))
        first, last = begin // self._inner, -(-(begin + count) // self._inner)
        skipped = begin - first * self._inner
        return tf.constant(np.asarray(self._array[first:last]).reshape(-1)[skipped : skipped + count])


class Traced:
    """An initial value that is a graph.

    Attributes:
        shape, dtype, live_bytes, rest_bytes: as of `InSlices`, where there is no obstacle.
        obstacle: why it can't be made in slices, as a sentence; "" where it can.
        nbytes: of the value; None where they are not known before it is computed.
    """

    def __init__(self, graph: Any, value: Any):
        self._graph = graph
        self._value = value
        self.dtype = value.dtype
        self.shape: tuple[int, ...] = tuple(value.shape) if value.shape.is_fully_defined() else ()
        self.nbytes = prod(self.shape) * self.dtype.size if value.shape.is_fully_defined() else None
        self.live_bytes = self.rest_bytes = 0
        self._in_slices: list[Any] = []  # the ops, in order
        self._others: list[Any] = []
        self._last_use: dict[str, Any] = {}  # by tensor that is made in slices, the last op that reads it
        self._computed: dict[str, Any] | None = None
        self.obstacle = self._find_obstacle()
        if not self.obstacle:
            self._find_live_bytes()

    def elements(self, begin: int, count: int) -> Any:
        """As of `InSlices`. Raises TensorFlow's errors of the ops."""
        import tensorflow as tf

        if self._computed is None:
            self._computed = self._compute_others()
        made = dict(self._computed)
        for op in self._in_slices:
            given = [made[tensor.name] for tensor in op.inputs]
            made[op.outputs[0].name] = _part(op, given, begin, count)
            del given
            for tensor in op.inputs:
                if self._last_use.get(tensor.name) is op:
                    made.pop(tensor.name, None)
        return tf.reshape(made[self._value.name], [count])

    def _find_obstacle(self) -> str:
        if not self.nbytes:
            return "its size is not known before it is computed, or is 0."
        reached = [*reach([self._value.op], self._sources)]
        if is_large(self._value) and (found := next((op for op in reached if not self._is_made(op)), None)):
            return f"{_named(found)} is not computed element by element, or keeps the state of a random generator."
        ops = self._graph.get_operations()
        made = {op for op in reached if self._is_made(op)}
        if any(op.type == READ_VARIABLE for op in made) and any(writes_variable(op.type) for op in ops):
            return "it reads a variable, and changes one."
        others = {op for op in ops if op not in made}
        for op in reversed(ops):
            if op in others:
                others.update(tensor.op for tensor in op.inputs)
                if (obstacle := _obstacle(op)) is not None:
                    return obstacle
        self._in_slices = [op for op in ops if op in made]
        self._others = [op for op in ops if op in others]
        return ""

    def _sources(self, op: Any) -> list[Any]:
        """The ops whose elements are read by the element at the same place of what an op makes."""
        if not self._is_made(op) or not _is_elementwise(op):
            return []
        return [t.op for t in op.inputs if _count(t) != 1]

    def _is_made(self, op: Any) -> bool:
        """Whether slices of what an op makes can be made from those of other tensors."""
        if len(op.outputs) != 1 or op.control_inputs or op.outputs[0].shape != self.shape:
            return False
        if _is_elementwise(op):
            return all(_count(t) == 1 or t.shape == self.shape for t in op.inputs)
        return is_const(op.type) or op.type in ("Fill", READ_VARIABLE) or _is_philox(op)

    def _find_live_bytes(self) -> None:
        self.rest_bytes = ALIGNMENT_BYTES * len(self._in_slices)
        for tensor in (tensor for op in self._others for tensor in op.outputs):
            self.rest_bytes += round_up(max(0, _count(tensor)) * tensor.dtype.size)
        made, now = {*self._in_slices}, 0
        for op in self._in_slices:
            self._last_use.update({tensor.name: op for tensor in op.inputs if tensor.op in made})
        for op in self._in_slices:
            now += op.outputs[0].dtype.size
            self.live_bytes = max(self.live_bytes, now)
            now -= sum({t.name: t.dtype.size for t in op.inputs if self._last_use.get(t.name) is op}.values())

    def _compute_others(self) -> dict[str, Any]:
        """By tensor that is not made in slices, its value."""
        captured = {inner.name: outer for outer, inner in self._graph.captures}
        made: dict[str, Any] = {}
        for op in self._others:
            if is_feed(op.type):
                made[op.outputs[0].name] = captured[op.outputs[0].name]
            else:
                results = _run(op, [made[tensor.name] for tensor in op.inputs])
                made.update(zip((t.name for t in op.outputs), results, strict=True))
        return made


def traced(make: Callable[[], Any]) -> Any:
    """The graph of an initial value, `Traced`; or the value, where the callable has it already; None where only an
    eager call makes it.
    """
    import tensorflow as tf
    from tensorflow.python.framework.func_graph import FuncGraph

    graph = FuncGraph("tfswap_initial_value")
    try:
        with graph.as_default():
            value = make()
    except Exception:  # whatever it is: an eager call raises it again, where it is no matter of graphs
        return None
    is_of_graph = tf.is_tensor(value) and getattr(value, "graph", None) is graph
    return Traced(graph, value) if is_of_graph else value


def lifted(value: Any) -> Traced:
    """The graph of an initial value that is a tensor of a larger graph. Raises UnliftableError where it depends on the
    arguments of that graph.
    """
    from tensorflow.python.eager.lift_to_graph import lift_to_graph
    from tensorflow.python.framework.func_graph import FuncGraph

    graph = FuncGraph("tfswap_initial_value")
    with graph.as_default():
        return Traced(graph, lift_to_graph([value], graph)[value])


def is_large(tensor: Any) -> bool:
    """Whether a tensor is too large for what runs once."""
    return tensor.dtype.size > 0 and not 0 <= _count(tensor) <= ELEMENTS


def _count(tensor: Any) -> int:
    """The elements of a tensor; -1 where they are not known."""
    return tensor.shape.num_elements() if tensor.shape.is_fully_defined() else -1


def _is_elementwise(op: Any) -> bool:
    return is_elementwise(op.type) or passes_on(op.type)


def _is_philox(op: Any) -> bool:
    if not philox.draws_from_counter(op.type):
        return False
    algorithm = op.inputs[philox.ALGORITHM_INPUT].op
    return is_const(algorithm.type) and algorithm.get_attr("value").int_val[0] in philox.ALGORITHMS


def _obstacle(op: Any) -> str | None:
    """Why an op can't run once, by itself, before the slices; None where it can."""
    if op.type in DRAWS:
        return f"{_named(op)} keeps the state of a random generator."
    if not is_known(op.type) or calls_functions(op.type) or runs_python(op.type):
        return f"{_named(op)} is a call."
    return f"{_named(op)} makes another large tensor." if any(map(is_large, op.outputs)) else None


def _named(op: Any) -> str:
    return f"{op.type} '{op.name}'"


def _part(op: Any, given: list[Any], begin: int, count: int) -> Any:
    """Elements of the output of an op that makes slices, as a vector."""
    import numpy as np
    import tensorflow as tf

    if is_const(op.type):
        return tf.constant(_constant_part(op.get_attr("value"), begin, count))
    if op.type == READ_VARIABLE:
        with tf.device(given[0].device):  # perhaps another one than the slice's
            return tf.reshape(_run(op, given)[0], [-1])[begin : begin + count]
    if philox.draws_from_counter(op.type):
        low, high = map(int, given[philox.COUNTER_INPUT].numpy())
        skipped = philox.counters_before(op.type, op.outputs[0].dtype.size, begin)
        counter = np.array(philox.advanced((low, high), skipped), np.uint64)
        given = [tf.constant([count], given[0].dtype), given[philox.KEY_INPUT], tf.constant(counter), *given[3:]]
    elif op.type == "Fill":
        given = [tf.constant([count], given[0].dtype), given[1]]
    else:
        given = [tf.reshape(tensor, []) if _count(tensor) == 1 else tensor for tensor in given]
    return _run(op, given)[0]


def _constant_part(proto: Any, begin: int, count: int) -> Any:
    """Elements of a constant. One whose elements are all the same has the value once."""
    import tensorflow as tf

    if proto.tensor_content:
        return tf.make_ndarray(proto).reshape(-1)[begin : begin + count]
    part = type(proto)()
    part.CopyFrom(proto)
    part.tensor_shape.CopyFrom(tf.TensorShape([count]).as_proto())
    return tf.make_ndarray(part)


def _run(op: Any, given: list[Any]) -> list[Any]:
    """Run an op of a graph eagerly."""
    import tensorflow as tf
    from tensorflow.python.eager import context, execute

    if is_const(op.type):
        return [tf.constant(tf.make_ndarray(op.get_attr("value")), op.outputs[0].dtype)]
    attrs = [part for name, value in _attributes(op).items() for part in (name, value)]
    with tf.device(op.device or None):
        return list(execute.execute(op.type, len(op.outputs), given, tuple(attrs), context.context()))


def _attributes(op: Any) -> Mapping[str, Any]:
    """The attributes of an op, as an eager call takes them."""
    import tensorflow as tf

    def eager(value: Any) -> Any:
        if isinstance(value, list):
            return [eager(each) for each in value]
        if isinstance(value, tf.DType):
            return value.as_datatype_enum
        return tf.TensorShape(value) if isinstance(value, type(tf.TensorShape([]).as_proto())) else value

    return {attr.name: eager(op.get_attr(attr.name)) for attr in op.op_def.attr}
