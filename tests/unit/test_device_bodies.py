"""Loops on several devices: their parts compute what the whole computes, and end, whatever the plans.

Random graphs with loops and conditionals in each other are cut and joined, with a random order of each part. Then the
devices run one node after another, in turns drawn at random, with channels that are queues. Values are numbers that
depend on all that was computed before.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import pytest

from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_parts import Parts, cut
from tfswap.passes.join_parts import join

GPU = DeviceModel("gpu")
FLOATS, COUNTER, TRUTH = TensorType("float32", (256,)), TensorType("int32", ()), TensorType("bool", ())
DEVICES = ("GPU:0", "GPU:1", "GPU:2")
KERNELS = ("Sin", "MatMul", "AddN")
EFFECT = "Assign"


class Drawing:
    """Draws a step: kernels, loops and conditionals on several devices."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.count = 0

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def step(self) -> Graph:
        graph = Graph()
        graph.feeds = [graph.add("Placeholder", self.name("feed"), outputs=(FLOATS,)) for _ in range(2)]
        tensors = [feed.out() for feed in graph.feeds]
        self.nodes(graph, tensors, 3, self.draw.randrange(3, 10))
        graph.fetches = self.draw.sample(tensors, 2)
        graph.prune()
        return graph

    def nodes(self, graph: Graph, tensors: list[Output], depth: int, count: int) -> None:
        """Add some nodes that read any of `tensors`, and their results to these."""
        for _ in range(count):
            kind = self.draw.random()
            if depth and kind < 0.25:
                node = self.loop(graph, tensors, depth)
                tensors += [node.out(i) for i in range(1, len(node.outputs))]
            elif depth and kind < 0.4:
                node = self.conditional(graph, tensors, depth)
                tensors += [node.out(i) for i in range(len(node.outputs))]
            else:
                tensors.append(self.kernel(graph, tensors).out())

    def device(self) -> str:
        return f"/device:{self.draw.choice(DEVICES)}"

    def kernel(self, graph: Graph, tensors: Sequence[Output], op: str = "", kind: TensorType = FLOATS) -> Node:
        inputs = [self.draw.choice(tensors) for _ in range(self.draw.randrange(1, 3))]
        others = [node for node in graph if node.op in (*KERNELS, EFFECT)]
        controls = self.draw.sample(others, min(len(others), self.draw.choice((0, 0, 1))))
        acts = not op and self.draw.random() < 0.2
        made = graph.add(
            op or (EFFECT if acts else self.draw.choice(KERNELS)),
            self.name("kernel"),
            inputs,
            controls=controls,
            outputs=(kind,),
            device=self.device(),
        )
        if acts:
            graph.targets.append(made)
        return made

    def number(self, graph: Graph, value: int) -> Output:
        return graph.add("Const", self.name("number"), attrs={"value": value}, outputs=(COUNTER,)).out()

    def computed(self, graph: Graph, op: str, inputs: Sequence[Output], kind: TensorType) -> Output:
        return graph.add(op, self.name(op), inputs, outputs=(kind,), device=self.device()).out()

    def arguments(self, graph: Graph, given: Sequence[Output]) -> list[Output]:
        graph.feeds = [graph.add("Placeholder", f"argument_{i}", outputs=(t.type,)) for i, t in enumerate(given)]
        return [feed.out() for feed in graph.feeds]

    def loop(self, graph: Graph, tensors: Sequence[Output], depth: int) -> Node:
        """A loop of a few iterations, which may end early."""
        given = [self.number(graph, 0), *(self.draw.choice(tensors) for _ in range(self.draw.randrange(1, 4)))]
        condition, body = Graph(), Graph()
        counter, *values = self.arguments(condition, given)
        goes_on = self.computed(condition, "Less", (counter, self.number(condition, self.draw.randrange(0, 5))), TRUTH)
        if self.draw.random() < 0.5:
            found = self.kernel(condition, values, "Greater", TRUTH).out()
            goes_on = self.computed(condition, "LogicalAnd", (goes_on, found), TRUTH)
        condition.fetches = [goes_on]
        counter, *values = self.arguments(body, given)
        tensors = list(values)
        self.nodes(body, tensors, depth - 1, self.draw.randrange(1, 6))
        following = self.computed(body, "AddV2", (counter, self.number(body, 1)), COUNTER)
        body.fetches = [following, *(self.draw.choice(tensors) for _ in values)]
        attrs = {"T": tuple(Dtype(tensor.type.dtype) for tensor in given)}
        return self.control_flow(graph, "While", given, attrs, [t.type for t in given], [condition, body])

    def conditional(self, graph: Graph, tensors: Sequence[Output], depth: int) -> Node:
        given = [self.draw.choice(tensors) for _ in range(self.draw.randrange(1, 4))]
        chosen = self.kernel(graph, tensors, "Greater", TRUTH).out()
        branches = [Graph(), Graph()]
        results = self.draw.randrange(0, 3)
        for branch in branches:
            inside = self.arguments(branch, given)
            self.nodes(branch, inside, depth - 1, self.draw.randrange(1, 6))
            branch.fetches = [self.draw.choice(inside) for _ in range(results)]
        attrs = {"Tin": (Dtype("float32"),) * len(given), "Tout": (Dtype("float32"),) * results}
        return self.control_flow(graph, "If", [chosen, *given], attrs, [FLOATS] * results, branches)

    def control_flow(
        self,
        graph: Graph,
        op: str,
        inputs: Sequence[Output],
        attrs: Mapping[str, object],
        outputs: Sequence[TensorType],
        bodies: Sequence[Graph],
    ) -> Node:
        node = graph.add(op, self.name(op), inputs, attrs=attrs, outputs=outputs, device=self.device())
        graph.bodies[node] = tuple(bodies)
        for body in bodies:
            body.prune()
        if self.draw.random() < 0.7:  # others run for their results alone
            graph.targets.append(node)
        return node


class Runs:
    """Runs graphs: a device, or all of them, one node after another, each as soon as its turn has come."""

    def __init__(self) -> None:
        self.channels: dict[object, deque[int]] = defaultdict(deque)
        self.kernels: Counter[tuple[str, int]] = Counter()
        """How often a kernel of an op has computed a value."""
        self.count = 0
        """How many nodes have run."""

    def graph(self, graph: Graph, given: Sequence[int]) -> Iterator[None]:
        """Run a graph of one device; yields while it waits. Returns the results."""
        values = {feed.out(): value for feed, value in zip(graph.feeds, given, strict=True)}
        for node in graph.topological():
            if node not in graph.feeds:
                yield from self.node(graph, node, values)
        return [values[fetch] for fetch in graph.fetches]  # pyright: ignore[reportReturnType] the generator's result

    def node(self, graph: Graph, node: Node, values: dict[Output, int]) -> Iterator[None]:
        inputs = [values[tensor] for tensor in node.inputs]
        if node.op == custom_ops.SEND:
            self.channels[node.attrs["channel"]].append(inputs[0])
        elif node.op == custom_ops.RECEIVE:
            channel = self.channels[node.attrs["channel"]]
            while not channel:
                yield
            values[node.out()] = channel.popleft()
        elif node.op == "While":
            found = yield from self.loop(graph.bodies[node], inputs)
            values.update({node.out(i): value for i, value in enumerate(found)})
        elif node.op == "If":
            found = yield from self.graph(graph.bodies[node][0 if inputs[0] else 1], inputs[1:])
            values.update({node.out(i): value for i, value in enumerate(found)})  # pyright: ignore[reportArgumentType] as above
        elif node.outputs:
            values[node.out()] = self.result(node, inputs)
        self.count += 1

    def loop(self, bodies: Sequence[Graph], values: Sequence[int]) -> Iterator[None]:
        while (yield from self.graph(bodies[0], values))[0]:  # pyright: ignore[reportOptionalSubscript] as above
            values = yield from self.graph(bodies[1], values)  # pyright: ignore[reportAssignmentType] as above
        return values  # pyright: ignore[reportReturnType] as above

    def result(self, node: Node, inputs: Sequence[int]) -> int:
        if node.op == "Const":
            return node.attrs["value"]  # pyright: ignore[reportReturnType] written by Drawing.number
        if node.op in (custom_ops.TO_HOST, custom_ops.TO_DEVICE, "Identity"):
            return inputs[0]
        if node.op == custom_ops.SIGNAL:
            return 0
        simple = {"AddV2": sum, "Less": lambda two: two[0] < two[1], "LogicalAnd": all}
        if node.op in simple:
            return simple[node.op](inputs)
        value = zlib.crc32(repr((node.op, inputs)).encode())
        self.kernels[node.op, value] += 1
        return value % 3 > 0 if node.op == "Greater" else value

    def whole(self, graph: Graph) -> list[int]:
        """The results of a graph in which nothing waits."""
        run = self.graph(graph, range(len(graph.feeds)))
        while True:
            try:
                next(run)
            except StopIteration as ended:
                return ended.value

    def devices(self, graph: Graph, draw: random.Random) -> list[int]:
        """The results of a graph on several devices, each node as soon as it may run; fails where all wait."""
        values = {feed.out(): number for number, feed in enumerate(graph.feeds)}
        done = set(graph.feeds)
        later = [node for node in graph if node not in done]
        running: dict[Node, Iterator[None]] = {}
        waiting: set[Node] = set()
        while running or later:
            ready = [n for n in later if done.issuperset((*(tensor.node for tensor in n.inputs), *n.controls))]
            running |= {node: self.node(graph, node, values) for node in ready}
            later = [node for node in later if node not in running]
            assert waiting != running.keys(), f"{[node.name for node in waiting]} wait for each other"
            node = draw.choice([node for node in running if node not in waiting])
            before = self.count
            try:
                next(running[node])
            except StopIteration:
                del running[node]
                done.add(node)
            waiting = {*waiting, node} if self.count == before else set()
        return [values[fetch] for fetch in graph.fetches]


def in_random_orders(graph: Graph, draw: random.Random) -> Graph:
    """A device's part, and the bodies in it, in random orders, as plans fix them."""
    made = graph.copy()
    for part in (made, *made.all_bodies()):
        part.arrange({node: draw.random() for node in part})
        kernels = [node for node in part.topological() if node.op not in ("Placeholder", "Const")]
        for before, node in pairwise(kernels):
            part.add_control(node, before)
    return made


def cut_and_joined(graph: Graph, draw: random.Random) -> tuple[Parts, Graph]:
    parts = cut(graph, DEVICES, GPU)
    return parts, join(parts, {name: in_random_orders(part, draw) for name, part in parts.graphs.items()}).graph


def effects(runs: Runs) -> dict[tuple[str, int], int]:
    return {key: count for key, count in runs.kernels.items() if key[0] == EFFECT}


@pytest.mark.parametrize("seed", range(150))
def test_the_parts_end_and_compute_what_the_whole_computes(seed):
    graph = Drawing(seed).step()
    whole = Runs()
    expected = whole.whole(graph)
    draw = random.Random(seed)
    for _ in range(3):
        _, joined = cut_and_joined(graph, draw)
        for body in joined.all_bodies():
            assert len({node.device for node in body if node.device}) <= 1
        parts = Runs()
        assert parts.devices(joined, draw) == expected
        assert parts.kernels <= whole.kernels
        assert effects(parts) == effects(whole)
        assert not any(parts.channels.values())
