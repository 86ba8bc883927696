"""Portable output: TensorFlow's own ops alone, which load without tfswap and survive TensorFlow's optimizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from portable_models import SIZE, net, with_grappler
from processes import last_json, run_python

import tfswap
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.device import machine
from tfswap.errors import InfeasibleMemoryLimit, InvalidModel, TfswapError
from tfswap.frontends import cli
from tfswap.ir import custom_ops
from tfswap.kernels.device import DeviceModel

ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "128", "TF_ENABLE_ONEDNN_OPTS": "0"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tensorflow as tf

    path = tmp_path_factory.mktemp("portable") / "model"
    made = net()
    tf.saved_model.save(made, str(path), signatures=made.serve)
    return path


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for the kernels that the other processes run with."""
    monkeypatch.setattr(machine, "_onednn", lambda: False)


def portable(model: Path, output: Path | None, limit: Any, function: str, batch: int, **asked: Any) -> Any:
    given = {"memory_limit": limit, "function": function, "batch_size": batch, "portable": True}
    return tfswap.optimize_graph(model, output, **{**given, **asked})


WITHOUT_TFSWAP = "import sys, json; sys.modules['tfswap'] = None; import portable_runner"


def run(function: str, *paths: Path) -> Any:
    """The result of a function of portable_runner, where tfswap can't be imported."""
    given = [str(path) for path in paths]
    program = f"{WITHOUT_TFSWAP}; print(json.dumps(portable_runner.{function}(*{given})))"
    return last_json(run_python(program, **ARENA))


def nodes(model: Path) -> list[Any]:
    """All nodes of all functions."""
    from tensorflow.core.protobuf import saved_model_pb2

    proto = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    found = []
    for graph in (meta.graph_def for meta in proto.meta_graphs):
        found += [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return found


def require_stock(model: Path) -> None:
    there = nodes(model)
    assert not [
        node.name for node in there if node.op.startswith(custom_ops.NAMESPACE) or custom_ops.KERNEL in node.attr
    ]
    assert any(node.name.startswith(custom_ops.AGAIN) for node in there)


@pytest.mark.slow
def test_a_served_net_keeps_less_however_tensorflow_optimizes_it(model: Path, tmp_path: Path) -> None:
    floor = portable(model, None, None, "serve", 8, mode="analyze").floor_bytes
    report = portable(model, tmp_path / "smaller", floor, "serve", 8)
    with_grappler(str(tmp_path / "smaller"), str(tmp_path / "optimized"))
    require_stock(tmp_path / "smaller")
    assert "import" not in (tmp_path / "smaller" / "README.txt").read_text()
    assert report.recomputed
    found = run("serve", model, tmp_path / "smaller", tmp_path / "optimized")
    (_, _, bits), *runs = found
    most = report.planned_peak_bytes - report.persistent_bytes
    image = 8 * SIZE * SIZE * 3 * 4
    for (plain_peak, _, _), *made in (runs[:3], runs[3:]):
        for peak, there, got in made:
            assert got == bits
            # Besides, a session makes images of what it is fed.
            assert 0.8 * most < peak - there <= most + image
            assert peak < 0.85 * plain_peak


def test_a_step_trains_with_less_and_the_same_bits(model: Path, tmp_path: Path) -> None:
    report = portable(model, tmp_path / "smaller", "75%", "train_step", 4096)
    require_stock(tmp_path / "smaller")
    found = run("train", model, tmp_path / "smaller")
    (_, losses), (peak, got), (plain_peak, _) = found
    assert got == losses
    assert peak <= 1.05 * report.memory_limit_bytes
    assert peak < 0.85 * plain_peak


def test_a_limit_that_can_t_be_met_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InfeasibleMemoryLimit) as refused:
        portable(model, tmp_path / "smaller", "10%", "serve", 8)
    assert not (tmp_path / "smaller").exists()
    assert portable(model, tmp_path / "smaller", refused.value.floor_bytes, "serve", 8).keeps_limit


def test_what_needs_our_ops_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TfswapError, match="precision is given and portable too"):
        portable(model, tmp_path / "a", "75%", "train_step", 4096, precision="fp16")
    with pytest.raises(TfswapError, match="portable is 'yes'"):
        portable(model, tmp_path / "a", "75%", "train_step", 4096, portable="yes")
    swaps = tfswap.optimize_graph(
        model, tmp_path / "ours", memory_limit="75%", tactics=("swap",), function="train_step", batch_size=4096
    )
    assert swaps.swapped
    with pytest.raises(InvalidModel, match="swap"):
        portable(model, tmp_path / "a", None, "train_step", 4096, plan=tmp_path / "ours" / "tfswap_plan.json")
    assert not (tmp_path / "a").exists()


def test_the_command_line_writes_it_too(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--function=serve", "--batch_size=8", "--memory_limit=90%", "--portable"]
    assert cli.main(["optimize", str(model), str(tmp_path / "smaller"), *flags]) == cli.OK
    reported = capsys.readouterr().out
    assert "import tfswap" not in reported
    assert "note: portable" in reported
    require_stock(tmp_path / "smaller")
    assert cli.main(["verify", str(tmp_path / "smaller"), "--json"]) == cli.OK
    assert len(json.loads(capsys.readouterr().out)["functions"]) == 1


def test_a_graph_def_that_predicts_can_be_portable() -> None:
    import tensorflow as tf

    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [1024, 64], name="x")
        h = y = tf.sin(x)
        for _ in range(4):
            y = tf.cos(y) * tf.tanh(y)
        tf.add(h, y, name="result")
    asked: dict[str, Any] = {"feeds": ["x"], "fetches": ["result"], "portable": True}
    floor = tfswap.optimize_graph(graph.as_graph_def(), mode="analyze", **asked).report.floor_bytes
    made = tfswap.optimize_graph(graph.as_graph_def(), memory_limit=floor, **asked)
    assert not [n for f in made.graph_def.library.function for n in f.node_def if n.op.startswith(custom_ops.NAMESPACE)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.ones([1024, 64]) * 0.3
        value = session.run(given)
        tf.import_graph_def(made.graph_def, name="")
        tf.import_graph_def(graph.as_graph_def(), name="plain")
        got, expected = session.run(["result:0", "plain/result:0"], {"x:0": value, "plain/x:0": value})
    assert got.tobytes() == expected.tobytes()


def test_on_a_gpu_tensors_go_by_way_of_identities_on_the_host() -> None:
    import tensorflow as tf

    from tfswap.exporters.function import export_function, grappler_off
    from tfswap.importers.function import import_function

    made = net()
    rows = tf.random.stateless_normal([4096, 128], seed=(1, 1))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in made.weights:
                h = tf.sin(h @ weight)
            loss = tf.reduce_mean(h * h)
        return loss, tape.gradient(loss, made.weights)

    concrete = step.get_concrete_function(rows)
    graph = import_function(concrete, [rows])
    optimizer = Optimizer(graph, DeviceModel("gpu"), Options(("swap",), portable=True))
    plan = optimizer.plan("70%")
    assert plan.evictions
    rewritten = optimizer.rewrite(plan)
    hosted = [node for node in rewritten if node.device == "/device:CPU:0"]
    assert {node.op for node in hosted} == {"Identity"}
    assert all(node.attrs["_grappler_do_not_remove"] for node in hosted)
    outs = sum(a.out is not None for a in plan.evictions)
    assert len(hosted) == outs + len(plan.evictions)
    # What comes back waits for a place in the order, and so does what counts on the memory that it gave back.
    assert all(node.controls for node in hosted)
    waited = {control for node in rewritten for control in node.controls}
    assert all(node in waited for node in hosted)
    function = export_function(rewritten, concrete)
    with grappler_off():
        expected = step(rows)
    for a, b in zip(tf.nest.flatten(function(rows)), tf.nest.flatten(expected), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
