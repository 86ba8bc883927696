"""Profiles that outlive a trace, described machines, the curve, and a step that is profiled."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from layered_steps import Layer, training_step
from processes import on_arena
from test_costs import CPU, MIB, RATES, step_graph
from test_state_homes import Step

from tfswap.analysis.cost import Costs, fitted, kernel_seconds, work_seconds
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.offline import offline_optimizer
from tfswap.compiler.options import Options
from tfswap.device import arena
from tfswap.errors import InvalidModel, TfswapError
from tfswap.frontends import profile as profiles
from tfswap.frontends.profile import COPY_BYTES, LEAST_COPY_BYTES, kernel_runs
from tfswap.frontends.simulate import sweep
from tfswap.ir.graph import Graph, Node
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import NAMES, THIS, default_rates, described
from tfswap.kernels.profile import Density, Profile, Timed, types_of
from tfswap.kernels.target import Target
from tfswap.passes.tactics.state_homes import keep_at_home
from tfswap.report.curve import Curve, Point


def profile_of(graph: Graph, seconds: float, **changes: Any) -> Profile:
    kernels = tuple(Timed(n.name, n.op, types_of(n), seconds) for n in graph if n.inputs)
    fields = {"kind": "cpu", "machine": "a test", "fingerprint": "", "rates": RATES, "unordered": None}
    return Profile(**{**fields, **changes}, kernels=kernels)


def test_a_measured_kernel_is_found_by_name_then_by_likeness():
    graph = step_graph()
    profile = profile_of(graph, 1.5)
    twin = training_step([Layer("dense"), Layer("relu")] * 3, rows=512, width=128)
    assert all(profile.seconds(n) == 1.5 for n in twin if n.inputs)
    renamed = Node("elsewhere/relu", "Relu", graph["relu1"].inputs, (), {}, graph["relu1"].outputs, "")
    assert profile.seconds(renamed) == 1.5
    wider = training_step([Layer("dense"), Layer("relu")] * 3, rows=512, width=64)
    assert profile.seconds(wider["relu1"]) is None
    assert profile.coverage([graph["relu1"], wider["relu1"]]) == 0.5


def test_an_update_of_a_variable_at_home_takes_the_time_of_the_update_in_place():
    step = Step()
    variable = step.variable("v")
    read = step.read("read", variable)
    value = step.compute("value", read, read)
    write = step.write("AssignSubVariableOp", "write", variable, value)
    profile = Profile("cpu", "", "", RATES, None, (Timed("write", write.op, types_of(write), 2.0),))
    keep_at_home(step, Target(CPU), ["v"])
    (result,) = (node for node in step if node.op == "Sub")
    assert (profile.seconds(result), profile.seconds(value)) == (2.0, None)


def test_costs_come_from_the_profile_and_then_from_its_rates():
    graph = step_graph()
    relu, dense = graph["relu1"], graph["dense0"]
    profile = Profile("cpu", "", "", RATES, None, (Timed(relu.name, relu.op, types_of(relu), 2.0),))
    costs = Costs.of(CPU, profile)
    assert (costs.source, Costs.of(CPU).source) == ("profiled", "analytic")
    assert costs.seconds(relu) == 2.0
    assert costs.seconds(dense) == kernel_seconds(dense, RATES)
    with pytest.raises(TfswapError, match="was taken on a cpu"):
        Costs.of(DeviceModel("gpu"), profile)


def test_the_unoptimised_time_is_measured_against_the_same_kernels_in_order():
    graph = step_graph()
    plain = Optimizer(graph, CPU)
    profile = profile_of(graph, 1e-3, fingerprint=plain.fingerprint, unordered=0.8)
    planned = Optimizer(graph, CPU, Options(profile=profile))
    ordered = planned.planner.candidate(None)
    assert ordered is not None
    assert planned.baseline.time_ratio(ordered.timing.total_s) == pytest.approx(1 / 0.8)
    other = profile_of(graph, 1e-3, fingerprint="another", unordered=0.8)
    others = Optimizer(graph, CPU, Options(profile=other))
    assert others.baseline.time_ratio(ordered.timing.total_s) != pytest.approx(1 / 0.8)


def test_rates_are_fitted_to_what_was_measured():
    graph = step_graph()
    rates = default_rates(CPU)
    measured = [(n, 3 * work_seconds(n, rates)) for n in graph if n.op in ("MatMul", "Relu")]
    found = fitted(rates, measured)
    assert found.flops_per_s == pytest.approx(rates.flops_per_s / 3)
    assert (found.steps_per_s, found.out_bytes_per_s) == (rates.steps_per_s, rates.out_bytes_per_s)


def test_profiles_are_saved_and_read(tmp_path: Path):
    graph = step_graph()
    density = Density("relu1:0", types_of(graph["relu1"]), 0.25)
    profile = profile_of(graph, 0.25, unordered=1.0, densities=(density,))
    assert (profile.density(graph["relu1"].out()), profile.density(graph["relu3"].out())) == (0.25, None)
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    for text, says in (
        ("{}", "not a profile"),
        ("[]", "not a profile"),
        ('{"format": 9}', "measure the profile again"),
        (profile.to_json().replace('"cores": ', f'"cores": {10**400}'), "cores is .* whole number of 64 bits"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidModel, match=says):
            Profile.load(path)
    with pytest.raises(InvalidModel, match="no profile can be read"):
        Profile.load(tmp_path / "nowhere")


# --- machines ----------------------------------------------------------------------------------------------------


def test_described_machines_are_ordered_as_their_vendors_say():
    machines = {name: described(name) for name in NAMES if name != THIS}
    assert {"k40c", "titan-x", "p100", "v100-pcie", "v100-nvlink", "a100", "h100", "h200", "rtx-4090"} == set(machines)
    speeds = [machines[n].rates.flops_per_s for n in ("k40c", "p100", "v100-pcie", "a100", "h100")]
    assert speeds == sorted(speeds)
    assert machines["v100-nvlink"].rates.out_bytes_per_s > 4 * machines["v100-pcie"].rates.out_bytes_per_s
    assert machines["p100"].host_bytes == 128 * 10**9
    for machine in machines.values():
        assert machine.device.kind == "gpu"
        assert machine.rates.copy_share == 0
        assert machine.memory_bytes < machine.host_bytes
    with pytest.raises(TfswapError, match="k40c, titan-x"):
        described("abacus")


# --- the curve ---------------------------------------------------------------------------------------------------


def curve(*points: tuple[int, float], memory_bytes: int | None = None) -> Curve:
    made = tuple(Point(limit, limit, ratio, ratio, 0, 0) for limit, ratio in points)
    return Curve("step", "a test", "analytic", points[-1][0], 1.0, points[0][0], memory_bytes, None, made)


def test_the_knee_is_where_less_memory_begins_to_cost_much():
    assert curve((100, 3.0), (200, 1.1), (300, 1.05), (400, 1.0)).knee.limit_bytes == 200
    assert curve((100, 1.004), (200, 1.002), (300, 1.0)).knee.limit_bytes == 100
    # Of what fits.
    assert curve((100, 3.0), (200, 1.1), (300, 1.0), memory_bytes=150).knee.limit_bytes == 100


def test_a_curve_says_what_does_not_fit():
    short = curve((100, 2.0), (200, 1.0), memory_bytes=150)
    assert short.feasible
    assert [short.fits(p) for p in short.points] == [True, False]
    assert "more than the machine has" in str(short)
    none = curve((100, 2.0), (200, 1.0), memory_bytes=50)
    assert not none.feasible
    assert "does not fit" in str(none)
    assert str(none).count("more than the machine has") == 2  # the knee's too
    content = json.loads(none.to_json())
    assert content["feasible"] is False
    assert [p["fits"] for p in content["points"]] == [False, False]


def test_a_curve_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = curve((100 * MIB, 2.0), (150 * MIB, 1.2), (200 * MIB, 1.0), memory_bytes=180 * MIB)
    page = tmp_path / "curve.html"
    drawn.save_html(page)
    text = page.read_text()
    assert text.count("<circle class=point") == 3 + 1  # and in the legend
    assert text.count("<circle class=knee") == text.count("<circle class=plain") == 1 + 1
    for reported in (
        "memory limit</text>",
        "step time, predicted, over unoptimised</text>",
        "the step as it is</text>",
    ):
        assert reported in text
    assert "http" not in text.replace("http-equiv", "")
    pytest.importorskip("matplotlib")
    drawn.save_png(tmp_path / "curve.png")
    for save in (drawn.save_html, drawn.save_png):
        with pytest.raises(TfswapError, match="nowhere/curve' can't be written"):
            save(tmp_path / "nowhere" / "curve")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TfswapError, match="pip install 'tfswap\\[plot\\]'"):
        drawn.save_png(tmp_path / "other.png")


@pytest.mark.parametrize("name", ["k40c", "v100-nvlink"])
def test_a_sweep_goes_from_the_floor_to_the_peak_and_never_gains_time_below(name: str):
    machine = described(name)
    costs = Costs(machine.rates)
    optimizer = offline_optimizer(step_graph(), machine.device, Options(host_limit_bytes=machine.host_bytes), (), costs)
    made = sweep(optimizer, "step", machine, 8)
    limits = [p.limit_bytes for p in made.points]
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (made.floor_bytes, max(made.floor_bytes, made.baseline_peak_bytes))
    assert all(p.peak_bytes <= p.limit_bytes for p in made.points)
    ratios = [p.time_ratio for p in made.points]
    assert ratios == sorted(ratios, reverse=True)


def test_a_faster_link_never_makes_a_step_slower():
    slow, fast = (
        sweep(
            offline_optimizer(
                step_graph(), described(n).device, Options(tactics=("swap",)), (), Costs(described(n).rates)
            ),
            "step",
            described(n),
            6,
        )
        for n in ("v100-pcie", "v100-nvlink")
    )
    assert fast.points[0].time_ratio < slow.points[0].time_ratio


# --- what TensorFlow's profiler says -------------------------------------------------------------------------------


def plane_of(space: Any, name: str, line: str, events: list[tuple[str, int, int]], op: bool) -> None:
    """A plane with one line of events (label, start and duration in ns), named by themselves or by a stat."""
    plane = space.planes.add(name=name)
    made = plane.lines.add(name=line, timestamp_ns=1000)
    plane.stat_metadata[1].name = "tf_op"
    for i, (label, start, duration) in enumerate(events):
        plane.event_metadata[i].name = "a_cuda_kernel" if op else label
        event = made.events.add(metadata_id=i, offset_ps=start * 1000, duration_ps=duration * 1000)
        if op:
            plane.stat_metadata[i + 2].name = label
            event.stats.add(metadata_id=1, ref_value=i + 2)


def test_kernels_are_those_of_the_gpu_where_it_has_any():
    pytest.importorskip("tensorflow")
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    # "a" is also the scope of "a/b", so TensorFlow runs it as "a_1".
    host = [("a_1:MatMul", 0, 10), ("a/b:Relu", 10, 10), ("other:Relu", 20, 10), ("a_1:MatMul", 40, 8)]
    plane_of(space, "/host:CPU", "tf_Compute", host, op=False)
    runs = kernel_runs(space, {"a", "a/b"})
    assert {name: [round(s * 1e9) for _, s in times] for name, times in runs.items()} == {"a": [10, 8], "a/b": [10]}
    device = [("a/b:Relu", 5, 100), ("a/b:Relu", 200, 50)]
    plane_of(space, "/device:GPU:0", "Stream #1(Compute)", device, op=True)
    plane_of(space, "/device:GPU:0", "TensorFlow Ops", [("a/b:Relu", 5, 1000)], op=True)
    runs = kernel_runs(space, {"a", "a/b"})
    assert {name: [round(s * 1e9) for _, s in times] for name, times in runs.items()} == {"a/b": [100, 50]}


# --- a step that runs --------------------------------------------------------------------------------------------


def profiled():
    import os
    import tempfile

    import tensorflow as tf
    from nets import Net

    import tfswap

    os.chdir(tempfile.mkdtemp())

    net = Net(6, width=256)
    step = tf.function(net.step)
    images = tf.random.stateless_normal([512, 256], seed=(9, 9))
    before = [w.numpy().tobytes() for w in net.weights]
    plain = tfswap.profile(step, images, steps=2)
    decorated = tfswap.profile(tfswap.optimize(step, memory_limit="70%"), images, steps=2)
    kept = [w.numpy().tobytes() for w in net.weights] == before
    planned = tfswap.optimize(step, memory_limit="70%", profile=plain)
    planned(images)
    ops = {k.op for k in plain.kernels}
    saved = tfswap.profile(step, images, steps=1, save_to="step.profile.json")
    try:
        tfswap.profile(step, images, save_to="nowhere/step.profile.json")
    except tfswap.TfswapError as error:
        refused = str(error)
    curve = tfswap.simulate(step, tf.TensorSpec([512, 256]), limits=4, profile="step.profile.json")
    this = tfswap.simulate(step, images, limits=3, device="this")
    return {
        "kept": kept,
        "ops": sorted(ops),
        "matmuls": sum(k.op == "MatMul" for k in plain.kernels),
        "positive": all(k.seconds > 0 for k in plain.kernels if k.op == "MatMul"),
        "unordered": plain.unordered,
        "costs": planned.report().costs,
        "decorated": len(decorated.kernels),
        "kernels": len(plain.kernels),
        "rates": [plain.rates.out_bytes_per_s, plain.rates.in_bytes_per_s, plain.rates.copy_share],
        "saved": tfswap.Profile.load("step.profile.json") == saved,
        "refused": refused,
        "curve": curve.costs,
        "this": [this.memory_bytes, this.costs],
    }


@pytest.mark.parametrize(("free_bytes", "nbytes"), [(math.inf, COPY_BYTES), (8 * MIB, 2 * MIB), (0, LEAST_COPY_BYTES)])
def test_copies_are_measured_with_tensors_that_have_room(
    free_bytes: float, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow's allocator waits ten seconds for a tensor that has none."""
    monkeypatch.setattr(arena, "free_bytes", lambda _device: free_bytes)
    assert profiles._copy_bytes() == nbytes


def test_a_step_is_profiled_and_planned_with_what_was_measured():
    pytest.importorskip("tensorflow")
    found = on_arena(profiled, 1024)
    assert found["kept"], "the variables have their old values back"
    assert {"MatMul", "_UnaryOpsComposition", "ReluGrad"} <= set(found["ops"])
    assert found["matmuls"] == 6 + 6 + 5
    assert found["positive"]
    assert found["unordered"] > 0
    assert found["costs"] == "profiled"
    assert found["decorated"] == found["kernels"]
    out_rate, in_rate, share = found["rates"]
    assert out_rate > 1e6 and in_rate > 1e6 and 0 <= share <= 1
    assert found["saved"] and "nowhere/step.profile.json' can't be written" in found["refused"]
    assert found["curve"] == "profiled"
    assert found["this"] == [1024 * MIB, "analytic, at measured rates"]


def test_a_step_is_simulated_as_tensorflow_would_run_it_on_the_described_machine():
    pytest.importorskip("tensorflow")

    def program():
        import tensorflow as tf
        from models import vgg

        from tfswap.compiler.offline import offline_optimizer
        from tfswap.frontends.resizable_step import find_step
        from tfswap.frontends.simulate import target

        _net, step, arguments = vgg()
        on, options, costs = target("k40c", None, (), None, None, None, None)
        found = find_step(tf.function(step), arguments, device=on.device)
        optimizer = offline_optimizer(found.graph(), on.device, options, found.variables, costs)
        return optimizer.baseline.time_ratio(optimizer.plan(None, ordered=True).seconds)

    found = on_arena(
        program,
        512,
    )
    assert 0.98 < found < 1.02  # the same kernels in another order
