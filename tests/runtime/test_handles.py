"""Handles other than variables, as arguments of steps and their loops: iterators, tables, queues, generators."""

from __future__ import annotations

import pytest
import tensorflow as tf
from processes import on_arena
from slow import slow
from step_peaks import measuring

import tfswap

ROWS, WIDTH = 1024, 128


def draw(*shape):
    return tf.random.stateless_normal(shape, (len(shape), 1))


def body_of(kind, train, batch):
    """The body of a loop of steps that reads batches from a handle of this kind; None for a whole iterator."""
    if kind == "iterator":
        iterator = iter(tf.data.Dataset.from_tensors(batch).repeat())
        return lambda i: train(next(iterator) / tf.cast(i + 1, tf.float32))
    if kind == "table":
        numbers = tf.range(9)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, tf.ones([9])), 2.0)
        counts = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 1.0)

        def body(i):
            counts.insert(i, counts.lookup(i) + 1)
            return train(batch * (table.lookup(i) + counts.lookup(i)))

        return body
    if kind == "queue":  # which gives sizes as it is traced, and no op does
        queue = tf.queue.PriorityQueue(4, [tf.float32], [[ROWS, WIDTH]])
        queue.enqueue((tf.constant(0, tf.int64), batch))

        def body(i):
            x = queue.dequeue()[1]
            queue.enqueue((tf.constant(0, tf.int64), x))
            return train(x / tf.cast(i + 1, tf.float32))

        return body
    if kind == "generator":
        generator = tf.random.Generator.from_seed(3)
        return lambda i: train(batch * generator.normal([ROWS, 1]))
    if kind == "python":

        def body(i):
            scale = tf.numpy_function(lambda i: batch.numpy() * 0 + i, [tf.cast(i, tf.float32)], tf.float32)
            scale.set_shape([ROWS, WIDTH])
            return train(batch + scale)

        return body
    return None


def made(kind):
    batch = draw(ROWS, WIDTH)
    weights = [tf.Variable(0.1 * draw(WIDTH, WIDTH)) for _ in range(8)]

    def train(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(tf.square(h))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    batches = tf.data.Dataset.from_tensors(batch).repeat()
    body = body_of(kind, train, batch)

    def loop():
        more, once = lambda i, total: i < 3, lambda i, total: (i + 1, total + body(i))
        return tf.while_loop(more, once, (0, 0.0))[1]

    def until_the_end(iterator):  # as AutoGraph makes it of `for x in iterator`
        def once(more, total):
            element = iterator.get_next_as_optional()

            def some():
                return (True, total + train(element.get_value()))

            return tf.cond(element.has_value(), some, lambda: (False, total))

        return tf.while_loop(lambda more, total: more, once, (True, 0.0))[1]

    if kind == "whole iterator":
        return until_the_end, lambda: [iter(batches.take(3))], weights
    return loop, list, weights


def run(kind, **limit):
    step, arguments, weights = made(kind)
    step = tfswap.optimize(tf.function(step), **limit) if limit else tf.function(step)
    results, peaks = [], []
    for _ in range(3):
        given = arguments()
        with measuring(peaks):
            results.append(step(*given).numpy().tobytes().hex())
    return [results, [w.numpy().tobytes().hex() for w in weights]], max(peaks), step


def keeps_limit_and_bits(kind):
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # as of steps with loops
    expected, unoptimised, _ = run(kind)
    found, peak, step = run(kind, memory_limit="60%")
    report = step.report()
    return [found == expected, peak <= report.memory_limit_bytes, report.memory_limit_bytes < unoptimised]


@pytest.mark.parametrize("kind", ["iterator", "whole iterator", "python", *slow("table", "queue", "generator")])
def test_a_loop_that_takes_a_handle_keeps_the_limit_and_the_bits(kind: str) -> None:
    assert on_arena(lambda: keeps_limit_and_bits(kind)) == [True, True, True]


def lookups():
    import tensorflow as tf

    import tfswap

    def draw(*shape):
        return tf.random.stateless_normal(shape, (len(shape), 1))

    x, keys = draw(512, 64), tf.range(512) % 9
    counts = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 1.0)
    weights = [tf.Variable(0.1 * draw(64, 64)) for _ in range(4)]

    @tf.function
    def step(x):
        counts.insert(keys, counts.lookup(keys) + 1)
        with tf.GradientTape() as tape:
            h = x * counts.lookup(keys)[:, None]
            for weight in weights:
                h = tf.nn.relu(h @ weight)
            loss = tf.reduce_mean(tf.square(h))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    step = tfswap.optimize(step, memory_limit="60%")
    peaks = []
    for _ in range(4):
        with measuring(peaks):
            step(x)
    return [peaks, step.report().planned_peak_bytes]


def test_what_a_table_gives_has_a_size_that_the_trace_does_not_know_and_the_plan_is_true() -> None:
    """Its shape is computed in the step: reshapes that read it hold it until their place in the order."""
    peaks, planned = on_arena(lookups)
    assert peaks == [planned] * 4


def pipeline(limit):
    import logging

    import tensorflow as tf

    import tfswap

    rows, width = 2048, 128
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tfswap").addHandler(handler)
    weights = [tf.Variable(tf.random.stateless_normal([width, width], (1, n)) * 0.1) for n in range(6)]
    batches = tf.data.Dataset.from_tensor_slices(tf.random.stateless_normal([2 * rows, width], (2, 2)))
    iterator = iter(batches.repeat().batch(rows, drop_remainder=True).prefetch(1))

    def train():
        with tf.GradientTape() as tape:
            h = next(iterator)
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(tf.square(h))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    step = tfswap.optimize(tf.function(train), memory_limit=limit)
    peaks = []
    for _ in range(4):
        with measuring(peaks):
            step()
    return [peaks, step.report().memory_limit_bytes, messages]


def test_a_limit_with_room_for_some_batches_of_the_pipeline_has_a_plan_that_leaves_it() -> None:
    peaks, limit, messages = on_arena(lambda: pipeline("50%"))
    assert max(peaks) <= limit
    assert not messages


def test_batches_without_room_are_reported_before_the_first_step() -> None:
    messages = on_arena(lambda: pipeline("35%"))[2]
    assert "step(next(iterator))" in messages[0]
