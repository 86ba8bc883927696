"""A step on several devices whose gradients are taken outside, cut into a forward and a backward function."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph, Node
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.device_carriers import unit
from tfswap.passes.device_parts import cut
from tfswap.passes.join_parts import Joined, join
from tfswap.passes.tactics import outer_gradients

GPU = DeviceModel("gpu")
FLOATS = TensorType("float32", (256,))
DEVICES = ("GPU:0", "GPU:1", "GPU:2", "CPU:0")
PLANNED = DEVICES[:3]
EFFECT, PURE = "AssignAddVariableOp", "Sin"
RESULTS = 2
BACKWARD = "backward"


def kernels(draw: random.Random, graph: Graph, stem: str, nodes: list[Node], count: int) -> None:
    """Add kernels that read any of `nodes`, and add them to these; some have effects."""
    for i in range(count):
        inputs = [node.out(draw.randrange(len(node.outputs))) for node in draw.choices(nodes, k=draw.randrange(1, 3))]
        device = f"/device:{draw.choice(DEVICES)}"
        acts = draw.random() < 0.2
        waits = draw.sample([n for n in graph if n.op in (EFFECT, PURE)], int(draw.random() < 0.3 and i > 0))
        made = graph.add(
            EFFECT if acts else PURE, f"{stem}_{i}", inputs, controls=waits, outputs=(FLOATS,), device=device
        )
        graph.targets += [made] if acts else []
        nodes.append(made)


def drawn(draw: random.Random) -> Graph:
    graph = Graph()
    graph.feeds = [graph.add("Placeholder", f"feed_{i}", outputs=(FLOATS,)) for i in range(2)]
    nodes = [*graph.feeds]
    kernels(draw, graph, "forward", nodes, draw.randrange(4, 14))
    results = draw.sample([node.out() for node in nodes[2:]], RESULTS)
    outside = graph.add(custom_ops.OUTSIDE, "outside", results, outputs=(FLOATS,) * RESULTS, device="/device:GPU:0")
    nodes += [outside] * 3
    kernels(draw, graph, BACKWARD, nodes, draw.randrange(4, 14))
    last = [node.out() for node in nodes if node.name.startswith(BACKWARD)][-2:]
    graph.fetches = [*results, *last]
    outer_gradients.fix_sides(graph, Target(GPU), RESULTS, lambda node: node.name.startswith(BACKWARD))
    graph.fetches += [outside.out(i) for i in range(RESULTS)]
    graph.prune()
    return graph


def joined(draw: random.Random, graph: Graph) -> Joined:
    parts = cut(graph, PLANNED, GPU)
    made = {name: part.copy() for name, part in parts.graphs.items()}
    orders: dict[str, list[str]] = {}
    for name in set(PLANNED) & made.keys():
        part = made[name]
        part.arrange({node: draw.random() for node in part})
        chain = [node for node in part.topological() if node.op != "Placeholder"]
        for before, node in pairwise(chain):
            part.add_control(node, before)
        orders[name] = [node.name for node in chain]
    return join(parts, made, orders)


@pytest.mark.parametrize("seed", range(100))
def test_each_kernel_is_in_one_function_and_reads_of_the_other_what_its_device_has(seed):
    draw = random.Random(seed)
    graph = drawn(draw)
    whole = joined(draw, graph)
    forward, backward = outer_gradients.cut(whole.graph, RESULTS, whole.kernels, gate=7)
    forward.topological(), backward.topological()  # they raise where there is a cycle
    names = [node.name for half in (forward, backward) for node in half if node.op in (EFFECT, PURE)]
    assert sorted(names) == sorted(node.name for node in graph if node.op in (EFFECT, PURE))
    for node in (each for each in graph if each.op == EFFECT):
        assert node.name in (backward if node.name.startswith(BACKWARD) else forward)
    carried = [node.inputs[0].node for node in forward if node.op == custom_ops.CARRY]
    assert not any(node.op == custom_ops.TO_HOST for node in carried)
    assert [feed.name for feed in backward.feeds if "gradient_" in feed.name] == [
        f"tfswap/gradient_{i}" for i in range(RESULTS)
    ]
    gates = {unit(node.device): node for node in backward if node.op == custom_ops.GATE}
    for node in backward:
        if node.op == custom_ops.DELIVER:
            assert gates[unit(node.device)] in node.controls
