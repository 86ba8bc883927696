"""Steps whose variables are on the device when they are first called, and may leave it: a peak counts from before."""

from __future__ import annotations

import gc

import pytest
import tensorflow as tf
from processes import on_arena
from step_peaks import measuring
from test_state_at_home import ROWS, WIDTH, Net, Updates

import tfswap
import tfswap.ops as ops


def begun(share):
    """A net whose variables are on the device, and its step with that share of the unoptimised peak."""
    net = Net.__new__(Net)
    Net.__init__.__wrapped__(net)
    net.x = tf.random.stateless_normal([64 * ROWS, WIDTH], (1, 2))
    return net, tfswap.optimize(tf.function(net.train), memory_limit=share)


def in_use():
    gc.collect()
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


@pytest.mark.slow
def test_a_step_that_begins_above_its_limit_is_refused() -> None:
    def program():
        net, step = begun("10%")
        digest, refused = net.digest(), []
        for _ in range(2):  # the first call gives variables buffers of their own
            before = in_use()
            try:
                step(net.x)
            except tfswap.InfeasibleMemoryLimit as error:
                refused.append((str(error), error.floor_bytes, error.floor_bytes / before, in_use() / before))
        same, floor = net.digest() == digest, refused[-1][1]
        again, peaks = tfswap.optimize(tf.function(net.train), memory_limit=floor), []
        for _ in range(2):
            with measuring(peaks):
                again(net.x)
        return {
            "refused": refused,
            "same": same,
            "peaks": [peak / floor for peak in peaks],
            "home": again.plan().at_home,
        }

    found = on_arena(program)
    text, _, floor, left = found["refused"][-1]
    assert "tfswap.scope()" in text and 1.0 < floor < 1.01 and left == 1.0 and found["same"], found
    assert found["peaks"][0] <= 1.0 and found["home"], found


def test_variables_make_room_for_other_tensors() -> None:
    """They are on the device before the first call, which is above no limit, and are not while the step peaks."""

    def program():
        net, step = begun("40%")
        peaks = []
        for _ in range(3):
            with measuring(peaks):
                step(net.x)
        report = step.report()
        return {
            "peak": max(peaks),
            "planned": report.planned_peak_bytes,
            "limit": step.plan().limit_bytes,
            "home": report.at_home_bytes,
        }

    found = on_arena(program)
    assert found["peak"] <= found["planned"] <= found["limit"] and found["home"], found


def test_host_memory_that_variables_have_no_room_in_is_reported_and_changes_nothing() -> None:
    def program():
        net, step = begun("40%")
        digest, reported = net.digest(), []
        ops.configure(host_memory_limit="1MiB")
        try:
            step(net.x)
        except (tfswap.TfswapError, tf.errors.ResourceExhaustedError) as error:
            reported.append(str(error))
        kept = net.digest() == digest
        ops.configure(host_memory_limit=None)
        step(net.x)
        return [reported, kept, net.digest() != digest]

    (reported,), kept, trained = on_arena(program)
    assert "host memory" in reported and kept and trained


def test_variables_that_share_a_home_have_room_where_they_come_back() -> None:
    """As Keras' averages do, which it assigns to the weights at the end of `fit`."""

    def program():
        net, peaks, planned = Updates(), [], []
        state_bytes = sum(v.numpy().nbytes for v in net.state)
        step = tfswap.optimize(tf.function(net.train), memory_limit=int(0.3 * state_bytes))
        x = tf.random.stateless_normal([32, 256], (1, 2))
        step(x)
        for weight, slot in zip(net.weights, net.slots, strict=True):
            slot.assign(weight)
        step.memory_limit = int(0.7 * state_bytes)
        with measuring(peaks):
            step(x)
        planned.append(step.report().planned_peak_bytes)
        return {"peaks": peaks, "planned": planned, "limit": step.memory_limit, "home": len(step.plan().at_home)}

    found = on_arena(program)
    assert found["peaks"] == found["planned"] and max(found["peaks"]) <= found["limit"], found
    assert 0 < found["home"] < 16
