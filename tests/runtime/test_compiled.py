"""Functions that XLA compiles inside of a step: planned around, within the limit. Each program in its own process."""

from __future__ import annotations

import functools
import json

import pytest
import tensorflow as tf
from processes import on_arena

import tfswap
from tfswap.exporters.function import memory_optimizer_off

pytest.importorskip("tensorflow")

MIB = 2**20


def info():
    return tf.config.experimental.get_memory_info("CPU:0")


class Blocks:
    def __init__(self, blocks, width=256):
        shapes = [width, 4 * width], [4 * width, width]
        self.weights = [
            [tf.Variable(tf.random.stateless_normal(s, seed=(i, k)) * s[0] ** -0.5) for k, s in enumerate(shapes)]
            for i in range(blocks)
        ]
        self.blocks = [
            tf.function(functools.partial(self.block, weights), jit_compile=True, autograph=False)
            for weights in self.weights
        ]

    def block(self, weights, h):
        rows = tf.reshape(tf.transpose(tf.reshape(h, [8, -1, h.shape[1]]), [1, 0, 2]), h.shape)
        return h + tf.nn.gelu(rows @ weights[0]) @ weights[1]

    def step(self, x):
        variables = tf.nest.flatten(self.weights)
        with tf.GradientTape() as tape:
            h = x
            for block in self.blocks:
                h = tf.sin(block(h))
            loss = tf.reduce_mean(h * h)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss


def batch(rows=512):
    return tf.random.stateless_normal([rows, 256], seed=(1, 2))


def bits(net):
    return [v.numpy().tobytes().hex() for v in tf.nest.flatten(net.weights)]


def test_blocks_that_xla_compiles_run_within_the_limit_with_their_values():
    def program():
        x = batch()
        plain, net = Blocks(3), Blocks(3)
        with memory_optimizer_off():
            losses = [float(tf.function(plain.step)(x)) for _ in range(2)]
        unoptimised = info()["peak"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        step = tfswap.optimize(tf.function(net.step), memory_limit=int(0.6 * unoptimised))
        made = [float(step(x)) for _ in range(2)]
        report = step.report()
        return {
            "limit": report.memory_limit_bytes,
            "peak": info()["peak"],
            "planned": report.planned_peak_bytes,
            "same": losses == made and bits(plain) == bits(net),
            "moved": len(report.swapped) + report.reruns,
        }

    found = on_arena(program)
    assert found["same"]
    assert found["moved"]
    assert found["peak"] <= found["limit"]
    assert found["planned"] <= found["limit"]


def test_keras_grouped_convolutions_which_have_no_other_kernel_on_a_cpu():
    def program():
        import keras

        def made():
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Conv2D(32, 3, padding="same", groups=4, activation="relu") for _ in range(3)]
            model = keras.Sequential([keras.Input((32, 32, 32)), *layers])

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x, training=True) ** 2)
                for variable, gradient in zip(
                    model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
                ):
                    variable.assign_sub(0.1 * gradient)
                return loss

            return model, tf.function(step)

        x = tf.random.stateless_normal([8, 32, 32, 32], seed=(1, 2))
        plain, step = made()
        with memory_optimizer_off():
            losses = [float(step(x)) for _ in range(2)]
        unoptimised = info()["peak"]
        model, step = made()
        tf.config.experimental.reset_memory_stats("CPU:0")
        step = tfswap.optimize(step, memory_limit=int(0.7 * unoptimised))
        mine = [float(step(x)) for _ in range(2)]
        return {
            "limit": step.report().memory_limit_bytes,
            "peak": info()["peak"],
            "same": losses == mine
            and all((a.numpy() == b.numpy()).all() for a, b in zip(plain.weights, model.weights, strict=True)),
        }

    found = on_arena(program)
    assert found["same"]
    assert found["peak"] <= found["limit"]


def test_what_such_a_block_holds_is_measured_and_the_peak_that_the_user_sees_is_his():
    def program():
        from tfswap.device import machine
        from tfswap.importers.function import import_function
        from tfswap.runtime.xla_calls import measure_compiled

        x, net = batch(), Blocks(2)
        concrete = tf.function(net.step).get_concrete_function(x)
        graph = import_function(concrete, [x])
        slab = tf.raw_ops.Empty(shape=[48 << 20], dtype=tf.uint8)
        del slab
        before = info()
        device, model = machine.current_device()
        measure_compiled(graph, concrete, [x, *concrete.captured_inputs], device, model)
        import gc

        gc.collect()
        after = info()
        return {
            "temporaries": [n.measured.temporary_bytes for n in graph if n.measured.temporary_bytes is not None],
            "before": [before["current"], before["peak"]],
            "after": [after["current"], after["peak"]],
        }

    found = on_arena(program)
    assert len(found["temporaries"]) == 4  # of two blocks, forward and backward
    hidden = 512 * 4 * 256 * 4  # one tensor of the hidden layer: the gradient's block holds some
    assert max(found["temporaries"]) > hidden
    assert found["after"][0] - found["before"][0] < 1024  # constants of a few integers that TensorFlow keeps
    assert found["after"][1] == found["before"][1]


def test_a_function_of_xla_that_writes_a_variable_is_refused():
    def program():
        count = tf.Variable(0.0)
        x, net = batch(), Blocks(2)

        @tf.function(jit_compile=True)
        def counted(h):
            count.assign_add(1.0)
            return h * 2.0

        try:
            tfswap.optimize(tf.function(lambda x: net.step(counted(x))), memory_limit="60%")(x)
        except tfswap.UnsupportedGraph as error:
            print(json.dumps({"error": str(error), "count": float(count)}))

    found = on_arena(program)
    assert "compiled by XLA" in found["error"]
    assert found["count"] == 0


def test_at_the_floor_no_request_of_a_block_gets_a_larger_chunk_than_planned():
    """XLA requests many buffers for one block, in an order of its own. Measuring the blocks takes no more either."""

    def program():
        from papers.harness import peer_nets

        slab = tf.raw_ops.Empty(shape=[510 << 20], dtype=tf.uint8)  # the arena is one region
        del slab
        model = peer_nets.resnet(layers=2, width=32, size=32, batch=4)
        compiled = functools.cache(functools.partial(tf.function, jit_compile=True))
        step = tf.function(peer_nets.make_step(model, compiled))
        tf.config.experimental.reset_memory_stats("CPU:0")
        try:
            tfswap.optimize(step, memory_limit=1)(*model.arguments)
        except tfswap.InfeasibleMemoryLimit as refused:
            floor = refused.floor_bytes
        step = tfswap.optimize(step, memory_limit=floor)
        for _ in range(2):
            step(*model.arguments)
        return [info()["peak"], step.report().planned_peak_bytes, floor]

    peak, planned, limit = on_arena(program)
    assert peak <= planned <= limit
