"""Steps of many kinds on emulated GPUs: peaks as planned, to the byte, with identical values and no races.

Unlike those of test_gpus.py, these are about what single ops do on a GPU.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import tensorflow as tf
from gpu_compare import DEVICE, compare, draws, relu_loss, reporting, trained, weights

import tfswap
import tfswap.ops


def compare_alone(gpus, *arguments, **options):
    """As `compare`, in addition the races of this comparison alone."""
    gc.collect()  # or what it frees later is in the first plan
    found = compare(gpus, *arguments, **options)
    found["races"] = gpus.report()
    gpus.clear_races()
    return found


def check_exact(found: dict) -> None:
    assert found.pop("report") == []
    for name, kind in found.items():
        planned, measured = kind["planned"]
        assert kind["same"] and not kind["races"], (name, kind)
        assert measured == planned, (name, kind)


@pytest.mark.slow
def test_a_ctc_loss_behind_convolutions(on_gpus):
    """Its loops compute their state anew in each iteration, and its constants include a matrix of `tf.eye`."""

    def loss_of(variables, x, labels):
        for kernel in variables[:2]:
            x = tf.nn.relu(tf.nn.conv1d(x, kernel, 1, "SAME"))
        lengths, frames = tf.fill([8], 5), tf.fill([8], 40)
        loss = tf.nn.ctc_loss(labels, x @ variables[2], lengths, frames, logits_time_major=False, blank_index=-1)
        return tf.reduce_mean(loss)

    def program(gpus):
        labels = np.random.default_rng(0).integers(1, 11, (8, 5)).astype("i")
        shapes = [[3, 16, 64], [3, 64, 64], [64, 12]]
        return {
            share: compare_alone(gpus, loss_of, shapes, draws(8, 40, 16), labels, limit=share)
            for share in ("92%", "150%")
        }

    check_exact(on_gpus(reporting(program)))


CONSTANTS = {
    "a diagonal": lambda: tf.eye(64),
    "a range": lambda: tf.range(64.0),
    "an interval": lambda: tf.linspace(0.0, 1.0, 64),
    "padded": lambda: tf.pad(tf.constant(np.arange(32.0, dtype="f")), [[0, 32]], constant_values=2.0),
    "a band": lambda: tf.linalg.band_part(tf.ones([64, 64]), -1, 0),
    "one hot": lambda: tf.one_hot(tf.constant(np.arange(64, dtype="i")), 64),
}


def scaled_loss(variables, x, made):
    y = tf.nn.relu((x @ variables[0]) * made()) @ variables[1]
    # With a loop in it, a step is planned as it was traced: Grappler folds nothing.
    (small,) = tf.while_loop(lambda y: tf.reduce_max(y) > 0.01, lambda y: (y * 0.5,), [tf.stop_gradient(x[:4])])
    return tf.reduce_mean(y * y) + tf.reduce_mean(small)


def test_kernels_of_constants_that_tensorflow_does_not_fold(on_gpus):
    def program(gpus):
        found = {}
        for name, made in CONSTANTS.items():

            def loss_of(variables, x, made=made):
                return scaled_loss(variables, x, made)

            found[name] = compare_alone(gpus, loss_of, [[64, 64]] * 2, draws(64, 64), limit="92%")
        return found

    check_exact(on_gpus(reporting(program)))


ROWS = {
    "a cast": lambda: tf.cast(tf.constant(np.arange(64.0)), tf.int32),
    "a cast of what it alone reads": lambda: tf.cast(tf.sqrt(tf.constant(np.arange(64.0))) * 3.0, tf.int32),
    "a gather": lambda: tf.gather(tf.cast(tf.constant(np.arange(64.0)), tf.int32), tf.range(63, -1, -1)),
    "an argmax": lambda: tf.argmax(tf.constant(draws(64, 64)), 1, output_type=tf.int32),
    "sorted": lambda: tf.argsort(tf.constant(draws(64))),
}
"""Integers of constants, which a GPU's kernels leave in device memory."""


def rows_of_a_loop(variables, x):
    """The rows are recomputed in the backward loop."""

    def body(i, h):
        return i + 1, tf.tanh(tf.gather(h, ROWS["a cast"]()) @ variables[0])

    _, h = tf.while_loop(lambda i, _: i < 8, body, [0, x], maximum_iterations=8)
    return tf.reduce_mean(h * h)


@pytest.mark.slow
def test_integers_of_constants_that_tensorflow_does_not_fold(on_gpus):
    def program(gpus):
        found = {}
        for name, made in ROWS.items():

            def loss_of(variables, x, made=made):
                return scaled_loss(variables, tf.gather(tf.nn.relu(x @ variables[2]), made()), lambda: 1.0)

            found[name] = compare_alone(gpus, loss_of, [[64, 64]] * 3, draws(64, 64), limit="92%")
        found["in a loop"] = compare_alone(gpus, rows_of_a_loop, [[64, 64]], draws(64, 64), limit="90%")
        return found

    check_exact(on_gpus(reporting(program)))


def attention(dtype, variables, x):
    x = tf.cast(x, dtype)
    w = [tf.cast(variable, dtype) for variable in variables]
    q, k, v = (tf.einsum("btd,dhe->bthe", x, tf.reshape(each, [64, 4, 16])) for each in w[:3])
    scores = tf.nn.softmax(tf.einsum("bqhe,bkhe->bhqk", q, k) * tf.cast(0.25, dtype))
    x += tf.einsum("bqhe,hed->bqd", tf.einsum("bhqk,bkhe->bqhe", scores, v), tf.reshape(w[3], [4, 16, 64]))
    x += tf.einsum("bte,ed->btd", tf.nn.gelu(tf.einsum("btd,de->bte", x, w[4])), w[5])
    return tf.reduce_mean(tf.cast(x, tf.float32) ** 2)


@pytest.mark.slow
def test_einsums_of_16_bits_take_what_they_are_planned_to_take(on_gpus):
    shapes = [*[[64, 64]] * 4, [64, 128], [128, 64]]

    def program(gpus):
        found = {}
        for dtype in (tf.float16, tf.bfloat16, tf.float32):

            def loss_of(variables, x, dtype=dtype):
                return attention(dtype, variables, x)

            for share in ("70%", "92%"):
                made = compare_alone(gpus, loss_of, shapes, draws(8, 32, 64), limit=share)
                found[f"{dtype.name}, {share}"] = made
        return found

    check_exact(on_gpus(reporting(program)))


def branching(variables, x):
    """A condition of the host is a value of the loop."""

    def body(i, goes, h):
        act = tf.cond(tf.reduce_mean(h) > 0.0, lambda: tf.nn.relu(h @ variables[0]), lambda: tf.tanh(h @ variables[1]))
        return i + 1, i < 15, tf.where(goes, act, h)

    _, _, h = tf.while_loop(lambda i, *_: i < 20, body, [0, tf.constant(True), x], maximum_iterations=20)
    return tf.reduce_mean(h * h)


def mapped(variables, x):
    y = tf.map_fn(lambda row: tf.tanh(row @ variables[0]) @ variables[1], x)
    return tf.reduce_mean(tf.scan(lambda sum, row: tf.tanh(sum + row), y) ** 2)


def shaping(variables, x, labels):
    """Branches take and return integers, which they read on the host."""
    shape = tf.shape(x)
    turned = tf.stack([shape[1], shape[0]])
    x = tf.cond(tf.reduce_sum(x) > 1e9, lambda: x * 2.0, lambda: tf.reshape(tf.reshape(x, turned), shape))
    rows = tf.switch_case(labels[0], [lambda: labels + 1, lambda: labels * 2, lambda: shape[0] - labels])
    for variable in variables:
        x = tf.nn.relu(x @ variable)
    return tf.reduce_mean(x * x) + tf.reduce_mean(tf.gather(x, rows))


def decaying(variables, x):
    """The loop saves the weights that it reads, which change before the backward loop, as by AdamW."""

    def body(i, h):
        return i + 1, tf.tanh(h @ variables[0].read_value() + x[i])

    _, h = tf.while_loop(lambda i, _: i < 12, body, [0, tf.zeros([16, 64])], maximum_iterations=12)
    variables[0].assign_sub(0.01 * variables[0])
    return tf.reduce_mean(h * h)


def saving_rows(variables, x, labels):
    """A branch saves integers for its gradient, which a GPU keeps in device memory."""
    for variable in variables[1:]:
        x = tf.nn.relu(x @ variable)
    x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.tanh(tf.gather(x, tf.argsort(x[:, 0])) @ variables[0]), lambda: x)
    return tf.reduce_mean(x * x)


def saving_unequally(variables, x, labels):
    """The branch that saves most is not the one with the highest peak afterwards."""
    for variable in variables[1:]:
        x = tf.nn.relu(x @ variable)
    rows = [lambda: labels, lambda: tf.argmax(x, 1, output_type=tf.int32)]
    branches = [lambda: tf.nn.relu(tf.gather(x, rows[0]()) @ variables[0]), lambda: tf.gather(x, rows[1]()), lambda: x]
    x = tf.switch_case(labels[0], branches)
    return tf.reduce_mean(x * x)


def test_branches_that_save_integers(on_gpus):
    labels = np.arange(64, dtype="i")

    def program(gpus):
        return {
            loss_of.__name__: compare_alone(gpus, loss_of, [[64, 64]] * 4, draws(64, 64), labels, limit=share)
            for loss_of, share in ((saving_rows, "90%"), (saving_unequally, "95%"))
        }

    check_exact(on_gpus(reporting(program)))


def test_loops_and_branches_with_values_of_the_host(on_gpus):
    labels = np.arange(8, dtype="i")

    def program(gpus):
        return {
            "branching": compare_alone(gpus, branching, [[64, 64]] * 2, draws(64, 64), limit="70%"),
            "mapped": compare_alone(gpus, mapped, [[64, 64]] * 2, draws(12, 16, 64), limit="85%"),
            "shaping": compare_alone(gpus, shaping, [[64, 64]] * 6, draws(256, 64), labels),
            "decaying": compare_alone(gpus, decaying, [[64, 64]], draws(12, 16, 64), limit="80%"),
        }

    check_exact(on_gpus(reporting(program)))


def positions(tokens, h):
    return h / tf.cast(tf.range(1, tf.shape(tokens)[1] + 1), tf.float32)[:, None]


def branches(tokens, h):
    def scaled():
        return h * tf.cast(tf.shape(tokens)[0], tf.float32)

    return tf.cond(tf.reduce_sum(h) > 0, scaled, lambda: h - tf.cast(tf.size(tokens), tf.float32))


def iterations(tokens, h):
    def body(i, h):
        return i + 1, tf.tanh(h + tf.cast(tf.shape(tokens)[0] + tokens[0, i], tf.float32) * 1e-3)

    return tf.while_loop(lambda i, _: i < tf.shape(tokens)[1] // 4, body, [0, h], maximum_iterations=12)[1]


@pytest.mark.slow
def test_shapes_of_any_number_of_tokens(on_gpus):
    """TensorFlow places what reads the shape of an argument with it, which is in host memory."""

    def program(gpus):
        found = {}
        for read in (positions, branches, iterations):

            def loss_of(variables, tokens, read=read):
                h = tf.gather(variables[0], tokens)
                for variable in variables[1:]:
                    h = tf.nn.silu(read(tokens, h) @ variable)
                return tf.reduce_mean(h * h)

            tokens = np.random.default_rng(0).integers(0, 500, (64, 20)).astype("i")
            signature = [tf.TensorSpec([None, 20], tf.int32)]
            shapes = [[500, 64], *[[64, 64]] * 3]
            found[read.__name__] = compare_alone(gpus, loss_of, shapes, tokens, limit="80%", signature=signature)
        return found

    check_exact(on_gpus(reporting(program)))


def asserting(variables, x, labels):
    tf.debugging.assert_less(labels, 9, message="too large")
    tf.debugging.Assert(tf.reduce_all(x < 50.0), [x, "too hot", tf.shape(x)])
    with tf.control_dependencies([tf.debugging.assert_near(x, x)]):
        return relu_loss(variables, x)


def asserting_in_a_loop(variables, x):
    def body(i, h):
        tf.debugging.assert_less(tf.reduce_max(h), 1e6, message="diverged")
        return i + 1, tf.tanh(h @ variables[0])

    return relu_loss(variables, tf.while_loop(lambda i, _: i < 20, body, [0, x], maximum_iterations=20)[1])


def cropping(variables, x):
    x = tf.image.stateless_random_crop(x, [8, 12, 12, 3], seed=[1, 2])
    for kernel in variables:
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
    return tf.reduce_mean(x * x)


def test_assertions(on_gpus):
    x, labels, square = draws(256, 64), np.arange(8, dtype="i"), [[64, 64]] * 6

    def program(gpus):
        return {
            "of values and labels": compare_alone(gpus, asserting, square, x, labels, limit="80%"),
            "in a loop": compare_alone(gpus, asserting_in_a_loop, square, x, limit="80%"),
            "of sizes, in a crop": compare_alone(
                gpus, cropping, [[3, 3, 3, 8], [3, 3, 8, 8]], draws(8, 16, 16, 3), limit="80%"
            ),
        }

    check_exact(on_gpus(reporting(program)))


def test_an_assertion_that_fails_says_its_text_and_keeps_nothing(on_gpus):
    def program(gpus):
        step = tfswap.optimize(trained(asserting, weights(*[[64, 64]] * 6)), memory_limit="80%")
        values, integers = draws(256, 64), np.arange(8, dtype="i")
        x, hot, labels, large = map(tf.constant, (values, 100 * values, integers, integers + 5))
        step(x, labels)
        before = tf.config.experimental.get_memory_info(DEVICE)["current"]
        failed = []
        for given in ((x, large), (hot, labels)):
            try:
                step(*given)
            except tf.errors.InvalidArgumentError as error:
                failed.append([text for text in ("too large", "too hot") if text in str(error)])
        step(x, labels)
        kept = tf.config.experimental.get_memory_info(DEVICE)["current"] - before
        return {"failed": failed, "kept": kept, "host": tfswap.ops.stats().pool_in_use_bytes}

    found = on_gpus(reporting(program))
    assert found == {"failed": [["too large"], ["too hot"]], "kept": 0, "host": 0, "report": []}
