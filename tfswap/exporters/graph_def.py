"""IR to GraphDef: the exact inverse of `tfswap.importers.graph_def`, shapes aside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfswap.ir.graph import Dims, Dtype, Graph, Opaque

if TYPE_CHECKING:
    from tensorflow.core.framework import attr_value_pb2, graph_pb2


def export_graph_def(graph: Graph) -> graph_pb2.GraphDef:
    """`graph` as TensorFlow's GraphDef, with its function library and versions."""
    from tensorflow.core.framework import graph_pb2

    graph_def = graph_pb2.GraphDef()
    if graph.library is not None:
        graph_def.ParseFromString(graph.library.data)
    encode = _AttrEncoder()
    for node in graph:
        proto = graph_def.node.add(name=node.name, op=node.op, device=node.device)
        proto.input.extend(i.node.name if i.index == 0 else i.name for i in node.inputs)
        proto.input.extend("^" + c.name for c in node.controls)
        for key, value in node.attrs.items():
            proto.attr[key].CopyFrom(encode(value))
    return graph_def


class _AttrEncoder:
    """Python to AttrValue, remembering what it has made: a graph repeats few distinct values."""

    def __init__(self) -> None:
        from tensorflow.core.framework import attr_value_pb2
        from tensorflow.python.framework import dtypes

        self._proto = attr_value_pb2.AttrValue
        self._dtypes = dtypes
        self._made: dict[tuple[type, object], attr_value_pb2.AttrValue] = {}

    def __call__(self, value: object) -> attr_value_pb2.AttrValue:
        if isinstance(value, (tuple, Opaque, float)) and not isinstance(value, (Dims, Dtype)):
            # Equal tuples can hold different types (1, True, 1.0), and 0.0 equals -0.0: no memory for these.
            return self._encode(value)
        key = (type(value), value)
        if key not in self._made:
            self._made[key] = self._encode(value)
        return self._made[key]

    def _encode(self, value: Any) -> attr_value_pb2.AttrValue:
        made = self._proto()
        if isinstance(value, Opaque):
            if value.kind == "tensor":
                made.tensor.ParseFromString(value.data)
            else:
                made.ParseFromString(value.data)
        elif value is None or isinstance(value, Dims):
            _fill_shape(made.shape, value)
        elif isinstance(value, tuple):
            made.list.SetInParent()
            for item in value:
                self._append(made.list, item)
        else:
            kind = self._scalar_kind(value)
            setattr(made, kind, self._dtypes.as_dtype(value).as_datatype_enum if kind == "type" else value)
        return made

    def _append(self, target: Any, item: Any) -> None:
        if item is None or isinstance(item, Dims):
            _fill_shape(target.shape.add(), item)
            return
        kind = self._scalar_kind(item)
        getattr(target, kind).append(self._dtypes.as_dtype(item).as_datatype_enum if kind == "type" else item)

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


def _fill_shape(target: Any, dims: Dims | None) -> None:
    if dims is None:
        target.unknown_rank = True
        return
    target.SetInParent()
    for dim in dims:
        target.dim.add(size=-1 if dim is None else dim)
