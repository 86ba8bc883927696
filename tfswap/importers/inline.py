"""Inlines function calls, so that their nodes are part of the planned graph.

TensorFlow's function optimizer does it. No other part of Grappler runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfswap.importers.references import reachable
from tfswap.importers.run_grappler import run_grappler
from tfswap.ir.custom_ops import GATE, INSIDE
from tfswap.ir.op_traits import control_flow

if TYPE_CHECKING:
    from tensorflow.core.framework import graph_pb2

# Calls of a function by name. Loops and conditionals call functions too, and stay as they are.
CALLS = frozenset(
    (
        "PartitionedCall",
        "StatefulPartitionedCall",
    )
)
LOWERING = "_lower_using_switch_merge"
FETCH = "tfswap_fetch_"
TARGET = "tfswap_target"
ENDS = re.compile(r"Func/(?P<call>.*)/(?P<end>input|input_control_node|output|output_control_node)/_(?P<number>\d+)")
"""Names of the nodes that represent an inlined function's arguments and results."""


class Inlined(NamedTuple):
    """A graph without calls.

    Attributes:
        fetches, targets: names of the fetched tensors, and of nodes that must run.
        calls: as in `Graph.calls`.
    """

    graph_def: graph_pb2.GraphDef
    fetches: list[str]
    targets: list[str]
    calls: Mapping[str, tuple[str, ...]]


def has_calls(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether the graph calls functions by name."""
    # The op of a TensorFlow 1 call is the function's name.
    functions = {f.signature.name for f in graph_def.library.function}
    return any(node.op in CALLS or node.op in functions for node in graph_def.node)


def inline_calls(graph_def: graph_pb2.GraphDef, fetches: list[tuple[str, int]], targets: list[str]) -> Inlined:
    """`graph_def` with its calls inlined, without inferred shapes.

    Calls that TensorFlow does not inline (with `_noinline`, or compiled by XLA) stay.

    Args:
        graph_def: the graph.
        fetches: names of fetched tensors, with TensorFlow's enum number of their types.
        targets: names of nodes that must run.
    """
    from tensorflow.core.framework import graph_pb2
    from tensorflow.core.protobuf import rewriter_config_pb2

    whole = graph_pb2.GraphDef()
    whole.CopyFrom(graph_def)
    names = []
    for i, (fetch, enum) in enumerate(fetches):
        node = whole.node.add(name=f"{FETCH}{i}", op="Identity", input=[fetch])
        node.attr["T"].type = enum
        names.append(node.name)
    if targets:
        whole.node.add(name=TARGET, op="NoOp", input=[f"^{t}" for t in targets])
        names.append(TARGET)
    for node in whole.node:
        node.attr.pop("_output_shapes", None)
    lowered = False
    for node in _nodes(whole):
        if node.op not in CALLS and LOWERING in node.attr:
            # A lowered loop is a cyclic graph, and lowered branches have dead tensors: neither can be planned.
            lowered |= node.attr[LOWERING].b
            del node.attr[LOWERING]
    _call_originals(whole)
    placeholders = [node.name for node in graph_def.node if node.op == "Placeholder"]
    options = rewriter_config_pb2.RewriterConfig(
        optimizers=["function"], function_optimization=rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    )
    shapes = _without_shapes(whole)
    made = run_grappler(whole, [*names, *placeholders], options)
    for node in made.node:
        if node.name in shapes:
            node.attr["shape"].CopyFrom(shapes[node.name])
    for node in made.node:  # colocation with nodes of inlined functions that no longer exist
        node.attr.pop("_class", None)
    ends = {node.name: list(node.input) for node in made.node if node.name in names}
    without_ends = graph_pb2.GraphDef(versions=made.versions)
    without_ends.node.extend(node for node in made.node if node.name not in ends)
    calls = _calls(whole, without_ends.node)
    _wait_for_control_inputs(whole, without_ends, calls)
    _take_handles(without_ends)
    without_ends.library.CopyFrom(_originals(without_ends.node, made.library, whole.library))
    if lowered:
        for node in _nodes(without_ends):
            if control_flow(node.op):
                node.attr[LOWERING].b = True
    del whole.node[len(graph_def.node) :]
    return Inlined(
        without_ends,
        [_tensor(ends[f"{FETCH}{i}"][0]) for i in range(len(fetches))],
        [name.removeprefix("^") for name in ends.get(TARGET, ())],
        calls,
    )


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _originals(nodes: Sequence[Any], made: Any, given: Any) -> Any:
    """A library of the functions that `nodes` run, with their nodes in the original order, which Grappler changes.

    Args:
        made: Grappler's library for `given`.
    """
    functions = {f.signature.name: f for library in (made, given) for f in library.function}
    library = type(made)()
    library.gradient.extend(made.gradient)
    library.function.extend(functions[name] for name in reachable(nodes, functions))
    return library


def _calls(graph_def: graph_pb2.GraphDef, made: Sequence[Any]) -> Mapping[str, tuple[str, ...]]:
    """`Graph.calls` of a graph, from its nodes after inlining."""
    names = {node.name for node in made}
    library = {f.signature.name: f.node_def for f in graph_def.library.function}
    calls: dict[str, list[str]] = {}

    def add(call: str, nodes: Sequence[Any]) -> None:
        prefix = f"{call}/" if call else ""
        calls[call] = [prefix + node.name for node in nodes]
        for node, name in zip(nodes, calls[call], strict=True):
            function = node.attr["f"].func.name if node.op in CALLS else node.op
            if function in library and name not in names:
                add(name, library[function])

    add("", graph_def.node)
    ends: dict[tuple[str, bool], list[tuple[int, str]]] = {}
    for name in names:
        if (end := ENDS.fullmatch(name)) and end["call"] in calls:
            ends.setdefault((end["call"], end["end"].startswith("in")), []).append((int(end["number"]), name))
    for (call, is_input), found in ends.items():
        place = 0 if is_input else len(calls[call])
        calls[call][place:place] = [name for _, name in sorted(found)]
    return {call: tuple(inside) for call, inside in calls.items()}


def _wait_for_control_inputs(graph_def: graph_pb2.GraphDef, made: graph_pb2.GraphDef, calls: Collection[str]) -> None:
    """Give inlined functions in `made`, in place, the control inputs of their calls in `graph_def`, and no others.

    Grappler makes them wait for all arguments (AddStrictInputSemantics in function_optimizer.cc). TensorFlow inlines
    calls before Grappler, without these edges (inline_function_utils.cc).
    """
    library = {f.signature.name: f.node_def for f in graph_def.library.function}
    ends = {(end["call"], end["end"]): name for name in (n.name for n in made.node) if (end := ENDS.fullmatch(name))}
    waits: dict[str, set[str]] = {}  # control inputs, by the node that a function's nodes wait for

    def add(prefix: str, start: str, nodes: Sequence[Any]) -> None:
        for node in nodes:
            call = prefix + node.name
            if call in calls:
                controls = [prefix + read[1:] for read in node.input if read.startswith("^")]
                begins = ends.get((call, "input_control_node"), "")
                waits[begins] = {start, *(ends.get((name, "output_control_node"), name) for name in controls)}
                add(f"{call}/", begins, library[node.attr["f"].func.name if node.op in CALLS else node.op])

    add("", "", graph_def.node)
    nodes = {node.name: node for node in made.node}
    dropped: set[str] = set()

    def keep(node: Any, kept: Callable[[str], bool]) -> None:
        reads = [read for read in node.input if read[:1] != "^" or kept(read[1:])]
        del node.input[:]
        node.input.extend(reads)

    for begins, controls in waits.items():  # callers come before the functions that they call
        if begins in nodes:
            keep(nodes[begins], (controls - dropped).__contains__)
            if not nodes[begins].input:
                dropped.add(begins)
                del nodes[begins]
    for node in nodes.values():
        keep(node, lambda name: name not in dropped)
    left = [node for node in made.node if node.name in nodes]
    del made.node[:]
    made.node.extend(left)


def _take_handles(made: graph_pb2.GraphDef) -> None:
    """Have the nodes of inlined functions in `made`, in place, take handles where these come from, and not from the
    nodes that represent arguments and results: accesses to a variable are those that take its handle.
    """
    from tensorflow.core.framework import types_pb2

    passed = {
        node.name: (node.input[0], node.input[1:])
        for node in made.node
        if node.op == "Identity" and node.attr["T"].type == types_pb2.DT_RESOURCE and ENDS.fullmatch(node.name)
    }
    for node in made.node:
        waits: list[str] = []
        for i, read in enumerate(node.input):
            while (name := read.removesuffix(":0")) in passed:
                read, controls = passed[name]
                waits += controls
            node.input[i] = read
        node.input.extend(wait for wait in dict.fromkeys(waits) if wait not in node.input)


def _call_originals(graph_def: graph_pb2.GraphDef) -> None:
    """Replace calls of optimized steps in `graph_def`, in place, by calls of their original functions, which are
    planned as a part of the calling step.
    """
    library = {f.signature.name: f for f in graph_def.library.function}
    for node in _nodes(graph_def):
        if node.op == INSIDE:
            node.op = "StatefulPartitionedCall"
            for attribute in ("step", "waits", "config_proto", "executor_type"):
                node.attr.pop(attribute, None)
            planned = library[node.attr["f"].func.name]
            origins = [n.attr["origin"].list.func[0].name for n in planned.node_def if n.op == GATE]
            node.attr["f"].func.name = next(iter(origins), planned.signature.name)


def _without_shapes(graph_def: graph_pb2.GraphDef) -> dict[str, Any]:
    """Remove the shapes of placeholders; returns them by name. Grappler makes a tensor for each, in the CPU's arena,
    which may hold no second copy of all arguments. Inlining needs none.
    """
    shapes = {}
    for node in graph_def.node:
        if node.op == "Placeholder" and "shape" in node.attr:
            shapes[node.name] = type(node.attr["shape"])()
            shapes[node.name].CopyFrom(node.attr["shape"])
            node.attr["shape"].shape.Clear()
            node.attr["shape"].shape.unknown_rank = True
    return shapes


def _nodes(graph_def: graph_pb2.GraphDef) -> Iterator[Any]:
    """The nodes of a graph and of its library."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def
