"""Forked processes: where TensorFlow can't run, every entry point raises immediately; others run as before."""

from __future__ import annotations

import os
import signal
import tempfile

import keras
import numpy as np
import tensorflow as tf
from processes import last_json, run_forked

import tfswap
import tfswap.ops


def in_child(*roads):
    """What each gives in a child of its own that may take 60 s."""
    reported = []
    for road in roads:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            try:
                outcome = f"ran: {road()}"
            except tfswap.TfswapError as error:
                outcome = str(error)
            except BaseException as error:
                outcome = f"not refused: {error!r}"
            os.write(writer, outcome.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            reported.append(pipe.read())
        assert os.waitpid(pid, 0)[1] == 0, (road, "hangs")
    return reported


def body(x):
    return tf.reduce_sum(tf.map_fn(tf.nn.relu, x @ x))


class Model(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.ones([32, 32]))

    @tf.function(input_signature=[tf.TensorSpec([4096, 32])])
    def train_step(self, x):
        with tf.GradientTape() as tape:
            h = x
            for _ in range(4):
                h = tf.nn.relu(h @ self.w)
            loss = tf.reduce_mean(h)
        self.w.assign_sub(tape.gradient(loss, self.w))
        return loss


def fitted(trained):
    """`fit` of a model, which has trained before or not."""
    model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tfswap.keras.optimize(model, memory_limit="1GiB")
    data = np.ones([16, 4], "float32"), np.ones([16, 1], "float32")
    if trained:
        model.fit(*data, verbose=0)
    return lambda: model.fit(*data, verbose=0)


def of_a_file():
    """Calls of a rewritten file, each of which has run."""
    with tempfile.TemporaryDirectory() as made:
        tf.saved_model.save(Model(), f"{made}/plain")
        tfswap.optimize_graph(f"{made}/plain", f"{made}/rewritten", memory_limit="70%")
        loaded, by_tensorflow = tfswap.load(f"{made}/rewritten"), tf.saved_model.load(f"{made}/rewritten")
    rows = tf.ones([4096, 32])
    signature = by_tensorflow.signatures["serving_default"]
    calls_file = tf.function(lambda x: by_tensorflow.train_step(x) + 1.0)
    loaded.train_step(rows), calls_file(rows)
    return [
        lambda: loaded.train_step(rows),
        lambda: by_tensorflow.train_step(rows),
        lambda: signature(x=rows),
        lambda: calls_file(rows),
    ]


def late():
    x = tf.ones([300, 300])
    planned = tfswap.optimize(tf.function(body), memory_limit="1GiB")
    ordered = tfswap.optimize(tf.function(body), memory_limit="1200KiB")
    never = tfswap.optimize(tf.function(body), memory_limit="1GiB")
    around = tf.function(lambda x: planned(x) + 1.0)
    within = tf.function(lambda x: ordered(x) + 1.0)
    twice = tf.function(lambda x: within(x) + 1.0)
    concrete = ordered.get_concrete_function(x)
    planned(x), around(x), twice(x)
    assert ordered.plan().order and not planned.plan().order
    outside = tfswap.optimize(tf.function(lambda x: tf.reduce_sum(tf.nn.relu(x @ x) @ x)), memory_limit="100%")
    tape = tf.GradientTape()
    with tape:
        tape.watch(x)
        loss = outside(x)

    reported = in_child(
        *of_a_file(),
        lambda: planned(x),
        lambda: ordered(x),
        lambda: never(x),
        lambda: concrete(x),
        lambda: around(x),
        lambda: within(x),
        lambda: twice(x),
        lambda: never.get_concrete_function(x),
        lambda: tape.gradient(loss, x),
        lambda: tfswap.ops.swap_out(x),
        lambda: tfswap.max_batch(planned, x, memory_limit="1GiB"),
        lambda: tfswap.profile(planned, x),
        fitted(True),
        fitted(False),
        lambda: in_child(lambda: planned(x)),
    )
    assert planned(x) == within(x) - 1.0  # the parent goes on
    return reported


def early():
    import sys

    assert "preloaded" in sys.modules and len(os.listdir("/proc/self/task")) == 1, "as every program of a test begins"

    def road():
        return float(tfswap.optimize(tf.function(body), memory_limit="1GiB")(tf.ones([300, 300])))

    step = tfswap.optimize(tf.function(body), memory_limit="1GiB")
    return in_child(road, lambda: float(step(tf.ones([300, 300]))))


SPAWNED = """
import multiprocessing
import tensorflow as tf
import tfswap
import tfswap.ops

@tfswap.optimize(memory_limit="1GiB")
@tf.function
def step(x):
    return tf.reduce_sum(x @ x)

def road(size):
    return float(step(tf.ones([size, size])))

if __name__ == "__main__":
    road(4)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print([pool.apply(road, (4,))])
"""


def test_in_a_late_child_every_road_says_what_to_do():
    reported = last_json(run_forked(late))
    *direct, nested = reported
    for each in (*direct, nested):
        assert "forked from one in which TensorFlow had started" in each, reported
        assert "spawn" in each


def test_an_early_child_runs():
    reported = last_json(run_forked(early))
    assert reported == ["ran: 27000000.0"] * 2


def test_a_spawned_process_runs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    run = run_forked(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
    assert run.stdout.splitlines()[-1] == "[64.0]"
