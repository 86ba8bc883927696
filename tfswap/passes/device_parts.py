"""Cuts a step on several devices into a graph for each, and joins the graphs that carry out their plans.

Each device with an arena of its own has a plan of its own. A tensor that another device reads is copied to host memory
by the device that computes it, and from there by the device that reads it:

    whole step:    f (GPU:0) ------------------------------------------------> g (GPU:1)
    parts:         f -> ToHost -> Send               Receive -> ToDevice -> g
    carried out:   f -> ToHost ----------------------------------> ToDevice -> g

`Send` and `Receive` stand for the other device while a part is planned. So each arena has the requests of its own
kernels alone, in the order of its own plan, and no peak depends on which device is faster. A control edge between
devices becomes a pair of nodes without tensors.

Sends, receives and collectives have one order in the whole step, and each device keeps its part of that order, by
control edges. So the joined graph has no cycle, whatever the plans: a path that enters a device at a receive leaves it
at a later send. Members of a collective have one place in that order.

Constants are in each part that reads them, and so are arguments in host memory. Nodes of two parts that compute alike
have one name (alike_parts.py); in the joined graph each has its own.

Not handled: copies from one device to another that do not pass through host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tfswap.analysis.output_bytes import is_on_host
from tfswap.errors import UnsupportedGraph
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import is_collective, is_const, only_waits
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.alike_parts import names_of_alike
from tfswap.passes.device_carriers import unit
from tfswap.passes.nodes import add_device_copy
from tfswap.passes.prepare.collective_order import join_collectives, order_collectives
from tfswap.support.reach import reach

Place = tuple[int, int]
"""The place of a send, its receive, or a collective in the order of the whole step."""


@dataclass
class Parts:
    """A step, cut by device.

    Attributes:
        whole: the step.
        graphs: a graph for each device, by its unit.
        sources: by device and name of a Receive or of a node that waits for another device, the device and the name of
            the Send, or of the node that it waits for.
        fetched: for each fetch of the step, the device and the number of the fetch there.
        own_names: by device, names of nodes of the step, by other names that they have in the part (alike_parts.py).
    """

    whole: Graph
    graphs: dict[str, Graph] = field(default_factory=dict)
    sources: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    fetched: list[tuple[str, int]] = field(default_factory=list)
    own_names: dict[str, dict[str, str]] = field(default_factory=dict)

    def own_name(self, where: str, node: Node) -> str:
        """The name in the step of a node of a part."""
        return self.own_names.get(where, {}).get(node.name, node.name)

    def join(self, made: Mapping[str, Graph]) -> Graph:
        """One graph of a graph for each device, with the feeds and fetches of the whole step."""
        return _Join(self, made).graph


def cut(graph: Graph, planned: Collection[str], device: DeviceModel) -> Parts:
    """Cut a step whose nodes, but for feeds and constants, all name a device.

    Args:
        planned: the units of the devices whose parts are planned.
        device: the model of these devices.

    Raises:
        UnsupportedGraph: a handle or a list goes from one device to another, or it is not known which collectives
            match.
    """
    return _Cut(graph, planned, device).parts


class _Cut:
    def __init__(self, graph: Graph, planned: Collection[str], device: DeviceModel):
        self.parts = Parts(graph)
        self._planned = planned
        self._device = device
        self._feeds = set(graph.feeds)
        self._rank = _ranks(graph, device)
        self._insertion = {node: i for i, node in enumerate(graph)}
        self._made: dict[tuple[str, Node], Node] = {}
        self._received: dict[tuple[str, Output], Output] = {}
        self._awaited: dict[tuple[str, str, frozenset[Node]], Node] = {}
        self._copied: dict[Output, Output] = {}  # to the host, by the tensor in the whole step
        self._place: dict[str, dict[Node, Place]] = {}  # by device, its sends, receives and collectives
        self._near: dict[Node, int] = {}  # of new nodes, their rank in the insertion order
        self._home = _homes(graph)
        self._names = names_of_alike(graph, self._home, planned)
        for node in graph.topological():
            if node not in self._feeds and not is_const(node.op) and not _is_virtual(node):
                self._add(node)
        self._finish()

    def _unit(self, node: Node) -> str:
        """The device of a node; the first planned one of a constant that names none."""
        return unit(node.device) if node.device else next(iter(self._planned))

    def _part(self, where: str) -> Graph:
        if where not in self.parts.graphs:
            part = self.parts.graphs[where] = Graph()
            whole = self.parts.whole
            part.library, part.read_in_vain = whole.library, whole.read_in_vain
            self._place[where] = {}
            self.parts.own_names[where] = {}
        return self.parts.graphs[where]

    def _add(self, node: Node) -> None:
        where = unit(node.device)
        inputs = [self._here(where, tensor) for tensor in node.inputs]
        controls = self._controls(where, node.controls)
        made = self._copy(where, node, inputs, controls)
        if is_collective(node.op):
            self._place[where][made] = self._rank[node.name], 0

    def _copy(self, where: str, node: Node, inputs: Iterable[Output], controls: Iterable[Node]) -> Node:
        part, whole = self._part(where), self.parts.whole
        device = f"/device:{where}" if is_const(node.op) else ""
        name = self._name(where, node)
        made = add_copy(part, node, name, inputs, controls=controls, device=device, source=whole)
        if made.name != node.name:
            self.parts.own_names[where][made.name] = node.name
        self._made[where, node] = made
        self._near[made] = self._insertion[node]
        return made

    def _name(self, where: str, node: Node) -> str:
        """The name of a node in the part of a device."""
        return self._names.get(where, {}).get(node, node.name)

    def _here(self, where: str, tensor: Output) -> Output:
        """A tensor of the whole step in the part of a device."""
        node = tensor.node
        if (where, node) in self._made:
            return self._made[where, node].out(tensor.index)
        if is_const(node.op) or (node in self._feeds and (self._is_hosted(tensor) or self._home[node] == where)):
            return self._copy(where, node, (), ()).out(tensor.index)
        if (where, tensor) not in self._received:
            self._received[where, tensor] = self._receive(where, tensor)
        return self._received[where, tensor]

    def _is_hosted(self, tensor: Output) -> bool:
        """Whether a GPU has the tensor in host memory, if it computes it or gets it as an argument."""
        if tensor.node in self._feeds:
            return tensor.type.dtype in ("int32", "string")
        return is_on_host(tensor.node, tensor.index, self._device)

    def _receive(self, where: str, tensor: Output) -> Output:
        node = tensor.node
        if tensor.type.dtype in ("resource", "variant"):
            raise UnsupportedGraph(
                f"{node.name!r} ({node.op}) gives a handle or a list on {unit(node.device)}, which is read on {where}. "
                "Read it on the device that it is on, and pass what it has."
            )
        home = self._home.get(node) or unit(node.device)
        here = self._here(home, tensor)
        stays = self._is_hosted(tensor)
        there, part = self._part(home), self._part(where)
        if home in self._planned and not stays:
            if tensor not in self._copied:
                copy = add_device_copy(there, custom_ops.TO_HOST, "to_host", here, f"/device:{home}")
                self._near[copy] = self._near[here.node]
                self._copied[tensor] = copy.out()
            here = self._copied[tensor]
        place = self._rank[node.name], len(self.parts.sources) + 1
        stem = f"tfswap/{self._name(home, node)}_{tensor.index}"
        send = there.add(
            custom_ops.SEND,
            there.unique_name(f"{stem}/send"),
            (here,),
            attrs={"T": Dtype(tensor.type.dtype)},
            device=f"/device:{home}",
        )
        there.targets.append(send)
        receive = part.add(
            custom_ops.RECEIVE,
            part.unique_name(f"{stem}/receive"),
            attrs={"T": Dtype(tensor.type.dtype), "shape": Dims(tensor.type.shape or ())},
            outputs=(tensor.type,),
            device=f"/device:{where}",
        )
        self._connect((home, send), (where, receive), place, self._insertion[node])
        received = receive.out()
        if where in self._planned and not (stays and tensor.type.dtype in ("int32", "string")):
            copy = add_device_copy(part, custom_ops.TO_DEVICE, "to_device", received, f"/device:{where}")
            self._near[copy] = self._insertion[node]
            received = copy.out()
        return received

    def _connect(self, first: tuple[str, Node], second: tuple[str, Node], place: Place, near: int) -> None:
        """Note that a node of one device comes before one of another."""
        for where, node in (first, second):
            self._place[where][node] = place
            self._near[node] = near
        self.parts.sources[second[0], second[1].name] = first[0], first[1].name

    def _controls(self, where: str, controls: Iterable[Node]) -> list[Node]:
        """The nodes of a device's part that stand for these nodes of the whole step."""
        by_device: dict[str, dict[Node, None]] = {}
        for node in _sources(controls):
            if node not in self._feeds and not is_const(node.op):
                by_device.setdefault(unit(node.device), {})[node] = None
        found = [self._made[where, node] for node in by_device.pop(where, ())]
        found += [self._await(where, home, frozenset(nodes)) for home, nodes in by_device.items()]
        return found

    def _await(self, where: str, home: str, nodes: frozenset[Node]) -> Node:
        """A node of the part of `where` that waits for nodes of another device."""
        if (where, home, nodes) not in self._awaited:
            last = max(nodes, key=lambda node: self._rank[node.name])
            there, part = self._part(home), self._part(where)
            stem = f"tfswap/{self._name(home, last)}"
            done = there.add(
                "NoOp",
                there.unique_name(f"{stem}/done"),
                controls=sorted((self._made[home, node] for node in nodes), key=lambda node: node.name),
                device=f"/device:{home}",
            )
            there.targets.append(done)
            awaits = part.add("NoOp", part.unique_name(f"{stem}/await"), device=f"/device:{where}")
            place = self._rank[last.name], len(self.parts.sources) + 1
            self._connect((home, done), (where, awaits), place, self._insertion[last])
            self._awaited[where, home, nodes] = awaits
        return self._awaited[where, home, nodes]

    def _finish(self) -> None:
        """Add fetches, targets and feeds, and the order of what connects the devices."""
        whole, parts = self.parts.whole, self.parts
        insertion = list(whole)
        executed = {name: rank for rank, name in enumerate(whole.executed)}
        for fetch in whole.fetches:
            where = self._home.get(fetch.node) or self._unit(fetch.node)
            here, part = self._here(where, fetch), self._part(where)
            parts.fetched.append((where, len(part.fetches)))
            part.fetches.append(here)
        for target in _sources(whole.targets):
            if target not in self._feeds:
                where = self._unit(target)
                part = self._part(where)
                if is_const(target.op):
                    self._here(where, target.out())
                part.targets.append(self._made[where, target])
        for feed in whole.feeds:
            if not any((where, feed) in self._made for where in parts.graphs):
                self._copy(self._home[feed], feed, (), ())
        for where, part in parts.graphs.items():
            part.feeds = [self._made[where, feed] for feed in whole.feeds if (where, feed) in self._made]
            part.targets = list(dict.fromkeys(part.targets))
            here = {node.name: made.name for (there, node), made in self._made.items() if there == where}
            part.calls = {call: tuple(here[n] for n in names if n in here) for call, names in whole.calls.items()}
            inside = whole.names_in_bodies
            part.names_in_bodies = {made: inside[n] for n, made in here.items() if n in inside}
            part.arrange({node: (self._near[node], i) for i, node in enumerate(part)})
            if executed:
                ranks = {node: executed[insertion[self._near[node]].name] for node in part}
                part.executed = tuple(node.name for node in sorted(part, key=ranks.__getitem__))
            if where in self._planned:
                places = self._place[where]
                ordered = sorted(places, key=places.__getitem__)
                for before, node in pairwise(ordered):
                    part.add_control(node, before)


def _is_virtual(node: Node) -> bool:
    """Whether a node only joins control edges: the edges go through it."""
    return only_waits(node.op) and not node.inputs and not node.outputs


def _sources(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes, and in place of virtual ones those that they wait for."""
    found = reach(nodes, lambda node: node.controls if _is_virtual(node) else ())
    return (node for node in found if not _is_virtual(node))


def _homes(graph: Graph) -> dict[Node, str]:
    """The device of each argument: that which it names, else that of its first reader."""
    readers: dict[Node, str] = {}
    feeds = set(graph.feeds)
    for node in graph.topological():
        for tensor in node.inputs:
            if tensor.node in feeds:
                readers.setdefault(tensor.node, unit(node.device))
    first = next((unit(node.device) for node in graph if node.device), "")
    return {feed: unit(feed.device) if feed.device else readers.get(feed, first) for feed in graph.feeds}


def _ranks(graph: Graph, device: DeviceModel) -> dict[str, int]:
    """A topological order of the step's nodes by name, in which the members of a collective have one place."""
    ordered = graph.copy()
    target = Target(device)
    order_collectives(ordered, target)
    join_collectives(ordered, target)
    found: dict[str, int] = {}
    for rank, node in enumerate(ordered.topological()):
        found[node.name] = rank
        if node.op == custom_ops.TOGETHER:
            found |= {member[0]: rank for member in node.attrs["members"]}  # pyright: ignore[reportGeneralTypeIssues] written by join_collectives
    return found


class _Join:
    """The joined graph, made of the rewritten graph of each part."""

    def __init__(self, parts: Parts, made: Mapping[str, Graph]):
        self.graph = graph = Graph()
        self._made: dict[Node, Node] = {}  # by node of a part; an argument of several parts is one node
        ends = parts.sources.items()
        self._source_of = {made[where][name]: made[home][source] for (where, name), (home, source) in ends}
        feeds: dict[str, Node] = {}
        for where, part in made.items():
            of_part = set(part.feeds)
            for node in part:
                name = parts.own_name(where, node)
                if node in of_part:
                    self._made[node] = feeds[name] = feeds.get(name) or self._copy(node, name, part, where)
                else:
                    self._made[node] = self._copy(node, name, part, where)
        for node, copy in self._made.items():
            copy.inputs = tuple(map(self._tensor, node.inputs))
            received = (tensor.node for tensor in node.inputs if tensor.node.op == custom_ops.RECEIVE)
            before = (each for earlier in (*node.controls, *received) for each in self._awaited(earlier))
            copy.controls = tuple(dict.fromkeys(before))
        for node, source in self._source_of.items():
            if node.op != custom_ops.RECEIVE:
                _wait(graph, self._made[node], self._made[source])
        gates = [node for node in graph if node.op == custom_ops.GATE]
        for gate in gates[1:]:
            _wait(graph, gate, gates[0])  # where the step begins
        graph.library = parts.whole.library
        graph.feeds = [feeds[feed.name] for feed in parts.whole.feeds]
        graph.fetches = [self._tensor(made[where].fetches[i]) for where, i in parts.fetched]
        targets = (target for part in made.values() for target in part.targets)
        graph.targets = list(dict.fromkeys(each for target in targets for each in self._awaited(target)))
        graph.prune()

    def _copy(self, node: Node, name: str, part: Graph, where: str) -> Node:
        """A node of the joined graph for one of a part, without its inputs. Nodes of two parts may have one name."""
        return add_copy(self.graph, node, name, (), device=node.device or f"/device:{where}", source=part)

    def _tensor(self, tensor: Output) -> Output:
        """A tensor of a part in the joined graph: that which was sent, for a received one."""
        node = tensor.node
        if node.op == custom_ops.RECEIVE:
            return self._tensor(self._source_of[node].inputs[0])
        return Output(self._made[node], tensor.index)

    def _awaited(self, node: Node) -> Iterable[Node]:
        """The nodes that a node waits for in the joined graph where it waited for this one in its part."""
        if node.op not in (custom_ops.SEND, custom_ops.RECEIVE):
            return (self._made[node],)
        before = (*(tensor.node for tensor in node.inputs), *node.controls)
        return [each for earlier in before for each in self._awaited(earlier)]


def _wait(graph: Graph, node: Node, source: Node) -> None:
    """Make a node wait for one of another device. A control edge would request memory on both (graph_partition.cc)."""
    kind = TensorType("int32", ())
    stem = f"tfswap/{source.name}"
    signal = graph.add(
        custom_ops.SIGNAL,
        graph.unique_name(f"{stem}/signal"),
        controls=(source,),
        outputs=(kind,),
        device=source.device,
    )
    name = graph.unique_name(f"{stem}/signalled")
    attrs = {"T": Dtype("int32")}
    graph.add_control(
        node, graph.add("Identity", name, (signal.out(),), attrs=attrs, outputs=(kind,), device=node.device)
    )
