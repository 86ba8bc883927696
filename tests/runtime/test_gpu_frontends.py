"""Steps of each front end and layout on emulated GPUs, in one process, one after another."""

from __future__ import annotations

import gc
import tempfile

import pytest
import tensorflow as tf
from gpu_compare import DEVICE, SHAPES, batch, check, compare, draws, made, relu_loss, reporting, run, trained, weights
from test_gpus import MIB

import tfswap
import tfswap.ops
from tfswap.exporters.function import memory_optimizer_off


class Model(tf.Module):
    def __init__(self):
        self.weights = weights(*SHAPES)
        step = trained(relu_loss, self.weights).python_function
        self.train_step = tf.function(step, input_signature=[tf.TensorSpec([None, 128])])


def saved(gpus, load, **options):
    x = batch()
    with tempfile.TemporaryDirectory() as folder:
        model = Model()
        tf.saved_model.save(model, f"{folder}/model")
        with memory_optimizer_off():
            expected, _ = run(model.train_step, [x], model.weights)
        del model
        report = tfswap.optimize_graph(
            f"{folder}/model", f"{folder}/rewritten", memory_limit="80%", batch_size=512, tactics=("swap",), **options
        )
        before, out = tf.config.experimental.get_memory_info(DEVICE)["current"], gpus.counts().bytes_out
        loaded = load(f"{folder}/rewritten")
        values, peak = run(loaded.train_step, [x], loaded.weights)
        given = before - x.shape.num_elements() * 4  # and the batch, which is the step's
        return {
            "same": values == expected,
            "out": gpus.counts().bytes_out - out,
            "peak": peak - given,
            "limit": next(line for line in str(report).splitlines() if line.startswith("memory limit")),
        }, loaded


def a_savedmodel(gpus):
    result, loaded = saved(gpus, tfswap.load)
    plan = loaded.train_step.plan()
    return {**result, "kept": result["peak"] <= plan.limit_bytes, "swaps": len(plan.evictions)}


def a_portable_savedmodel(gpus):
    result, _ = saved(gpus, tf.saved_model.load, portable=True)
    return {**result, "kept": result["peak"] <= float(result["limit"].split()[-2]) * 2**20 * 1.02, "swaps": 1}


def an_audit(gpus):
    from tfswap.runtime import audit as module

    x, counted, audit = batch(), [], module.audit
    module.audit = lambda *arguments: counted.append(audit(*arguments)) or counted[-1]
    step = made()[1]
    step(x)
    step.report()
    module.audit = audit
    return {"edges": counted}


def a_step_that_others_memory_has_made_too_large(gpus):
    x, (_, step) = batch(), made()
    step(x)
    planned, limit = step.plan().planned_peak_bytes, step.plan().limit_bytes
    _others = tf.ones([256 << 10]) * 1.0
    peaks = [run(step, [x], [], steps=1)[1] for _ in range(3)]
    now = step.plan().planned_peak_bytes
    return {"above": min(peaks) > limit, "more": now > planned, "planned": peaks[-1] == now}


def images_with_channels_first(gpus):
    def loss_of(variables, x):
        for kernel in variables:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME", data_format="NCHW"))
            x = tf.nn.bias_add(x, tf.ones([8]), data_format="NCHW")
        return tf.reduce_mean(x * x)

    return compare(gpus, loss_of, [[3, 3, 8, 8]] * 6, draws(16, 8, 16, 16), limit="75%")


def what_the_layout_optimizer_makes_channels_first(gpus):
    def loss_of(variables, x):
        for kernel in variables:
            x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), tf.ones([8])))
            x, *_ = tf.compat.v1.nn.fused_batch_norm(x, tf.ones([8]), tf.zeros([8]))
        return tf.reduce_mean(tf.nn.max_pool2d(x, 2, 2, "SAME") ** 2)

    return compare(gpus, loss_of, [[3, 3, 8, 8]] * 4, draws(16, 16, 16, 8), limit="75%")


def what_it_makes_channels_first_of_16_bit_floats(gpus):
    def loss_of(variables, x):
        x = tf.cast(x, tf.float16)
        for kernel in variables:
            x = tf.nn.conv2d(x, tf.cast(kernel, tf.float16), 1, "SAME")
            x = tf.nn.relu(x - tf.reduce_mean(x, [0, 1, 2]))
        return tf.reduce_mean(tf.cast(x, tf.float32) ** 2)

    return compare(gpus, loss_of, [[3, 3, 8, 8]] * 4, draws(16, 16, 16, 8), limit="75%")


def a_fused_convolution_of_16_bit_floats(gpus):
    from tfswap.compiler.grappler import as_executed
    from tfswap.importers.function import import_function
    from tfswap.kernels.device import DeviceModel

    def layer(x, kernel):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), tf.ones([8], x.dtype)))

    given = [tf.TensorSpec(shape, tf.float16) for shape in ([4, 8, 8, 8], [3, 3, 8, 8])]
    graph = as_executed(import_function(tf.function(layer).get_concrete_function(*given)), DeviceModel("gpu"))
    return {"ops": [node.op for node in graph if "Conv2D" in node.op]}


def shapes_that_the_host_computes(gpus):
    def loss_of(variables, x):
        for variable in variables:
            rows, columns = tf.unstack(tf.shape(x))
            x = tf.nn.relu(tf.reshape(x, [rows * 2 // 2, columns + 0]) @ variable)
            x = tf.concat([x[: rows // 2], x[rows // 2 :]], 0)
        return tf.reduce_mean(tf.reshape(x, [-1, tf.size(x) // tf.shape(x)[0]]) ** 2)

    return compare(gpus, loss_of, SHAPES, draws(512, 128), limit="70%", signature=[tf.TensorSpec([None, 128])])


KINDS = {
    "a SavedModel": a_savedmodel,
    "a portable SavedModel": a_portable_savedmodel,
    "an audit": an_audit,
    "a step that others' memory has made too large": a_step_that_others_memory_has_made_too_large,
    "images with channels first": images_with_channels_first,
    "what the layout optimizer makes channels first": what_the_layout_optimizer_makes_channels_first,
    "what it makes channels first of 16-bit floats": what_it_makes_channels_first_of_16_bit_floats,
    "a fused convolution of 16-bit floats": a_fused_convolution_of_16_bit_floats,
    "shapes that the host computes": shapes_that_the_host_computes,
}


def each_kind(gpus):
    """What each finds, one after another, with its races."""
    found = {}
    for name, program in KINDS.items():
        gc.collect()  # or what it frees later is in the first plan
        found[name] = program(gpus)
        found[name]["races"] = gpus.report()
        gpus.clear_races()
    return found


@pytest.mark.slow
def test_steps_of_each_frontend_and_layout(on_gpus):
    """In one process, one after another."""
    found = on_gpus(reporting(each_kind))
    assert found.pop("report") == []
    assert [name for name, kind in found.items() if kind["races"]] == []
    for name in ("a SavedModel", "a portable SavedModel"):
        assert found[name]["same"] and found[name]["kept"] and found[name]["swaps"], found[name]
        assert found[name]["out"] >= MIB
    assert found["an audit"]["edges"][0] > 100
    others = found["a step that others' memory has made too large"]
    assert others["above"] and others["more"] and others["planned"]
    for name in (
        "images with channels first",
        "what the layout optimizer makes channels first",
        "what it makes channels first of 16-bit floats",
    ):
        check({**found[name], "report": []})
    check({**found["shapes that the host computes"], "report": []}, swaps=False)
    assert found["a fused convolution of 16-bit floats"]["ops"] == ["_FusedConv2D"]  # and not oneDNN's
