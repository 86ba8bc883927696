"""Functions that nodes run in the step, out of the graph's sight: what they hold on the device is in no count.

Seen are calls that become part of the graph (inline.py), loops and conditionals (bodies.py). Data pipelines run on the
host. What is left: dataset loops, calls that TensorFlow does not inline, and ops that nobody knows here. Of calls that
XLA compiles it is measured what they hold (runtime/xla_calls.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfswap.importers.references import functions_in
from tfswap.ir.graph import Graph, Node, Opaque
from tfswap.ir.op_traits import control_flow, makes_pipeline


def hidden_calls(graph: Graph) -> Iterator[tuple[Node, list[str]]]:
    """Nodes of `graph` and of its bodies that run functions out of sight, with those functions' names."""
    for part in (graph, *graph.all_bodies()):
        for node in part:
            if node in part.bodies or _is_on_host(node):
                continue
            if node.measured.temporary_bytes is None and (names := functions_of(node)):
                yield node, names


def _is_on_host(node: Node) -> bool:
    """Whether it makes a pipeline; the scan that AutoGraph makes of `for x in dataset` runs on the step's device."""
    return makes_pipeline(node.op) and node.attrs.get("use_default_device", True) is True


def library_functions(graph: Graph) -> Mapping[str, Any]:
    """The FunctionDefs that come with a graph, by name."""
    from tensorflow.core.framework import graph_pb2

    if graph.library is None:
        return {}
    library = graph_pb2.GraphDef.FromString(graph.library.data).library
    return {f.signature.name: f for f in library.function}


def functions_of(node: Node) -> list[str]:
    """Names of the functions that a node runs: of a loop or conditional as its bodies are, of others by attribute.

    Attributes come from a protobuf map, whose order is another one in each process.
    """
    kind = control_flow(node.op)
    attributes = [node.attrs[name] for name in (sorted(node.attrs) if kind is None else kind.functions)]
    encoded = [value.data for value in attributes if isinstance(value, Opaque) and value.kind == "attr"]
    if not encoded:  # a graph without any is planned where there is no TensorFlow
        return []
    from tensorflow.core.framework import attr_value_pb2

    values = map(attr_value_pb2.AttrValue.FromString, encoded)
    return [function.name for value in values for function in functions_in(value)]
