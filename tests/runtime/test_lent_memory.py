"""Swapped tensors that wait in another device's memory: limits kept, peaks as planned, values identical, no races.

The devices are emulated (tests/emulated_gpu). The link between them is much faster than those to the host.
"""

from __future__ import annotations

import gc

import pytest
import several_gpus
import tensorflow as tf
from emulated_gpu.settings import Link
from gpu_compare import draws, reporting

import tfswap
from tfswap.kernels.hardware import Rates
from tfswap.kernels.profile import Profile
from tfswap.support.sizes import format_bytes

HOST = Link(50e6)
BETWEEN = Link(2e9)
KERNEL_US = 100.0
LINKS = {"to_host": HOST, "to_device": HOST, "between": BETWEEN, "kernel_us": KERNEL_US}
UNEQUAL = {"GPU:0": "60%", "GPU:1": "150%"}


def profile(peer: float = BETWEEN.bandwidth) -> Profile:
    """The rates of these devices."""
    fast = 1e18
    rates = Rates(fast, fast, fast, HOST.bandwidth, HOST.bandwidth, 1e-6 * KERNEL_US, peer_bytes_per_s=peer)
    return Profile("gpu", "emulated", "", rates, None, ())


def compared(limits=UNEQUAL, peer=BETWEEN.bandwidth, make=several_gpus.mirrored, tactics=("swap",)):
    return several_gpus.compare(make, limits, profile=profile(peer), tactics=tactics)


def check(found: dict) -> None:
    assert found["same"], found
    for device, (planned, measured) in found["planned"].items():
        assert measured == planned <= found["limits"][device], found


@pytest.mark.emulated_gpu(count=2, jitter=11, **LINKS)
def test_a_device_with_room_lends_memory(on_gpus):
    """The step takes less time than one that swaps to the host. Peaks do not depend on which device is faster."""
    found = on_gpus(reporting(lambda gpus: {"host": compared(peer=0.0), "lent": compared()}))
    assert found["report"] == []
    check(found["host"])
    check(found["lent"])
    assert found["host"]["lent"] == {"GPU:0": 0, "GPU:1": 0} and found["host"]["copied"] == [0, 0, 0]
    notes, nbytes = found["lent"]["notes"], found["lent"]["lent"]["GPU:0"]
    assert f"take {format_bytes(nbytes)} of GPU:1's memory" in notes["GPU:0"], notes
    assert f"{format_bytes(nbytes)} are lent to other devices" in notes["GPU:1"], notes
    out_bytes, in_bytes, peak_bytes = found["lent"]["copied"]
    assert out_bytes == in_bytes > 0 and 0 < peak_bytes <= nbytes, found
    assert found["lent"]["seconds"] < 0.8 * found["host"]["seconds"], found


@pytest.mark.slow
@pytest.mark.emulated_gpu(count=4, jitter=5, **LINKS)
def test_each_of_several_devices_borrows_from_the_one_with_the_most_room(on_gpus):
    limits = {"GPU:0": "60%", "GPU:1": "200%", "GPU:2": "65%", "GPU:3": "110%"}
    found = on_gpus(reporting(lambda gpus: compared(limits, tactics=("swap", "recompute"))))
    assert found["report"] == []
    check(found)
    lent, notes = found["lent"], found["notes"]
    assert all(lent[device] and "of GPU:1's memory" in notes[device] for device in ("GPU:0", "GPU:2")), found
    assert f"{format_bytes(lent['GPU:0'] + lent['GPU:2'])} are lent" in notes["GPU:1"], notes


@pytest.mark.skipif(
    int(tf.version.VERSION.split(".")[1]) < 21, reason="copies between devices are on the kernels' stream"
)
@pytest.mark.emulated_gpu(count=2, ignored_waits=("between",), **LINKS)
def test_a_copy_that_does_not_wait_for_the_kernel_before_it_is_found(on_gpus):
    report = on_gpus(reporting(lambda gpus: compared()))["report"]
    assert any("bytes between devices by Tfswap>SwapOut" in line for line in report), report


def failing():
    """Layers on the first device, of which the last fails for some arguments; the second device computes little."""
    with tf.device("GPU:0"):
        variables, x = several_gpus.layers(8), tf.constant(draws(1024, 64))
    with tf.device("GPU:1"):
        other = tf.Variable(draws(64, 64))

    def step(wide):
        with tf.GradientTape() as tape, tf.device("GPU:0"):
            h = x
            for variable in variables:
                h = tf.nn.relu(tf.sin(h @ variable))
            h = h + tf.reduce_sum(tf.reshape(wide, [4, 4]))
            loss = tf.reduce_mean(h * h)
        with tf.device("GPU:1"):
            other.assign_add(tf.sin(other))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return tf.function(step, input_signature=[tf.TensorSpec([None])])


@pytest.mark.emulated_gpu(count=2, jitter=7, **LINKS)
def test_a_step_that_fails_leaves_the_lent_memory_whole(on_gpus):
    def program(gpus):
        limits = {"GPU:0": "60%", "GPU:1": "8MiB"}
        step = tfswap.optimize(failing(), memory_limit=limits, tactics=("swap",), profile=profile())
        good, bad = tf.zeros([16]), tf.zeros([15])
        step(good)
        peaks, copied = [], []
        for wrong in (False, True, True, False):
            if wrong:
                with pytest.raises(tf.errors.InvalidArgumentError):
                    step(bad)
                continue
            _, peak = several_gpus.peaks_of(lambda: step(good).numpy())
            peaks.append(peak)
            copied.append([step.stats().lent_out_bytes, step.stats().lent_in_bytes])
        planned = {device: step.plan(device).planned_peak_bytes for device in several_gpus.gpus()}
        return {"peaks": peaks, "planned": planned, "copied": copied}

    found = on_gpus(reporting(program))
    assert found["report"] == [] and found["peaks"] == [found["planned"]] * 2, found
    assert found["copied"][0] == found["copied"][1] and min(found["copied"][0]) > 0, found


@pytest.mark.emulated_gpu(count=2, **LINKS)
def test_lent_memory_is_given_back_where_the_limit_of_the_lender_changes_and_with_the_step(on_gpus):
    def program(gpus):
        in_use = lambda: tf.config.experimental.get_memory_info("GPU:1")["current"]  # noqa: E731
        _variables, python_function, inputs = several_gpus.mirrored()
        before = in_use()
        step = tfswap.optimize(tf.function(python_function), memory_limit=UNEQUAL, tactics=("swap",), profile=profile())
        found = []
        for limits in (UNEQUAL, {"GPU:0": "60%", "GPU:1": "60%"}, UNEQUAL):
            step.memory_limit = limits
            step(*inputs).numpy()
            found.append([step.plan("GPU:0").lent_bytes, in_use() - before])
        del step
        gc.collect()
        return {"found": found, "left": in_use() - before}

    found = on_gpus(reporting(program))
    (lent, there), (none, _), (again, _) = found["found"]
    assert found["report"] == [] and lent == again > 0 == none, found
    assert there >= lent > found["left"], found


@pytest.mark.emulated_gpu(count=2, **LINKS)
def test_a_profile_has_the_rate_between_devices(on_gpus):
    def program(gpus):
        step = tf.function(lambda x: tf.reduce_sum(tf.sin(x @ x)))
        rates = tfswap.profile(step, tf.ones([64, 64])).rates
        with pytest.raises(tfswap.UnsupportedGraph, match="a profile is of one"):
            tfswap.profile(tf.function(several_gpus.pipeline()[1]), *several_gpus.pipeline()[2])
        return {"rates": [rates.peer_bytes_per_s, rates.out_bytes_per_s]}

    found = on_gpus(reporting(program))
    peer, out = found["rates"]
    assert found["report"] == [] and out < peer <= 1.05 * BETWEEN.bandwidth, found
