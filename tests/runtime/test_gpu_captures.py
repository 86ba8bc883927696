"""Tensors on the CPU that a GPU's step captures, on emulated GPUs (tests/emulated_gpu)."""

from __future__ import annotations

import pytest
import several_gpus
import tensorflow as tf
from gpu_compare import DEVICE, SHAPES, draws, relu_loss, reporting, trained, weights
from step_peaks import measuring

import tfswap
from tfswap.exporters.function import memory_optimizer_off


def layers(variables, x):
    for variable in variables:
        x = tf.nn.relu(x @ variable)
    return x


def at_both_ends(variables, x, captured):
    return captured - layers(variables, x + captured)


def in_a_loop(variables, x, captured):
    h = layers(variables, x)
    return tf.while_loop(lambda _: True, lambda h: [tf.tanh(h) * captured], [h], maximum_iterations=4)[0]


def in_a_branch(variables, x, captured):
    h = layers(variables, x)
    return tf.cond(x[0, 0] < 9.0, lambda: h - captured, lambda: h + captured)


def cast(variables, x, captured):
    return tf.cast(captured, tf.float32) - layers(variables, x)


def numbers(dtype):
    values = draws(512, 128, seed=9)
    return tf.constant(values > 0 if dtype == "bool" else (8 * values).astype(dtype))


CASES = {read.__name__: ("float32", read) for read in (at_both_ends, in_a_loop, in_a_branch)}
CASES |= {dtype: (dtype, cast) for dtype in ("float32", "float64", "int32", "int64", "bool", "uint8")}


@pytest.mark.parametrize("case", CASES)
def test_each_step_peaks_as_planned(on_gpus, case):
    def program(_):
        dtype, read = CASES[case]
        with tf.device("CPU:0"):
            captured = numbers(dtype)
        x = tf.constant(draws(512, 128))

        def loss_of(variables, x):
            h = read(variables, x, captured)
            return tf.reduce_mean(h * h)

        def run(optimized):
            step = optimized(trained(loss_of, weights(*SHAPES)))
            losses, peaks = [], []
            for _ in range(3):
                with measuring(peaks, DEVICE):
                    losses.append(step(x).numpy().tobytes().hex())
            return losses, peaks, step

        with memory_optimizer_off():
            expected = run(lambda step: step)[0]
        found, peaks, step = run(lambda step: tfswap.optimize(step, memory_limit="60%", tactics=("swap",)))
        plan = step.plan()
        return {
            "same": found == expected,
            "peaks": peaks,
            "planned": plan.planned_peak_bytes,
            "limit": plan.limit_bytes,
        }

    found = on_gpus(reporting(program))
    assert found["same"] and found["report"] == []
    assert set(found["peaks"]) == {found["planned"]} and found["planned"] <= found["limit"]


@pytest.mark.emulated_gpu(count=2)
@pytest.mark.parametrize("given", ["captured", "argument"])
def test_each_of_several_gpus_peaks_as_planned(on_gpus, given):
    def program(_):
        with tf.device("CPU:0"):
            target, x = tf.constant(draws(512, 64)), tf.constant(draws(512, 64, seed=2))

        def make():
            halves = []
            for device in several_gpus.gpus():
                with tf.device(device):
                    halves.append(several_gpus.layers(10))
            variables = [*halves[0], *halves[1]]

            def loss_of(x, target):
                with tf.device("GPU:0"):
                    loss = relu_loss(halves[0], x + target)
                with tf.device("GPU:1"):
                    return loss + relu_loss(halves[1], x - target)

            if given == "argument":
                return variables, lambda x, y: several_gpus.trained(variables, loss_of, x, y), [x, target]
            return variables, lambda x: several_gpus.trained(variables, loss_of, x, target), [x]

        return several_gpus.compare(make, 800_000, tactics=("swap",))

    found = on_gpus(reporting(program))
    assert found["same"] and found["report"] == []
    for device, (planned, measured) in found["planned"].items():
        assert measured == planned <= found["limits"][device]
