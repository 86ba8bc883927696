"""A step that is cut by device: its parts, and the graph that they are joined to, whatever order each part gets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tfswap.errors import UnsupportedGraph
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.passes.device_parts import Parts, cut
from tfswap.passes.join_parts import join

GPU = DeviceModel("gpu")
FLOATS = TensorType("float32", (256,))
DEVICES = ("GPU:0", "GPU:1", "GPU:2", "CPU:0")
PLANNED = DEVICES[:3]


def kernel(graph: Graph, name: str, device: str, inputs=(), controls=(), op: str = "AddN") -> Node:
    attrs = {"T": Dtype("float32"), "N": len(inputs)}
    outputs = (FLOATS,)
    return graph.add(op, name, inputs, controls=controls, attrs=attrs, outputs=outputs, device=f"/device:{device}")


def draw_kernels(
    draw: random.Random, graph: Graph, nodes: list[Node], numbers: range, devices: Sequence[str], waits: Sequence[int]
) -> None:
    """Add kernels that read, and wait for, any of `nodes` and earlier ones; `waits` says for how many."""
    for i in numbers:
        inputs = [draw.choice(nodes).out() for _ in range(draw.randrange(1, 3))]
        kernels = [node for node in nodes if node.op == "AddN"]
        controls = draw.sample(kernels, min(len(kernels), draw.choice(waits)))
        nodes.append(kernel(graph, f"kernel_{i}", draw.choice(devices), inputs, controls))


def drawn(seed: int) -> Graph:
    """A graph of kernels on several devices that read and wait for earlier ones on any device."""
    draw = random.Random(seed)
    graph = Graph()
    graph.feeds = [graph.add("Placeholder", f"feed_{i}", outputs=(FLOATS,)) for i in range(2)]
    nodes = [*graph.feeds, graph.add("Const", "constant", outputs=(FLOATS,))]
    draw_kernels(draw, graph, nodes, range(draw.randrange(4, 30)), DEVICES, waits=(0, 0, 1, 2))
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
    joined = join(parts, made).graph
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
    joined = join(parts, ordered(parts, random.Random(seed))).graph
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
    joined = join(parts, parts.graphs).graph
    copy = next(node for node in joined if node.op == custom_ops.TO_DEVICE)
    assert joined["early"] in copy.controls


def test_a_list_that_goes_to_another_device_is_refused():
    graph = Graph()
    outputs = (TensorType("variant", ()),)
    made = graph.add("EmptyTensorList", "list", outputs=outputs, device="/device:GPU:0")
    filled = kernel(graph, "push", "GPU:0", [made.out(), kernel(graph, "x", "GPU:0").out()], op="TensorListPushBack")
    filled.outputs = outputs
    read = graph.add("TensorListLength", "n", (filled.out(),), outputs=(TensorType("int32", ()),))
    read.device = "/device:GPU:1"
    graph.fetches = [read.out()]
    with pytest.raises(UnsupportedGraph, match="'push' .* on GPU:0, which is read on GPU:1"):
        cut(graph, PLANNED, GPU)


# --- conditionals on several devices ----------------------------------------------------------------------------------


def conditional(graph: Graph, name: str, device: str, given: list[Output], branches: list[Graph]) -> Node:
    chosen = graph.add("Placeholder", f"{name}/chosen", outputs=(TensorType("bool", ()),), device=f"/device:{device}")
    graph.feeds.append(chosen)
    node = graph.add(
        "If",
        name,
        (chosen.out(), *given),
        attrs={"Tin": (Dtype("float32"),) * len(given), "Tout": (Dtype("float32"),) * len(branches[0].fetches)},
        outputs=[FLOATS] * len(branches[0].fetches),
        device=f"/device:{device}",
    )
    graph.bodies[node] = tuple(branches)
    return node


def drawn_branch(draw: random.Random, feeds: int, results: int) -> Graph:
    branch = Graph()
    branch.feeds = [branch.add("Placeholder", f"argument_{i}", outputs=(FLOATS,)) for i in range(feeds)]
    nodes = [*branch.feeds]
    draw_kernels(draw, branch, nodes, range(draw.randrange(1, 9)), PLANNED, waits=(0, 1, 2))
    branch.fetches = [draw.choice(nodes).out() for _ in range(results)]
    branch.targets = [node for node in nodes if node.op == "AddN"][-1:]
    branch.prune()
    return branch


def drawn_with_conditionals(seed: int) -> Graph:
    draw = random.Random(seed)
    graph = Graph()
    graph.feeds = [graph.add("Placeholder", f"feed_{i}", outputs=(FLOATS,)) for i in range(2)]
    tensors = [feed.out() for feed in graph.feeds]
    for i in range(draw.randrange(3, 14)):
        inputs = [draw.choice(tensors) for _ in range(draw.randrange(1, 4))]
        if draw.random() < 0.4:
            results = draw.randrange(0, 3)
            branches = [drawn_branch(draw, len(inputs), results) for _ in range(2)]
            made = conditional(graph, f"cond_{i}", draw.choice(PLANNED), inputs, branches)
            graph.targets.append(made)
        else:
            made = kernel(graph, f"kernel_{i}", draw.choice(PLANNED), inputs)
        tensors += [made.out(j) for j in range(len(made.outputs))]
    graph.fetches = draw.sample(tensors, 2)
    return graph


def run(made: dict[str, Graph], joined: Graph, taken: int) -> None:
    """Run the parts, each device one node after the other in its order, until all have ended; fails in a deadlock."""

    def steps(graph: Graph, device: str) -> list[Node]:
        found: list[Node] = []
        for node in graph.topological():
            if device in node.device and node not in graph.feeds:
                inside = steps(graph.bodies[node][taken], device) if node in graph.bodies else []
                found += [*inside, node]
        return found

    waiting = {device: steps(joined, device) for device in made}
    done: set[Node] = set()
    sent: set[object] = set()
    feeds = {*joined.feeds, *(feed for body in joined.all_bodies() for feed in body.feeds)}
    while any(waiting.values()):
        before = len(done)
        for nodes in waiting.values():
            while nodes and _is_ready(nodes[0], done | feeds, sent):
                node = nodes.pop(0)
                done.add(node)
                sent |= {node.attrs["channel"]} if node.op == custom_ops.SEND else set()
        assert len(done) > before, {device: nodes[0] for device, nodes in waiting.items() if nodes}


def _is_ready(node: Node, done: set[Node], sent: set[object]) -> bool:
    if node.op == custom_ops.RECEIVE and node.attrs["channel"] not in sent:
        return False
    return all(source in done for source in (*(tensor.node for tensor in node.inputs), *node.controls))


@pytest.mark.parametrize("seed", range(60))
def test_conditionals_on_several_devices_end_whatever_the_orders(seed):
    graph = drawn_with_conditionals(seed)
    parts = cut(graph, PLANNED, GPU)
    made = ordered(parts, random.Random(seed))
    joined = join(parts, made).graph
    for body in joined.all_bodies():
        assert len({node.device for node in body if node.device and node not in body.feeds}) <= 1
    for taken in range(2):
        run(made, joined, taken)


@pytest.mark.parametrize("seed", range(60))
def test_each_channel_of_a_branch_has_two_ends_on_two_devices(seed):
    graph = drawn_with_conditionals(seed)
    parts = cut(graph, PLANNED, GPU)
    joined = join(parts, parts.graphs).graph
    ends: dict[object, list[tuple[str, str]]] = {}
    for node in (each for body in joined.all_bodies() for each in body):
        if node.op in (custom_ops.SEND, custom_ops.RECEIVE):
            ends.setdefault(node.attrs["channel"], []).append((node.op, node.device))
    for both in ends.values():
        assert sorted(op for op, _ in both) == [custom_ops.RECEIVE, custom_ops.SEND]
        assert len({device for _, device in both}) == 2


def test_a_conditional_gives_each_device_what_it_reads_and_computes():
    graph = Graph()
    first, second = kernel(graph, "first", "GPU:0"), kernel(graph, "second", "GPU:1", op="Second")
    branches = []
    for _ in range(2):
        branch = Graph()
        branch.feeds = [branch.add("Placeholder", f"argument_{i}", outputs=(FLOATS,)) for i in range(2)]
        here = kernel(branch, "here", "GPU:0", [branch.feeds[0].out()])
        there = kernel(branch, "there", "GPU:1", [branch.feeds[1].out(), here.out()])
        branch.fetches = [there.out(), here.out()]
        branches.append(branch)
    node = conditional(graph, "cond", "GPU:0", [first.out(), second.out()], branches)
    graph.fetches = [node.out(0), node.out(1)]
    parts = cut(graph, PLANNED, GPU)
    here, there = (parts.graphs[device]["cond"] for device in ("GPU:0", "GPU:1"))
    assert [tensor.node.name for tensor in here.inputs] == ["cond/chosen", "first"] and len(here.outputs) == 1
    assert there.inputs[1].node.name == "second" and len(there.outputs) == 1
    assert [where for where, _ in parts.fetched] == ["GPU:1", "GPU:0"]
    joined = join(parts, parts.graphs).graph
    assert [fetch.node.device for fetch in joined.fetches] == ["/device:GPU:1", "/device:GPU:0"]


def test_an_argument_that_a_branch_reads_is_where_the_branch_runs():
    """Nodes of a body that runs on one device name none."""
    graph, branches = Graph(), []
    argument = graph.add("Placeholder", "argument", outputs=(FLOATS,))
    for _ in range(2):
        branch = Graph()
        branch.feeds = [branch.add("Placeholder", "given", outputs=(FLOATS,))]
        read = branch.add("AddN", "read", [branch.feeds[0].out()], outputs=(FLOATS,))
        branch.fetches = [read.out()]
        branches.append(branch)
    node = conditional(graph, "cond", "GPU:0", [argument.out()], branches)
    count = kernel(graph, "count", "CPU:0", op="Count")
    graph.feeds, graph.fetches = [argument], [node.out(0), count.out()]
    parts = cut(graph, PLANNED, GPU)
    assert {where: [feed.name for feed in part.feeds] for where, part in parts.graphs.items()} == {
        "GPU:0": ["argument"],
        "CPU:0": [],
    }
    assert not parts.sources


def read_first(device: str) -> Parts:
    """A step whose argument is read by a node that nothing reads on `device`, then on GPU:0."""
    graph = Graph()
    argument = graph.add("Placeholder", "argument", outputs=(FLOATS,))
    printed = kernel(graph, "printed", device, [argument.out()], op="Print")
    read = kernel(graph, "read", "GPU:0", [argument.out()], controls=[printed])
    graph.feeds, graph.fetches, graph.targets = [argument], [read.out()], [printed]
    return cut(graph, PLANNED, GPU)


def test_an_argument_that_the_cpu_reads_first_is_on_its_gpu():
    parts = read_first("CPU:0").graphs
    assert {where: [node.op for node in part if node.op != custom_ops.SIGNAL] for where, part in parts.items()} == {
        "CPU:0": [custom_ops.RECEIVE, "Print", custom_ops.SEND],
        "GPU:0": ["Placeholder", custom_ops.TO_HOST, custom_ops.SEND, custom_ops.RECEIVE, "AddN"],
    }


def test_nothing_waits_for_an_argument():
    """One that another device reads is sent, and a send is a target of its part."""
    parts = read_first("GPU:1")
    joined = join(parts, parts.graphs).graph
    [feed] = joined.feeds
    assert feed not in joined.targets
    assert not any(feed in node.controls for node in joined)
