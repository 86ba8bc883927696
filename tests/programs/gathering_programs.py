"""Training programs whose replicas gather tensors, of different sizes in a last batch, for
test_programs_on_several_gpus.py. The form is that of mirrored_programs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from gpu_compare import draws
from mirrored_programs import UNEQUAL, Program, distributed, keras_loop, without_grappler
from replicated_models import tokens, transformer
from several_gpus import descend, layers, strategy


def sparse_gradients() -> Program:
    """A transformer by AdamW, whose embedding has sparse gradients. Replicas gather these in a conditional, the last
    time of 4 and of 3 sequences.
    """
    without_grappler()
    return keras_loop(transformer, lambda: tf.keras.optimizers.AdamW(1e-3, clipnorm=1.0), tokens(55), 16, epochs=2)


def contrastive() -> Program:
    """Each replica compares its examples with those of all: features are gathered, and gradients go through that. In
    the last batch replicas have 100 and 99 examples.
    """
    replicas = strategy()
    with replicas.scope():
        variables = layers(8)

    def features(h):
        for variable in variables:
            h = tf.nn.gelu(h @ variable) + tf.sin(h)
        return tf.math.l2_normalize(h, 1)

    def replica_step(x):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            own, other = features(x), features(x + 0.1)
            logits = 10.0 * tf.matmul(own, context.all_gather(other, axis=0), transpose_b=True)
            before = context.all_gather(tf.shape(x)[:1], axis=0)[: context.replica_id_in_sync_group]
            labels = tf.range(tf.shape(x)[0]) + tf.reduce_sum(before)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / 512.0
        descend(tape, loss, variables)
        return losses

    def step(x):
        losses = replicas.run(replica_step, args=(x,))
        return tf.reduce_sum(replicas.gather(losses, axis=0))

    return Program(variables, step, distributed(replicas, draws(1223, 64), 512, 2))


def wide_gradients() -> Program:
    """Few examples and large weights: the peak is where gradients are added up, each a third of it."""
    replicas = strategy()
    with replicas.scope():
        variables = [tf.Variable(0.05 * draws(256, 256, seed=i)) for i in range(3)]

    def replica_step(x):
        with tf.GradientTape() as tape:
            h = x
            for variable in variables:
                h = tf.tanh(h @ variable)
            loss = tf.reduce_sum(h * h) / 32.0
        descend(tape, loss, variables)
        return loss

    def step(x):
        return replicas.reduce("SUM", replicas.run(replica_step, args=(x,)), axis=None)

    return Program(variables, step, distributed(replicas, draws(64, 256), 32, 2))


PROGRAMS: dict[str, tuple[Callable[[], Program], Any]] = {
    make.__name__: (make, limits)
    for make, limits in (
        (sparse_gradients, UNEQUAL),
        (contrastive, UNEQUAL),
        (wide_gradients, "75%"),
    )
}
