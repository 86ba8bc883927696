"""Cuts a step on several devices into a graph for each.

Each device with an arena of its own has a plan of its own. A tensor that another device reads is copied to host memory
by the device that computes it, and from there by the device that reads it:

    whole step:    f (GPU:0) ------------------------------------------------> g (GPU:1)
    parts:         f -> ToHost -> Send               Receive -> ToDevice -> g
    carried out:   f -> ToHost ----------------------------------> ToDevice -> g

`Send` and `Receive` stand for the other device while a part is planned; then the graphs that carry out the plans are
joined (join_parts.py). So each arena has the requests of its own kernels alone, in the order of its own plan, and no
peak depends on which device is faster. In place of a control edge between devices a number in host memory is sent.

Sends, receives and collectives have one order in the whole step, and each device keeps its part of that order, by
control edges. So the joined graph has no cycle, whatever the plans: a path that enters a device at a receive leaves it
at a later send. Members of a collective have one place in that order. What kernels give that start at one time is all
sent before any of it is received: then devices that wait for one another, as replicas do, do so in the same way.

Constants are in each part that reads them, and so are arguments in host memory or on a CPU, and integers whose number
follows from shapes. Nodes of two parts that compute alike have one name (alike_parts.py); in the joined graph each has
its own.

A loop or a conditional that runs on several devices is on each of them, with the part of its functions that is there
(device_bodies.py). All take the same branch, and as many iterations. Inside, tensors go from one device to another by a
Send and a Receive that stay (channel_ops.cc). In each iteration each device keeps its part of one order of these, so a
channel has its tensors in the order of the iterations, and no device waits for one that waits for it.

A step whose gradients are taken outside (tactics/outer_gradients.py) has the caller's part on each device. What one
device sends after it, another receives after it. So what the backward function reads of the forward function is on one
device.

Not handled: copies from one device to another that do not pass through host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tfswap.analysis.collectives import has_collectives
from tfswap.analysis.output_bytes import is_of_cpu, is_on_host
from tfswap.errors import UnsupportedGraph
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Node, Output
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import control_flow, is_const, is_pure, stateful_form
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.alike_parts import names_of_alike
from tfswap.passes.device_bodies import (
    Body,
    attributes,
    computes_counter,
    devices_of,
    first_readers,
    inside,
    is_virtual,
    makes_list,
)
from tfswap.passes.device_carriers import unit
from tfswap.passes.device_memory import Places
from tfswap.passes.device_schedule import scheduled
from tfswap.passes.nodes import RECEIVED, add_device_copy, add_signal
from tfswap.passes.prepare.collective_order import join_members, order_collectives
from tfswap.support.reach import reach

Place = tuple[int, int, int]
"""The place of a send, a receive or a collective in the order of the whole step: when its node starts, which of the
three it is, and its number among these.
"""
COLLECTIVE, SENT, TAKEN = range(3)
BEFORE = -1
"""When arguments are there: before any node starts."""


@dataclass
class Parts:
    """A step, cut by device.

    Attributes:
        whole: the step.
        graphs: a graph for each device, by its unit.
        sources: by device and name of a Receive, the device and the name of its Send.
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


def cut(graph: Graph, planned: Collection[str], device: DeviceModel) -> Parts:
    """Cut a step whose nodes, but for feeds and constants, all name a device.

    Args:
        planned: the units of the devices whose parts are planned: GPUs, and the CPU where it has a limit of its own.
        device: the model of the GPUs.

    Raises:
        UnsupportedGraph: a handle or a list goes from one device to another, or it is not known which collectives
            match.
    """
    return _Cut(graph, planned, device).parts


class _Cut:
    """The cut of a step, or of a function that a loop or a conditional of it runs."""

    def __init__(self, graph: Graph, planned: Collection[str], device: DeviceModel, body: Body | None = None):
        self.parts = Parts(graph)
        self._body = body
        self._planned = planned
        self._device_model = device
        self._feeds = set(graph.feeds)
        self._places = Places(planned, device, self._feeds, is_body=body is not None)
        self._outside = next((node for node in graph if node.op == custom_ops.OUTSIDE), None)
        self._before = graph.needed([self._outside]) if self._outside else set(graph)
        self._rank, self._start = _ranks(graph, device)
        self._insertion = {node: i for i, node in enumerate(graph)}
        self._devices = {node: devices_of(graph, node) for node in graph}
        if self._outside:
            self._devices[self._outside] = list(
                dict.fromkeys(each for found in self._devices.values() for each in found)
            )
        self._made: dict[tuple[str, Node], Node] = {}
        self._received: dict[tuple[str, Output, bool], Output] = {}
        self._awaited: dict[tuple[str, str, frozenset[Node]], Node] = {}
        self._copied: dict[tuple[Output, bool, bool], Output] = {}  # by tensor, _is_after, and whether it is pooled
        self._place: dict[str, dict[Node, Place]] = {}  # by device, its sends, receives and collectives
        self._near: dict[Node, int] = {}  # of new nodes, their rank in the insertion order
        homes = _homes(graph)
        self._names = names_of_alike(graph, homes, planned) if body is None else {}
        self._home: dict[Node, str | None] = (
            {**homes} if body is None else dict(zip(graph.feeds, body.homes, strict=True))
        )
        self._results: dict[Output, dict[str, Output]] = {}  # of nodes on several devices, by device, its home first
        self._same: dict[Output, Output] = {}  # by result of a loop that changes nothing about it, the argument
        for node in sorted(graph.topological(), key=lambda node: node not in self._before):
            self._is_after = node not in self._before
            if not self._is_anywhere(node) and not is_virtual(node):
                self._add(node)
        self._finish()

    def _is_anywhere(self, node: Node) -> bool:
        """Whether a node is on each device that reads it."""
        return node in self._feeds or is_const(node.op) or makes_list(node)

    def _unit(self, node: Node) -> str:
        """The device of a node; the first planned one of a constant that names none."""
        return unit(node.device) if node.device else next(iter(self._planned))

    def _part(self, where: str) -> Graph:
        if where not in self.parts.graphs:
            part = self.parts.graphs[where] = Graph()
            whole = self.parts.whole
            part.library, part.read_in_vain, part.variables = whole.library, whole.read_in_vain, whole.variables
            self._place[where], self.parts.own_names[where] = {}, {}
        return self.parts.graphs[where]

    def _device(self, tensor: Output) -> str:
        """The device that has a tensor."""
        tensor = self._same.get(tensor, tensor)
        if tensor in self._results:
            return next(iter(self._results[tensor]))
        return self._home.get(tensor.node) or self._unit(tensor.node)

    def _add(self, node: Node) -> None:
        if node is self._outside:
            self._add_outside(node)
            return
        if len(devices := self._devices[node]) > 1:
            self._add_on_each(node, devices)
            return
        where = unit(node.device)
        inputs = [self._here(where, tensor) for tensor in node.inputs]
        controls = self._controls(where, node.controls)
        made = self._copy(where, node, inputs, controls)
        if has_collectives(self.parts.whole, node):
            self._place[where][made] = self._joint_place(node)

    def _add_on_each(self, node: Node, devices: Sequence[str]) -> None:
        """Add a loop or a conditional on each of several devices, with the part of its functions on that device.

        They have one place in the order, as members of a collective have.
        """
        kind = control_flow(node.op)
        assert kind is not None
        bodies = self.parts.whole.bodies[node]
        deciding, given = node.inputs[: kind.first_argument], node.inputs[kind.first_argument :]
        stem = f"{self._body.name}/{node.name}" if self._body else node.name
        functions = inside(node, bodies, stem, [self._device(tensor) for tensor in given], devices)
        cuts = [
            _Cut(body, self._planned, self._device_model, how).parts
            for body, how in zip(bodies, functions.bodies, strict=True)
        ]
        for i, home in enumerate(functions.homes):
            if home is None:
                self._same[node.out(i)] = self._same.get(given[i], given[i])
            else:
                self._results[node.out(i)] = {}
        for where in devices:
            made, read, results = functions.on(where, cuts)
            inputs = [self._here(where, tensor) for tensor in (*deciding, *(given[i] for i in read))]
            controls = self._controls(where, node.controls)
            part = self._part(where)
            copy = part.add(
                stateful_form(node.op),
                part.unique_name(node.name),
                inputs,
                controls=controls,
                attrs=attributes(node, [given[i].type for i in read], results),
                outputs=[node.outputs[i] for i in results],
                device=f"/device:{where}",
            )
            part.bodies[copy] = tuple(made)
            part.targets.append(copy)  # the other parts wait for what it sends
            self._made[where, node] = copy
            self._near[copy] = self._insertion[node]
            self._place[where][copy] = self._joint_place(node)
            for n, i in enumerate(results):
                if functions.homes[i] is not None:
                    self._results[node.out(i)][where] = copy.out(n)

    def _add_outside(self, node: Node) -> None:
        """Add the caller's part on each device: of the results and gradients that are there.

        Sends before it and after it do not mix: a tensor that is sent in the forward function is received there. The
        caller may compute on the first device with results of all.
        """
        for where in self._devices[node]:
            own = [i for i, tensor in enumerate(node.inputs) if self._device(tensor) == where]
            others = [tensor.type.nbytes or 0 for i, tensor in enumerate(node.inputs) if i not in own]
            part = self._part(where)
            made = part.add(
                node.op,
                part.unique_name(node.name),
                [self._here(where, node.inputs[i]) for i in own],
                controls=[self._made[where, each] for each in _sources(node.controls) if (where, each) in self._made],
                attrs={**node.attrs, "elsewhere": tuple(others) if where == next(iter(self._planned)) else ()},
                outputs=[node.outputs[i] for i in own],
                device=f"/device:{where}",
            )
            part.targets.append(made)
            self._made[where, node] = made
            self._near[made] = self._insertion[node]
            self._place[where][made] = self._joint_place(node)
            self._results |= {node.out(i): {where: made.out(n)} for n, i in enumerate(own)}

    def _joint_place(self, node: Node) -> Place:
        """The place of a node that is on several devices."""
        return self._start[node.name], COLLECTIVE, self._rank[node.name]

    def _put_after(self, where: str, node: Node) -> None:
        """Keep a node of a device's part on the side of the caller's part that its readers are on."""
        if self._is_after and self._outside:
            self._part(where).add_control(node, self._made[where, self._outside])

    def _copy(self, where: str, node: Node, inputs: Iterable[Output], controls: Iterable[Node]) -> Node:
        part, whole = self._part(where), self.parts.whole
        is_there = node in self._feeds if is_of_cpu(node) or not node.device else unit(node.device) == where
        device = "" if is_there else f"/device:{where}"
        made = add_copy(part, node, self._name(where, node), inputs, controls=controls, device=device, source=whole)
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
        tensor = self._same.get(tensor, tensor)
        node = tensor.node
        if where in self._results.get(tensor, ()):
            return self._results[tensor][where]
        if (where, node) in self._made and tensor not in self._results:
            return self._made[where, node].out(tensor.index)
        if self._is_found(where, node):
            inputs = [self._here(where, each) for each in node.inputs]
            return self._copy(where, node, inputs, ()).out(tensor.index)
        key = where, tensor, self._is_after and where not in self._planned  # a GPU's copy is of both functions
        if key not in self._received:
            self._received[key] = self._receive(where, tensor)
        return self._received[key]

    def _is_found(self, where: str, node: Node) -> bool:
        """Whether a device that reads what a node gives has the node too."""
        if node in self._feeds:
            home = self._home.get(node)
            return not home or home == where or (self._body is None and self._places.is_hosted(node.out()))
        counts = self._body is not None and computes_counter(node)
        return counts or _follows_from_shapes(node, self._device_model) or self._is_anywhere(node)

    def _receive(self, where: str, tensor: Output) -> Output:
        node = tensor.node
        home = self._device(tensor)
        _refuse_handle(tensor, home, where)
        here = self._here(home, tensor)
        there, part = self._part(home), self._part(where)
        if self._places.is_freed(home, tensor):
            pooled = self._places.is_pooled(where, tensor)
            key = tensor, self._is_after, pooled
            if key not in self._copied:
                copy = add_device_copy(there, custom_ops.TO_HOST, "to_host", here, f"/device:{home}", pooled=pooled)
                self._put_after(home, copy)
                self._near[copy] = self._near[here.node]
                self._copied[key] = copy.out()
            here = self._copied[key]
        stem = f"tfswap/{self._name(home, node)}_{tensor.index}"
        received = self._send(stem, (home, here), where, node).out()
        if self._places.is_taken(where, tensor):
            copy = add_device_copy(part, custom_ops.TO_DEVICE, RECEIVED, received, f"/device:{where}", stem=stem)
            self._near[copy] = self._insertion[node]
            received = copy.out()
        return received

    def _send(self, stem: str, source: tuple[str, Output], where: str, node: Node) -> Node:
        """A Receive on a device of a tensor in host memory that another sends.

        Args:
            source: that device, and the tensor.
            node: of the whole step, which has to do with it.
        """
        (home, tensor), kind = source, source[1].type
        there, part = self._part(home), self._part(where)
        name = there.unique_name(f"{stem}/send")
        attrs: dict[str, object] = {"T": Dtype(kind.dtype)}
        if self._body is not None:
            attrs["channel"] = f"{self._body.name}/{name} {home} {where}".encode()
        send = there.add(custom_ops.SEND, name, (tensor,), attrs=attrs, device=f"/device:{home}")
        there.targets.append(send)
        receive = part.add(
            custom_ops.RECEIVE,
            part.unique_name(f"{stem}/receive"),
            attrs={**attrs, "shape": Dims(kind.shape or ())},
            outputs=(kind,),
            device=f"/device:{where}",
        )
        first = self._start[self._outside.name] if self._is_after and self._outside else BEFORE
        start, number = max(self._start[node.name], first), len(self.parts.sources)
        for device, end, which in ((home, send, SENT), (where, receive, TAKEN)):
            self._place[device][end] = start, which, number
            self._near[end] = self._insertion[node]
        self.parts.sources[where, receive.name] = home, send.name
        return receive

    def _controls(self, where: str, controls: Iterable[Node]) -> list[Node]:
        """The nodes of a device's part that stand for these nodes of the whole step."""
        by_device: dict[str, dict[Node, None]] = {}
        for node in _sources(controls):
            for device in () if self._is_anywhere(node) else (where,) if node is self._outside else self._devices[node]:
                by_device.setdefault(device, {})[node] = None
        found = [self._made[where, node] for node in by_device.pop(where, ())]
        found += [self._await(where, home, frozenset(nodes)) for home, nodes in by_device.items()]
        return found

    def _await(self, where: str, home: str, nodes: frozenset[Node]) -> Node:
        """A node of the part of `where` that waits for nodes of another device."""
        if (where, home, nodes) not in self._awaited:
            last = max(nodes, key=lambda node: self._rank[node.name])
            stem = f"tfswap/{self._name(home, last)}"
            before = sorted((self._made[home, node] for node in nodes), key=lambda node: node.name)
            signal = add_signal(self._part(home), f"{stem}/done", before, f"/device:{home}")
            self._put_after(home, signal)
            self._near[signal] = self._insertion[last]
            self._awaited[where, home, nodes] = self._send(stem, (home, signal.out()), where, last)
        return self._awaited[where, home, nodes]

    def _finish(self) -> None:
        """Add fetches, targets and feeds, and the order of what connects the devices."""
        whole, parts = self.parts.whole, self.parts
        insertion = list(whole)
        for number, fetch in enumerate(whole.fetches):
            for where in self._body.results[number] if self._body else (self._device(fetch),):
                here, part = self._here(where, fetch), self._part(where)
                parts.fetched.append((where, len(part.fetches)))
                part.fetches.append(here)
        for target in _sources(whole.targets):
            for where in () if target in self._feeds else self._devices[target] or [self._unit(target)]:
                part = self._part(where)
                if self._is_anywhere(target):
                    self._here(where, target.out())
                part.targets.append(self._made[where, target])
        for feed in () if self._body else whole.feeds:
            if not any((where, feed) in self._made for where in parts.graphs):
                self._copy(self._device(feed.out()), feed, (), ())
        for where, part in parts.graphs.items():
            part.feeds = [self._made[where, feed] for feed in whole.feeds if (where, feed) in self._made]
            part.targets = list(dict.fromkeys(part.targets))
            names = {node.name: made.name for (there, node), made in self._made.items() if there == where}
            _describe(part, whole, names, {node: insertion[near] for node, near in self._near.items()})
            if where in self._planned:
                places = self._place[where]
                ordered = sorted(places, key=places.__getitem__)
                for before, node in pairwise(ordered):
                    part.add_control(node, before)


def _follows_from_shapes(node: Node, device: DeviceModel) -> bool:
    """Whether a node gives small tensors of unknown size, as axes that follow from shapes: each device that reads them
    computes them, since a Receive has a size.
    """
    sizeless = any(kind.nbytes is None for kind in node.outputs)
    return sizeless and is_pure(node.op) and all(is_on_host(node, i, device) for i, _ in enumerate(node.outputs))


def _refuse_handle(tensor: Output, home: str, where: str) -> None:
    """Raise UnsupportedGraph where one device reads a handle or a list of another."""
    if tensor.type.dtype in ("resource", "variant"):
        raise UnsupportedGraph(
            f"{tensor.node.name!r} ({tensor.node.op}) gives a handle or a list on {home}, which is read on {where}. "
            "Read it on the device that it is on, and pass what it has."
        )


def _describe(part: Graph, whole: Graph, names: Mapping[str, str], near: Mapping[Node, Node]) -> None:
    """Add what the whole step knows of its nodes to a device's part, and arrange the part as the step is.

    Args:
        names: the names in the part, by name in the step.
        near: the node of the step that each node of the part is of, or belongs to.
    """
    part.calls = {
        call: tuple([names.get(name, name) for name in inside if name in names or name in whole.calls])
        for call, inside in whole.calls.items()
    }
    part.names_in_bodies = {made: whole.names_in_bodies[n] for n, made in names.items() if n in whole.names_in_bodies}
    insertion = {node: place for place, node in enumerate(whole)}
    part.arrange({node: (insertion[near[node]], place) for place, node in enumerate(part)})
    if whole.executed:
        executed = {name: rank for rank, name in enumerate(whole.executed)}
        part.executed = tuple(node.name for node in sorted(part, key=lambda node: executed[near[node].name]))


def _sources(nodes: Iterable[Node]) -> Iterator[Node]:
    """These nodes, and in place of virtual ones those that they wait for."""
    found = reach(nodes, lambda node: node.controls if is_virtual(node) else ())
    return (node for node in found if not is_virtual(node))


def _homes(graph: Graph) -> dict[Node, str]:
    """The device of each argument: that which it names, else that of its first reader."""
    first = next((unit(node.device) for node in graph if node.device), "")
    readers = first_readers(graph)
    return {feed: unit(feed.device) if feed.device else readers.get(feed, first) for feed in graph.feeds}


def _ranks(graph: Graph, device: DeviceModel) -> tuple[dict[str, int], dict[str, int]]:
    """By name of a node, its number in an order, and when it starts there (device_schedule.py).

    The members of a collective have one place in that order, and so have nodes with matching collectives inside.
    """
    ordered = graph.copy()
    target = Target(device)
    order_collectives(ordered, target)
    join_members(ordered)
    for outside in [node for node in ordered if node.op == custom_ops.OUTSIDE]:
        before = {*ordered.needed([outside]), *ordered.feeds}
        for node in ordered:
            if node not in before and not is_const(node.op):
                ordered.add_control(node, outside)
    feeds = set(ordered.feeds)
    ranks: dict[str, int] = {}
    starts: dict[str, int] = {}
    for rank, (node, start) in enumerate(scheduled(ordered).items()):
        members: Sequence[tuple[str, object]] = node.attrs["members"] if node.op == custom_ops.TOGETHER else ()  # pyright: ignore[reportAssignmentType] written by join_members
        for name in (node.name, *(member[0] for member in members)):
            ranks[name], starts[name] = rank, BEFORE if node in feeds else start
    return ranks, starts
