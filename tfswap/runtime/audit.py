"""Checks that TensorFlow runs the planned graph, in the functions that its executor gets.

TensorFlow may prune, merge, inline and reorder nodes; a simulated peak does not hold if nodes or edges are missing. The
gate of a rewritten step (ops/csrc/core/gate_ops.cc) reports the functions that TensorFlow executes, after all of its
passes and partitioned by device: for every caller, and each time that TensorFlow makes them again. Every planned kernel
is looked up there, with its op, and every edge between two planned nodes, in the bodies of loops and conditionals too.

Not seen: TensorFlow's changes when it makes an executor of such a function. It folds constants, which plans count
(analysis/constants.py), and merges equal nodes, of which an order leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfswap.importers.references import functions_in
from tfswap.ir.custom_ops import GATE
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import calls_functions, control_flow, is_const, is_view
from tfswap.passes.verify import VerificationError
from tfswap.support.reach import reach

if TYPE_CHECKING:
    from tensorflow.core.framework import function_pb2

ONEDNN = ("_Mkl", "_MklNative")
"""Prefixes of oneDNN's forms of ops (mkl_graph_util.h). Plans count them as the ops that they replace."""

REMEDY = "The limit would not hold. Please report this, with your TensorFlow's version."


class Audit:
    """Compares one rewritten step with the functions that TensorFlow executes.

    Args:
        graph: the step as it was planned.
        gate: the number of its gate.
    """

    def __init__(self, graph: Graph, gate: int):
        import tfswap.ops

        self._executed = tfswap.ops.executed
        self._planned = Expected.of(graph)
        self._gate = gate
        self._pending = b""  # functions of a step that not all of its devices have reported yet
        self._failure: str | None = None  # the error's traceback would keep all that the step holds

    def check(self) -> None:
        """Check the functions that were executed since the last call, if any.

        Raises:
            VerificationError: they differ from the plan, in this call or an earlier one.
        """
        if executed := b"".join(map(self._executed, self._planned.gates)):  # messages one after the other merge
            from tensorflow.core.framework import function_pb2

            pending = self._pending + executed
            library = function_pb2.FunctionDefLibrary.FromString(pending)
            try:
                self._pending = b"" if audit(self._planned, library, self._gate) else pending
            except VerificationError as error:
                self._failure = str(error)
        if self._failure is not None:
            raise VerificationError(self._failure)


@dataclass(frozen=True)
class Expected:
    """The nodes and edges of a planned graph that must be found.

    Attributes:
        sources: by node, the nodes that it reads or waits for. Without what is fed.
        kernels: the nodes that must exist. Views and constants may go, and calls are inlined.
        ops: by node, the type of its op; without calls, which are inlined.
        bodies: the bodies of loops and conditionals, by node.
        gates: numbers of the gates, one on each device.
    """

    sources: Mapping[str, frozenset[str]]
    kernels: frozenset[str]
    ops: Mapping[str, str]
    bodies: Mapping[str, tuple[Expected, ...]]
    gates: tuple[int, ...] = ()

    @staticmethod
    def of(graph: Graph) -> Expected:
        feeds = set(graph.feeds)
        nodes = [node for node in graph if node not in feeds]

        def sources(node: Node) -> frozenset[str]:
            return frozenset(n.name for n in (*(t.node for t in node.inputs), *node.controls) if n not in feeds)

        there = [node for node in nodes if node in graph.bodies or not calls_functions(node.op)]
        return Expected(
            {node.name: sources(node) for node in nodes},
            frozenset(node.name for node in there if not (is_view(node.op) or is_const(node.op))),
            {node.name: node.op for node in there},
            {node.name: tuple(map(Expected.of, bodies)) for node, bodies in graph.bodies.items()},
            gates_of(graph),
        )


def audit(planned: Expected, library: function_pb2.FunctionDefLibrary, gate: int) -> int:
    """Compare a planned step with its functions as they were executed; returns the number of edges found, 0 where some
    of its devices have not reported yet.

    Args:
        library: the step's function on each device, and the functions that these call.

    Raises:
        VerificationError: a kernel or an edge did not survive, or a node computes something else.
    """
    functions = {f.signature.name: f for f in library.function}
    edges = 0
    for made in _made(functions, gate, planned.gates):
        if sum(any(map(_is_gate(planned.gates), f.node_def)) for f in made) >= len(planned.gates):
            edges += _compare(planned, Found(made), functions, "")
    return edges


def gates_of(graph: Graph) -> tuple[int, ...]:
    """The numbers of a graph's gates."""
    return tuple(number for node in graph if node.op == GATE and isinstance(number := node.attrs["gate"], int))


def _made(functions: Mapping[str, Any], gate: int, gates: Sequence[int]) -> Iterator[list[Any]]:
    """The step's function on each device, for each time that TensorFlow has made it: those with gates, and those that
    differ from them in their number only.
    """
    families = {n.rstrip("0123456789") for n, f in functions.items() if any(map(_is_gate(gates), f.node_def))}
    if not families:
        raise VerificationError(f"TensorFlow runs a step without its gate {gate}, which holds it in order. {REMEDY}")
    for family in sorted(families):
        member = re.compile(re.escape(family) + r"\d+")
        yield [f for n, f in functions.items() if member.fullmatch(n)]


def _is_gate(gates: Sequence[int]) -> Callable[[Any], bool]:
    return lambda node: node.op == GATE and node.attr["gate"].i in gates


class Found:
    """Nodes of executed functions, and their predecessors."""

    def __init__(self, functions: Iterable[Any]):
        self.nodes: dict[str, Any] = {node.name: node for f in functions for node in f.node_def}
        self._sends = {n.attr["tensor_name"].s: n.name for n in self.nodes.values() if n.op in ("_Send", "_HostSend")}
        self._memory: dict[str, frozenset[str]] = {}

    def sources(self, name: str) -> set[str]:
        """The nodes that a node reads or waits for; for a receive, the send on the other device."""
        node = self.nodes[name]
        names = {i.removeprefix("^").partition(":")[0] for i in node.input} & self.nodes.keys()
        if node.op in ("_Recv", "_HostRecv") and (send := self._sends.get(node.attr["tensor_name"].s)) is not None:
            names.add(send)
        return names

    def behind(self, name: str, planned: Mapping[str, object]) -> set[str]:
        """The planned nodes that `name` directly follows: with only unplanned nodes in between."""
        before = reach(self.sources(name), lambda source: () if source in planned else self.sources(source))
        return {source for source in before if source in planned}

    def comes_after(self, name: str, first: str) -> bool:
        """Whether a path leads from `first` to `name`."""
        return first in self.behind(name, {first: None})


def _compare(planned: Expected, found: Found, functions: Mapping[str, Any], where: str) -> int:
    edges = 0
    for name, sources in planned.sources.items():
        if name not in found.nodes:
            if name in planned.kernels:
                raise VerificationError(f"TensorFlow removed the planned node {name!r}{where}. {REMEDY}")
            continue
        _compare_op(name, planned.ops.get(name), found.nodes[name].op, where)
        behind = found.behind(name, planned.sources)
        for source in sources & found.nodes.keys():
            if source not in behind and not found.comes_after(name, source):
                raise VerificationError(f"TensorFlow removed the planned edge {source!r} -> {name!r}{where}. {REMEDY}")
            edges += 1
        if name in planned.bodies:
            edges += _compare_bodies(name, planned, found.nodes[name], functions)
    return edges


def _compare_op(name: str, planned: str | None, found: str, where: str) -> None:
    if planned is not None and found not in (planned, *(prefix + planned.removeprefix("_") for prefix in ONEDNN)):
        raise VerificationError(f"TensorFlow made {found} of the planned {planned} node {name!r}{where}. {REMEDY}")


def _compare_bodies(name: str, planned: Expected, node: Any, functions: Mapping[str, Any]) -> int:
    kind = control_flow(node.op)
    assert kind is not None  # its op is the planned one
    called = [f.name for attribute in kind.functions for f in functions_in(node.attr[attribute])]
    edges = 0
    for function, body in zip(called, planned.bodies[name], strict=True):
        edges += _compare(body, Found([functions[function]]), functions, f" in {function!r}, which {name!r} runs")
    return edges
