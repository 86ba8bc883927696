"""Convolutions' workspaces: what a plan leaves to each, which algorithm that buys, and who is configured."""

from __future__ import annotations

import json
import math

import pytest
from layered_steps import Layer, training_step
from processes import on_arena

from tfswap.analysis.cost import Costs
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.offline import offline_optimizer
from tfswap.compiler.options import Options
from tfswap.frontends.simulate import sweep
from tfswap.ir.graph import Graph, Node
from tfswap.ir.text import parse_graph
from tfswap.kernels.cudnn_algorithms import Algorithm, algorithms
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Rates, described
from tfswap.plan.schedule import build_schedule, planned_schedule
from tfswap.planner.convolution_room import fastest, rooms
from tfswap.planner.promise import simulated_limit
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.working_set import find_reuse, largest_working_set, working_set_bytes

MIB = 2**20
CPU = DeviceModel()
RATES = Rates(1e12, 1e12, 1e11, 1e9, 1e9, 0.0)


# --- the algorithms ----------------------------------------------------------------------------------------------


def convolution(op: str = "Conv2D", n=8, size=16, c=64, k=128, window=3, stride=1, dtype="float32", extra="") -> Node:
    """A convolution with padding SAME, or a gradient of one."""
    out = -(-size // stride)
    image, kernel = f"{dtype}[{n},{size},{size},{c}]", f"{dtype}[{window},{window},{c},{k}]"
    result = f"{dtype}[{n},{out},{out},{k}]"
    given = f"%x = Placeholder() -> {image}\n%w = Placeholder() -> {kernel}\n%g = Placeholder() -> {result}\n"
    given += "%s = Placeholder() -> int32[4]\n"
    inputs, made = {
        "Conv2D": ("%x, %w", result),
        "Conv2DBackpropInput": ("%s, %w, %g", image),
        "Conv2DBackpropFilter": ("%x, %s, %g", kernel),
    }[op]
    attrs = f"{{data_format=b'NHWC', strides=(1, {stride}, {stride}, 1){extra}}}"
    return list(parse_graph(f"{given}%c = {op}({inputs}) {attrs} -> {made}"))[-1]


def by_name(node: Node) -> dict[str, Algorithm]:
    return {found.name: found for found in algorithms(node)}


def test_workspaces_are_those_of_the_published_formulas():
    found = by_name(convolution(n=64, size=16, c=512, k=512))
    assert found["WINOGRAD"].workspace_bytes == 16 * MIB  # Lavin and Gray's, of 512 x 512 channels
    product, tiles = found["IMPLICIT_GEMM"], 64 * 4 * 4
    assert (product.workspace_bytes, product.operations) == (0, 2 * 64 * 16 * 16 * 512 * 512 * 9)
    assert product.operations / found["WINOGRAD"].operations == 2.25  # F(2x2, 3x3)
    assert product.operations / found["WINOGRAD_NONFUSED"].operations == 4.0  # F(4x4, 3x3)
    assert found["WINOGRAD_NONFUSED"].workspace_bytes == 4 * 36 * (512 * 512 + tiles * 1024)
    # 16 + 2 pixels are padded to 32, of whose columns 17 are kept: 8 bytes for each of N C + N K + C K maps.
    assert found["FFT"].workspace_bytes == 8 * 32 * 17 * (64 * 512 * 2 + 512 * 512)
    # A tile of 32 has 30 results each way, so one is enough for each image.
    assert found["FFT_TILING"] == found["FFT"]._replace(name="FFT_TILING")


@pytest.mark.parametrize("op", ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"])
def test_a_gradient_takes_what_the_convolution_takes(op: str):
    found, forward = by_name(convolution(op)), by_name(convolution())
    if op == "Conv2DBackpropFilter":
        forward.pop("WINOGRAD")  # cuDNN has none that is fused
    assert found == forward


@pytest.mark.parametrize(
    "node",
    [
        convolution(window=1),
        convolution(stride=2),
        convolution(dtype="float16"),
        convolution(extra=", dilations=(1, 2, 2, 1)"),
    ],
)
def test_what_the_others_do_not_serve_is_a_product(node: Node):
    assert [found.name for found in algorithms(node)] == ["IMPLICIT_GEMM"]


@pytest.mark.parametrize("op", ["Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"])
def test_a_convolution_of_no_images_runs_no_algorithm(op: str):
    assert algorithms(convolution(op, n=0)) == []


def test_more_room_buys_a_faster_algorithm_and_never_a_slower_one():
    found = algorithms(convolution(window=5))
    assert {"FFT", "FFT_TILING", "WINOGRAD_NONFUSED"} < set(by_name(convolution(window=5)))
    ways = [(a, 100 + a.workspace_bytes) for a in found]
    times = [fastest(ways, most, RATES)[0].seconds(RATES) for most in sorted({in_use for _, in_use in ways})]
    assert times[0] > times[-1] == min(a.seconds(RATES) for a in found)
    assert times == sorted(times, reverse=True)
    for way in ways[1:]:  # to the byte
        assert fastest([ways[0], way], way[1] - 1, RATES)[0].name == "IMPLICIT_GEMM"
    assert algorithms(list(parse_graph("%x = Placeholder() -> float32[4]\n%y = Relu(%x) -> float32[4]"))[-1]) == []


# --- the room at each place --------------------------------------------------------------------------------------


LAYERS = 3


def convolutions(rows: int = 8, size: int = 16, channels: int = 16) -> Graph:
    """A training step of convolutions and Relus, with weights as arguments."""
    maps, window = f"float32[{rows},{size},{size},{channels}]", f"float32[3,3,{channels},{channels}]"
    attrs = "{T=float32, data_format=b'NHWC', padding=b'SAME', strides=(1, 1, 1, 1)}"
    text = [f"%h0 = Placeholder() -> {maps}", "%s = Placeholder() -> int32[4]"]
    text += [f"%w{n} = Placeholder() -> {window}" for n in range(1, LAYERS + 1)]
    for n in range(1, LAYERS + 1):
        text.append(f"%c{n} = Conv2D(%h{n - 1}, %w{n}) {attrs} -> {maps}")
        text.append(f"%h{n} = Relu(%c{n}) {{T=float32}} -> {maps}")
    last = f"%h{LAYERS}"
    text.append(f"%loss = L2Loss({last}) {{T=float32}} -> float32[]")
    for n in range(LAYERS, 0, -1):
        text.append(f"%r{n} = ReluGrad({last}, %h{n}) {{T=float32}} -> {maps}")
        text.append(f"%d{n} = Conv2DBackpropFilter(%h{n - 1}, %s, %r{n}) {attrs} -> {window}")
        if n > 1:
            text.append(f"%g{n} = Conv2DBackpropInput(%s, %w{n}, %r{n}) {attrs} -> {maps}")
        last = f"%g{n}"
    graph = parse_graph("\n".join(text))
    graph.feeds = [node for node in graph if node.op == "Placeholder"]
    graph.fetches = [node.out() for node in graph if node.name == "loss" or node.op == "Conv2DBackpropFilter"]
    return graph


RUNS = 3 * LAYERS - 1  # of convolutions: the gradient of the images is not needed


def test_each_convolution_is_listed_with_what_is_free_at_its_place():
    optimizer = Optimizer(convolutions(), CPU, Options(("swap",)))
    floor = optimizer.floor_bytes()
    plan = optimizer.plan(floor + (optimizer.baseline.peak_bytes - floor) // 2)
    variant = optimizer.variant_of(plan)
    flow, steps = variant.flow, planned_schedule(variant.flow, plan)
    limit = simulated_limit(plan.limit_bytes or 0)
    found = rooms(flow, steps, NOTHING_KNOWN, limit)
    assert len(found) == sum(node.op.startswith("Conv2D") for node in flow.nodes) == RUNS
    # What the simulation says is free; or less, where a chunk that would be given whole is larger than that.
    during = simulate_memory(flow, steps).during_bytes
    at = [n for n, step in enumerate(steps) if step.subject in {room.kernel for room in found} and step.kind == "run"]
    free = [(limit - during[n]) // 256 * 256 for n in at]
    assert all(room.free_bytes <= nbytes for room, nbytes in zip(found, free, strict=True))
    assert [room.free_bytes for room in found][: LAYERS + 1] == free[: LAYERS + 1]
    report = optimizer.report(plan)
    assert report.workspace_bytes == min(room.free_bytes for room in found)
    assert sorted(row.free_bytes for row in report.convolutions) == sorted(room.free_bytes for room in found)
    assert report.convolutions[0].name in str(report)
    content = json.loads(report.to_json())
    assert content["workspace_bytes"] == report.workspace_bytes
    assert content["convolutions"][0]["free_bytes"] == report.workspace_bytes
    assert optimizer.report(optimizer.plan(None)).convolutions == ()  # no limit


@pytest.mark.parametrize("name", ["k40c", "v100-pcie"])
def test_a_larger_limit_buys_faster_algorithms_on_a_described_machine(name: str):
    machine = described(name)
    optimizer = offline_optimizer(convolutions(64), machine.device, Options(("swap",)), (), Costs(machine.rates))
    curve = sweep(optimizer, "step", machine, 6)
    ratios = [point.time_ratio for point in curve.points]
    assert ratios == sorted(ratios, reverse=True)
    assert all(point.peak_bytes <= point.limit_bytes for point in curve.points)
    tight, loose = dict(curve.points[0].algorithms), dict(curve.points[-1].algorithms)
    assert sum(tight.values()) == sum(loose.values()) == RUNS
    assert tight.get("IMPLICIT_GEMM", 0) > loose.get("IMPLICIT_GEMM", 0)
    assert curve.points[-1].workspace_bytes > 0
    assert "workspace" in str(curve) and "<th>workspace</th>" in curve._repr_html_()
    assert json.loads(curve.to_json())["points"][0]["workspace_bytes"] == curve.points[0].workspace_bytes


def test_a_point_of_the_curve_is_what_would_be_planned_whatever_other_limits_are_tried():
    machine = described("k40c")
    made = [
        sweep(offline_optimizer(convolutions(64), machine.device, Options(), (), Costs(machine.rates)), "", machine, n)
        for n in (2, 3, 9)
    ]
    few, some, many = ({point.limit_bytes: point for point in curve.points} for curve in made)
    assert len(few.keys() & many.keys()) == 2 and len(some.keys() & many.keys()) == 3
    assert all(many[limit] == point for limit, point in [*few.items(), *some.items()])
    optimizer = offline_optimizer(convolutions(64), machine.device, Options(), (), Costs(machine.rates))
    plans = {limit: optimizer.plan(limit) for limit in some}
    assert all(plan.seconds == some[limit].step_s for limit, plan in plans.items())


def test_a_plan_leaves_room_for_the_workspaces_that_pay():
    machine = described("k40c")
    optimizer = offline_optimizer(convolutions(64), machine.device, Options(), (), Costs(machine.rates))
    planner = optimizer.planner
    faster = 0
    for limit in (point.limit_bytes for point in sweep(optimizer, "", machine, 12).points):
        found = planner.candidate(limit)
        rungs = [
            judged for ladder in planner.ladders for n in range(len(ladder.targets)) if (judged := ladder.judged(n))
        ]
        fitting = [f for judged in [*planner.unmoved, *rungs] if (f := judged.fitting(limit)) is not None]
        assert found is not None and found.timing.total_s == min(f.timing.total_s for f in fitting)
        without = min(fitting, key=lambda f: planner.timing(f.choice).total_s)
        faster += found.timing.total_s < without.timing.total_s
    assert faster  # than the plan that would be the fastest if workspaces took no memory


# --- reuse within and between layers -----------------------------------------------------------------------------


def dense(rows: int = 512):
    return training_step([Layer("dense"), Layer("relu")] * 4, rows=rows, width=64)


def test_forwarded_buffers_are_listed_by_themselves():
    optimizer = Optimizer(training_step([Layer("dense"), Layer("relu"), Layer("scale")] * 3, 512, 64), CPU, Options(()))
    flow = optimizer.flow
    steps = build_schedule(optimizer.planner.problems[0].order, ())
    found = find_reuse(flow, steps)
    made = 512 * 64 * 4
    assert found.between_layers_bytes == 0  # nothing is away
    assert found.within_layers_bytes == made  # at the peak a gradient writes over another
    assert found.forwarded_bytes >= 4 * made and found.forwarded_bytes % made == 0


def test_what_evicted_tensors_save_is_listed_by_itself():
    optimizer = Optimizer(dense(), CPU, Options(("swap",)))
    low = optimizer.report(optimizer.plan(optimizer.floor_bytes()))
    none = optimizer.report(optimizer.plan(None))
    assert low.swapped and low.reuse.between_layers_bytes > 0
    assert none.reuse.between_layers_bytes == 0
    assert json.loads(low.to_json())["reuse"]["between_layers_bytes"] == low.reuse.between_layers_bytes
    assert "by eviction" in str(low)


def test_at_the_floor_one_kernels_working_set_is_alive_at_a_time():
    optimizer = Optimizer(dense(), CPU, Options(("swap",)))
    report = optimizer.report(optimizer.plan(optimizer.floor_bytes()))
    flow = optimizer.flow
    kernel, nbytes = largest_working_set(flow)
    assert (report.largest_kernel, report.working_set_bytes) == (flow.nodes[kernel].name, nbytes)
    assert all(working_set_bytes(flow, i) <= nbytes for i, is_kernel in enumerate(flow.is_kernel) if is_kernel)
    least = report.persistent_bytes + nbytes
    assert least <= report.floor_bytes <= math.ceil(1.001 * least) + 64 * 1024
    assert report.largest_kernel in str(report)


# --- TensorFlow is configured ------------------------------------------------------------------------------------


def test_cudnn_is_limited_when_the_user_asks_and_before_the_step_runs():
    def program():
        import ctypes
        import os

        import tensorflow as tf
        from models import vgg

        import tfswap

        name = "TF_CUDNN_WORKSPACE_LIMIT_IN_MB"

        def reported():  # as TensorFlow reads it
            getenv = ctypes.CDLL(None).getenv
            getenv.restype = ctypes.c_char_p
            return getenv(name.encode())

        _net, step, arguments = vgg()
        seen = []

        def watched(*arguments):
            loss = step(*arguments)
            tf.py_function(lambda: seen.append(reported()), [], [])
            return loss

        silent = tfswap.optimize(tf.function(step), memory_limit="80%", tactics=())
        silent(*arguments)
        assert reported() is None
        asked = tfswap.optimize(tf.function(watched), memory_limit="80%", tactics=(), limit_workspaces=True)
        asked(*arguments)
        least = asked.report().workspace_bytes
        assert seen and set(seen) == {str(least >> 20).encode()}, (seen, least)

        os.environ[name] = "1"  # a user's own that is smaller stays
        again = tfswap.optimize(tf.function(watched), memory_limit="80%", tactics=(), limit_workspaces=True)
        again(*arguments)
        assert reported() == b"1"
        return least

    found = on_arena(
        program,
        1024,
    )
    assert found > 2 * MIB
