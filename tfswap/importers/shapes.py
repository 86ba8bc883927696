"""Shapes of a GraphDef's tensors, which TensorFlow infers from the arguments' shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfswap.errors import InvalidModel
from tfswap.ir.graph import SMALL_INTEGERS, Variable
from tfswap.ir.types import Shape, TensorType

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, tensor_shape_pb2

HANDLES = frozenset(("resource", "variant"))
"""Element types of handles: of variables, lists and other objects."""

HandleType = tuple[int, Any] | tuple[int, Any, Any]
"""The element type (TensorFlow's enum) and shape proto of a variable, or of a list's elements; for a list also the
proto of its full type."""


@dataclass
class Argument:
    """The known facts about an argument of a graph.

    Attributes:
        dtype: the element type (TensorFlow's enum).
        shape: the shape.
        handles: the types behind a handle.
        bound: whether the shape, or the value, is an upper bound.
        value: its integers, flat; None where unknown.
        content: the contents of a list or an optional (list_elements.py).
    """

    dtype: int
    shape: Shape
    handles: Sequence[HandleType]
    bound: bool = False
    value: tuple[int, ...] | None = None
    content: Content | None = None


@dataclass(frozen=True)
class Content:
    """The known contents of a list or an optional.

    Attributes:
        parts: the type of a list's elements (one Argument for all), or an optional's components. Empty: it has no
            elements. None: unknown.
        length: the number of a list's elements, set or not; None where unknown.
        optional: whether it is an optional.
        by_branch: the contents by branch of the conditional that made it, where these differ.
    """

    parts: tuple[Argument, ...] | None
    length: int | None = None
    optional: bool = False
    by_branch: tuple[Content | None, ...] = ()

    @property
    def bound(self) -> bool:
        """Whether a part of it is an upper bound."""
        inside = (*(part.content for part in self.parts or ()), *self.by_branch)
        return any(p.bound for p in self.parts or ()) or any(c.bound for c in inside if c is not None)


def variable_behind(argument: Argument, name: str, kept: bool) -> Variable | None:
    """The variable behind an argument; None where there is none, or its shape is not known."""
    import tensorflow as tf

    if tf.as_dtype(argument.dtype) != tf.resource or len(argument.handles) != 1:
        return None
    dtype, shape, *_ = argument.handles[0]
    dims = shape_of(shape)
    return None if dims is None or None in dims else Variable(TensorType(tf.as_dtype(dtype).name, dims), name, kept)


def shape_of(proto: tensor_shape_pb2.TensorShapeProto) -> Shape:
    """The shape of a proto, as in TensorType."""
    return None if proto.unknown_rank else tuple(None if d.size < 0 else d.size for d in proto.dim)


def handle_types(tensor: Any) -> list[HandleType]:
    """The types behind a symbolic handle; empty where TensorFlow does not know them."""
    from tensorflow.python.ops import handle_data_util

    data = handle_data_util.get_resource_handle_data(tensor) if tensor.dtype.name in HANDLES else None
    return [] if data is None else [(t.dtype, t.shape, t.type) for t in data.shape_and_type]


class Inferred:
    """TensorFlow's inferred facts about a graph's tensors, by their names ("node:0")."""

    def __init__(self, graph: Any, bound: Mapping[str, Any], shapes: Mapping[str, Any]):
        self._graph = graph
        self._bound = bound
        self._shapes = shapes

    def forget(self) -> None:
        """Free TensorFlow's graph, and its constants in the arena of a CPU.

        A graph refers to itself: otherwise it would exist until the next garbage collection.
        """
        _dismantle(self._graph)

    def argument(self, name: str) -> Argument:
        """The tensor as an argument of another graph."""
        tensor = self._tensor(name)
        node, _, index = name.partition(":")
        shape = shape_of(self._shapes[node].list.shape[int(index)])
        return Argument(tensor.dtype.as_datatype_enum, shape, handle_types(tensor))

    def value(self, name: str) -> tuple[int, ...] | None:
        """The integers of a small tensor, flat, where TensorFlow can compute them without running the graph."""
        tensor = self._tensor(name)
        count = tensor.shape.num_elements()
        if tensor.dtype.name not in ("int32", "int64") or count is None or count > SMALL_INTEGERS:
            return None
        found = _evaluated(tensor)
        return None if found is None else tuple(found.ravel().tolist())

    def evaluated_shape(self, name: str) -> Shape:
        """The shape of a tensor that depends on constants only; None for others."""
        found = _evaluated(self._tensor(name))
        return None if found is None else found.shape

    def _tensor(self, name: str) -> Any:
        made = self._bound.get(name)
        return self._graph.get_tensor_by_name(name) if made is None else made


def _evaluated(tensor: Any) -> Any:
    """The value of a tensor that depends on constants only, as an array; None for others."""
    from tensorflow.python.framework import tensor_util

    return tensor_util.try_evaluate_constant(tensor)


def infer_shapes(
    graph_def: graph_pb2.GraphDef, arguments: Mapping[str, Argument], known: Mapping[str, Argument] | None = None
) -> Inferred:
    """Write the `_output_shapes` of `graph_def`, in place, as TensorFlow infers them from the arguments.

    Existing ones are used as declared: those of a trace include the shapes of `set_shape`.

    Args:
        arguments: the arguments, by the names of their nodes.
        known: facts about tensors ("node:0") that TensorFlow does not infer.

    Raises:
        InvalidModel: the graph does not fit the arguments.
    """
    import tensorflow as tf
    from tensorflow.python.ops import handle_data_util

    bound: dict[str, Any] = {}
    with tf.Graph().as_default() as scratch:
        try:
            tensors = {**(known or {}), **{f"{name}:0": a for name, a in arguments.items()}}
            for i, (name, argument) in enumerate(tensors.items()):
                resource = tf.as_dtype(argument.dtype) == tf.resource
                # Another name, since "a/b" would occupy the name "a" too, and a node "a" would be imported as "a_1".
                stand_in = f"tfswap_argument_{i}"
                if argument.value is not None:
                    made = tf.constant(argument.value, argument.dtype, argument.shape, name=stand_in)
                else:
                    made = tf.compat.v1.placeholder(argument.dtype, () if resource else argument.shape, name=stand_in)
                if argument.handles:
                    handle_data_util.set_handle_data(made, _handle_data(argument.handles))
                bound[name] = made
            with _without_devices(graph_def):
                tf.graph_util.import_graph_def(graph_def, input_map=bound, name="")
        except (ValueError, TypeError) as error:  # a dimension beyond 64 bits is a TypeError
            _dismantle(scratch)
            raise InvalidModel(
                f"TensorFlow can't build this graph with the given input shapes: {error}. "
                "Check batch_size= or input_shapes=; where they are right, the graph is damaged."
            ) from error
        shapes = {n.name: n.attr["_output_shapes"] for n in scratch.as_graph_def(add_shapes=True).node}
    for node in graph_def.node:
        if f"{node.name}:0" in bound and node.name not in shapes:
            shapes[node.name] = shapes[bound[f"{node.name}:0"].op.name]
        if node.name not in shapes:
            continue
        found = shapes[node.name].list.shape
        for i in range(len(found)):
            if (made := bound.get(f"{node.name}:{i}")) is not None:
                found[i].CopyFrom(shapes[made.op.name].list.shape[0])
        node.attr["_output_shapes"].CopyFrom(shapes[node.name])
    return Inferred(scratch, bound, shapes)


@contextlib.contextmanager
def _without_devices(graph_def: graph_pb2.GraphDef) -> Iterator[None]:
    """Within this, nodes name no device. Shapes do not depend on it, and TensorFlow takes longer to set devices than to
    import all else.
    """
    devices = [(node, node.device) for node in graph_def.node if node.device]
    for node, _ in devices:
        node.device = ""
    try:
        yield
    finally:
        for node, device in devices:
            node.device = device


def _dismantle(graph: Any) -> None:
    from tensorflow.python.framework import ops

    ops.dismantle_graph(graph)


def _handle_data(handles: Sequence[HandleType]) -> Any:
    from tensorflow.core.framework import cpp_shape_inference_pb2 as shape_inference

    made = shape_inference.CppShapeInferenceResult.HandleData(is_set=True)
    for dtype, shape, *full_type in handles:
        made.shape_and_type.add(dtype=dtype, type=full_type[0] if full_type else None).shape.CopyFrom(shape)
    return made
