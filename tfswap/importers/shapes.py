"""Shapes of a GraphDef's tensors, inferred by TensorFlow from its arguments' shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfswap.errors import InvalidModel
from tfswap.ir.graph import SMALL_INTEGERS
from tfswap.ir.types import Shape

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, tensor_shape_pb2

HANDLES = frozenset(("resource", "variant"))
"""Element types of tensors that stand for others."""

HandleType = tuple[int, Any] | tuple[int, Any, Any]
"""Element type (as TensorFlow numbers them) and shape proto of what is behind a resource, or in a tensor list; for
the latter also its full type's proto."""


@dataclass
class Argument:
    """What a graph is given: an element type (as TensorFlow numbers them), a shape, and what is behind a handle.

    Attributes:
        bound: whether the shape, or the value, is the largest that the step can make it.
        value: the integers that it holds, flat, where they are known.
        content: what is in it, if it is a list or an optional (see contents.py).
    """

    dtype: int
    shape: Shape
    handles: Sequence[HandleType]
    bound: bool = False
    value: tuple[int, ...] | None = None
    content: Content | None = None


@dataclass(frozen=True)
class Content:
    """What is known of what is in a list or an optional.

    Attributes:
        parts: what each element of the list is (one Argument for all), or the optional's components; none where there
            is nothing in it, and None where nothing is known.
        length: how many elements the list has, set or not.
        optional: whether it is an optional.
        by_branch: the same for each branch of a conditional that may have made it, where that differs.
    """

    parts: tuple[Argument, ...] | None
    length: int | None = None
    optional: bool = False
    by_branch: tuple[Content | None, ...] = ()

    @property
    def bound(self) -> bool:
        """Whether some of it may be smaller."""
        inside = (*(part.content for part in self.parts or ()), *self.by_branch)
        return any(p.bound for p in self.parts or ()) or any(c.bound for c in inside if c is not None)


def shape_of(proto: tensor_shape_pb2.TensorShapeProto) -> Shape:
    """The shape as types have it."""
    return None if proto.unknown_rank else tuple(None if d.size < 0 else d.size for d in proto.dim)


def handle_types(tensor: Any) -> list[HandleType]:
    """What is behind a symbolic tensor that stands for others, where TensorFlow knows it."""
    from tensorflow.python.ops import handle_data_util

    data = handle_data_util.get_resource_handle_data(tensor) if tensor.dtype.name in HANDLES else None
    return [] if data is None else [(t.dtype, t.shape, t.type) for t in data.shape_and_type]


class Inferred:
    """What TensorFlow knows of a graph's tensors, by their names ("node:0")."""

    def __init__(self, graph: Any, bound: Mapping[str, Any], shapes: Mapping[str, Any]):
        self._graph = graph
        self._bound = bound
        self._shapes = shapes

    def forget(self) -> None:
        """Give back what TensorFlow holds for this: constants too, in the device's own memory where that is a CPU's.

        A graph refers to itself: without this it is there until the garbage collector comes.
        """
        _dismantle(self._graph)

    def argument(self, name: str) -> Argument:
        """The tensor as what another graph is given."""
        tensor = self._tensor(name)
        node, _, index = name.partition(":")
        shape = shape_of(self._shapes[node].list.shape[int(index)])
        return Argument(tensor.dtype.as_datatype_enum, shape, handle_types(tensor))

    def value(self, name: str) -> tuple[int, ...] | None:
        """The integers that a small tensor holds, flat, where TensorFlow knows them without running the graph."""
        tensor = self._tensor(name)
        count = tensor.shape.num_elements()
        if tensor.dtype.name not in ("int32", "int64") or count is None or count > SMALL_INTEGERS:
            return None
        found = _evaluated(tensor)
        return None if found is None else tuple(found.ravel().tolist())

    def evaluated_shape(self, name: str) -> Shape:
        """The shape of a tensor that depends on constants alone; None for others."""
        found = _evaluated(self._tensor(name))
        return None if found is None else found.shape

    def _tensor(self, name: str) -> Any:
        made = self._bound.get(name)
        return self._graph.get_tensor_by_name(name) if made is None else made


def _evaluated(tensor: Any) -> Any:
    """What the tensor holds, as an array, where it depends on constants alone; else None."""
    from tensorflow.python.framework import tensor_util

    return tensor_util.try_evaluate_constant(tensor)


def infer_shapes(
    graph_def: graph_pb2.GraphDef, arguments: Mapping[str, Argument], known: Mapping[str, Argument] | None = None
) -> Inferred:
    """Write the `_output_shapes` of `graph_def`, in place, as inferred by TensorFlow from its arguments' shapes.

    Those that it has already are taken for true: a trace knows what `set_shape` said, and ops do not say it.

    Args:
        arguments: per fed node, what it is given.
        known: tensors ("node:0") of which more is known than TensorFlow can infer.
    """
    import tensorflow as tf
    from tensorflow.python.ops import handle_data_util

    bound: dict[str, Any] = {}
    with tf.Graph().as_default() as scratch:
        try:
            tensors = {**(known or {}), **{f"{name}:0": a for name, a in arguments.items()}}
            for i, (name, argument) in enumerate(tensors.items()):
                resource = tf.as_dtype(argument.dtype) == tf.resource
                # Not by its own name: "a/b" would take the name "a" too, and a node "a" be imported as "a_1".
                stand_in = f"tfswap_argument_{i}"
                if argument.value is not None:
                    made = tf.constant(argument.value, argument.dtype, argument.shape, name=stand_in)
                else:
                    made = tf.compat.v1.placeholder(argument.dtype, () if resource else argument.shape, name=stand_in)
                if argument.handles:
                    handle_data_util.set_handle_data(made, _handle_data(argument.handles))
                bound[name] = made
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


def _dismantle(graph: Any) -> None:
    from tensorflow.python.framework import ops

    ops.dismantle_graph(graph)


def _handle_data(handles: Sequence[HandleType]) -> Any:
    from tensorflow.core.framework import cpp_shape_inference_pb2 as shape_inference

    made = shape_inference.CppShapeInferenceResult.HandleData(is_set=True)
    for dtype, shape, *full_type in handles:
        made.shape_and_type.add(dtype=dtype, type=full_type[0] if full_type else None).shape.CopyFrom(shape)
    return made
