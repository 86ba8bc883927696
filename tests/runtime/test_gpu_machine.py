"""Steps on emulated GPUs (tests/emulated_gpu) that differ from what was planned for: memory, workspaces, pace."""

from __future__ import annotations

import os

import pytest
import tensorflow as tf
from gpu_compare import DEVICE, SHAPES, batch, check, draws, made, relu_loss, reporting, run, trained, weights

import tfswap
import tfswap.ops

MIB = 1 << 20


@pytest.mark.emulated_gpu(memory=64 * MIB)
def test_a_step_says_what_the_device_has_left_where_another_process_has_the_rest(on_gpus):
    """TensorFlow takes the device's memory as steps need it, and another process takes it first."""

    def program(gpus):
        x = batch()
        _variables, step = made()
        step.get_concrete_function(x)
        has = tf.config.experimental.get_memory_info(DEVICE)["current"]
        gpus.set_others((64 << 20) - 2 * has)
        try:
            step(x)
        except tf.errors.ResourceExhaustedError as error:
            reported = error.message.splitlines()[0]
        gpus.set_others(0)
        tf.config.experimental.reset_memory_stats(DEVICE)
        step(x).numpy()
        peak = tf.config.experimental.get_memory_info(DEVICE)["peak"]
        return {
            "reported": reported,
            "kept": peak <= step.plan().limit_bytes,
            "host": tfswap.ops.stats().pool_in_use_bytes,
        }

    found = on_gpus(
        reporting(program),
        TF_FORCE_GPU_ALLOW_GROWTH="true",
    )
    assert "the device has given its allocator" in found["reported"] and "another process" in found.pop("reported")
    assert found == {"kept": True, "host": 0, "report": []}


@pytest.mark.emulated_gpu(product_workspace=64 << 10)
def test_what_cublas_takes_is_planned_for_once_it_was_seen(on_gpus):
    def program(gpus):
        x = batch()
        expected, _ = run(trained(relu_loss, again := weights(*SHAPES)), [x], again, steps=6)
        variables, step = made()
        values, _ = run(step, [x], variables, steps=3)
        values_after, peak = run(step, [x], variables, steps=3)
        return {"same": [*values[:3], *values_after] == expected, "kept": peak <= step.plan().limit_bytes}

    found = on_gpus(
        reporting(program),
    )
    assert found == {"same": True, "kept": True, "report": []}


@pytest.mark.emulated_gpu(workspace=(3 * MIB, 5 * MIB // 2, 2 * MIB, MIB, MIB // 2, 1000, 0))
@pytest.mark.parametrize("allowed_mib", [None, 1, 3])
def test_the_first_step_keeps_its_limit_while_algorithms_are_tried(on_gpus, allowed_mib):
    """Workspaces are limited by the user's setting, or by the plan's (None)."""

    def program(gpus):
        images = tf.constant(draws(16, 32, 32, 8))

        def loss_of(variables, x):
            for variable in variables:
                x = tf.nn.relu(tf.nn.conv2d(x, variable, 1, "SAME"))
            return tf.reduce_mean(x * x)

        options = {"limit_workspaces": "TF_CUDNN_WORKSPACE_LIMIT_IN_MB" not in os.environ}
        step = tfswap.optimize(
            trained(loss_of, variables := weights(*[[3, 3, 8, 8]] * 8)), memory_limit="70%", **options
        )
        peaks = [run(step, [images], variables, steps=1)[1] for _ in range(3)]
        plan = step.plan()
        return {"peaks": peaks, "planned": plan.planned_peak_bytes, "kept": max(peaks) <= plan.limit_bytes}

    settings = {} if allowed_mib is None else {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": str(allowed_mib)}
    found = on_gpus(reporting(program), **settings)
    planned = found.pop("planned")
    assert found == {"peaks": [planned] * 3, "kept": True, "report": []}


@pytest.mark.emulated_gpu(kernel_us=100.0)
def test_a_gpu_that_is_slower_or_faster_than_planned_keeps_limit_and_values(on_gpus):
    def program(gpus):
        x = batch()
        expected, _ = run(trained(relu_loss, again := weights(*SHAPES)), [x], again, steps=6)
        variables, step = made()
        values, peaks = [], []
        for kernel_us, rate in ((100.0, 2e9), (5.0, 2e9), (1000.0, 2e9), (100.0, 0.5e9), (100.0, 25e9), (5.0, 0.5e9)):
            gpus.set_kernel_us(kernel_us)
            gpus.set_links(rate, rate, 10.0)
            losses, peak = run(step, [x], variables, steps=1)
            values.append(losses[0])
            peaks.append(peak)
        plan = step.plan()
        return {
            "same": [*values, *losses[1:]] == expected,
            "kept": max(peaks) <= plan.limit_bytes,
            "swaps": len(plan.evictions),
            "planned": [plan.planned_peak_bytes, max(peaks)],
        }

    found = on_gpus(
        reporting(program),
    )
    check(found)


def test_a_profile_knows_what_a_copy_takes_besides_its_bytes(on_gpus):
    def program(gpus):
        from tfswap.frontends.profile import measure_copies
        from tfswap.kernels.device import DeviceModel

        gpus.set_links(20e9, 20e9, 0.0)
        quick = measure_copies(DeviceModel("gpu"))["copy_latency_s"]
        gpus.set_links(20e9, 20e9, 50_000.0)
        return [quick, measure_copies(DeviceModel("gpu"))["copy_latency_s"]]

    quick, slow = on_gpus(program)
    assert quick < 0.025 < 0.05 <= slow < 0.15
