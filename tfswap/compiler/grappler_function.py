"""A step in the form of the function that TensorFlow makes of it, which Grappler optimizes.

Grappler depends on names: it orders nodes from the graph's ends (model_pruner.cc), and sorts the inputs of a sum
(arithmetic_optimizer.cc), which are added in that order. So nodes have the names that TensorFlow gives them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tfswap.exporters.graph_def import enum_of, fill_shape
from tfswap.importers.shapes import HANDLES, Argument, HandleType
from tfswap.ir.graph import Graph, Node, Output
from tfswap.ir.op_traits import control_flow
from tfswap.ir.types import Shape, TensorType
from tfswap.ir.views import origin
from tfswap.passes.nodes import PRESERVE

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_shape_pb2

READ = "ReadVariableOp"
WRITES = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
GATHER = "ResourceGather"
"""Ops that show a variable's type: by their result, by their input, and by rows of it."""


def arguments_of(graph: Graph, given: Sequence[Node]) -> dict[str, Argument]:
    """The step's arguments, by name; variables with their types, where the step's ops show these."""
    held: dict[str, list[HandleType]] = {
        node.name: [(enum_of(kind.dtype), _shape(kind.shape))] for node, kind in _held(graph).items()
    }
    types = ((feed.name, feed.outputs[0]) for feed in given)
    return {n: Argument(enum_of(kind.dtype), kind.shape, held.get(n, []), bound=kind.bound) for n, kind in types}


def _held(graph: Graph) -> dict[Node, TensorType]:
    """The type of each variable, by the node of its handle."""
    held: dict[Node, TensorType] = {}
    for node in graph:
        if node.op in (READ, *WRITES, GATHER):
            kind = node.inputs[1].type if node.op in WRITES else node.outputs[0]
            if node.op == GATHER and kind.shape is not None:
                kind = TensorType(kind.dtype, (None, *kind.shape[len(node.inputs[1].type.shape or ()) :]))
            held.setdefault(origin(node.inputs[0]).node, kind)
        elif (flow := control_flow(node.op)) is not None:
            for body in graph.bodies.get(node, ()):
                inner = _held(body)
                for feed, given in zip(body.feeds, node.inputs[flow.first_argument :], strict=True):
                    if feed in inner:
                        held.setdefault(origin(given).node, inner[feed])
    return held


def _shape(shape: Shape) -> tensor_shape_pb2.TensorShapeProto:
    from tensorflow.core.framework import tensor_shape_pb2

    made = tensor_shape_pb2.TensorShapeProto()
    fill_shape(made, shape)
    return made


def as_in_function(
    graph_def: graph_pb2.GraphDef,
    feeds: Mapping[str, int],
    arguments: Mapping[str, Argument],
    shapes: Mapping[str, Shape] | None,
    unfolded: Container[str],
    place: str,
) -> dict[str, node_def_pb2.NodeDef]:
    """Place nodes on a device, make the feeds a function's arguments, and keep nodes from folding.

    Returns placeholders for the arguments, by name.

    Args:
        feeds: the arguments' numbers, by name.
        shapes: the shapes that Grappler sees, by name; by default those of the arguments.
        unfolded: names of nodes that Grappler must not fold.
    """
    fed: dict[str, node_def_pb2.NodeDef] = {}
    for node in graph_def.node:
        node.device = node.device or place
        if node.name in unfolded:
            node.attr[PRESERVE].b = True
        if node.name in feeds:
            fed[node.name] = type(node)(name=node.name, op="Placeholder")
            fed[node.name].attr["dtype"].type = arguments[node.name].dtype
            shape = arguments[node.name].shape if shapes is None else shapes[node.name]
            _make_argument(node, feeds[node.name], replace(arguments[node.name], shape=shape))
    return fed


def _make_argument(node: node_def_pb2.NodeDef, number: int, argument: Argument) -> None:
    """Make `node`, in place, an argument of a function.

    An `_Arg` node has no shape, which Grappler needs. `_ParallelConcatStart` has one, and Grappler does not change it.
    """
    del node.input[:]
    node.ClearField("attr")
    if argument.dtype in map(enum_of, HANDLES):
        node.op = "_Arg"
        node.attr["T"].type = argument.dtype
        node.attr["index"].i = number
        for dtype, shape, *_ in argument.handles:
            node.attr["_handle_dtypes"].list.type.append(dtype)
            node.attr["_handle_shapes"].list.shape.add().CopyFrom(shape)
        return
    node.op = "_ParallelConcatStart"
    node.attr["dtype"].type = argument.dtype
    node.attr["shape"].shape.CopyFrom(_shape(argument.shape))


def add_results(graph_def: graph_pb2.GraphDef, names: Sequence[str], fetches: Sequence[Output], place: str) -> None:
    """Add a function's results of these names, in order."""
    for number, (name, fetch) in enumerate(zip(names, fetches, strict=True)):
        result = graph_def.node.add(name=name, op="_Retval", input=[fetch.name], device=place)
        result.attr["T"].type = enum_of(fetch.type.dtype)
        result.attr["index"].i = number


def names_in_function(graph: Graph, given: Sequence[Node]) -> tuple[list[str], dict[str, str]]:
    """The names that differ between a trace and the function that TensorFlow makes of it.

    Follows NodeNameMapping in graph_to_functiondef.cc.

    Args:
        given: the arguments.

    Returns:
        Names of the nodes of results, which `graph` need not have; and the new names of arguments and other nodes, by
        their names in the trace.
    """
    used: dict[str, int] = {}

    def unique(name: str) -> str:
        candidate = name
        while candidate in used:
            candidate = f"{name}_{used[name]}"
            used[name] += 1
        used[candidate] = 0
        return candidate

    results = [f"{unique(_in_signature(fetch.node.name))}_RetVal" for fetch in graph.fetches]
    names = {feed.name: unique(_in_signature(feed.name)) for feed in given}
    names |= {node.name: unique(node.name) for node in graph if node.name not in names}
    return results, {traced: name for traced, name in names.items() if name != traced}


def _in_signature(name: str) -> str:
    return re.sub("[^a-z0-9]", "_", name.lower()).lstrip("_0123456789") or "unknown"


def drop_controls(node: node_def_pb2.NodeDef, feeds: Container[str]) -> None:
    """Remove control edges from arguments, in place, which constants folded from an argument's shape have."""
    inputs = [name for name in node.input if not (name.startswith("^") and name[1:] in feeds)]
    if len(inputs) < len(node.input):
        del node.input[:]
        node.input.extend(inputs)
