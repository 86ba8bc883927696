"""GraphDef to IR.

Attributes become plain Python values (bytes, int, float, bool, Dtype, Dims, tuples). Tensors and function references
stay serialised. Shapes come from the attribute `_output_shapes` (`as_graph_def(add_shapes=True)`), which is left out of
the IR.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tfswap.errors import UnsupportedGraph
from tfswap.importers.python_functions import token_of_tape
from tfswap.importers.shapes import shape_of
from tfswap.ir.graph import SMALL_INTEGERS, Dims, Dtype, Graph, Node, Opaque, Output
from tfswap.ir.op_traits import is_loop_frame, passes_on
from tfswap.ir.python_calls import CALL, TOKEN, connect_gradients
from tfswap.ir.types import Shape, TensorType

if TYPE_CHECKING:
    from tensorflow.core.framework import attr_value_pb2, graph_pb2, node_def_pb2, tensor_pb2, tensor_shape_pb2


def import_graph_def(
    graph_def: graph_pb2.GraphDef,
    feeds: Iterable[str],
    fetches: Iterable[str],
    targets: Iterable[str] = (),
    bounds: Collection[str] = (),
) -> Graph:
    """The IR of `graph_def`.

    Args:
        feeds: names of the nodes that are arguments.
        fetches: names of the tensors ("node:0") that are results.
        targets: names of further nodes that must run.
        bounds: names of tensors whose shapes are upper bounds.

    Raises:
        UnsupportedGraph: TensorFlow 1 loop frames, or a name that is not in the graph.
    """
    importer = _Importer(bounds)
    graph = importer.graph
    for proto in graph_def.node:
        importer.add(proto)
    importer.connect()
    connect_gradients(graph)
    find = importer.find
    graph.feeds = [find(name, "the list of feeds") for name in feeds]
    graph.fetches = [importer.tensor(name, "the list of fetches") for name in fetches]
    graph.targets = [find(name, "the list of targets") for name in targets]
    rest = type(graph_def)()
    rest.library.CopyFrom(graph_def.library)
    rest.versions.CopyFrom(graph_def.versions)
    graph.library = Opaque("GraphDef", rest.SerializeToString(deterministic=True))
    _bind_by_later_views(importer.pending)
    return graph


class _Importer:
    """Nodes first, then the edges between them: a GraphDef lists its nodes in any order.

    A graph has few distinct attributes and types. Equal ones share one object.
    """

    def __init__(self, bounds: Collection[str]):
        self.graph = Graph()
        self.pending: list[tuple[Node, Any]] = []  # nodes with the names of their inputs
        self._bounds = bounds
        self._decode = _AttrDecoder()
        self._by_name: dict[str, Node] = {}
        self._integers: dict[object, tuple[int, ...] | None] = {}  # small integer constants, by content
        self._attrs: dict[frozenset[tuple[str, int]], dict[str, object]] = {}
        self._types: dict[tuple[TensorType, ...], tuple[TensorType, ...]] = {}

    def add(self, proto: node_def_pb2.NodeDef) -> None:
        """Add a node without its inputs. Raises UnsupportedGraph for a TensorFlow 1 loop frame."""
        if is_loop_frame(proto.op):
            raise UnsupportedGraph(
                f"node {proto.name!r} is of type {proto.op}: this graph has TensorFlow 1 loop frames. "
                "Rebuild it with tf.compat.v1.enable_control_flow_v2(), which keeps loops as While nodes."
            )
        attrs: dict[str, object] = {}
        shapes: object = ()
        for key, value in proto.attr.items():
            if key == "_output_shapes":
                shapes = self._decode(value)
            else:
                attrs[key] = self._decode(value)

        attrs = self._attrs.setdefault(frozenset((key, id(value)) for key, value in attrs.items()), attrs)
        node = self.graph.add(sys.intern(proto.op), proto.name, attrs=attrs, device=proto.device)
        if proto.op == CALL:
            node.tape = token_of_tape(proto.attr[TOKEN].s)
        types = _output_types(node, shapes if isinstance(shapes, tuple) else (), self._bounds)
        node.outputs = self._types.setdefault(types, types)
        self._by_name[proto.name] = node
        if proto.op == "Const" and node.outputs[0].dtype in ("int32", "int64"):
            content = attrs["value"]
            if content not in self._integers:
                self._integers[content] = _small_integers(node, proto.attr["value"].tensor)
            if (values := self._integers[content]) is not None:
                self.graph.small_constants[node] = values
        self.pending.append((node, proto.input))

    def connect(self) -> None:
        """Give all nodes their inputs and control inputs."""
        for node, names in self.pending:
            inputs: list[Output] = []
            controls: list[Node] = []
            for name in names:
                if name.startswith("^"):
                    controls.append(self.find(name[1:], node.name))
                else:
                    inputs.append(self.tensor(name, node.name))
            node.inputs = tuple(inputs)
            node.controls = tuple(controls)

    def tensor(self, name: str, where: str) -> Output:
        """As `find`, for "node:index"."""
        source, _, index = name.partition(":")
        return Output(self.find(source, where), int(index or 0))

    def find(self, name: str, where: str) -> Node:
        """The node of this name. Raises UnsupportedGraph, which says where the name is used."""
        node = self._by_name.get(name.partition(":")[0])
        if node is None:
            raise UnsupportedGraph(f"{where!r} names the node {name!r}, which the graph does not have")
        return node


def _small_integers(node: Node, tensor: tensor_pb2.TensorProto) -> tuple[int, ...] | None:
    """The flat values of an integer constant; None where it has more than SMALL_INTEGERS."""
    count = node.outputs[0].num_elements
    if count is None:
        count = math.prod(d.size for d in tensor.tensor_shape.dim)
    if count > SMALL_INTEGERS:
        return None
    from tensorflow.python.framework import tensor_util

    return tuple(tensor_util.MakeNdarray(tensor).ravel().tolist())


def _bind_by_later_views(nodes: Iterable[tuple[Node, Any]]) -> None:
    """Give tensors of unknown size, in place, the shape of a later EnsureShape of them."""
    pending = [node for node, _ in nodes if passes_on(node.op)]
    while pending:
        node = pending.pop()
        for read, known in zip(node.inputs, node.outputs, strict=False):
            if read.type.nbytes is None and known.nbytes is not None and read.type.dtype == known.dtype:
                source = read.node
                types = list(source.outputs)
                types[read.index] = known
                source.outputs = tuple(types)
                if passes_on(source.op):
                    pending.append(source)


class _AttrDecoder:
    """AttrValue to Python, with a cache: a graph has few distinct values."""

    def __init__(self) -> None:
        from tensorflow.python.framework import dtypes

        self._dtypes = dtypes
        self._seen: dict[bytes, object] = {}

    def __call__(self, value: attr_value_pb2.AttrValue) -> object:
        key = value.SerializeToString(deterministic=True)
        if key not in self._seen:
            self._seen[key] = self._decode(value)
        return self._seen[key]

    def _decode(self, value: attr_value_pb2.AttrValue) -> object:
        kind = value.WhichOneof("value")
        if kind == "tensor":
            return Opaque("tensor", value.tensor.SerializeToString(deterministic=True))
        if kind in ("s", "i", "f", "b"):
            return getattr(value, kind)
        if kind == "type":
            return self._dtype(value.type)
        if kind == "shape":
            return _dims(value.shape)
        if kind == "list" and not value.list.func and not value.list.tensor:
            items = value.list
            return (
                *items.s,
                *items.i,
                *items.f,
                *items.b,
                *(self._dtype(t) for t in items.type),
                *(_dims(s) for s in items.shape),
            )
        return Opaque("attr", value.SerializeToString(deterministic=True))

    def _dtype(self, enum: int) -> Dtype:
        return Dtype(self._dtypes.as_dtype(enum).name)


def _dims(proto: tensor_shape_pb2.TensorShapeProto) -> Dims | None:
    shape = shape_of(proto)
    return None if shape is None else Dims(shape)


class _Signature:
    """The element types of an op's outputs, by its attributes, from TensorFlow's registry."""

    def __init__(self, op: str):
        from tensorflow.python.framework import dtypes, op_def_registry

        definition = op_def_registry.get(op)
        if definition is None:
            raise UnsupportedGraph(f"op {op!r} is not known to this TensorFlow: import the package that registers it")
        self.args = [
            (
                a.number_attr,
                a.type_attr,
                a.type_list_attr,
                None if not a.type else dtypes.as_dtype(a.type).base_dtype.name,
            )
            for a in definition.output_arg
        ]

    def dtypes(self, attrs: Mapping[str, Any]) -> list[str]:
        result: list[str] = []
        for number, type_attr, type_list, fixed in self.args:
            if type_list:
                result += attrs[type_list]
            else:
                result += [fixed or attrs[type_attr]] * (attrs[number] if number else 1)
        return result


_signatures: dict[str, _Signature] = {}
_types: dict[tuple[str, Shape, bool], TensorType] = {}


def _output_types(node: Node, shapes: tuple[Shape, ...], bounds: Collection[str]) -> tuple[TensorType, ...]:
    signature = _signatures.get(node.op)
    if signature is None:
        signature = _signatures[node.op] = _Signature(node.op)
    result = []
    for i, dtype in enumerate(signature.dtypes(node.attrs)):
        shape = shapes[i] if i < len(shapes) else None
        key = dtype, shape, node.out(i).name in bounds
        if key not in _types:
            _types[key] = TensorType(str(dtype).removesuffix("_ref"), None if shape is None else tuple(shape), key[2])
        result.append(_types[key])
    return tuple(result)
