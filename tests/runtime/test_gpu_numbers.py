"""Steps on emulated GPUs that TensorFlow numbers otherwise than the machine: some are hidden, or one is several."""

from __future__ import annotations

from unittest import mock

import pytest
import tensorflow as tf
from gpu_compare import SHAPES, check, compare, draws, relu_loss, reporting, trained, weights

import tfswap

MIB = 1 << 20


def swaps(gpus):
    return compare(gpus, relu_loss, SHAPES, draws(512, 128), tactics=("swap",))


@pytest.mark.emulated_gpu(count=2, ends_late=True)
def test_the_second_gpu_alone_keeps_a_steps_limit(on_gpus):
    def program(gpus):
        _first, second = tf.config.list_physical_devices("GPU")
        tf.config.set_visible_devices(second, "GPU")
        config = tf.config.experimental
        with mock.patch.object(config, "get_device_details", side_effect=config.get_device_details) as details:
            found = swaps(gpus)
        described = {call.args[0].name for call in details.call_args_list}
        return {**found, "described": [described == {second.name}, len(tf.config.list_logical_devices("GPU"))]}

    found = on_gpus(reporting(program))
    check(found)
    assert found["described"] == [True, 1]


@pytest.mark.emulated_gpu(count=2, cuda=True)
def test_codecs_run_on_the_second_gpu_alone(on_gpus):
    def program(gpus):
        tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[1], "GPU")

        def loss_of(variables, x):
            for variable in variables:
                x = tf.nn.relu(x @ variable) + 0.1 * x
            return tf.reduce_mean(x * x)

        options = {"limit": "75%", "tactics": ("encode",), "precision": "fp8"}
        return compare(gpus, loss_of, [[64, 64]] * 8, draws(1024, 64), **options)

    found = on_gpus(reporting(program))
    check({**found, "same": True}, swaps=False)


@pytest.mark.emulated_gpu(memory=128 * MIB, ends_late=True)
@pytest.mark.parametrize("fault", [False, True])
def test_parts_of_one_gpu_are_devices_with_streams_of_their_own(on_gpus, fault):
    def program(gpus):
        part = tf.config.LogicalDeviceConfiguration(memory_limit=48)
        [gpu] = tf.config.list_physical_devices("GPU")
        tf.config.set_logical_device_configuration(gpu, [part, part])
        found = swaps(gpus)
        with tf.device("GPU:1"):
            step = tfswap.optimize(trained(relu_loss, weights(*SHAPES)), memory_limit="60%", tactics=("swap",))
            x = tf.constant(draws(512, 128))
        step(x)
        gpus.set_faults(early_events=("out",) if fault else ())
        step(x)
        gpus.set_faults()
        return {**found, "evicted": len(step.plan().evictions)}

    found = on_gpus(reporting(program))
    freed = [line for line in found["report"] if "SwapOut" in line and "a free of" in line]
    assert bool(freed) == bool(found["report"]) == fault and found["evicted"]
    check({**found, "report": []})
