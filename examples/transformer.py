"""A small language model in a training loop of one's own: as it is, and with tfswap under a share of what that takes.

    python examples/transformer.py
    python examples/transformer.py --limit 35% --length 192

Attention with dropout, AdamW, gradients clipped by their global norm: nothing of it knows of tfswap but the one line
that decorates the step. Under a minute on two cores.
"""

from __future__ import annotations

from typing import Any

from side_by_side import side_by_side

TOKENS, WIDTH, HEADS, LAYERS, BATCH = 1000, 128, 4, 6, 16


def make_step(length: int) -> tuple[Any, tuple[Any, ...]]:
    """A training step, and a batch of text."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    places = layers.Embedding(length, WIDTH)(tf.range(length))
    h = layers.Embedding(TOKENS, WIDTH)(tokens) + places
    for _ in range(LAYERS):
        normal = layers.LayerNormalization()(h)
        attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        h = h + attention(normal, normal, use_causal_mask=True)
        inner = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(h))
        h = h + layers.Dropout(0.1)(layers.Dense(WIDTH)(inner))
    model = keras.Model(tokens, layers.Dense(TOKENS)(layers.LayerNormalization()(h)))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(text: Any) -> Any:
        with tf.GradientTape() as tape:
            made = model(text[:, :-1], training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(text[:, 1:], made))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    text = tf.random.stateless_uniform([BATCH, length + 1], seed=(1, 2), maxval=TOKENS, dtype=tf.int32)
    return step, (text,)


if __name__ == "__main__":
    raise SystemExit(side_by_side(__doc__, make_step, limit="45%", length=128))
