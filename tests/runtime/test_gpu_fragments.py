"""Plans against fragmentation on emulated GPUs, whose arenas grow no further: chunk splits and reserved slots.

docs/design/fragmentation.md says what these are.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import tensorflow as tf
from gpu_compare import DEVICE, check, compare, draws, reporting

import tfswap

MIB = 1 << 20


@pytest.mark.emulated_gpu(jitter=7, kernel_us=20.0)
def test_requests_that_get_a_chunk_of_their_own_size(on_gpus):
    """Layers of many widths: a free chunk is smaller than the next request, or up to twice as large."""

    def program(gpus):
        def loss_of(variables, x):
            for variable in variables:
                x = tf.nn.softplus(x @ variable)
            return tf.reduce_mean(x * x)

        widths = [64, 96, 160, 112, 176, 80, 144, 128, 72, 168]
        return compare(gpus, loss_of, list(pairwise(widths)), draws(512, 64), limit="45%")

    found = on_gpus(reporting(program))
    check(found)
    assert found["splits"] > 0


def parted(x):
    """Two small tensors stay until the end; the large one needs the places of both maps, which are free by then."""
    a = tf.exp(x)
    first = tf.reduce_sum(tf.reshape(a, [64, -1]), 1)
    b = tf.exp(a)
    second = tf.reduce_sum(tf.reshape(b, [64, -1]), 1)
    c = tf.reduce_sum(tf.reshape(b, [1024, -1]), 1)
    large = tf.tanh(tf.tile(c, [4096]))
    return tf.reduce_mean(large) + tf.reduce_sum(first * second)


@pytest.mark.emulated_gpu(memory=28 * MIB, jitter=7, kernel_us=20.0)
@pytest.mark.parametrize("slots", [True, False])
def test_small_tensors_in_slots_of_their_own(on_gpus, slots):
    def program(gpus):
        from tfswap.runtime.step_compiler import StepCompiler

        made, make = [], StepCompiler.make_slots
        StepCompiler.make_slots = lambda *given: made.append(make(*given) if slots else 0) or made[-1]
        with tf.device("CPU:0"):
            host = tf.random.stateless_uniform([2 * MIB], (1, 1))
            expected = tf.function(parted)(host).numpy().tobytes().hex()
        x = tf.identity(host)
        planned = tfswap.optimize(tf.function(parted, autograph=False), memory_limit=28 * MIB, tactics=())
        values, peaks = set(), set()
        try:
            for _ in range(3):
                tf.config.experimental.reset_memory_stats(DEVICE)
                values.add(planned(x).numpy().tobytes().hex())
                peaks.add(tf.config.experimental.get_memory_info(DEVICE)["peak"])
        except tfswap.InfeasibleMemoryLimit as error:
            return {"floor": error.floor_bytes}
        return {
            "same": values == {expected},
            "exact": peaks == {planned.plan().planned_peak_bytes},
            "slots": any(made),
        }

    found = on_gpus(reporting(program))
    assert found.pop("report") == []
    if slots:
        assert found == {"same": True, "exact": True, "slots": True}
    else:
        assert found["floor"] > 28 * MIB
