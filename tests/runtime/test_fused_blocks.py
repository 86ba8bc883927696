"""The tactic "fuse": XLA compiles chains of kernels into blocks, within the limit. Each program in its own process."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
from processes import on_arena

import tfswap
from tfswap.ir.permits import FUSE, TACTICS


def trained(limit, steps=3):
    """A transformer's steps under a limit: the variables' largest relative difference from the plain step's, and the
    peak.
    """
    import numpy as np
    from papers.harness import peer_nets

    def made():
        model = peer_nets.transformer(layers=1, width=128, length=64, batch=8)
        return model, tf.function(peer_nets.make_step(model))

    def peak():
        return tf.config.experimental.get_memory_info("CPU:0")["peak"]

    slab = tf.raw_ops.Empty(shape=[250 << 20], dtype=tf.uint8)  # the arena is one region
    del slab
    model, step = made()
    step = tfswap.optimize(step, memory_limit=limit, tactics=(*TACTICS, FUSE), values="close")
    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(steps):
        step(*model.arguments)
    report, most = step.report(), peak()
    plain, step = made()
    for _ in range(steps):
        step(*plain.arguments)
    pairs = [(v.numpy(), w.numpy()) for v, w in zip(model.variables, plain.variables, strict=True)]
    return {
        "peak": most,
        "planned": report.planned_peak_bytes,
        "limit": report.memory_limit_bytes,
        "text": str(report),
        "moved": report.reruns + len(report.swapped),
        "blocks": json.loads(report.to_json())["blocks"],
        "off": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
    }


def test_a_step_with_blocks_keeps_its_limit_with_close_values():
    def program():
        return trained("70%")

    fused = on_arena(program)
    assert fused["peak"] <= fused["planned"] <= fused["limit"]
    assert fused["planned"] <= 1.02 * fused["peak"]
    assert 0 < fused["off"] < 1e-6
    blocks = fused["blocks"]
    assert f"XLA compiles {len(blocks)} blocks" in fused["text"]
    assert "saves, us" in fused["text"]
    assert all(block["gain_s"] > 0 and 0 < block["most_difference"] < 1e-3 for block in blocks)
    gelu = next(block for block in blocks if block["recomputed"] and any("Erfc" in n for n in block["recomputed"]))
    assert gelu["freed_bytes"] > 0
    assert "peer_nets.py:" in gelu["source"]


def test_what_a_block_takes_besides_its_results_is_in_the_plan():
    def program():
        slab = tf.raw_ops.Empty(shape=[250 << 20], dtype=tf.uint8)
        del slab
        w, v = tf.Variable(tf.fill([64, 2048], 1e-3)), tf.Variable(tf.fill([2048, 64], 1e-3))
        total = tf.Variable(tf.zeros([2048, 64]))

        @tf.function
        def step(x):
            h = x @ w
            e = tf.exp(h)  # both sums read it, and XLA computes it once, into a temporary tensor
            share = tf.reduce_sum(e * e, 1, keepdims=True) / tf.reduce_sum(e, 1, keepdims=True)
            total.assign_add((h * share + tf.abs(h) * tf.square(h)) @ v)
            return tf.reduce_mean(total)

        given = tf.ones([2048, 64])
        made = tfswap.optimize(step, memory_limit="90%", tactics=(*TACTICS, FUSE), values="close")
        tf.config.experimental.reset_memory_stats("CPU:0")
        for _ in range(2):
            made(given)
        report = made.report()
        return len(report.blocks), tf.config.experimental.get_memory_info("CPU:0")["peak"], report.planned_peak_bytes

    blocks, peak, planned = on_arena(program)
    assert blocks
    assert peak <= planned
    assert planned > 3 * 2048 * 2048 * 4, "what it reads, makes, and computes in between"


def test_a_step_has_no_block_that_may_hold_more_than_its_limit():
    """It would be measured before the step runs, above the limit."""

    def program():
        slab = tf.raw_ops.Empty(shape=[250 << 20], dtype=tf.uint8)
        del slab
        w, v = tf.Variable(tf.fill([64, 2048], 1e-3)), tf.Variable(tf.fill([2048, 64], 1e-3))
        total = tf.Variable(tf.zeros([2048, 64]))

        @tf.function
        def step(x):
            h = x @ w
            e = tf.exp(h)
            share = tf.reduce_sum(e * e, 1, keepdims=True) / tf.reduce_sum(e, 1, keepdims=True)
            total.assign_add((h * share) @ v)
            return tf.reduce_mean(total)

        given = tf.ones([2048, 64])
        made = tfswap.optimize(step, memory_limit=44 << 20, tactics=(*TACTICS, FUSE), values="close")
        tf.config.experimental.reset_memory_stats("CPU:0")
        made(given)
        return len(made.report().blocks), tf.config.experimental.get_memory_info("CPU:0")["peak"]

    blocks, peak = on_arena(program)
    assert not blocks
    assert peak <= 44 << 20


@pytest.mark.slow
def test_blocks_are_swapped_around_and_recomputed_near_the_floor():
    def program():
        return trained("35%")

    found = on_arena(program)
    assert found["peak"] <= found["planned"] <= found["limit"]
    assert found["moved"]
    assert 0 < found["off"] < 1e-6


def test_two_plans_of_a_step_with_blocks_are_the_same():
    def program():
        from papers.harness import peer_nets

        plans = []
        for _ in range(2):
            model = peer_nets.transformer(layers=1, width=64, length=32, batch=4)
            step = tf.function(peer_nets.make_step(model))
            made = tfswap.optimize(step, memory_limit="60%", tactics=(*TACTICS, FUSE), values="close")
            made(*model.arguments)
            plans.append(made.plan())
        return [plans[0].fingerprint == plans[1].fingerprint, plans[0].order == plans[1].order]

    assert on_arena(program) == [True, True]


def test_blocks_need_close_values_and_a_step_of_this_process(tmp_path):
    with pytest.raises(tfswap.TfswapError, match='"fuse".*values="close"'):
        tfswap.optimize(lambda x: x, memory_limit="60%", tactics=(*TACTICS, FUSE))

    class Net(tf.Module):
        def __init__(self):
            self.w = tf.Variable(tf.ones([64, 64]))

        @tf.function(input_signature=[tf.TensorSpec([8, 64])])
        def step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.gelu(x @ self.w))
            self.w.assign_sub(0.1 * tape.gradient(loss, self.w))
            return loss

    net = Net()
    tf.saved_model.save(net, str(tmp_path / "model"), signatures={"train": net.step})
    with pytest.raises(tfswap.TfswapError, match="measured in the process that runs"):
        tfswap.optimize_graph(
            tmp_path / "model",
            tmp_path / "made",
            function="train",
            memory_limit="60%",
            tactics=(*TACTICS, FUSE),
            values="close",
        )
