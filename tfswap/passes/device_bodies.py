"""The parts of loops and conditionals that run on several devices, one for each device (device_parts.py).

All devices take the same branch, and as many iterations. A branch index, or the numbers that decide how often a loop
runs, are on each device: integers and truth values of few elements, which each device computes for itself from such
numbers. Where a condition reads other tensors, the device that computes it sends its result to the others.

Every other loop variable is on the device that computes its next value, which sends it to those that read it in each
iteration. What no iteration changes is on each device that reads it, and is not a result of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from tfswap.ir.graph import SMALL_INTEGERS, Dtype, Graph, Node
from tfswap.ir.node_copies import add_copy
from tfswap.ir.op_traits import calls_functions, control_flow, is_const, is_pure, only_waits, passes_on
from tfswap.ir.types import TensorType
from tfswap.passes.device_carriers import FIRST, unit

if TYPE_CHECKING:
    from tfswap.passes.device_parts import Parts

Argument = TypeVar("Argument", Node, int)

READ_ONLY = "_read_only_resource_inputs"
"""An attribute with numbers of inputs, for traces of other functions alone."""


class Body(NamedTuple):
    """A function of a loop or a conditional that runs on several devices.

    Attributes:
        name: of the node and the function, unique in the step.
        results: the devices that need each result.
        homes: the device of each argument; None where each device that reads it has it.
    """

    name: str
    results: Sequence[Sequence[str]]
    homes: Sequence[str | None]


class OnDevice(NamedTuple):
    """The part of a loop or a conditional on a device.

    Attributes:
        bodies: the parts of its functions.
        read: the numbers of the arguments that these take.
        results: the numbers of the results.
    """

    bodies: Sequence[Graph]
    read: Sequence[int]
    results: Sequence[int]


@dataclass(frozen=True)
class Inside:
    """The functions of a loop or a conditional, and how they are cut.

    Attributes:
        bodies: how each is cut.
        homes: the device of each result; None of one that is the argument of its number.
    """

    node: Node
    bodies: Sequence[Body]
    homes: Sequence[str | None]

    def on(self, where: str, cuts: Sequence[Parts]) -> OnDevice:
        """The part on a device of the functions that were cut."""
        made = [cut.graphs.get(where) or _empty(cut.whole) for cut in cuts]
        read = [i for i in range(len(cuts[0].whole.feeds)) if self._has(where, i, made, cuts)]
        for part, cut in zip(made, cuts, strict=True):
            own = [cut.whole.feeds[i] for i in read]
            device = f"/device:{where}"
            part.feeds = [
                part[feed.name]
                if feed.name in part
                else add_copy(part, feed, feed.name, (), device=feed.device and device)
                for feed in own
            ]
        if not _is_loop(self.node):
            return OnDevice(made, read, [i for i, devices in enumerate(self.bodies[0].results) if where in devices])
        body = made[1]
        computed = [i for i, devices in enumerate(self.bodies[1].results) if where in devices]
        fetches = dict(zip(computed, body.fetches, strict=True))
        body.fetches = [fetches.get(i) or feed.out() for i, feed in zip(read, body.feeds, strict=True)]
        return OnDevice(made, read, read)

    def _has(self, where: str, number: int, made: Sequence[Graph], cuts: Sequence[Parts]) -> bool:
        """Whether the part on a device has an argument."""
        if _is_loop(self.node) and where in self.bodies[1].results[number]:
            return True
        return any(cut.whole.feeds[number].name in part for part, cut in zip(made, cuts, strict=True))


def inside(node: Node, bodies: Sequence[Graph], stem: str, given: Sequence[str], devices: Sequence[str]) -> Inside:
    """How a loop or a conditional is cut.

    Args:
        stem: a prefix of the names of its functions.
        given: the device of each argument.
        devices: those that it runs on, its own first.
    """
    if _is_loop(node):
        return _in_loop(node, bodies, stem, given, devices)
    homes = [_home_of_result(bodies, i) or devices[0] for i in range(len(node.outputs))]
    anywhere = [None] * len(given)
    return Inside(
        node, [Body(f"{stem}/{k}", [(home,) for home in homes], anywhere) for k, _ in enumerate(bodies)], homes
    )


def _in_loop(node: Node, bodies: Sequence[Graph], stem: str, given: Sequence[str], devices: Sequence[str]) -> Inside:
    body = bodies[1]
    homes: list[str | None] = []
    results: list[Sequence[str]] = []
    for i, feed in enumerate(body.feeds):
        if passed_through(body, i):
            homes.append(None)
            results.append(())
        elif is_counter(feed.outputs[0]):
            homes.append(None)
            results.append(devices)
        else:
            before = given[i] if given[i] in devices else devices[0]
            homes.append(_home_of_result((body,), i) or before)
            results.append((cast("str", homes[-1]),))
    made = [Body(f"{stem}/condition", (devices,), homes), Body(f"{stem}/body", results, homes)]
    return Inside(node, made, [each[0] if each else None for each in results])


def devices_of(graph: Graph, node: Node) -> list[str]:
    """The devices that a node runs on, its own first; none where it names none."""
    found = dict.fromkeys([unit(node.device)] if node.device else ())
    if control_flow(node.op) is not None:
        for body in graph.bodies.get(node, ()):
            feeds = set(body.feeds)
            own = (each for each in body if each not in feeds and not is_const(each.op) and not is_virtual(each))
            found |= dict.fromkeys(device for each in own for device in devices_of(body, each))
    return list(found)


def first_readers(graph: Graph, device: str = "") -> dict[Node, str]:
    """By argument of a graph, the device of its first reader, in bodies too; none for one that nothing reads.

    That is a GPU where one reads the argument, in whose arena it is already, although the CPU may read it first.

    Args:
        device: of nodes that name none. In a body that runs on one device, these are where the loop is.
    """
    found: dict[Node, str] = {}
    feeds = set(graph.feeds)
    for node in graph.topological():
        inner: dict[int, str] = {}
        kind = control_flow(node.op)
        for body in graph.bodies.get(node, ()):
            readers = first_readers(body, node.device or device)
            numbers = {feed: number for number, feed in enumerate(body.feeds)}
            for feed, where in readers.items():
                _add_reader(inner, numbers[feed], where)
        for number, tensor in enumerate(node.inputs):
            if tensor.node not in feeds:
                continue
            argument = number - (kind.first_argument if kind else 0)
            if node not in graph.bodies or argument < 0:
                _add_reader(found, tensor.node, unit(node.device or device))
            elif argument in inner:
                _add_reader(found, tensor.node, inner[argument])
    return found


def _add_reader(found: dict[Argument, str], argument: Argument, where: str) -> None:
    if found.get(argument, FIRST) == FIRST:
        found[argument] = where


def attributes(node: Node, given: Sequence[TensorType], results: Sequence[int]) -> dict[str, object]:
    """The attributes of a loop or a conditional with these arguments, and those of its results with these numbers."""
    attrs = {key: value for key, value in node.attrs.items() if key != READ_ONLY}
    types = {"T": given} if _is_loop(node) else {"Tin": given, "Tout": [node.outputs[i] for i in results]}
    attrs |= {name: tuple([Dtype(kind.dtype) for kind in kinds]) for name, kinds in types.items()}
    if shapes := cast("Sequence[object]", node.attrs.get("output_shapes", ())):
        attrs["output_shapes"] = tuple([shapes[i] for i in results])
    return attrs


def is_counter(kind: TensorType) -> bool:
    """Whether each device of a loop computes a variable of this type for itself."""
    elements = kind.num_elements
    return kind.dtype in ("bool", "int32", "int64") and elements is not None and elements <= SMALL_INTEGERS


def computes_counter(node: Node) -> bool:
    """Whether each device of a loop computes what a node gives for itself."""
    kinds = (*(tensor.type for tensor in node.inputs), *node.outputs)
    return bool(node.inputs) and is_pure(node.op) and not calls_functions(node.op) and all(map(is_counter, kinds))


def makes_list(node: Node) -> bool:
    """Whether a node makes lists out of nothing: each device that fills one has a node for it."""
    return (
        bool(node.outputs)
        and is_pure(node.op)
        and all(kind.dtype == "variant" for kind in node.outputs)
        and all(is_counter(tensor.type) for tensor in node.inputs)
    )


def passed_through(body: Graph, number: int) -> bool:
    """Whether a loop's variable is the same in all iterations."""
    tensor = body.fetches[number]
    while passes_on(tensor.node.op) and tensor.node.inputs:
        tensor = tensor.node.inputs[tensor.index]
    return tensor.node is body.feeds[number]


def is_virtual(node: Node) -> bool:
    """Whether a node only joins control edges: the edges go through it."""
    return only_waits(node.op) and not node.inputs and not node.outputs


def _is_loop(node: Node) -> bool:
    kind = control_flow(node.op)
    assert kind is not None
    return kind.is_loop


def _home_of_result(bodies: Sequence[Graph], number: int) -> str | None:
    """The device of a result: that of a function which computes it; None where none does."""
    for body in bodies:
        node = body.fetches[number].node
        if node.device and node not in body.feeds and not is_const(node.op) and not makes_list(node):
            return unit(node.device)
    return None


def _empty(whole: Graph) -> Graph:
    made = Graph()
    made.library = whole.library
    return made
