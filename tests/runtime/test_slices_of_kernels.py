"""Steps whose largest kernels run in slices of rows keep limits below what these kernels hold, with the same values."""

from __future__ import annotations

import hashlib

import pytest
from processes import TWO_THREADS, on_arena
from slow import slow
from step_peaks import measuring

import tfswap
from tfswap.exporters.function import memory_optimizer_off
from tfswap.ir.permits import SLICE, TACTICS

IMAGES, SIDE, CHANNELS = 12, 160, 16
MAP_BYTES = 4 * IMAGES * SIDE * SIDE * CHANNELS
SEQUENCES, LENGTH, WIDTH, WORDS = 8, 128, 128, 4000
LOGITS_BYTES = 4 * SEQUENCES * LENGTH * WORDS
HEADS, HEAD = 4, 32
SCORES_BYTES = 4 * SEQUENCES * HEADS * LENGTH * LENGTH
DEPTH = 24


def _normal(*shape):
    import tensorflow as tf

    return tf.random.stateless_normal(shape, seed=(1, len(shape)))


def _descend(tape, loss, variables):
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(1e-3 * gradient)
    return loss


def convolutions():
    """A step of three convolutions with batch statistics and pooling, its argument, and its variables."""
    import tensorflow as tf

    filters = [tf.Variable(0.1 * _normal(3, 3, read, CHANNELS)) for read in (3, CHANNELS, CHANNELS)]
    bias = tf.Variable(_normal(3, CHANNELS))

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for number, kernel in enumerate(filters):
                h = tf.nn.bias_add(tf.nn.conv2d(h, kernel, 1, "SAME"), bias[number])
                mean, variance = tf.nn.moments(h, [0, 1, 2])
                h = tf.nn.relu((h - mean) * tf.math.rsqrt(variance + 1e-3))
            pooled = tf.nn.max_pool2d(h, 2, 2, "VALID")
            loss = tf.reduce_mean(tf.reduce_sum(pooled * pooled, [1, 2, 3]))
        return _descend(tape, loss, [*filters, bias])

    return step, _normal(IMAGES, SIDE, SIDE, 3), [*filters, bias]


def words():
    """A step of a language model with many words and one dense layer, its argument, and its variables."""
    import tensorflow as tf

    table, weights, bias = (tf.Variable(_normal(*shape)) for shape in ((WORDS, WIDTH), (WIDTH, WORDS), (WORDS,)))

    def step(tokens):
        with tf.GradientTape() as tape:
            logits = tf.nn.bias_add(tf.tensordot(tf.gather(table, tokens), weights, 1), bias)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tokens, logits=logits))
        return _descend(tape, loss, [weights, bias])

    tokens = tf.reshape(tf.range(SEQUENCES * LENGTH) % WORDS, [SEQUENCES, LENGTH])
    return step, tokens, [weights, bias]


def attention():
    """A step of self-attention with several heads, its argument, and its variables."""
    import tensorflow as tf

    weights = [tf.Variable(0.1 * _normal(HEADS * HEAD, HEADS * HEAD)) for _ in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            split = [tf.reshape(tf.tensordot(x, w, 1), [SEQUENCES, LENGTH, HEADS, HEAD]) for w in weights]
            query, key, value = (tf.transpose(each, [0, 2, 1, 3]) for each in split)
            read = tf.nn.softmax(0.2 * tf.matmul(query, key, transpose_b=True)) @ value
            loss = tf.reduce_mean(tf.reduce_sum(read * read, [1, 2, 3]))
        return _descend(tape, loss, weights)

    return step, _normal(SEQUENCES, LENGTH, HEADS * HEAD), weights


def normalised():
    """A step of dense layers, each normalised over a sequence, its argument, and its variables."""
    import tensorflow as tf

    weights = [tf.Variable(0.1 * _normal(WIDTH, WIDTH)) for _ in range(4)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                inner = tf.tensordot(tf.nn.relu(h), weight, 1)
                mean, variance = tf.nn.moments(inner, [1, 2], keepdims=True)
                h += (inner - mean) * tf.math.rsqrt(variance + 1e-5)
            loss = tf.reduce_mean(h * h)
        return _descend(tape, loss, weights)

    return step, _normal(16, 2 * LENGTH, WIDTH), weights


def volume():
    """A step of convolutions of one volume, with pooling and a concatenation, its argument, and its variables."""
    import tensorflow as tf

    sizes = ((3, 1, 8), (3, 8, 8), (3, 16, 8), (1, 8, 2))
    filters = [tf.Variable(0.2 * _normal(side, side, side, read, made)) for side, read, made in sizes]
    turned = tf.Variable(0.2 * _normal(2, 2, 2, 8, 8))

    def conv(h, kernel):
        return tf.nn.conv3d(h, kernel, [1] * 5, "SAME")

    def step(x):
        with tf.GradientTape() as tape:
            h = tf.nn.relu(conv(tf.nn.relu(conv(x, filters[0])), filters[1]))
            low = tf.nn.max_pool3d(h, 2, 2, "VALID")
            up = tf.nn.conv3d_transpose(low, turned, h.shape, [1, 2, 2, 2, 1], "SAME")
            h = tf.nn.relu(conv(tf.concat([up, h], -1), filters[2]))
            loss = tf.reduce_mean(tf.square(conv(h, filters[3])))
        return _descend(tape, loss, [*filters, turned])

    return step, _normal(1, DEPTH, DEPTH, DEPTH, 1), [*filters, turned]


def trained(make, limit=None, tactics=(*TACTICS, SLICE), steps=3, values="bits"):
    """Losses and final values; under a limit also peaks and the plan."""
    import tensorflow as tf

    step, argument, variables = make()
    step = tf.function(step)
    if limit is not None:
        step = tfswap.optimize(step, memory_limit=limit, tactics=tactics, values=values)
    losses, peaks = [], []
    for _ in range(steps):
        with memory_optimizer_off() if limit is None else measuring(peaks):
            losses.append(float(step(argument)))
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in variables)).hexdigest()
    if limit is None:
        return {"result": [losses, digest]}
    plan = step.plan()
    return {
        "result": [losses, digest],
        "peaks": peaks,
        "planned": plan.planned_peak_bytes,
        "sliced": [each.rows for each in plan.sliced],
        "floor": step.report().floor_bytes,
        "seconds": plan.seconds,
        "report": str(step.report()),
    }


@pytest.mark.parametrize(
    ("make", "largest_bytes"), [(words, LOGITS_BYTES), *slow((attention, SCORES_BYTES), (convolutions, MAP_BYTES))]
)
def test_steps_train_in_less_than_two_of_their_largest_tensors(make, largest_bytes: int) -> None:
    plain = on_arena(lambda: trained(make), **TWO_THREADS)
    roomy = on_arena(lambda: trained(make, "100%"), **TWO_THREADS)
    whole = on_arena(lambda: trained(make, 10 * largest_bytes, TACTICS), **TWO_THREADS)
    limit = int(0.8 * whole["floor"])
    sliced = on_arena(lambda: trained(make, limit), **TWO_THREADS)
    for found in (roomy, whole, sliced):
        assert found["result"] == plain["result"], found
    assert roomy["sliced"] == whole["sliced"] == []
    assert sliced["sliced"]
    assert "kernels in" in sliced["report"] and "slices of rows" in sliced["report"]
    assert "in slices" not in whole["report"]
    assert sliced["planned"] <= limit
    assert set(sliced["peaks"]) == {sliced["planned"]}
    assert sliced["floor"] < 0.7 * whole["floor"]


def test_rows_of_one_volume_train_in_a_part_of_a_gradients_columns() -> None:
    plain = on_arena(lambda: trained(volume), **TWO_THREADS)
    columns_bytes = 4 * 27 * 16 * DEPTH**3
    sliced = on_arena(lambda: trained(volume, columns_bytes // 4, values="close"), **TWO_THREADS)
    assert sliced["sliced"] and "kernels in slices add in another order" in sliced["report"]
    assert set(sliced["peaks"]) == {sliced["planned"]} and sliced["planned"] <= columns_bytes // 4
    assert sliced["result"][0] == pytest.approx(plain["result"][0], rel=1e-5)


@pytest.mark.parametrize("onednn", ["0", *slow("1")])
def test_a_step_whose_sequences_are_independent_runs_in_micro_batches(onednn: str) -> None:
    environment = TWO_THREADS | {"TF_ENABLE_ONEDNN_OPTS": onednn}
    plain = on_arena(lambda: trained(normalised), **environment)
    whole = on_arena(lambda: trained(normalised, "28%", TACTICS), **environment)
    sliced = on_arena(lambda: trained(normalised, "28%", values="close"), **environment)
    assert sliced["sliced"] and sliced["seconds"] < whole["seconds"]
    assert set(sliced["peaks"]) == {sliced["planned"]}
    assert sliced["result"][0] == pytest.approx(plain["result"][0], rel=1e-5)
