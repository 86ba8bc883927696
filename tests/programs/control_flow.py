"""Training steps with loops and conditionals: what test_control_flow.py runs in processes of their own.

    python control_flow.py PROGRAM unoptimised
    python control_flow.py PROGRAM LIMIT          # "floor", or a share such as 120%

Prints a JSON object: the measured peak, the planned figures, and a digest of losses and variables.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf
from models import settle, train

Made = tuple[list[Any], Callable[..., Any], list[Any]]


def _weights(*shapes: tuple[int, ...]) -> list[Any]:
    return [tf.Variable(tf.random.stateless_normal(shape, seed=(i, 7)) * 0.05) for i, shape in enumerate(shapes)]


def _data(*shape: int) -> Any:
    return tf.random.stateless_normal(shape, seed=(1, 2))


def _descend(tape: Any, loss: Any, weights: list[Any]) -> Any:
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(0.01 * tf.convert_to_tensor(gradient))
    return loss


def while_loop() -> Made:
    (w,) = weights = _weights((64, 64))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 8, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=8)
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def until_small() -> Made:
    """How many of at most 6 iterations there are depends on the values."""
    (w,) = weights = _weights((64, 64))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda h: tf.reduce_max(h) > 0.1, lambda h: [tf.tanh(h @ w)], [x], maximum_iterations=6)[
                0
            ]
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def nested() -> Made:
    """A loop in a loop: what the inner one saves is saved by the outer one."""
    (w,) = weights = _weights((64, 64))

    def rows(h: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h], maximum_iterations=3)[1]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, rows(h)), [0, x], maximum_iterations=4)
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def overwritten() -> Made:
    """Each iteration replaces a value that it does not read."""
    (w,) = weights = _weights((64, 64))

    def step(x: Any) -> Any:
        h = tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(tf.tanh(x @ w) @ w)), [0, x])[1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ w + tf.stop_gradient(h)))
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def slopes() -> Made:
    """Gradients of gradients of a loop in a loop: backward loops have backward loops."""
    (w,) = weights = _weights((64, 64))

    def rows(h: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, h], maximum_iterations=3)[1]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                _, h = tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, rows(h)), [0, x], maximum_iterations=4)
                loss = tf.reduce_sum(h * h)
            slope = inner.gradient(loss, x)
            loss += tf.reduce_sum(slope * slope)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def slopes_of_branches() -> Made:
    """Gradients of gradients of a loop with a choice in it, which saves optionals, and of most branches nothing."""
    v, w = weights = _weights((64, 64), (64, 64))

    def layer(i: Any, h: Any) -> Any:
        return tf.switch_case(i % 3, [lambda: tf.tanh(h @ v), lambda: tf.sigmoid(h @ w) * h, lambda: h * h])

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                _, h = tf.while_loop(
                    lambda i, h: i < 6, lambda i, h: (i + 1, layer(i, h)), [0, x], maximum_iterations=6
                )
                loss = tf.reduce_sum(h * h)
            slope = inner.gradient(loss, x)
            loss = 0.001 * loss + tf.reduce_mean(slope * slope)
        return _descend(tape, loss, weights)

    return weights, step, [_data(512, 64)]


def branches() -> Made:
    """Conditionals in a loop: what their branches save is in lists of optionals."""
    (w,) = weights = _weights((64, 64))

    def layer(i: Any, h: Any) -> Any:
        return tf.cond(i % 2 == 0, lambda: tf.tanh(h @ w), lambda: tf.nn.relu(h @ w))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            _, h = tf.while_loop(lambda i, h: i < 8, lambda i, h: (i + 1, layer(i, h)), [0, x], maximum_iterations=8)
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def scan() -> Made:
    u, w = weights = _weights((64, 64), (64, 64))

    def step(xs: Any) -> Any:
        with tf.GradientTape() as tape:
            hs = tf.scan(lambda h, x: tf.tanh(h @ w + x @ u), xs, initializer=tf.zeros([256, 64]))
            loss = tf.reduce_mean(hs * hs)
        return _descend(tape, loss, weights)

    return weights, step, [_data(12, 256, 64)]


def map_fn() -> Made:
    (w,) = weights = _weights((64, 64))

    def step(xs: Any) -> Any:
        with tf.GradientTape() as tape:
            hs = tf.map_fn(lambda x: tf.nn.relu(tf.tanh(x @ w) @ w), xs)
            loss = tf.reduce_mean(hs * hs)
        return _descend(tape, loss, weights)

    return weights, step, [_data(12, 256, 64)]


def gradients_of_examples() -> Made:
    """Each example's own, clipped: `tf.vectorized_map` runs the gradients of convolutions in a loop, which is given the
    filters' shape.
    """
    filters, dense = weights = _weights((5, 5, 1, 8), (1152, 10))

    def step(x: Any) -> Any:
        def gradients(image: Any) -> Any:
            with tf.GradientTape() as tape:
                h = tf.nn.relu(tf.nn.conv2d(image[None], filters, 1, "VALID"))
                loss = tf.reduce_sum(tf.square(tf.reshape(h, [1, -1]) @ dense))
            return loss, tape.gradient(loss, weights)

        losses, made = tf.vectorized_map(gradients, x)
        for weight, each in zip(weights, made, strict=True):
            weight.assign_sub(0.01 * tf.reduce_mean(tf.clip_by_norm(each, 1.0, range(1, len(each.shape))), 0))
        return tf.reduce_sum(losses)

    return weights, step, [_data(32, 16, 16, 1)]


def ctc() -> Made:
    """TensorFlow's own loss scans with functions of TensorFlow 1, which a node calls by their name."""
    weights = _weights((3, 40, 128), (128, 30))
    labels = tf.random.stateless_uniform([16, 20], seed=(3, 4), minval=1, maxval=30, dtype=tf.int32)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.nn.relu(tf.nn.conv1d(x, weights[0], 1, "SAME")) @ weights[1]
            label_length, logit_length = tf.fill([16], 20), tf.fill([16], 100)
            loss = tf.reduce_mean(
                tf.nn.ctc_loss(labels, tf.transpose(logits, [1, 0, 2]), label_length, logit_length, blank_index=0)
            )
        return _descend(tape, loss, weights)

    return weights, step, [_data(16, 100, 40)]


def called() -> Made:
    """A loop and a conditional inside of functions that the step calls."""
    w, v = weights = _weights((64, 64), (64, 64))

    @tf.function
    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, h: i < 6, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=6)[1]

    @tf.function
    def either(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: tf.nn.relu(tf.tanh(x @ v)), lambda: x * 0.5)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = either(looped(x))
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def _residual(x: Any, weights: list[Any]) -> Any:
    for w in weights:
        x = tf.tanh(x @ w) + x
    return x


def masked_loss() -> Made:
    """A loss of the rows that a mask takes."""
    weights = _weights(*[(64, 64)] * 6)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = _residual(x, weights)
            rows = tf.boolean_mask(h, x[:, 0] > 0.3)
            loss = tf.reduce_mean(rows * rows)
        return _descend(tape, loss, weights)

    return weights, step, [_data(2048, 64)]


def hard_examples() -> Made:
    """A loss of the rows that are worse than the mean, and of the distinct groups that they are in."""
    weights = _weights(*[(64, 64)] * 6)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = _residual(x, weights)
            error = tf.reduce_mean((h - x) ** 2, 1)
            hard = tf.where(error > tf.reduce_mean(error))[:, 0]
            groups, _ = tf.unique(hard // 4)
            loss = tf.reduce_mean(tf.gather(error, hard)) + tf.reduce_mean(tf.gather(h, groups) ** 2)
        return _descend(tape, loss, weights)

    return weights, step, [_data(2048, 64)]


def cond() -> Made:
    """Conditionals in the forward pass, and so in the backward pass; the larger branch is taken."""
    weights = _weights(*[(64, 64)] * 6)

    def layer(i: int, h: Any) -> Any:
        w = weights[i]
        if i % 2 == 0:
            return tf.tanh(h @ w)
        return tf.cond(tf.reduce_sum(h) > -1e9, lambda: tf.nn.relu(tf.tanh(h @ w)), lambda: h * 0.5)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in range(len(weights)):
                h = layer(i, h)
            loss = tf.reduce_mean(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(2000, 64)]


def skipped() -> Made:
    """Layers that are skipped by chance: a branch hands on what it is given, which has no buffer of its own then."""
    weights = _weights(*[(64, 64)] * 6)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i, w in enumerate(weights):
                kept = tf.reduce_sum(h) > (-1e9 if i % 3 else 1e9)
                h = tf.sin(tf.cond(kept, lambda h=h, w=w: h + tf.nn.elu(h @ w), lambda h=h: h))
            loss = tf.reduce_mean(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(2000, 64)]


def conditional_update() -> Made:
    """Updates, with momentum, in a conditional: variables are assigned in its body."""
    weights = _weights(*[(128, 128)] * 6)
    momenta = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = tf.nn.relu(tf.tanh(h @ w))
            loss = tf.reduce_mean(h * h)
        gradients = tape.gradient(loss, weights)

        def update() -> Any:
            for w, m, g in zip(weights, momenta, gradients, strict=True):
                m.assign(0.9 * m + g)
                w.assign_sub(0.01 * m)
            return tf.constant(True)

        tf.cond(tf.math.is_finite(loss), update, lambda: tf.constant(False))
        return loss

    return [*weights, *momenta], step, [_data(1000, 128)]


def _keras(model: Any, optimizer: Any, x: Any, loss_of: Callable[[Any], Any] = lambda loss: loss) -> Made:
    optimizer.build(model.trainable_variables)
    measure = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = measure(y, model(x, training=True))
            scaled = loss_of(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    y = tf.random.stateless_uniform([x.shape[0]], seed=(3, 4), maxval=10, dtype=tf.int32)
    return [*model.variables, *optimizer.variables], step, [x, y]


def _recurrent(kind: str) -> Made:
    layers = tf.keras.layers
    inputs = tf.keras.Input((12, 32))
    h = getattr(layers, kind)(48, return_sequences=True)(inputs)
    model = tf.keras.Model(inputs, layers.Dense(10)(getattr(layers, kind)(48)(h)))
    return _keras(model, tf.keras.optimizers.Adam(1e-3), _data(32, 12, 32))


def lstm() -> Made:
    return _recurrent("LSTM")


def gru() -> Made:
    return _recurrent("GRU")


def attention() -> Made:
    """A decoder that adds its state to all keys in each iteration."""
    w, b, v = weights = _weights((64, 64), (64,), (64,))

    def body(i: Any, h: Any, keys: Any) -> tuple[Any, ...]:
        scores = tf.reduce_sum(v * tf.tanh(keys + (h @ w + b)[:, None]), -1)
        return i + 1, tf.tanh(h + tf.reduce_sum(tf.nn.softmax(scores)[:, :, None] * keys, 1)), keys

    def step(keys: Any) -> Any:
        with tf.GradientTape() as tape:
            first = (0, keys[:, 0], keys)
            h = tf.while_loop(lambda i, *_: i < 20, body, first, maximum_iterations=20)[1]
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(16, 50, 64)]


def bidirectional() -> Made:
    """Masks, dropout in the recurrence, and a layer that goes backwards."""
    layers = tf.keras.layers
    inputs = tf.keras.Input((12,), dtype="int32")
    h = layers.Embedding(50, 32, mask_zero=True)(inputs)
    h = layers.Bidirectional(layers.LSTM(48, return_sequences=True, recurrent_dropout=0.2, seed=1))(h)
    model = tf.keras.Model(inputs, layers.Dense(10)(layers.Bidirectional(layers.GRU(32))(h)))
    words = tf.random.stateless_uniform([64, 12], seed=(1, 2), maxval=50, dtype=tf.int32)
    return _keras(model, tf.keras.optimizers.Adam(1e-3), words)


def _stack_loss(h: Any, weights: list[Any]) -> Any:
    for w in weights:
        h = tf.nn.relu(tf.tanh(h @ w))
    return tf.reduce_mean(h * h)


def _summed(weights: list[Any], loss_of: Callable[[Any], Any], x: Any) -> Made:
    """Gradients are summed over micro-batches: a forward and a backward pass in each iteration."""
    sums = [tf.Variable(tf.zeros_like(w)) for w in weights]

    def step(x: Any) -> Any:
        total = tf.constant(0.0)
        for i in tf.range(x.shape[0]):
            with tf.GradientTape() as tape:
                loss = loss_of(x[i])
            for s, g in zip(sums, tape.gradient(loss, weights), strict=True):
                s.assign_add(g)
            total += loss
        for w, s in zip(weights, sums, strict=True):
            w.assign_sub(0.01 * s)
            s.assign(tf.zeros_like(s))
        return total

    return [*weights, *sums], step, [x]


def micro_batches() -> Made:
    """A stack of dense layers, whose maps wait."""
    weights = _weights(*[(64, 64)] * 6)
    return _summed(weights, lambda x: _stack_loss(x, weights), _data(4, 1000, 64))


def pools_in_micro_batches() -> Made:
    """A net whose maps wait for their signs and for where their maxima lie."""
    weights = _weights((8, 32), (32, 32), (32, 32))

    def loss_of(h: Any) -> Any:
        for w in weights:
            h = tf.nn.max_pool2d(tf.nn.relu(tf.tensordot(h, w, 1)), 2, 2, "SAME")
        return tf.reduce_mean(h * h)

    return _summed(weights, loss_of, _data(3, 8, 32, 32, 8))


def dropout_in_loop() -> Made:
    """What the loop saves of its masks and of the last map is read for predicates alone."""
    weights = _weights((64, 64), (64, 64))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for i in tf.range(8):
                y = tf.nn.experimental.stateless_dropout(tf.nn.relu(h @ weights[0]), 0.3, seed=tf.stack([i, 3]))
                h += tf.nn.relu(y @ weights[1])
            loss = tf.reduce_mean(h * h)
        return _descend(tape, loss, weights)

    return weights, step, [_data(1000, 64)]


def recurrent_micro_batches() -> Made:
    """As `micro_batches`, of a net that is a loop itself."""
    (w,) = weights = _weights((64, 64))
    total = tf.Variable(tf.zeros_like(w))

    def step(x: Any) -> Any:
        total.assign(tf.zeros_like(w))
        for i in tf.range(3):
            with tf.GradientTape() as tape:
                _, h = tf.while_loop(
                    lambda t, h: t < 8, lambda t, h: (t + 1, tf.tanh(h @ w)), [0, x[i]], maximum_iterations=8
                )
                loss = tf.reduce_sum(h * h)
            total.assign_add(tape.gradient(loss, w))
        w.assign_sub(0.01 * total)
        return tf.reduce_sum(total)

    return [*weights, total], step, [_data(3, 1000, 64)]


def steps_in_loop() -> Made:
    """Several steps in a loop, each of two micro-batches in a loop of its own, with gradients in loop variables."""
    weights = _weights(*[(64, 64)] * 5)
    loop = functools.partial(tf.while_loop, parallel_iterations=1)  # else who draws first is up to the executor

    def micro_step(i: Any, sums: Any, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _stack_loss(tf.nn.dropout(x[i], 0.1, seed=3), weights)
        return i + 1, [s + g for s, g in zip(sums, tape.gradient(loss, weights), strict=True)], x

    def one_step(k: Any, x: Any) -> Any:
        zeros = [tf.zeros(w.shape) for w in weights]
        sums = loop(lambda i, *_: i < 2, micro_step, [0, zeros, x], maximum_iterations=2)[1]
        for w, s in zip(weights, sums, strict=True):
            w.assign_sub(0.01 * s)
        return k + 1, x

    def step(x: Any) -> Any:
        loop(lambda k, _: k < 3, one_step, [0, x], maximum_iterations=3)
        return _stack_loss(x[0], weights)

    return weights, step, [_data(2, 1000, 64)]


def training_branch() -> Made:
    """The larger branch of a conditional holds most of the step."""
    weights = _weights(*[(64, 64)] * 6)

    def train_on(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = _stack_loss(x, weights)
        return _descend(tape, loss, weights)

    def step(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > -1e9, lambda: train_on(x), lambda: tf.reduce_mean(x))

    return weights, step, [_data(1000, 64)]


def loss_scale() -> Made:
    layers = tf.keras.layers
    stack = [layers.Input((128,)), *(layers.Dense(128, activation="relu") for _ in range(6)), layers.Dense(10)]
    optimizer = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.Adam(1e-3))
    return _keras(tf.keras.Sequential(stack), optimizer, _data(512, 128), optimizer.scale_loss)


PROGRAMS: dict[str, Callable[[], Made]] = {
    made.__name__: made
    for made in (
        while_loop,
        until_small,
        nested,
        overwritten,
        slopes,
        slopes_of_branches,
        branches,
        scan,
        map_fn,
        gradients_of_examples,
        ctc,
        called,
        masked_loss,
        hard_examples,
        cond,
        skipped,
        conditional_update,
        lstm,
        gru,
        bidirectional,
        attention,
        loss_scale,
        micro_batches,
        pools_in_micro_batches,
        dropout_in_loop,
        recurrent_micro_batches,
        steps_in_loop,
        training_branch,
    )
}


class _Holder:
    def __init__(self, variables: list[Any]):
        self.variables = variables


def main(name: str, limit: str, tactics: Sequence[str] | None = None) -> dict[str, Any]:
    import tfswap
    from tfswap.exporters.function import grappler_off

    settle()
    tf.keras.utils.set_random_seed(0)
    variables, step, arguments = PROGRAMS[name]()
    holder = _Holder(variables)
    if limit == "unoptimised":
        with grappler_off():
            return train(holder, tf.function(step), arguments)
    options = {} if tactics is None else {"tactics": tuple(tactics)}
    if limit == "floor":
        try:
            tfswap.optimize(tf.function(step), memory_limit=1, **options)(*arguments)
        except tfswap.InfeasibleMemoryLimit as error:
            return {"floor": error.floor_bytes}
    optimized = tfswap.optimize(
        tf.function(step), memory_limit=limit if "%" in limit else int(limit), on_exceeded="raise", **options
    )
    result = train(holder, optimized, arguments)
    plan = optimized.plan()
    unmodelled = optimized.report().unmodelled
    return {
        **result,
        "limit": plan.limit_bytes,
        "planned": plan.planned_peak_bytes,
        "bounds": len(unmodelled),
        "accumulators": len(plan.accumulators),
        "prefetched": len(plan.prefetched),
        "recomputed": len(plan.recomputed),
        "encoded": len(plan.encoded),
        "inside": {i.body: [len(i.evictions), len(i.order) - len(set(i.order))] for i in plan.inside},
        "host_bytes": plan.host_bytes,
    }


def _prefetching() -> Any:
    """Lets what loops save be prefetched wherever it is swapped, whether it would be waited for or not."""
    from tfswap.compiler.alternatives import Alternatives

    stages = Alternatives.stages

    def ahead(alternatives: Alternatives, smallest_bytes: int) -> list[Any]:
        return [stage._replace(prefetched=stage.accumulators) for stage in stages(alternatives, smallest_bytes)]

    return mock.patch.object(Alternatives, "stages", ahead)


def prefetched(name: str, limit: str) -> dict[str, Any]:
    """As `main`, with all that loops save prefetched."""
    with _prefetching():
        return main(name, limit, ("swap",))


def any_number_of_iterations() -> dict[str, Any]:
    """A step whose argument says how many of at most 6 iterations there are, with what its loop saves prefetched."""
    import tfswap

    settle()
    (w,) = weights = _weights((64, 64))

    def step(x: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, h: i < n, lambda i, h: (i + 1, tf.tanh(h @ w)), [0, x], maximum_iterations=6)[1]
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    x, first, numbers = _data(1000, 64), w.numpy().copy(), (6, 0, 1, 2, 6)
    with _prefetching():
        optimized = tfswap.optimize(tf.function(step), memory_limit="80%", tactics=("swap",), on_exceeded="raise")
        losses, peaks = [], []
        for n in numbers:
            tf.config.experimental.reset_memory_stats("CPU:0")
            losses.append(float(optimized(x, tf.constant(n))))
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    made = w.numpy().copy()
    w.assign(first)
    plain = [float(tf.function(step)(x, tf.constant(n))) for n in numbers]
    return {
        "same": losses == plain and bool((w.numpy() == made).all()),
        "peaks": peaks,
        "planned": optimized.plan().planned_peak_bytes,
        "prefetched": len(optimized.plan().prefetched),
    }


def every_sequence(limit: str) -> dict[str, Any]:
    """A loop whose input decides the branch of each iteration, through all sequences of four."""
    import tfswap

    settle()
    (w,) = weights = _weights((16, 16))
    branches: list[Callable[[Any], Any]] = [
        lambda h: tf.tanh(tf.stack([h, h, h]))[0] @ w,
        lambda h: tf.tanh(h @ w),
    ]

    def step(x: Any, chosen: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.nn.relu(x @ w)
            for i in tf.range(4):
                h = tf.switch_case(chosen[i], [functools.partial(branch, h) for branch in branches])
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
    x = _data(1000, 16)
    sequences = [tf.constant(sequence) for sequence in itertools.product(range(2), repeat=4)]
    optimized(x, sequences[0])
    peaks: list[int] = []
    for sequence in sequences:
        tf.config.experimental.reset_memory_stats("CPU:0")
        optimized(x, sequence)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    return {"peak": max(peaks), "planned": optimized.plan().planned_peak_bytes, "plans": optimized.plans}


def any_end(share: float) -> dict[str, Any]:
    """A loop that saves for its gradient, and ends after none to all of four iterations, as its argument says.

    Args:
        share: of the step's floor, that is the limit.
    """
    import tfswap

    settle()
    (w,) = weights = _weights((16, 16))
    x = _data(600, 16)

    def body(i: Any, h: Any) -> Any:
        return i + 1, tf.tanh(tf.concat([tf.sigmoid(h[:150] @ w), h[150:]], 0))

    def step(x: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, h: i < n, body, [0, tf.nn.relu(x @ w)], maximum_iterations=4)[1]
            h = tf.nn.relu(tf.reshape(tf.tanh(tf.tile(h, [1, 2])), [-1, 16]) @ w)
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(step), memory_limit=1)(x, tf.constant(2))
    optimized = tfswap.optimize(tf.function(step), memory_limit=int(share * refused.value.floor_bytes))
    ends = [tf.constant(n) for n in (0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0)]
    optimized(x, ends[0])
    peaks: list[int] = []
    for n in ends:
        tf.config.experimental.reset_memory_stats("CPU:0")
        optimized(x, n)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
    plan = optimized.plan()
    return {
        "peak": max(peaks),
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "plans": optimized.plans,
    }


def rare_branch_and_early_end(share: float) -> dict[str, Any]:
    """A branch that one of a hundred iterations takes, and a loop with as many iterations as another one has left.

    Args:
        share: of the step's floor, that is the limit.
    """
    import tfswap

    settle()
    (w,) = weights = _weights((64, 64))

    def heavy(h: Any) -> Any:
        made = [tf.tanh(h * float(k)) for k in range(2, 8)]
        return tf.add_n([*made, *(tf.sigmoid(t @ w) for t in made)])

    def step(x: Any, least: Any) -> Any:
        h = x
        for i in tf.range(100):
            h = tf.cond(tf.equal(i, 50), lambda: heavy(h), lambda: tf.tanh(h))  # noqa: B023 - called immediately
        n, h = tf.while_loop(
            lambda _, h: tf.reduce_sum(h) > least, lambda n, h: (n + 1, tf.tanh(h)), [0, h], maximum_iterations=8
        )
        h = tf.while_loop(lambda i, _: i < 8 - n, lambda i, h: (i + 1, heavy(h)), [0, h])[1]
        h = tf.stop_gradient(h)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(h @ w))
        return _descend(tape, loss, weights)

    x, least = _data(1024, 64), tf.constant(1e9)
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(step), memory_limit=1)(x, least)
    optimized = tfswap.optimize(tf.function(step), memory_limit=int(share * refused.value.floor_bytes))
    optimized(x, least)
    tf.config.experimental.reset_memory_stats("CPU:0")
    optimized(x, least)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"peak": peak, "limit": optimized.plan().limit_bytes}


def any_course(share: float) -> dict[str, Any]:
    """Loops with no bound, one in the other, and a conditional in them, whose inputs decide how often and which.

    Args:
        share: of the step's floor, that is the limit.
    """
    import tfswap
    from tfswap.exporters.function import grappler_off

    settle()
    w, u = weights = _weights((64, 64), (64, 112))

    def converge(x: Any, h: Any, tolerance: Any) -> Any:
        def damped(h: Any) -> Any:
            return 0.3 * h + 0.7 * tf.tanh(tf.nn.relu(h @ u) @ tf.transpose(u) + x)

        def refine(h: Any, change: Any) -> tuple[Any, Any]:
            new = tf.cond(change > 0.3, lambda: damped(h), lambda: tf.tanh(h @ w + x))
            return new, tf.reduce_mean(tf.abs(new - h))

        return tf.while_loop(lambda h, change: change > tolerance, refine, [h, 1.0])[0]

    def step(x: Any, inner: Any, outer: Any) -> Any:
        def refine(h: Any, change: Any) -> tuple[Any, Any]:
            new = 0.5 * (converge(x, h, inner) + converge(x, 0.9 * h, inner))
            return new, tf.reduce_mean(tf.abs(new - h))

        h = tf.stop_gradient(tf.while_loop(lambda h, change: change > outer, refine, [x, 1.0])[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.relu(tf.tanh(h @ w + x) @ u)))
        return _descend(tape, loss, weights)

    first = [weight.numpy() for weight in weights]
    tolerances = ((2.0, 2.0), (2.0, 0.1), (0.1, 2.0), (0.5, 0.2), (1e-3, 1e-2), (1e-4, 1e-4))
    calls = [(s * _data(1000, 64), tf.constant(i), tf.constant(o)) for i, o in tolerances for s in (0.1, 3.0)]

    def digests(function: Any) -> tuple[list[bytes], list[int]]:
        for weight, value in zip(weights, first, strict=True):
            weight.assign(value)
        found: list[bytes] = []
        peaks: list[int] = []
        for call in calls:
            tf.config.experimental.reset_memory_stats("CPU:0")
            found.append(function(*call).numpy().tobytes())
            peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])
        return [*found, *(weight.numpy().tobytes() for weight in weights)], peaks

    with grappler_off():
        expected, _ = digests(tf.function(step))
    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
        tfswap.optimize(tf.function(step), memory_limit=1)(*calls[0])
    limit = int(share * refused.value.floor_bytes)
    optimized = tfswap.optimize(tf.function(step), memory_limit=limit, on_exceeded="raise")
    found, peaks = digests(optimized)
    plan = optimized.plan()
    return {
        "same": found == expected,
        "peaks": peaks,
        "planned": plan.planned_peak_bytes,
        "limit": plan.limit_bytes,
        "plans": optimized.plans,
    }


def _fail_thrice(optimized: Any, good: tuple[Any, ...], bad: tuple[Any, ...]) -> dict[str, int]:
    """Runs a step with arguments that it fails for between others; how often it failed, and what is left of that."""
    import tfswap.ops

    for _ in range(2):
        optimized(*good)
    used = tf.config.experimental.get_memory_info("CPU:0")["current"]
    failed = 0
    for _ in range(3):
        try:
            optimized(*bad)
        except tf.errors.InvalidArgumentError:
            failed += 1
    optimized(*good)
    return {
        "failed": failed,
        "host_in_use": tfswap.ops.stats().pool_in_use_bytes,
        "grown": tf.config.experimental.get_memory_info("CPU:0")["current"] - used,
    }


def fail_inside() -> dict[str, int]:
    """A step that fails in the fifth iteration of its loop, three times, and runs well before and after."""
    import tfswap

    settle()
    (w,) = weights = _weights((64, 64))

    def body(i: Any, h: Any, bad: Any) -> Any:
        return i + 1, tf.debugging.check_numerics(tf.tanh(h @ w) / tf.cast(bad - i, tf.float32), "bad"), bad

    def step(x: Any, bad: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, *_: i < 8, body, [0, x, bad], maximum_iterations=8)[1]
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    optimized = tfswap.optimize(tf.function(step), memory_limit="60%", on_exceeded="raise")
    x, good, bad = _data(1000, 64), tf.constant(99), tf.constant(4)
    left = _fail_thrice(optimized, (x, good), (x, bad))
    return {"accumulators": len(optimized.plan().accumulators), **left}


def fail_going_back() -> dict[str, int]:
    """As `fail_inside`, in the backward loop, with an element on its way that nobody waits for any more."""
    import tfswap

    settle()
    (w,) = weights = _weights((64, 64))

    @tf.custom_gradient
    def scaled_back(h: Any, i: Any, bad: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return tf.debugging.check_numerics(upstream / tf.cast(bad - i, tf.float32), "bad"), None, None

        return tf.identity(h), gradient

    def step(x: Any, bad: Any) -> Any:
        def body(i: Any, h: Any) -> Any:
            return i + 1, scaled_back(tf.tanh(h @ w), i, bad)

        with tf.GradientTape() as tape:
            h = tf.while_loop(lambda i, _: i < 8, body, [0, x], maximum_iterations=8)[1]
            loss = tf.reduce_sum(h * h)
        return _descend(tape, loss, weights)

    x, good, bad = _data(1000, 64), tf.constant(99), tf.constant(4)
    with _prefetching():
        optimized = tfswap.optimize(tf.function(step), memory_limit="80%", tactics=("swap",), on_exceeded="raise")
        left = _fail_thrice(optimized, (x, good), (x, bad))
    return {"prefetched": len(optimized.plan().prefetched), **left}


def fail_in_micro_batch() -> dict[str, int]:
    """As `fail_inside`, of a step that moves tensors inside of its loop: the third of four micro-batches fails."""
    import tfswap

    settle()
    weights = _weights(*[(64, 64)] * 6)

    def step(x: Any, bad: Any) -> Any:
        for i in tf.range(4):
            with tf.GradientTape() as tape:
                loss = _stack_loss(x[i], weights)
            gradients = tape.gradient(loss, weights)
            tf.debugging.check_numerics(loss / tf.cast(bad - i, tf.float32), "bad")
            for w, g in zip(weights, gradients, strict=True):
                w.assign_sub(0.01 * g)

    optimized = tfswap.optimize(tf.function(step), memory_limit="40%", on_exceeded="raise")
    x, good, bad = _data(4, 1000, 64), tf.constant(99), tf.constant(2)
    left = _fail_thrice(optimized, (x, good), (x, bad))
    return {"moved": sum(len(i.evictions) for i in optimized.plan().inside), **left}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
