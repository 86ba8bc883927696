"""The order that all devices keep of what they send: a device does not wait while it has other work."""

from __future__ import annotations

import random

import pytest

from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_parts import cut
from tfswap.passes.device_schedule import scheduled

FLOATS = TensorType("float32", (256,))
DEVICES = ("GPU:0", "GPU:1", "GPU:2", "CPU:0")
STAGE = 3
"""The kernels of a stage."""


def kernel(graph: Graph, name: str, device: str, *inputs: Node) -> Node:
    return graph.add(
        "AddN", name, [node.out() for node in inputs], attrs={}, outputs=(FLOATS,), device=f"/device:{device}"
    )


def pipeline(batches: int) -> Graph:
    """Micro-batches, one traced after the other, each forward on GPU:0 and GPU:1, and back."""
    graph = Graph()
    graph.feeds = [graph.add("Placeholder", f"x_{i}", outputs=(FLOATS,)) for i in range(batches)]
    for i, x in enumerate(graph.feeds):
        made = x
        for name, device in (("forward", "GPU:0"), ("there", "GPU:1"), ("backward", "GPU:0")):
            for k in range(STAGE if name != "there" else 2 * STAGE):
                made = kernel(graph, f"{name}_{i}_{k}", device, made)
        graph.fetches.append(made.out())
    return graph


def stages(order: list[Node]) -> list[str]:
    """The stages of GPU:0 in the order in which they begin."""
    return [node.name[:-2] for node in order if node.device == "/device:GPU:0" and node.name.endswith("_0")]


def test_a_stage_begins_the_next_micro_batch_while_the_one_before_is_elsewhere():
    order = scheduled(pipeline(4))
    assert stages(order)[:3] == ["forward_0", "forward_1", "forward_2"]
    begun = {node.name: place for place, node in enumerate(order)}
    assert begun["backward_0_0"] < begun["forward_3_2"], "what was traced first goes first, if it is ready"


def test_devices_send_in_that_order():
    parts = cut(pipeline(4), DEVICES[:2], DeviceModel("gpu"))
    order = [node.name for node in parts.graphs["GPU:0"].topological() if node.op.startswith("Tfswap>")]
    sent = order.index("tfswap/forward_1_2_0/send")
    assert sent < order.index("tfswap/there_0_5_0/receive") < order.index("tfswap/forward_3_2_0/send")


@pytest.mark.parametrize("seed", range(50))
def test_the_order_is_topological(seed):
    draw = random.Random(seed)
    graph = Graph()
    graph.feeds = [graph.add("Placeholder", "x", outputs=(FLOATS,))]
    nodes = [*graph.feeds, graph.add("Const", "constant", outputs=(FLOATS,))]
    for i in range(40):
        made = kernel(graph, f"kernel_{i}", draw.choice(DEVICES), *draw.choices(nodes, k=2))
        made.op = draw.choice(("AddN", "Identity"))
        nodes.append(made)
        if draw.random() < 0.3:
            graph.add_control(made, draw.choice(nodes[:-1]))
    place = {node: i for i, node in enumerate(scheduled(graph))}
    assert place.keys() == set(graph)
    for node in graph:
        assert all(place[source] < place[node] for source in (*(t.node for t in node.inputs), *node.controls))


BRANCH = """\
%h = Placeholder() -> float32[256]
%here = AddN(%h) {N=1} @"/device:GPU:0" -> float32[256]
%there = AddN(%here) {N=1} @"/device:GPU:1" -> float32[256]
feeds %h
fetches %there
"""
ON_BOTH = """\
%p = Placeholder() -> bool[]
%x = Placeholder() -> float32[256]
%made = AddN(%x) {N=1} @"/device:GPU:1" -> float32[256]
%view = Identity(%made) @"/device:GPU:1" -> float32[256]
%chosen = If(%p, %view) {Tin=(float32), Tout=(float32)} @"/device:GPU:1" -> float32[256]
feeds %p, %x
fetches %chosen
"""


def test_a_conditional_on_several_devices_starts_when_each_has_what_it_reads():
    """A view takes no time, so that nothing but the copy to the other device is between it and the conditional."""
    graph = parse_graph(ON_BOTH)
    graph.bodies[graph["chosen"]] = (parse_graph(BRANCH), parse_graph(BRANCH))
    starts = scheduled(graph)
    assert starts[graph["view"]] < starts[graph["chosen"]]
    parts = cut(graph, DEVICES[:2], DeviceModel("gpu"))
    order = [node.name for node in parts.graphs["GPU:0"].topological()]  # it has no cycle
    assert order.index("tfswap/view_0/received") < order.index("chosen")
