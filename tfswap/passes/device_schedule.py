"""The order in which devices would run a step's nodes, if each ran one kernel at a time, and all took equally long.

Sends, receives and collectives have that order on all devices (device_parts.py). In the traced order a device would
wait: where a program runs one micro-batch after another through stages on several devices, the first stage would begin
a micro-batch only after the one before it has come back. Here a device without work for the earlier micro-batch begins
the next one. Of the kernels that are ready, a device runs the one that was traced first, so that it runs ahead no
further than it has to, and holds no more tensors.

Ensures: the order is topological. It depends on the graph alone.

This is list scheduling (Graham, 1969), with the traced order as priority.
"""

from __future__ import annotations

import heapq

from tfswap.ir.graph import Graph, Node
from tfswap.ir.op_traits import is_const, is_view
from tfswap.passes.device_bodies import devices_of, is_virtual
from tfswap.passes.device_carriers import unit

COPY = 1
"""What it takes to pass a tensor to another device, in kernels."""


def scheduled(graph: Graph) -> dict[Node, int]:
    """The time at which each node starts, in kernels: by time, and those that start together in topological order.

    What reads a node on another device starts later than it, also where it is a loop or a conditional on several.
    """
    work = _Schedule(graph)
    ordered = sorted(work.place, key=lambda node: (work.start[node], work.place[node]))
    return {node: work.start[node] for node in ordered}


class _Schedule:
    """The simulation.

    Attributes:
        place: of each node in a topological order, by which its device chooses.
        start: the time at which each node starts.
    """

    def __init__(self, graph: Graph):
        self.place = {node: i for i, node in enumerate(graph.topological())}
        self.start: dict[Node, int] = {}
        self._feeds = set(graph.feeds)
        self._devices: dict[str, _Device] = {}
        self._users: dict[Node, list[Node]] = {node: [] for node in self.place}
        self._missing: dict[Node, int] = {}
        self._on = {node: devices_of(graph, node) for node in self.place}
        self._given_at = dict.fromkeys(self.place, 0)  # when a node's inputs are on its device
        for node in self.place:
            sources = {*(tensor.node for tensor in node.inputs), *node.controls}
            self._missing[node] = len(sources)
            for source in sources:
                self._users[source].append(node)
        self._add([node for node in self.place if not self._missing[node]])
        while running := [device for device in self._devices.values() if device.next_start() is not None]:
            device = min(running, key=lambda device: (device.next_start(), device.name))
            self._add(self._started(*device.run()))

    def _add(self, nodes: list[Node]) -> None:
        """Take nodes whose sources have all started. Those that take no time start when their inputs are there."""
        while nodes:
            node = nodes.pop()
            if node in self._feeds or is_const(node.op) or is_view(node.op) or is_virtual(node):
                nodes += self._started(node, self._given_at[node], 0)
            else:
                where = unit(node.device)
                device = self._devices.setdefault(where, _Device(where))
                heapq.heappush(device.later, (self._given_at[node], self.place[node], node))

    def _started(self, node: Node, at: int, takes: int = 1) -> list[Node]:
        """Note that a node has started; returns the nodes whose sources have all started now."""
        self.start[node] = at
        found: list[Node] = []
        for user in self._users[node]:
            is_elsewhere = bool(node.device) and len({*self._on[node], *self._on[user]}) > 1
            self._given_at[user] = max(self._given_at[user], at + takes + COPY * is_elsewhere)
            self._missing[user] -= 1
            if not self._missing[user]:
                found.append(user)
        return found


class _Device:
    """A device that runs one kernel at a time.

    Attributes:
        later: kernels by the time when their inputs are there, and by place.
    """

    def __init__(self, name: str):
        self.name = name
        self.later: list[tuple[int, int, Node]] = []
        self._ready: list[tuple[int, Node]] = []  # by place
        self._free_at = 0

    def next_start(self) -> int | None:
        """When it starts its next kernel; None without one."""
        if self._ready:
            return self._free_at
        return max(self._free_at, self.later[0][0]) if self.later else None

    def run(self) -> tuple[Node, int]:
        """Start the next kernel; returns it and the time."""
        at = self.next_start()
        assert at is not None
        while self.later and self.later[0][0] <= at:
            _, place, node = heapq.heappop(self.later)
            heapq.heappush(self._ready, (place, node))
        _, node = heapq.heappop(self._ready)
        self._free_at = at + 1
        return node, at
