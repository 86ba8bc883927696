"""A step that is cut by device: its parts, and the graph that they are joined to, whatever order each part gets."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tfswap.errors import UnsupportedGraph
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_parts import Parts, cut

GPU = DeviceModel("gpu")
FLOATS = TensorType("float32", (256,))
DEVICES = ("GPU:0", "GPU:1", "GPU:2", "CPU:0")
PLANNED = DEVICES[:3]


def kernel(graph: Graph, name: str, device: str, inputs=(), controls=(), op: str = "AddN") -> Node:
    attrs = {"T": Dtype("float32"), "N": len(inputs)}
    outputs = (FLOATS,)
    return graph.add(op, name, inputs, controls=controls, attrs=attrs, outputs=outputs, device=f"/device:{device}")


def drawn(seed: int) -> Graph:
    """A graph of kernels on several devices that read and wait for earlier ones on any device."""
    draw = random.Random(seed)
    graph = Graph()
    graph.feeds = [graph.add("Placeholder", f"feed_{i}", outputs=(FLOATS,)) for i in range(2)]
    nodes = [*graph.feeds, graph.add("Const", "constant", outputs=(FLOATS,))]
    for i in range(draw.randrange(4, 30)):
        inputs = [draw.choice(nodes).out() for _ in range(draw.randrange(1, 3))]
        kernels = [node for node in nodes if node.op == "AddN"]
        controls = draw.sample(kernels, min(len(kernels), draw.choice((0, 0, 1, 2))))
        nodes.append(kernel(graph, f"kernel_{i}", draw.choice(DEVICES), inputs, controls))
    graph.fetches = [node.out() for node in draw.sample(nodes, 2)]
    joins = graph.add("NoOp", "joins", controls=[node for node in nodes[-3:] if node.op == "AddN"])
    graph.targets = [joins]
    graph.prune()
    return graph


def ordered(parts: Parts, draw: random.Random) -> dict[str, Graph]:
    """A random order of each planned part, as a plan fixes it."""
    made = {name: part.copy() for name, part in parts.graphs.items()}
    for name in PLANNED:
        if name not in made:
            continue
        part = made[name]
        ranks = {node: draw.random() for node in part}
        part.arrange(ranks)
        kernels = [node for node in part.topological() if node.op not in ("Placeholder", "Const")]
        for before, node in pairwise(kernels):
            part.add_control(node, before)
    return made


@pytest.mark.parametrize("seed", range(60))
def test_the_joined_graph_has_no_cycle_and_every_dependency_whatever_the_orders(seed):
    graph = drawn(seed)
    parts = cut(graph, PLANNED, GPU)
    made = ordered(parts, random.Random(seed))
    joined = parts.join(made)
    joined.topological()  # raises where there is a cycle
    assert [feed.name for feed in joined.feeds] == [feed.name for feed in graph.feeds]
    assert len(joined.fetches) == len(graph.fetches)
    assert not any(node.op in (custom_ops.SEND, custom_ops.RECEIVE) for node in joined)
    for node in (each for each in graph if each.op == "AddN"):
        there = joined[node.name]
        assert there.device == node.device
        needed = {each.name for each in Graph.needed([there])}
        before = (*(tensor.node for tensor in node.inputs), *node.controls)
        assert {each.name for each in before if each.op == "AddN"} <= needed


@pytest.mark.parametrize("seed", range(60))
def test_no_kernel_of_a_planned_part_reads_another_devices_arena(seed):
    graph = drawn(seed)
    parts = cut(graph, PLANNED, GPU)
    joined = parts.join(ordered(parts, random.Random(seed)))
    feeds = set(joined.feeds)
    for node in joined:
        for source in (tensor.node for tensor in node.inputs if tensor.node not in feeds):
            if source.device != node.device:
                assert node.op in (custom_ops.TO_DEVICE, "Identity") or "CPU" in node.device
                assert source.op in (custom_ops.TO_HOST, custom_ops.SIGNAL) or "CPU" in source.device


def test_copies_keep_the_place_that_their_part_gives_them():
    """The copy from the host runs after what comes before it in its part's order, though it reads another device's."""
    graph = Graph()
    first = kernel(graph, "first", "GPU:0")
    early = kernel(graph, "early", "GPU:1", op="Early")
    graph.fetches = [kernel(graph, "last", "GPU:1", [first.out(), early.out()]).out()]
    parts = cut(graph, PLANNED, GPU)
    part = parts.graphs["GPU:1"]
    receive = next(node for node in part if node.op == custom_ops.RECEIVE)
    part.add_control(receive, part["early"])
    joined = parts.join(parts.graphs)
    copy = next(node for node in joined if node.op == custom_ops.TO_DEVICE)
    assert joined["early"] in copy.controls


def test_a_list_that_goes_to_another_device_is_refused():
    graph = Graph()
    outputs = (TensorType("variant", ()),)
    made = graph.add("EmptyTensorList", "list", outputs=outputs, device="/device:GPU:0")
    read = graph.add("TensorListLength", "n", (made.out(),), outputs=(TensorType("int32", ()),), device="/device:GPU:1")
    graph.fetches = [read.out()]
    with pytest.raises(UnsupportedGraph, match="'list' .* on GPU:0, which is read on GPU:1"):
        cut(graph, PLANNED, GPU)
