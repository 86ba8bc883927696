"""Kinds of steps on several GPUs, for test_several_gpus.py: each gives what `several_gpus.compare` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gpu_compare import draws
from several_gpus import Made, gpus, layers, peaks_of, strategy, trained


def on(replica: int, values: Any) -> Any:
    with tf.device(gpus()[replica]):
        return tf.constant(values)


def rows(replica: int) -> Any:
    return on(replica, draws(1024, 64, seed=replica))


def dense(variables: Sequence[Any], x: Any) -> Any:
    for variable in variables:
        x = tf.nn.relu(tf.sin(x @ variable))
    return tf.reduce_mean(x * x)


def replicated(
    loss_of: Callable[..., Any],
    make_variables: Callable[[], Sequence[Any]],
    *given: Callable[[int], Any],
    make_optimizer: Callable[[], Any] | None = None,
    change: Callable[[Any], Any] = lambda gradients: gradients,
    replicas: Any = None,
) -> Made:
    """Replicas of one loss; gradients are added, changed, and applied by hand or by an optimizer."""
    replicas = replicas or strategy()
    with replicas.scope():
        variables = make_variables()
        optimizer = make_optimizer() if make_optimizer is not None else None
        if optimizer is not None:
            optimizer.build(variables)

    def replica_step(*inputs):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, *inputs)
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)]
        if optimizer is not None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss
        gradients = change(tf.distribute.get_replica_context().all_reduce("sum", gradients))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    def step(*inputs):
        return replicas.reduce("MEAN", replicas.run(replica_step, args=inputs), axis=None)

    def distributed(values: Callable[[int], Any]) -> Any:
        return replicas.experimental_distribute_values_from_function(
            lambda context: values(context.replica_id_in_sync_group)
        )

    return variables, step, [distributed(each) for each in given]


def adam() -> Made:
    return replicated(dense, lambda: layers(8), rows, make_optimizer=lambda: tf.keras.optimizers.Adam(0.01))


def clipped() -> Made:
    return replicated(dense, lambda: layers(8), rows, change=lambda g: tf.clip_by_global_norm(g, 0.1)[0])


def printing() -> Made:
    """Replicas with ops that have no GPU kernel; a strategy names a replica's GPU on all of its ops."""

    def loss_of(variables, x):
        h = tf.nn.relu(tf.sin(x @ variables[0]))
        tf.print("a replica:", tf.reduce_mean(h), tf.strings.as_string(h[0, :2]), output_stream="file:///dev/null")
        return dense(variables[1:], h)

    return replicated(loss_of, lambda: layers(8), rows)


def embedding() -> Made:
    def loss_of(variables, tokens, x):
        return dense(variables[1:], tf.gather(variables[0], tokens) + x)

    tokens = (np.arange(1024) * 7 % 500).astype("int64")
    return replicated(loss_of, lambda: [tf.Variable(draws(500, 64)), *layers(8)], lambda i: on(i, tokens), rows)


def convolutions() -> Made:
    def loss_of(variables, x):
        for variable in variables:
            x = tf.nn.relu(tf.nn.conv2d(x, variable, 1, "SAME"))
        return tf.reduce_mean(tf.nn.max_pool2d(x, 2, 2, "SAME") ** 2)

    kernels = [0.1 * draws(3, 3, 8, 8, seed=i) for i in range(6)]
    return replicated(loss_of, lambda: [*map(tf.Variable, kernels)], lambda i: on(i, draws(8, 32, 32, 8, seed=i)))


def recurrent() -> Made:
    def loss_of(variables, x):
        def body(i, state):
            return i + 1, tf.tanh(state @ variables[0] + x[i] @ variables[1])

        _, state = tf.while_loop(lambda i, _: i < 30, body, [0, tf.zeros([256, 64])], maximum_iterations=30)
        return tf.reduce_mean(state * state)

    return replicated(loss_of, lambda: layers(2), lambda i: on(i, draws(30, 256, 64, seed=i)))


def dropout() -> Made:
    def loss_of(variables, x):
        for i, variable in enumerate(variables):
            x = tf.nn.relu(x @ variable) * tf.random.stateless_uniform([1024, 64], seed=[i, 3])
        return tf.reduce_mean(x * x)

    return replicated(loss_of, lambda: layers(8), rows)


def half() -> Made:
    def loss_of(variables, x):
        x = tf.cast(x, tf.float16)
        for variable in variables:
            x = tf.nn.relu(x @ tf.cast(variable, tf.float16))
        return tf.reduce_mean(tf.cast(x, tf.float32) ** 2)

    return replicated(loss_of, lambda: layers(8), rows)


def labelled() -> Made:
    def loss_of(variables, x, labels):
        for variable in variables:
            x = tf.nn.relu(x @ variable)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x))

    return replicated(loss_of, lambda: layers(8), rows, lambda i: on(i, np.arange(1024, dtype="int32") % 64))


def nested() -> Made:
    variables, step, inputs = adam()
    function = tf.function(step)
    return variables, lambda *given: function(*given) + 1.0, inputs


def counted() -> Made:
    """With a variable that is added up when it is read, as metrics are."""
    replicas = strategy()
    sums = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with replicas.scope():
        total = tf.Variable(0.0, **sums)

    def loss_of(variables, x):
        loss = dense(variables, x)
        total.assign_add(loss)
        return loss

    return replicated(loss_of, lambda: layers(8), rows, replicas=replicas)


def scaled() -> Made:
    """With an optimizer that applies gradients where they are finite: collectives in a conditional on all devices."""
    optimizers = tf.keras.optimizers
    return replicated(
        dense,
        lambda: layers(8),
        rows,
        make_optimizer=lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=2),
    )


def branches() -> Made:
    """Conditionals on both devices, one in the other, whose results, arguments and effects are on either. The third
    step takes another branch.
    """
    first, second = gpus()[:2]
    with tf.device(first):
        variables = [tf.Variable(0.1 * draws(64, 64, seed=i)) for i in range(6)]
        x = tf.constant(draws(1024, 64))
    with tf.device(second):
        others = [tf.Variable(0.1 * draws(64, 64, seed=9 + i)) for i in range(6)]
        count = tf.Variable(0.0)

    def through(h, variable, device):
        with tf.device(device):
            return tf.nn.relu(tf.sin(h @ variable))

    def deep(h):
        with tf.device(second):
            count.assign_add(1.0)
        h = through(h, variables[4], first)
        here, there = through(h, variables[5], first), through(h, others[4], second)

        def inner():
            with tf.control_dependencies([through(there, others[5], second)]):
                return through(there, variables[3], first), tf.identity(there)

        with tf.device(first):
            return tf.cond(tf.reduce_max(here) > 0.1, inner, lambda: (tf.sin(here), through(here, others[3], second)))

    def shallow(h):
        return through(h, others[5], second), tf.sin(h)

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for i in range(3):
                h = through(through(h, variables[i], first), others[i], second)
            loss = tf.reduce_mean(h * h)
        ends = tf.cond(count < 2.0, lambda: deep(h), lambda: shallow(h))
        trained_here = [*variables[:3], *others[:3]]
        for variable, gradient in zip(trained_here, tape.gradient(loss, trained_here), strict=True):
            variable.assign_sub(gradient)
        with tf.device(first):
            return loss + tf.reduce_sum(ends[0]) * 1e-6 + tf.reduce_sum(ends[1]) * 1e-6 + 0.0 * count

    return [*variables, *others, count], step, [x]


def split_layers() -> Made:
    """Layers whose halves are on two devices."""
    first, second = gpus()[:2]
    with tf.device(first):
        variables = [tf.Variable(0.1 * draws(64, 128, seed=i)) for i in range(3)]
        outputs = [tf.Variable(0.1 * draws(256, 64, seed=20 + i)) for i in range(3)]
        x = tf.constant(draws(1024, 64))
    with tf.device(second):
        others = [tf.Variable(0.1 * draws(64, 128, seed=9 + i)) for i in range(3)]

    def loss_of(h):
        for left, right, output in zip(variables, others, outputs, strict=True):
            with tf.device(first):
                half_of_it = tf.nn.relu(h @ left)
            with tf.device(second):
                other_half = tf.nn.relu(h @ right)
            with tf.device(first):
                h = tf.tanh(tf.concat([half_of_it, other_half], 1) @ output)
        return tf.reduce_mean(h * h)

    return (
        [*variables, *others, *outputs],
        lambda x: trained([*variables, *others, *outputs], loss_of, x),
        [x],
    )


def feed_forward() -> Made:
    """Residual blocks with GELU and a normalization, one device after the other. TensorFlow runs their gradients on the
    first: Grappler regroups these.
    """
    devices, blocks = gpus(), []
    for i in range(6):
        with tf.device(devices[i * len(devices) // 6]):
            values = draws(64, 128, seed=i), draws(128, seed=9 + i), draws(128, 64, seed=20 + i)
            blocks.append([tf.Variable(0.1 * each) for each in values])
    with tf.device(devices[0]):
        x = tf.constant(draws(256, 64))

    def loss_of(h):
        for i, (widen, bias, narrow) in enumerate(blocks):
            with tf.device(devices[i * len(devices) // 6]):
                h += tf.nn.gelu(h @ widen + bias) @ narrow
                mean = tf.reduce_mean(h, -1, keepdims=True)
                variance = tf.reduce_mean(tf.math.squared_difference(h, mean), -1, keepdims=True)
                h = (h - mean) * tf.math.rsqrt(variance + 1e-5)
        with tf.device(devices[-1]):
            return tf.reduce_mean(h * h * h)

    variables = [variable for block in blocks for variable in block]
    return variables, lambda x: trained(variables, loss_of, x), [x]


def stacked() -> Made:
    """A recurrent net whose layers are on two devices, with gradients through the loop."""
    first, second = gpus()[:2]
    with tf.device(first):
        here, x = tf.Variable(0.1 * draws(64, 64)), tf.constant(draws(20, 256, 64))
    with tf.device(second):
        there = tf.Variable(0.1 * draws(64, 64, seed=1))

    def loss_of(x):
        def body(i, h, g):
            with tf.device(first):
                h = tf.tanh(h @ here + x[i])
            with tf.device(second):
                g = tf.tanh(g @ there + h)
            return i + 1, h, g

        zeros = tf.zeros([256, 64])
        _, _, state = tf.while_loop(lambda i, *_: i < 20, body, [0, zeros, zeros], maximum_iterations=20)
        with tf.device(second):
            return tf.reduce_mean(state * state)

    return [here, there], lambda x: trained([here, there], loss_of, x), [x]


def branching_loop() -> Made:
    """A loop with a conditional on both devices, through which gradients go. The branches save different tensors, of
    either device, and one saves more.
    """
    first, second = gpus()[:2]
    with tf.device(first):
        here, x = tf.Variable(0.1 * draws(64, 64)), tf.constant(draws(20, 256, 64))
    with tf.device(second):
        there = tf.Variable(0.1 * draws(64, 64, seed=1))

    def body(i, h, g):
        with tf.device(first):
            h = tf.tanh(h @ here + x[i])

        def through():
            with tf.device(second):
                made = tf.tanh(g @ there + h)
            with tf.device(first):
                return made, tf.sin(h @ here)

        def past():
            with tf.device(second):
                made = tf.sin(g @ there)
            with tf.device(first):
                return made, tf.cos(h)

        g, h = tf.cond(i % 3 > 0, past, through)
        return i + 1, h, g

    def loss_of(x):
        zeros = tf.zeros([256, 64])
        _, h, g = tf.while_loop(lambda i, *_: i < 20, body, [0, zeros, zeros], maximum_iterations=20)
        with tf.device(second):
            return tf.reduce_mean(g * g) + tf.reduce_mean(h * h)

    return [here, there], lambda x: trained([here, there], loss_of, x), [x]


def micro_batches() -> Made:
    """A loop around the replicas' step, with collectives in it."""
    replicas = strategy()
    with replicas.scope():
        variables = layers(4)

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = dense(variables, x)
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)]
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    def step(x):
        def body(i, total):
            losses = replicas.run(lambda x: replica_step(x[i]), args=(x,))
            return i + 1, total + replicas.reduce("MEAN", losses, axis=None)

        return tf.while_loop(lambda i, _: i < 20, body, [0, 0.0])[1]

    def given(context):
        number = context.replica_id_in_sync_group
        return on(number, draws(20, 256, 64, seed=number))

    return variables, step, [replicas.experimental_distribute_values_from_function(given)]


def undecided_loop() -> Made:
    """A loop on both devices and the host, whose number of iterations depends on a tensor of the second device."""
    first, second = gpus()[:2]
    with tf.device(first):
        here, x = [tf.Variable(0.2 * draws(64, 64, seed=i)) for i in range(4)], tf.constant(draws(1024, 64))
    with tf.device(second):
        there, norm = [tf.Variable(0.2 * draws(64, 64, seed=9 + i)) for i in range(4)], tf.Variable(0.0)
        zeros = tf.zeros([1024, 64])

    def through(h, variables):
        for variable in variables:
            h = tf.tanh(h @ variable)
        return h

    def goes_on(h, g):
        with tf.device(second):
            return tf.reduce_sum(g * g) < 3000.0

    def body(h, g):
        with tf.device(first):
            h = 1.3 * through(h, here) + x
        with tf.device(second):
            g = 1.2 * through(g, there) + h
            norm.assign_add(tf.reduce_sum(g))
        with tf.device("CPU:0"):
            tf.print("norm", norm)
            largest = tf.reduce_max(g)
        with tf.device(first):
            return h + largest, g

    def step(x):
        h, g = tf.while_loop(goes_on, body, [x, zeros])
        with tf.device(first):
            for variable in here:
                variable.assign_sub(1e-3 * variable)
            return tf.reduce_mean(h) + tf.reduce_mean(g)

    return [*here, *there, norm], step, [x]


def uneven(optimized: Callable[[Any], Any]) -> tuple[list[str], dict[str, int], Any]:
    """As `several_gpus.train`, of convolutions and batches with any number of images. In the last batch the second
    replica has none.
    """
    replicas = strategy()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def loss_of(variables, x, labels):
        for variable in variables:
            x = tf.nn.relu(tf.nn.conv2d(x, variable, 1, "SAME"))
        return loss(labels, tf.reduce_mean(x, [1, 2])) / 16

    kernels = [0.1 * draws(3, 3, 8, 8, seed=i) for i in range(6)]
    variables, python_function, _ = replicated(loss_of, lambda: [*map(tf.Variable, kernels)], replicas=replicas)
    data = tf.data.Dataset.from_tensor_slices((draws(33, 32, 32, 8), np.arange(33) % 8)).batch(16)
    batches = replicas.experimental_distribute_dataset(data)
    step = optimized(tf.function(python_function, input_signature=batches.element_spec))
    losses, peaks = peaks_of(lambda: [step(*batch).numpy().tobytes().hex() for batch in [*batches]])
    return [*losses, *(each.numpy().tobytes().hex() for v in variables for each in v.values)], peaks, step


KINDS: dict[str, tuple[Callable[[], Made], str]] = {
    each.__name__: (each, limit)
    for each, limit in (
        (adam, "65%"),
        (clipped, "65%"),
        (printing, "65%"),
        (embedding, "65%"),
        (convolutions, "65%"),
        (recurrent, "65%"),
        (dropout, "65%"),
        (half, "65%"),
        (labelled, "65%"),
        (nested, "65%"),
        (counted, "65%"),
        (scaled, "65%"),
        (branches, "100%"),
        (split_layers, "100%"),
        (feed_forward, "90%"),
        (stacked, "65%"),
        (micro_batches, "100%"),
        (undecided_loop, "100%"),
    )
}
