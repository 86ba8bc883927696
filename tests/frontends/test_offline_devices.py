"""Plans without a process: a step on several GPUs has a plan for each, also where there are none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tensorflow as tf
from layered_steps import Layer, training_step

import tfswap
from tfswap.compiler.offline import OnDevice, Variable, offline_optimizer, offline_step
from tfswap.compiler.options import Options
from tfswap.device.offline_placement import place_offline
from tfswap.errors import TfswapError, UnsupportedGraph
from tfswap.frontends import cli
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import described
from tfswap.report.device_curves import DeviceCurves
from tfswap.report.printed import RECEIVED
from tfswap.report.report import report_of_devices

GPU = described("a100").device


def placed(*devices: str) -> Graph:
    """A step whose kernels are on these devices in turns."""
    graph = training_step([Layer("dense"), Layer("relu"), Layer("scale", 1)] * 2, 64, 64)
    kernels = [node for node in graph if node not in graph.feeds]
    for number, node in enumerate(kernels):
        node.device = devices[number % len(devices)]
    return graph


def test_a_plan_for_one_gpu_refuses_several_by_their_names() -> None:
    with pytest.raises(UnsupportedGraph, match=r"the step is on GPU:0, GPU:1, and") as refused:
        offline_optimizer(placed("/job:localhost/replica:0/task:0/device:GPU:1", "/device:GPU:0"), GPU, Options())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("devices", [("/device:GPU:1",), ("/device:GPU:0", "")])
def test_a_step_on_one_gpu_is_planned(devices: tuple[str, ...]) -> None:
    assert offline_optimizer(placed(*devices), GPU, Options()).floor_bytes() > 0


def test_where_there_are_no_gpus_the_step_runs_in_one_arena() -> None:
    assert offline_optimizer(placed("/device:GPU:0", "/device:GPU:1"), DeviceModel(), Options()).floor_bytes() > 0


def test_several_gpus_have_an_optimizer_each():
    graph = placed("/device:GPU:0", "/device:GPU:1")
    variables = [Variable("float32", (1 << 20,), device) for device in ("", "/device:GPU:1", "/device:GPU:1")]
    found = offline_step(graph, {"GPU:0": OnDevice(GPU, Options())}, variables)
    assert list(found.optimizers) == ["GPU:0", "GPU:1"]
    held = [each.resident_bytes >> 22 for each in found.optimizers.values()]
    assert held == [1, 2]


def test_a_report_names_what_other_devices_send_by_what_computes_it():
    found = offline_step(placed("/device:GPU:0", "/device:GPU:1"), {"GPU:0": OnDevice(GPU, Options())})
    reports = {where: each.report(each.plan(each.floor_bytes())) for where, each in found.optimizers.items()}
    text = str(report_of_devices("step", reports))
    received = set(re.findall(r"tfswap/(\S+)_0/received:0", text))
    assert received and received <= {node.name for node in found.graph}
    assert f"note: {RECEIVED}" in text.splitlines()


def test_a_portable_step_has_its_part_on_the_cpu_and_is_of_one_gpu():
    portable = {"GPU:0": OnDevice(GPU, Options(portable=True))}
    assert list(offline_step(placed("/device:GPU:0", "/device:CPU:0"), portable).optimizers) == [""]
    with pytest.raises(UnsupportedGraph, match="GPU:0, GPU:1, and portable=True is for a step on one device"):
        offline_step(placed("/device:GPU:0", "/device:GPU:1"), portable)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("/device:TPU:0", "XLA compiles what runs there"),
        ("/job:worker/replica:0/task:1/device:GPU:0", "which is another process's"),
        ("/device:GPU:2", "step has the device GPU:2, and there are GPU:0, GPU:1 only"),
    ],
)
def test_devices_that_are_not_there_are_refused_by_name(device: str, why: str):
    graph = placed("/device:GPU:0", device)
    with pytest.raises(UnsupportedGraph, match=why):
        place_offline("step", graph, [""] * len(graph.feeds), GPU, ["GPU:0", "GPU:1"])


BRANCH = """\
%h = Placeholder() -> float32[4]
%here = Cos(%h) @"/device:GPU:0" -> float32[4]
%made = Sin(%here) @"/device:GPU:1" -> float32[4]
%saved = {saved} -> variant[]
feeds %h
fetches %made, %saved
"""


def test_what_a_branch_saves_nothing_for_is_on_the_device_of_what_another_one_saves():
    """Placing the nodes again changes nothing: TensorFlow's optimizers add nodes between the two times."""
    chosen = '%chosen = If(%p, %x) -> float32[4], variant[]\n%y = Cos(%chosen:0) @"/device:GPU:0" -> float32[4]\n'
    graph = parse_graph(
        f"%p = Placeholder() -> bool[]\n%x = Placeholder() -> float32[4]\n{chosen}feeds %p, %x\nfetches %y"
    )
    ways = ("OptionalNone()", "OptionalFromValue(%made)")
    branches = graph.bodies[graph["chosen"]] = tuple(parse_graph(BRANCH.format(saved=way)) for way in ways)
    for _ in range(2):
        place_offline("step", graph, [""] * len(graph.feeds), GPU, ["GPU:0", "GPU:1"])
        assert [branch["saved"].device for branch in branches] == ["/device:GPU:1"] * 2


def pipeline() -> tf.Module:
    """Layers on two devices, whose variables have none. Here both are the CPU."""
    made = tf.Module()
    made.layers = [tf.Variable(tf.random.stateless_normal([64, 64], (i, 1)) * 0.1) for i in range(4)]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for i, layer in enumerate(made.layers):
                with tf.device(f"GPU:{i // 2}"):
                    h = tf.nn.relu(tf.sin(h @ layer))
            with tf.device("GPU:1"):
                loss = tf.reduce_mean(h * h)
        for layer, gradient in zip(made.layers, tape.gradient(loss, made.layers), strict=True):
            layer.assign_sub(0.1 * gradient)
        return loss

    made.train_step = tf.function(step, input_signature=[tf.TensorSpec([None, 64], name="x")])
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("offline") / "model")
    tf.saved_model.save(pipeline(), path)
    return path


def test_a_step_is_simulated_on_machines_with_several_gpus(saved: str, tmp_path: Path):
    found = tfswap.simulate(saved, batch_size=2048, limits=3, device=["a100", "h100"])
    traced = tfswap.simulate(pipeline().train_step, tf.TensorSpec([2048, 64]), limits=3, device="dgx-a100:2")
    assert isinstance(found, DeviceCurves) and isinstance(traced, DeviceCurves)
    for each, machines in ((found, ["A100", "H100"]), (traced, ["DGX A100", "DGX A100"])):
        assert list(each.devices) == ["GPU:0", "GPU:1"]
        assert all(name in curve.machine for name, curve in zip(machines, each.devices.values(), strict=True))
        assert [len(curve.points) for curve in each.devices.values()] == [3, 3]
        assert all(p.step_s == max(one.step_s for one in p.points.values()) for p in each.points)
    hosts = [curve.host_bytes for curve in found.devices.values()]
    passed = 128 * 10**9 - hosts[0]  # what goes from one GPU to the other
    assert 0 < passed < 8 << 20 and hosts[1] == 256 * 10**9 - passed
    assert found.link == "copies go by way of the host"
    assert traced.link == "a link of 240 GB/s each way, and tfswap's copies go by way of the host"
    content = json.loads(found.to_json())
    assert content["feasible"] and list(content["devices"]) == ["GPU:0", "GPU:1"]
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["train_step", "device", "GPU:0", "GPU:1"]
    found.save_html(tmp_path / "curves.html")
    assert (tmp_path / "curves.html").read_text().count("<svg ") == 2
    assert found._repr_html_().count("<details class=device") == 2


def branching() -> tf.Module:
    """A conditional on another device, whose branches save different numbers of tensors for their gradients."""
    made = tf.Module()
    made.layers = [tf.Variable(tf.random.stateless_normal([64, 64], (i, 1)) * 0.1) for i in range(4)]

    def through(h: tf.Tensor, *layers: tf.Variable) -> tf.Tensor:
        with tf.device("GPU:1"):
            for layer in layers:
                h = tf.sin(h @ layer)
            return h

    def step(x: tf.Tensor) -> tf.Tensor:
        first, *others = made.layers
        with tf.GradientTape() as tape:
            with tf.device("GPU:0"):
                h = tf.sin(x @ first)
            h = tf.cond(tf.reduce_sum(h) > 0.0, lambda: through(h, others[0]), lambda: tf.sin(through(h, *others)))
            loss = tf.reduce_mean(h * h)
        for layer, gradient in zip(made.layers, tape.gradient(loss, made.layers), strict=True):
            layer.assign_sub(0.1 * gradient)
        return loss

    made.train_step = tf.function(step)
    return made


def test_gradients_go_through_branches_of_different_lengths_on_another_device():
    found = tfswap.simulate(branching().train_step, tf.TensorSpec([2048, 64]), limits=2, device="a100,a100")
    assert isinstance(found, DeviceCurves) and list(found.devices) == ["GPU:0", "GPU:1"]


def test_a_machine_with_fewer_gpus_and_the_search_for_a_size_are_refused(saved: str):
    with pytest.raises(UnsupportedGraph, match="train_step has the device GPU:1, and there are GPU:0 only"):
        tfswap.simulate(saved, batch_size=2048, device="a100")
    with pytest.raises(UnsupportedGraph, match="train_step has the device GPU:1"):
        tfswap.max_batch(saved, device="a100", memory_limit="1GiB")
    for wrong in ([], ["a100", 1], 3):
        with pytest.raises(TfswapError, match="device is "):
            tfswap.simulate(saved, batch_size=2048, device=wrong)


def test_the_command_line_takes_a_list_of_devices(saved: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    flags = ["--batch_size=2048", "--limits=2", f"--html={tmp_path}/curves.html", "--json"]
    assert cli.main(["simulate", saved, "--device=a100,a100", *flags]) == cli.OK
    assert list(json.loads(capsys.readouterr().out)["devices"]) == ["GPU:0", "GPU:1"]
    assert cli.main(["simulate", saved, "--device=a100,abacus"]) == cli.USAGE
    assert cli.main(["analyze", saved, "--memory_limit=GPU:0=1GiB,GPU:0=2GiB"]) == cli.USAGE
    assert cli.main(["analyze", saved, "--memory_limit=GPU:0=1GiB,2GiB"]) == cli.USAGE
