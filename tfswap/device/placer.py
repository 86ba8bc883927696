"""Gives the nodes of a step on several devices that name none a device (placement.py), in bodies too.

A loop's variable is on the device that computes its next value. That of a body's node depends on where variables are,
and variables on nodes. So a body is placed several times, from what is certain: nodes and variables (resources) that
name devices, lists that are filled before the loop, and variables that no iteration changes. What remains undecided is
on the device of the loop.

Lists that start empty are where elements are pushed. So what a loop saves for its backward loop stays where it is, and
is read there.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tfswap.device.machine import type_of
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.op_traits import control_flow, is_const, wraps
from tfswap.passes.device_bodies import is_counter, is_virtual, passed_through
from tfswap.passes.device_carriers import FIRST, unit, units
from tfswap.passes.prepare.text_on_host import is_text

HANDLES = ("resource", "variant")
"""Types of handles and lists. What reads one is on its device."""
MOST_PASSES = 8
"""How often a loop's body is placed at most. Each pass decides what depends on the one before."""


class Placer:
    """Places the nodes of a graph.

    Args:
        name: of the function, for messages.
        given: the device of each argument; None where it is undecided, as of a number that all devices have.
        first: the device of nodes that no rule gives one.
        hosted: arguments that are handles of objects on the CPU, of a step on GPUs.
        cut: whether the step is cut by device: it is on GPUs.
        is_body: whether the graph is a body, where the device of an argument counts.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        given: Sequence[str | None],
        first: str,
        hosted: Collection[Node],
        *,
        cut: bool,
        is_body: bool = False,
    ):
        self._name = name
        self._graph = graph
        self._given = dict(zip(graph.feeds, given, strict=False))
        self._first = first
        self._hosted = hosted
        self._cut = cut
        self._is_body = is_body
        self._unit: dict[Node, str | None] = {}
        self._results: dict[Output, str | None] = {}  # of loops and conditionals on several devices
        self._inner: dict[Node, list[Placer]] = {}  # of these
        self._empty_on: dict[Node, str] = {}  # of lists without elements that are results of a branch
        self._names = dict(units(graph))  # of devices, by unit
        self._find()

    def place(self) -> None:
        """Name the devices, in place."""
        for node, where in self._unit.items():
            if self._needs_name(node):
                node.device = self._device_name(where or self._first)
            for inner in self._inner.get(node, ()):
                inner.place()
        if self._cut:
            self._place_lists()

    def unit_of(self, tensor: Output) -> str | None:
        """The device of a tensor; None where it is undecided."""
        if tensor in self._results:
            return self._results[tensor]
        node = tensor.node
        return None if is_const(node.op) or self._is_list(node) else self._unit[node]

    def wrap_on(self, where: str, node: Node) -> None:
        """Move a node that wraps a tensor for a result, or makes nothing in its place: branches save different tensors
        by these, on one device.
        """
        if self._is_list(node):
            self._empty_on[node] = where
        elif wraps(node.op) and not node.device:
            self._unit[node] = where

    def _find(self) -> None:
        """Find the device of each node."""
        for node in self._graph.topological():
            found = self._choose(node)
            self._unit[node] = found if self._is_body or node in self._given else found or self._first
            if node in self._graph.bodies and control_flow(node.op) is not None:
                self._find_inside(node)

    def _choose(self, node: Node) -> str | None:
        """The device of a node: that of the first rule that holds."""
        if node in self._given:
            return self._given[node]
        if node.device:
            return unit(node.device)
        handles = {self.unit_of(t) for t in node.inputs if t.type.dtype in HANDLES}
        if handles - {None}:
            return self._only(handles)
        if self._cut and is_on_cpu(node, self._hosted):
            return FIRST
        read = self._only({self.unit_of(t) for t in node.inputs if self._is_body or t.node not in self._given})
        return self._first if self._cut and read == FIRST else read

    def _only(self, found: Collection[str | None]) -> str | None:
        """The one device of these, the first of several; None where none is decided."""
        decided = [each for each in found if each is not None]
        return self._first if len(decided) > 1 else next(iter(decided), None)

    def _needs_name(self, node: Node) -> bool:
        """Whether a node gets the name of its device."""
        if node in self._given:
            return self._cut and node.outputs[0].dtype == "resource"
        if node.device or self._is_list(node):
            return False
        return bool(node.inputs) or (self._cut and not is_const(node.op))

    def _device_name(self, where: str) -> str:
        return self._names.setdefault(where, f"/device:{where}")

    def _is_list(self, node: Node) -> bool:
        """Whether a node without a device makes an empty list, which is where it is filled."""
        return self._cut and not node.device and node not in self._given and _makes_list(node)

    def _place_lists(self) -> None:
        lists = [node for node in self._graph if self._is_list(node)]
        readers = {t.node: node for node in reversed(list(self._graph)) for t in node.inputs if node.device}
        for node in lists:
            where = self._empty_on.get(node, self._first)
            node.device = readers[node].device if node in readers else self._device_name(where)

    # --- loops and conditionals -----------------------------------------------------------------------------

    def _find_inside(self, node: Node) -> None:
        """Place a loop or a conditional where its bodies are, and the nodes of those that run on several devices.

        Raises UnsupportedGraph where it runs on several devices, and the step is not cut.
        """
        kind, bodies = control_flow(node.op), self._graph.bodies[node]
        assert kind is not None
        given = [self.unit_of(tensor) for tensor in node.inputs[kind.first_argument :]]
        inside = {unit(n.device) for body in bodies for part in (body, *body.all_bodies()) for n in part if n.device}
        if self._cut:
            pairs = zip(node.inputs[kind.first_argument :], given, strict=True)
            inside |= {where for tensor, where in pairs if tensor.type.dtype in HANDLES and where}
            inside |= self._of_kernels(node)
        if not inside - {self._unit[node]}:
            return
        if self._cut and len(inside) == 1:
            (self._unit[node],) = inside
            node.device = self._device_name(*inside)
            return
        if not self._cut:
            raise UnsupportedGraph(
                f"{self._name}: {node.name!r} ({node.op}) runs nodes on {', '.join(sorted(inside))}, and loops and "
                "conditionals on several devices that share an arena are not planned. Optimize the function that makes "
                "one step, and call it in a loop outside."
            )
        if kind.is_loop:
            self._find_in_loop(node, given)
        else:
            self._find_in_branches(node, given)

    def _of_kernels(self, node: Node) -> set[str]:
        """Where the kernels of a loop or a conditional are if some of them have to be on the CPU; else nothing."""
        unnamed = [each for each in inner_kernels(self._graph, node) if not each.device]
        hosted = [each for each in unnamed if is_on_cpu(each, ())]
        rest = {self._unit[node] or self._first} if len(hosted) < len(unnamed) else set[str]()
        return {FIRST} | rest if hosted else set()

    def _body(self, body: Graph, given: Sequence[str | None], where: str) -> Placer:
        return Placer(self._name, body, given, where, (), cut=True, is_body=True)

    def _find_in_branches(self, node: Node, given: Sequence[str | None]) -> None:
        where = self._unit[node] or self._first
        self._inner[node] = [self._body(body, given, where) for body in self._graph.bodies[node]]
        for i, tensor in enumerate(map(node.out, range(len(node.outputs)))):
            found = (
                inner.unit_of(body.fetches[i])
                for inner, body in zip(self._inner[node], self._graph.bodies[node], strict=True)
            )
            self._results[tensor] = home = next((each for each in found if each is not None), where)
            for inner, body in zip(self._inner[node], self._graph.bodies[node], strict=True):
                inner.wrap_on(home, body.fetches[i].node)

    def _find_in_loop(self, node: Node, given: Sequence[str | None]) -> None:
        where = self._unit[node] or self._first
        condition, body = self._graph.bodies[node]
        kinds = [feed.outputs[0] for feed in body.feeds]
        counters = {i for i, kind in enumerate(kinds) if is_counter(kind)}
        certain = {i for i, kind in enumerate(kinds) if kind.dtype in HANDLES and given[i] is not None}
        certain |= {i for i in range(len(kinds)) if passed_through(body, i)}
        homes = [each if i in certain - counters else None for i, each in enumerate(given)]
        for _ in range(MOST_PASSES):
            placed = self._body(body, homes, where)
            found = [placed.unit_of(fetch) for fetch in body.fetches]
            now = [homes[i] if i in certain else None if i in counters else each for i, each in enumerate(found)]
            if now == homes:
                break
            homes = now
        homes = [None if i in counters else each or given[i] or where for i, each in enumerate(homes)]
        self._inner[node] = [self._body(each, homes, where) for each in (condition, body)]
        self._results |= {node.out(i): each or where for i, each in enumerate(homes)}


def inner_kernels(graph: Graph, node: Node) -> Iterator[Node]:
    """The nodes of a node's bodies that compute: no arguments and no constants."""
    for body in graph.bodies.get(node, ()):
        feeds = set(body.feeds)
        for each in body:
            if each not in feeds and not is_const(each.op) and not is_virtual(each):
                yield each
            yield from inner_kernels(body, each)


def is_on_cpu(node: Node, hosted: Collection[Node]) -> bool:
    """Whether TensorFlow runs a node of a GPU's step on the CPU."""
    if node.device:
        return type_of(node.device) == "CPU"
    return any(t.node in hosted for t in node.inputs) or not (has_gpu_kernel(node) or is_text(node))


def has_gpu_kernel(node: Node) -> bool:
    kernels = _gpu_kernels(node.op)
    if kernels is None:
        return True
    types = {name: value for name, value in node.attrs.items() if isinstance(value, Dtype)}
    return any(all(types[name] in allowed for name, allowed in kernel.items() if name in types) for kernel in kernels)


@functools.cache
def _gpu_kernels(op: str) -> tuple[dict[str, frozenset[str]], ...] | None:
    """By attribute, the types that each kernel for GPUs takes; None where no device has one, since calls have none, and
    where this TensorFlow has no GPU, and may have no kernels for one.
    """
    from tensorflow.python.framework import config, dtypes, kernels

    if not config.list_physical_devices("GPU"):
        return None

    found: Any = kernels.get_registered_kernels_for_op(op).kernel
    if not found:
        return None
    return tuple(
        {c.name: frozenset(dtypes.as_dtype(t).name for t in c.allowed_values.list.type) for c in kernel.constraint}
        for kernel in found
        if kernel.device_type in ("GPU", "DEFAULT")
    )


def _makes_list(node: Node) -> bool:
    kinds = {kind.dtype for kind in node.outputs}
    return kinds == {"variant"} and all(is_const(t.node.op) for t in node.inputs)
