"""Graphs that others publish for rematerialisation: read, checked, and turned into the facts that the planner works on.

The format is networkx's node-link JSON, as in the repository haoming-codes/moccasin of Bartan et al., "Moccasin:
Efficient Tensor Rematerialization for Neural Networks" (ICML 2023). The nets' nodes have `cost_ram` (bytes) and
`cost_cpu` (time), their edges `source` and `target`; nodes of the random layered graphs have `out_cost` and `duration`,
their edges "0" and "1", and the order to begin with is `graph.order`.

The memory of a schedule is theirs: at each run the outputs that are needed later, and the run's own. No kernel has a
workspace, and none writes into a buffer that it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import networkx as nx

from tfswap.analysis.dataflow import Dataflow, Value
from tfswap.errors import TfswapError
from tfswap.ir.graph import Graph
from tfswap.ir.types import TensorType
from tfswap.kernels import kernel_memory

SECONDS = 1e-6
"""Seconds of a unit of an instance's time."""
UNIT_BYTES = 1 << 16
"""Bytes for the planner of a unit of an instance's memory. It rounds to 256 bytes, and keeps tensors below 64 KiB: so
neither changes anything.
"""
OP = "AddN"
"""An op of any number of inputs that may run again. The facts here say all else that matters."""
NAMES = (("cost_ram", "out_cost"), ("cost_cpu", "duration"), ("source", "0"), ("target", "1"))
"""The two names of each field: in nets, and in random graphs."""
MOST = 2**46
"""The largest sum of costs: more UNIT_BYTES than that are beyond 64 bits."""


class DamagedInstance(TfswapError):
    """A file that is no instance: what is wrong, and where."""


@dataclass(frozen=True)
class Instance:
    """One graph.

    Attributes:
        sizes, times: per node, of its output and of one run; at least 0.
        inputs: per node, those that it reads, each once.
        order: a topological order of all nodes: the given one, or Kahn's.
    """

    name: str
    sizes: tuple[int, ...]
    times: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    @cached_property
    def peak(self) -> int:
        """The peak of `order`."""
        return self.peak_of(self.order)

    @cached_property
    def floor(self) -> int:
        """The largest inputs and output of a node: no schedule has a lower peak."""
        return max((size + sum(self.sizes[u] for u in self.inputs[v]) for v, size in enumerate(self.sizes)), default=0)

    def peak_of(self, order: Sequence[int]) -> int:
        """The peak of a schedule, in which nodes may run again.

        An output stays from a run to the last node that reads it before it runs again. Raises ValueError where a node
        reads what no run has made, and where a node never runs.
        """
        made: dict[int, int] = {}
        last: dict[int, int] = {}  # by position of a run, of the last node that reads its output
        for position, v in enumerate(order):
            for u in self.inputs[v]:
                if u not in made:
                    raise ValueError(f"{self.name}: node {v} runs at {position}, before its input {u}")
                last[made[u]] = position
            made[v] = last[position] = position
        if len(made) < len(self.sizes):
            raise ValueError(f"{self.name}: {len(self.sizes) - len(made)} nodes never run")
        ends: list[list[int]] = [[] for _ in order]
        for position, end in last.items():
            ends[end].append(position)
        live = peak = 0
        for position, v in enumerate(order):
            live += self.sizes[v]
            peak = max(peak, live)
            live -= sum(self.sizes[order[begin]] for begin in ends[position])
        return peak

    def extra_time(self, order: Sequence[int]) -> float:
        """The time of what runs again, as a share of the time of each node once."""
        return sum(self.times[v] for v in order) / max(1, sum(self.times)) - 1.0

    @property
    def cost_s(self) -> list[float]:
        """Seconds per node, for the planner."""
        return [time * SECONDS for time in self.ordered(self.times)]

    def ordered(self, facts: Sequence[int]) -> list[int]:
        """Facts of nodes in the planner's numbering, which is `order`."""
        return [facts[v] for v in self.order]

    def flow(self) -> Dataflow:
        """The planner's facts. Node `i` of them is `order[i]`, and so is value `i`; a unit is UNIT_BYTES."""
        graph, place = Graph(), {v: i for i, v in enumerate(self.order)}
        flow = Dataflow([])
        for i, v in enumerate(self.order):
            reads = [place[u] for u in self.inputs[v]]
            nbytes = self.sizes[v] * UNIT_BYTES
            tensors = (flow.nodes[read].out() for read in reads)
            node = graph.add(OP, f"n{v}", tensors, outputs=(TensorType("uint8", (nbytes,)),))
            flow.nodes.append(node)
            flow.add(Value(node.out(), nbytes, i))
            flow.value_of[node, 0] = i
            flow.place[node.name] = i
            flow.deps.append(tuple(reads))
            flow.own_deps.append(tuple(reads))
            flow.reads.append(tuple(reads))
            flow.makes.append(((0, i),))
            events: tuple[kernel_memory.Event, ...] = (("out", 0),)
            flow.events.append(events)
            flow.forwards.append(())
            flow.updates.append(())
            flow.is_kernel.append(True)
        return flow


def read_instance(path: Path) -> Instance:
    """The graph in a file. Raises DamagedInstance."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedInstance(f"{path} can't be read as JSON: {error}. Download it again.") from error
    try:
        return instance_of(path.stem.removesuffix("_nx"), data)
    except DamagedInstance as error:
        raise DamagedInstance(f"{path}: {error} Download it again, or leave it out.") from error


def instance_of(name: str, data: Any) -> Instance:
    """The graph of a node-link document. Raises DamagedInstance."""
    nodes, links = _rows(data, "nodes"), _rows(data, "links")
    if not nodes:
        raise DamagedInstance("it has no nodes.")
    ids = [node.get("id", node.get("name")) for node in nodes]
    place = {i: n for n, i in enumerate(ids) if _is_id(i)}
    if len(place) < len(nodes):
        raise DamagedInstance('each node needs an "id" of its own, or a "name": some have none, or one twice.')
    memory, time, source, target = (_field(nodes if n < 2 else links, names) for n, names in enumerate(NAMES))
    sizes, times = _costs(nodes, memory, ids), _costs(nodes, time, ids)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for number, link in enumerate(links):
        ends = [link.get(source), link.get(target)]
        unknown = [end for end in ends if not _is_id(end) or end not in place]
        if unknown:
            raise DamagedInstance(f"edge {number} has an end, {unknown[0]!r}, that is no node.")
        graph.add_edge(*(place[end] for end in ends))
    try:
        cycle = [ids[n] for n, _ in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        cycle = []
    if cycle:
        raise DamagedInstance(
            f"its edges have a cycle, {' -> '.join(map(str, [*cycle, cycle[0]]))}: nothing runs first."
        )
    inputs = tuple(tuple(graph.predecessors(n)) for n in range(len(nodes)))
    given = data["graph"].get("order") if isinstance(data.get("graph"), dict) else None
    order = _given_order(given, place, inputs) if given is not None else tuple(nx.topological_sort(graph))
    return Instance(name, sizes, times, inputs, order)


def _rows(data: Any, name: str) -> list[dict[str, Any]]:
    rows = data.get(name) if isinstance(data, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DamagedInstance(f'it has no list "{name}" of objects, as a networkx node-link document has.')
    return rows


def _field(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
    """The name that these rows have for a field."""
    return next((name for name in names if any(name in row for row in rows)), names[0])


def _costs(nodes: list[dict[str, Any]], name: str, ids: Sequence[Any]) -> tuple[int, ...]:
    for shown, node in zip(ids, nodes, strict=True):
        value = node.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DamagedInstance(f'node {shown}: "{name}" is {value!r}, not a number.')
        if value != int(value) or value < 0:
            raise DamagedInstance(f'node {shown}: "{name}" is {value!r}, not a whole number of at least 0.')
    if (total := sum(int(node[name]) for node in nodes)) > MOST:
        raise DamagedInstance(f'the "{name}" of its nodes add up to {total}, more than {MOST}.')
    return tuple(int(node[name]) for node in nodes)


def _is_id(value: object) -> TypeGuard[int | str]:
    return isinstance(value, int | str)


def _given_order(given: Any, place: dict[Any, int], inputs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(_is_id(v) and v in place for v in given):
        raise DamagedInstance('"graph.order" is no list of nodes.')
    order = tuple(place[v] for v in given)
    if len({*order}) < len(order) or len(order) < len(place):
        raise DamagedInstance('"graph.order" does not name each node once.')
    rank = {v: n for n, v in enumerate(order)}
    early = next((v for v in order for u in inputs[v] if rank[u] > rank[v]), None)
    if early is not None:
        raise DamagedInstance(f'"graph.order" has node {given[rank[early]]!r} before one that it reads.')
    return order
