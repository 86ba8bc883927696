"""TensorFlow's numbering of the nodes of a graph whose function calls were inlined at import.

TensorFlow's executor gets a step with each call in its graph, and replaces the calls one after another: an inlined
function's nodes have higher numbers than all earlier ones. Within a graph or a function the order is topological with
each call as one node, the smallest number first (graph_constructor.cc).

Not handled: nodes that passes have added, which were in no function. They count as the graph's own and come last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const
from tfswap.support.topological import topological


class Inlined(NamedTuple):
    """An inlined function, or the graph itself.

    Attributes:
        entries: its nodes, and the names of the calls in it, in TensorFlow's order.
        inputs: those of the nodes that read the call's inputs.
        waits: whether the call had control inputs.
    """

    entries: Sequence[Node | str]
    inputs: frozenset[Node]
    waits: bool


def in_call_order(graph: Graph, order: Sequence[Node]) -> Mapping[str, Inlined]:
    """The nodes of `order`, which is topological, by the call that they come from; "" is the graph itself."""
    if not graph.calls:
        return {"": Inlined(order, frozenset(), False)}
    caller = {name: call for call, inside in graph.calls.items() for name in inside}
    rank = {name: i for inside in graph.calls.values() for i, name in enumerate(inside)}
    around: dict[str, tuple[str, ...]] = {"": ()}  # by call: the calls around it, the outermost first, and itself
    for call in graph.calls:  # callers come before their callees
        if call:
            around[call] = (*around[caller[call]], call)
    ranks: dict[str, dict[Node | str, int]] = {call: {} for call in graph.calls}
    for call in filter(None, graph.calls):
        ranks[caller[call]][call] = rank[call]
    for i, node in enumerate(order):
        ranks[caller.get(node.name, "")][node] = rank.get(node.name, len(rank) + i)
    waits: dict[Node | str, set[Node | str]] = {entry: set() for found in ranks.values() for entry in found}
    inputs: dict[str, set[Node]] = {call: set() for call in ranks}
    held_up: set[str] = set()
    for node in order:
        call = caller.get(node.name, "")
        for source, is_data in (*((t.node, True) for t in node.inputs), *((c, False) for c in node.controls)):
            there = around[caller.get(source.name, "")]
            if is_const(source.op) and there and there[-1] not in around[call]:
                continue  # of equal constants of several functions one was kept
            if call not in there and is_data and call:
                inputs[call].add(node)
            elif call not in there and call:
                held_up.add(call)
            paths = zip((*there, source), (*around[call], node), strict=False)
            before, after = next((a, b) for a, b in paths if a != b)
            if before in waits:  # arguments are there from the start
                waits[after].add(before)
    return {
        call: Inlined(_ordered(found, waits), frozenset(inputs[call]), call in held_up) for call, found in ranks.items()
    }


def _ordered(rank: Mapping[Node | str, int], waits: Mapping[Node | str, set[Node | str]]) -> list[Node | str]:
    """In topological order; of those that are ready the one with the smallest rank first.

    Where nodes of several functions were merged, calls can wait for one another: these come last, by their ranks.
    """
    entries = sorted(rank, key=rank.__getitem__)
    place = {entry: i for i, entry in enumerate(entries)}
    found = topological([[place[source] for source in waits[entry]] for entry in entries])
    return [entries[i] for i in (*found, *sorted(set(place.values()).difference(found)))]
