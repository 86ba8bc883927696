"""The predicted time of a step on several devices: copies between them, and what one waits for another."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_device_parts import FLOATS, GPU, PLANNED, drawn, kernel, ordered

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.types import TensorType
from tfswap.kernels.hardware import Rates
from tfswap.kernels.target import Target
from tfswap.passes.device_parts import Parts, cut
from tfswap.plan.schedule import build_schedule
from tfswap.planner.planner import Planner
from tfswap.simulator.device_timing import PartLanes, TimedPart, simulate_devices

FAST = 1e30
RATES = Rates(FAST, FAST, FAST, out_bytes_per_s=256.0, in_bytes_per_s=512.0, launch_s=1.0, copy_latency_s=0.5)
"""A kernel takes a second. The tensors of 1,024 bytes take 4.5 seconds to the host, and 2.5 from there."""
COSTS = Costs(RATES)
OUT_S, IN_S = 4.5, 2.5


def lanes_of(graph: Graph) -> PartLanes:
    flow = analyse_dataflow(graph, GPU)
    order = [i for i, is_kernel in enumerate(flow.is_kernel) if is_kernel]
    return PartLanes(flow, build_schedule(order, ()), COSTS.of_step(flow), RATES)


def timed(parts: Parts, made: dict[str, Graph] | None = None) -> dict[str, TimedPart]:
    planned = {name: part for name, part in (made or parts.graphs).items() if name in PLANNED}
    others = {name: part for name, part in parts.graphs.items() if name not in PLANNED}
    return simulate_devices({name: lanes_of(part) for name, part in planned.items()}, parts.sources, others)


def seconds(found: dict[str, TimedPart]) -> dict[str, float]:
    return {device: part.timing.total_s for device, part in found.items()}


def there_and_back() -> Graph:
    graph = Graph()
    feed = graph.add("Placeholder", "feed", outputs=(FLOATS,), device="/device:GPU:0")
    graph.feeds = [feed]
    first = kernel(graph, "first", "GPU:0", [feed.out()], op="Sin")
    there = kernel(graph, "there", "GPU:1", [first.out()], op="Sin")
    graph.fetches = [kernel(graph, "back", "GPU:0", [there.out()], op="Sin").out()]
    return graph


def test_a_tensor_that_crosses_is_copied_out_and_then_in():
    found = timed(cut(there_and_back(), PLANNED, GPU))
    arrived = 1.0 + OUT_S
    back = arrived + IN_S + 1.0 + OUT_S
    assert list(found["GPU:1"].arrivals.values()) == [arrived]
    assert list(found["GPU:0"].arrivals.values()) == [back]
    assert seconds(found) == {"GPU:0": back + IN_S + 1.0, "GPU:1": back}


def test_a_device_that_does_something_else_does_not_wait():
    graph = there_and_back()
    busy = [kernel(graph, f"busy_{i}", "GPU:1") for i in range(20)]
    graph.fetches += [node.out() for node in busy]
    graph.arrange({node: (node.name not in graph.feeds, node not in busy) for node in graph})
    found = timed(cut(graph, PLANNED, GPU))
    assert seconds(found)["GPU:1"] == 20.0 + IN_S + 1.0 + OUT_S


def test_an_effect_is_awaited_by_the_host_which_runs_ahead_of_kernels():
    """The device has still to run the kernel whose effect is awaited; its own order keeps that before what follows."""
    graph = Graph()
    nodes = [kernel(graph, f"long_{i}", "GPU:0") for i in range(5)]
    after = kernel(graph, "after", "GPU:1", controls=nodes[-1:])
    graph.fetches = [each.out() for each in (*nodes, after)]
    assert seconds(timed(cut(graph, PLANNED, GPU))) == {"GPU:0": 5.0, "GPU:1": 1.0}


def test_what_starts_the_copy_of_a_variable_from_its_home_is_awaited_by_other_devices():
    graph = Graph()
    variable = graph.add("Placeholder", "variable", outputs=(TensorType("resource", ()),), device="/device:GPU:0")
    graph.feeds = [variable]
    loaded = kernel(graph, "loaded", "GPU:0", [variable.out()], op=custom_ops.READ_HOME)
    after = kernel(graph, "after", "GPU:1", controls=[loaded])
    graph.fetches = [loaded.out(), after.out()]
    assert seconds(timed(cut(graph, PLANNED, GPU)))["GPU:1"] == 1.0


def test_what_the_host_sends_is_there_when_it_has_what_it_needs():
    graph = there_and_back()
    graph["there"].device = "/device:CPU:0"
    found = timed(cut(graph, PLANNED, GPU))
    assert seconds(found) == {"GPU:0": 1.0 + OUT_S + IN_S + 1.0}


@pytest.mark.parametrize("seed", range(40))
def test_devices_never_wait_for_each_other_whatever_the_orders(seed):
    parts = cut(drawn(seed), PLANNED, GPU)
    found = timed(parts, ordered(parts, random.Random(seed)))
    for device, part in found.items():
        assert part.timing.total_s >= max(part.arrivals.values(), default=0.0) - IN_S, device


def test_a_plan_knows_when_a_tensor_of_another_device_can_come():
    parts = cut(there_and_back(), PLANNED, GPU)
    part = parts.graphs["GPU:1"]
    (receive,) = (node for node in part if node.op == custom_ops.RECEIVE)
    costs = Costs(RATES, arrivals={receive.name: 100.0})
    planner = Planner(analyse_dataflow(part, GPU), Target(GPU), costs=costs)
    (problem, *_) = planner.problems
    names = [planner.flow.nodes[i].op for i in problem.order]
    starts = dict(zip(names, problem.starts_s, strict=False))
    assert starts[custom_ops.RECEIVE] == 0.0 and starts[custom_ops.TO_DEVICE] == 100.0
    assert planner.unmoved[0].draft.timing.total_s == 100.0 + IN_S + 1.0 + OUT_S
    assert np.all(np.diff(problem.starts_s) >= 0)
