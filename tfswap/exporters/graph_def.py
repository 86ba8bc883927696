"""IR to GraphDef: the exact inverse of `tfswap.importers.graph_def`, shapes aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tfswap.importers.library import drop_lost_colocations
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Opaque
from tfswap.ir.types import Shape

if TYPE_CHECKING:
    from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, tensor_shape_pb2

    from tfswap.exporters.function_def import BodyFunctions


def export_graph_def(graph: Graph, bodies: BodyFunctions | None = None) -> graph_pb2.GraphDef:
    """`graph` as TensorFlow's GraphDef, with its function library and versions.

    Args:
        bodies: gets the bodies of the graph's loops and conditionals, which become part of the library too.
    """
    from tensorflow.core.framework import graph_pb2

    from tfswap.exporters.function_def import BodyFunctions

    bodies = bodies or BodyFunctions()
    graph_def = graph_pb2.GraphDef()
    if graph.library is not None:
        graph_def.ParseFromString(graph.library.data)
    graph_def.node.extend(encode_nodes(graph, bodies.attributes))
    graph_def.library.function.extend(bodies.made.values())
    return graph_def


def encode_nodes(
    graph: Graph, running: Callable[[Node, tuple[Graph, ...]], Mapping[str, Any]]
) -> list[node_def_pb2.NodeDef]:
    """The nodes of `graph` as NodeDefs. Colocations with nodes that a pass has removed are left out.

    Args:
        running: gives the attributes by which a node runs its bodies.
    """
    encode = _AttrEncoder()
    made: list[node_def_pb2.NodeDef] = []
    for node in graph:
        proto = encode.node(node)
        if node in graph.bodies:
            for key, value in running(node, graph.bodies[node]).items():
                proto.attr[key].CopyFrom(value)
        made.append(proto)
    drop_lost_colocations(made)
    return made


class _AttrEncoder:
    """Python to AttrValue, with a cache: a graph repeats few distinct values."""

    def __init__(self) -> None:
        from tensorflow.core.framework import attr_value_pb2, node_def_pb2

        self._proto = attr_value_pb2.AttrValue
        self._node_proto = node_def_pb2.NodeDef
        self._made: dict[tuple[type, object], attr_value_pb2.AttrValue] = {}

    def __call__(self, value: object) -> attr_value_pb2.AttrValue:
        if isinstance(value, (tuple, Opaque, float)) and not isinstance(value, (Dims, Dtype)):
            # Equal tuples can hold different types (1, True, 1.0), and 0.0 equals -0.0: these are not cached.
            return self._encode(value)
        key = (type(value), value)
        if key not in self._made:
            self._made[key] = self._encode(value)
        return self._made[key]

    def node(self, node: Node) -> node_def_pb2.NodeDef:
        """A node without its bodies."""
        proto = self._node_proto(name=node.name, op=node.op, device=node.device)
        proto.input.extend(i.node.name if i.index == 0 else i.name for i in node.inputs)
        proto.input.extend("^" + c.name for c in node.controls)
        for key, value in node.attrs.items():
            proto.attr[key].CopyFrom(self(value))
        return proto

    def _encode(self, value: Any) -> attr_value_pb2.AttrValue:
        made = self._proto()
        if isinstance(value, Opaque):
            if value.kind == "tensor":
                made.tensor.ParseFromString(value.data)
            else:
                made.ParseFromString(value.data)
        elif value is None or isinstance(value, Dims):
            fill_shape(made.shape, value)
        elif isinstance(value, tuple):
            made.list.SetInParent()
            for item in value:
                self._append(made.list, item)
        else:
            kind = self._scalar_kind(value)
            setattr(made, kind, enum_of(value) if kind == "type" else value)
        return made

    def _append(self, target: Any, item: Any) -> None:
        if item is None or isinstance(item, Dims):
            fill_shape(target.shape.add(), item)
            return
        if isinstance(item, Node):  # which is part of another
            item = self.node(item).SerializeToString(deterministic=True)
        kind = self._scalar_kind(item)
        getattr(target, kind).append(enum_of(item) if kind == "type" else item)

    @staticmethod
    def _scalar_kind(value: object) -> str:
        if isinstance(value, bool):
            return "b"
        if isinstance(value, Dtype):
            return "type"
        for python_type, kind in ((bytes, "s"), (int, "i"), (float, "f")):
            if isinstance(value, python_type):
                return kind
        raise TypeError(f"no attribute kind for {value!r}")


def enum_of(dtype: str) -> int:
    """TensorFlow's number for an element type."""
    from tensorflow.python.framework import dtypes

    return dtypes.as_dtype(dtype).as_datatype_enum


def fill_shape(target: tensor_shape_pb2.TensorShapeProto, dims: Shape) -> None:
    """Write a shape, None for one that is not known, into an empty proto."""
    if dims is None:
        target.unknown_rank = True
        return
    target.SetInParent()
    for dim in dims:
        target.dim.add(size=-1 if dim is None else dim)
