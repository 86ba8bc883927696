"""Steps with kernels side by side in TensorFlow: values, measured peaks, failures."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf
from processes import TWO_THREADS, on_arena
from slow import slow
from step_peaks import measuring

import tfswap
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.grappler import as_planned
from tfswap.device import arena, machine
from tfswap.exporters.function import memory_optimizer_off
from tfswap.importers.function import import_function


class Attention:
    def __init__(self, layers=3, width=128):
        def make(*seed):
            return tf.Variable(tf.random.stateless_normal([8, width, width], seed=seed) * 0.1)

        self.weights = [make(i, j) for i in range(layers) for j in range(4)]

    @staticmethod
    def data():
        return tf.random.stateless_normal([8, 384, 128], seed=(1, 2))

    def step(self, x):
        with tf.GradientTape() as tape:
            h = x
            for q, k, v, out in zip(*(self.weights[n::4] for n in range(4)), strict=True):
                a = tf.tanh(h)
                scores = tf.nn.softmax(tf.linalg.matmul(a @ q, a @ k, transpose_b=True) * 0.1)
                h = h + (scores @ (a @ v)) @ out
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss


class Convolutions:
    def __init__(self, layers=6, depth=64):
        self.weights = [
            tf.Variable(tf.random.stateless_normal([3, 3, depth, depth], seed=(i, 0)) * 0.05) for i in range(layers)
        ]

    @staticmethod
    def data():
        return tf.random.stateless_normal([16, 32, 32, 64], seed=(1, 2))

    def step(self, x):
        with tf.GradientTape() as tape:
            h = x
            for weight in self.weights:
                h = tf.nn.relu(tf.nn.conv2d(h, weight, 1, "SAME"))
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss


def measured_in_steps(kind, limit, busy):
    """Peaks and values of five steps of a net of this kind, while as many threads as `busy` compute."""
    settle()
    x, plain = kind.data(), kind()
    reference = tf.function(plain.step)
    with memory_optimizer_off():
        expected = [float(reference(x)) for _ in range(6)]
    net = kind()
    step = tfswap.optimize(tf.function(net.step), memory_limit=limit)
    measured, losses = [], []

    def measure():
        with measuring(measured):
            losses.append(float(step(x)))

    measure()  # it is planned, which would take long on a busy machine
    stop = threading.Event()

    def burn():
        a = np.ones((300, 300))
        while not stop.is_set():
            a @ a

    others = [threading.Thread(target=burn) for _ in range(busy)]
    for thread in others:
        thread.start()
    for _ in range(5):
        measure()
    stop.set()
    same = all(np.array_equal(a, b) for a, b in zip(plain.weights, net.weights, strict=True))
    plan = step.plan()
    return {
        "paired": len(plan.paired),
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "measured": measured,
        "same": same and losses == expected,
        "evictions": len(plan.evictions),
        "concurrent": plan.concurrent,
    }


def settle():
    """Makes the arena one free region."""
    slab = tf.raw_ops.Empty(shape=[900 << 20], dtype=tf.uint8)
    del slab


@pytest.mark.parametrize(
    ("net", "limit", "busy"),
    [
        (Attention, "100%", 0),
        (Convolutions, "65%", 3),
        *slow((Attention, "60%", 3), (Attention, "60%", 0), (Convolutions, "65%", 0)),
    ],
)
def test_the_peak_is_the_planned_one_and_the_values_are_the_same(net, limit, busy):
    run = on_arena(lambda: measured_in_steps(net, limit, busy), 1000, **TWO_THREADS)
    # Groups have room in place of pairs where nothing has to move.
    assert bool(run["paired"]) == bool(run["evictions"]) == (limit != "100%")
    assert bool(run["concurrent"]) == (limit == "100%")
    assert run["same"]
    assert max(run["measured"]) <= run["limit"]
    assert {peak == run["planned"] for peak in run["measured"]} == {True}


def near_the_floor():
    settle()
    x, net = Attention.data(), Attention(layers=6)
    concrete = tf.function(net.step).get_concrete_function(x)
    device, model = machine.current_device()
    graph = as_planned(import_function(concrete, [x]), concrete, model)
    optimizer = Optimizer(graph, model, snapshot=arena.snapshot(device), keeps_results=True)
    plans = [optimizer.plan(int(share * optimizer.floor_bytes())) for share in (1.02, 1.04)]
    return [[len(plan.paired), len(plan.splits), plan.planned_peak_bytes <= plan.limit_bytes] for plan in plans]


def test_near_the_floor_those_stay_side_by_side_that_do_not_raise_the_peak():
    """There requests get chunks of their own size, and what runs in a pair at the peak runs alone."""
    plans = on_arena(near_the_floor, 1000, **TWO_THREADS)
    assert all(paired > 2 and splits and kept for paired, splits, kept in plans), plans


def failing():
    import tensorflow as tf
    from tensorflow.core.framework import node_def_pb2

    from tfswap.native.load import load

    ops = load().ops

    def kernel(op, *inputs, name="one", **attrs):
        made = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
        made.attr["T"].type = tf.float32.as_datatype_enum
        for key, value in attrs.items():
            made.attr[key].b = value
        return made.SerializeToString()

    def run(x, y, *kernels, types=[tf.float32] * 2, allocations=1):
        return ops.tfswap_pair(inputs=[x, x, y, y], Tout=types, kernels=kernels, allocations=allocations)

    def refused(*args, **kwargs):
        try:
            run(*args, **kwargs)
        except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError, tf.errors.ResourceExhaustedError) as error:
            return str(error)
        return ""

    def in_use():
        return tf.config.experimental.get_memory_info("CPU:0")["current"]

    product = kernel("MatMul", "a", "b")
    another = kernel("MatMul", "a", "b", name="another")
    x, y = tf.random.stateless_normal([2, 300, 300], seed=(1, 2))
    wide, _tall = tf.zeros([1, 40000]), tf.zeros([40000, 1])
    one, other = run(x, y, product, product)
    results = {"same": bool(tf.reduce_all(one == x @ x) and tf.reduce_all(other == y @ y))}
    del one, other
    static = tf.function(lambda: run(x, y, product, product)).get_concrete_function()
    results["shapes"] = [list(t.shape) for t in static.outputs]
    before = in_use()
    results["more awaited than made"] = [t.shape[0] for t in run(x, y, product, product, allocations=7)]
    results["first"] = refused(wide, y, product, product)
    results["second"] = refused(y, wide, product, another)
    results["types"] = refused(x, y, product, product, types=[tf.float32] * 3)
    results["not a node"] = refused(x, y, product, b"\xff")
    results["no such op"] = refused(x, y, product, kernel("NoSuchOp", "a", "b"))
    results["leaked"] = in_use() - before
    return results


def test_a_pair_that_fails_says_why_and_keeps_nothing():
    found = on_arena(failing, 1000, **TWO_THREADS)
    assert found["same"]
    assert found["shapes"] == [[300, 300]] * 2
    assert found["more awaited than made"] == [300, 300]
    assert "Matrix size-incompatible" in found["first"]
    assert "Matrix size-incompatible" in found["second"]
    assert "{{node one}}" in found["first"]
    assert "{{node another}}" in found["second"]
    assert "Tin and Tout" in found["types"]
    assert "not a NodeDef" in found["not a node"]
    assert "NoSuchOp" in found["no such op"]
    assert found["leaked"] == 0


def test_kernels_that_stay_on_a_core_have_the_bits_of_those_that_share_all():
    code = "import json, one_core_programs; print(json.dumps(one_core_programs.differing()))"
    assert on_arena(code, 1000, **TWO_THREADS) == []
