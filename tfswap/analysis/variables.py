"""The variables among a step's feeds that it writes, and the bytes of results and of copied variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tfswap.analysis.dataflow import PERSISTENT, Dataflow
from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import (
    READ_VARIABLE,
    control_flow,
    is_view,
    reads_variable,
    turns_on_copy_on_read,
    writes_variable,
)
from tfswap.kernels.alignment import round_up


def written_variables(graph: Graph, flow: Dataflow) -> list[int]:
    """The positions of feeds that are variables which the step writes. Iterators and tables are not among them."""
    return [p for p, feed in enumerate(graph.feeds) if flow.first_versions([feed.name])]


def written_in_bodies(graph: Graph, flow: Dataflow) -> frozenset[str]:
    """The names of feeds that are variables which bodies of loops and conditionals write."""
    inner = {u.old for i in flow.runs for u in flow.updates[i]}
    return frozenset(feed.name for feed in graph.feeds if flow.first_versions([feed.name]) & inner)


def copied_bytes(flow: Dataflow, shared: Collection[str]) -> int:
    """The bytes of the variables behind the feeds `shared`, which updates copy because they have other owners."""
    return sum(round_up(flow.values[v].nbytes) for v in flow.first_versions(shared))


def fetched_bytes(flow: Dataflow) -> int:
    """The bytes of results that the step allocates."""
    values = (flow.values[v] for v in flow.fetched)
    return sum(round_up(value.nbytes) for value in values if value.producer != PERSISTENT)


class ResourcesUsed(NamedTuple):
    """The accesses of a node's bodies to variables, by position of the input.

    Attributes:
        written: the variables that they write.
        read: the variables that they read as a whole.
        sparsely_read: the variables with sparse accesses.
        nbytes: the bytes of the variables that they access.
    """

    written: tuple[int, ...]
    read: tuple[int, ...]
    sparsely_read: tuple[int, ...]
    nbytes: dict[int, int]


def resources_used(node: Node, bodies: Sequence[Graph]) -> ResourcesUsed:
    """The accesses of the bodies of `node` to variables."""
    kind = control_flow(node.op)
    assert kind is not None
    written: set[int] = set()
    read: set[int] = set()
    sparse: set[int] = set()
    nbytes: dict[int, int] = {}
    for body in bodies:
        position = {(feed, 0): kind.first_argument + i for i, feed in enumerate(body.feeds)}
        for inner in body.topological():
            places = [position.get((t.node, t.index)) for t in inner.inputs]
            if inner in body.bodies:
                used = resources_used(inner, body.bodies[inner])
                written.update(p for i in used.written if (p := places[i]) is not None)
                read.update(p for i in used.read if (p := places[i]) is not None)
                sparse.update(p for i in used.sparsely_read if (p := places[i]) is not None)
                nbytes.update({p: n for i, n in used.nbytes.items() if (p := places[i]) is not None})
            elif is_view(inner.op):
                position.update({(inner, o): p for o, p in enumerate(places) if p is not None})
            resources = [p for p, t in zip(places, inner.inputs, strict=True) if t.type.dtype == "resource"]
            if reads_variable(inner.op) or writes_variable(inner.op):
                # The value that is read, or the largest input of a write: slots are as large as their variable.
                touched = inner.outputs or [t.type for t in inner.inputs]
                size = max((kind.nbytes or 0 for kind in touched), default=0)
                nbytes.update({p: max(size, nbytes.get(p, 0)) for p in resources if p is not None})
            if inner.op == READ_VARIABLE:
                read.update(p for p in resources if p is not None)
            if writes_variable(inner.op):
                written.update(p for p in resources if p is not None)
            if turns_on_copy_on_read(inner.op):
                sparse.update(p for p in resources if p is not None)
    return ResourcesUsed(tuple(sorted(written)), tuple(sorted(read)), tuple(sorted(sparse)), nbytes)


def read_as_a_whole(graph: Graph, used: Mapping[Node, ResourcesUsed]) -> set[Node]:
    """What gives the variables that a graph, or what its loops and conditionals run, reads as a whole.

    Args:
        used: by loop and conditional, as of `resources_used`.
    """
    found = {node.inputs[0].node for node in graph if node.op == READ_VARIABLE}
    for node, inner in used.items():
        found.update(node.inputs[p].node for p in inner.read)
    return found


def sparsely_accessed(graph: Graph, used: Mapping[Node, ResourcesUsed]) -> set[Node]:
    """The nodes of the handles of variables with sparse accesses in a graph or its bodies.

    Args:
        used: `resources_used` of each loop and conditional.
    """
    found = {
        t.node for node in graph if turns_on_copy_on_read(node.op) for t in node.inputs if t.type.dtype == "resource"
    }
    for node, inner in used.items():
        found.update(node.inputs[p].node for p in inner.sparsely_read)
    return found
