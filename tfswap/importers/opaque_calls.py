"""Opaque calls: functions that nodes run in the step and that are not in the graph, so that their memory is unknown.

They are dataset loops, calls that TensorFlow does not inline, and unknown ops. Other calls are inlined (inline.py).
Loops and conditionals have bodies (bodies.py), and data pipelines run on the host. The memory of calls that XLA
compiles is measured (runtime/xla_calls.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfswap.importers.references import functions_in
from tfswap.ir.graph import Graph, Node, Opaque
from tfswap.ir.op_traits import control_flow, makes_pipeline


def opaque_calls(graph: Graph) -> Iterator[tuple[Node, list[str]]]:
    """Nodes of `graph` and of its bodies that make opaque calls, with the names of the functions."""
    for part in (graph, *graph.all_bodies()):
        for node in part:
            if node in part.bodies or _is_on_host(node):
                continue
            if node.measured.temporary_bytes is None and (names := functions_of(node)):
                yield node, names


def _is_on_host(node: Node) -> bool:
    """Whether the node makes a data pipeline. AutoGraph's scan for `for x in dataset` runs on the step's device."""
    return makes_pipeline(node.op) and node.attrs.get("use_default_device", True) is True


def library_functions(graph: Graph) -> Mapping[str, Any]:
    """The FunctionDefs of a graph's library, by name."""
    from tensorflow.core.framework import graph_pb2

    if graph.library is None:
        return {}
    library = graph_pb2.GraphDef.FromString(graph.library.data).library
    return {f.signature.name: f for f in library.function}


def functions_of(node: Node) -> list[str]:
    """Names of the functions that a node runs: those of a loop or conditional in the order of its bodies, others in the
    order of the attributes' names. The order of a protobuf map differs between processes.
    """
    kind = control_flow(node.op)
    attributes = [node.attrs[name] for name in (sorted(node.attrs) if kind is None else kind.functions)]
    encoded = [value.data for value in attributes if isinstance(value, Opaque) and value.kind == "attr"]
    if not encoded:  # such a graph can be planned without TensorFlow
        return []
    from tensorflow.core.framework import attr_value_pb2

    values = map(attr_value_pb2.AttrValue.FromString, encoded)
    return [function.name for value in values for function in functions_in(value)]
