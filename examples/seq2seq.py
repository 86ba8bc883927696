"""An encoder and decoder with additive attention, in loops: as it is, and with tfswap under a share of what that takes.

    python examples/seq2seq.py
    python examples/seq2seq.py --limit 15% --length 200

The decoder adds its state to the keys of all letters for each letter that it writes: most of what the step keeps for
its gradients. tfswap finds that this can be recomputed in the backward loop, and swaps what else the loops keep.
Under a minute on two cores.
"""

from __future__ import annotations

from typing import Any

from side_by_side import side_by_side

LETTERS, WIDTH, BATCH = 32, 64, 32


def make_step(length: int) -> tuple[Any, tuple[Any, ...]]:
    """A training step that learns to write words backwards, and a batch of words."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    embed = layers.Embedding(LETTERS, WIDTH)
    encode = layers.GRU(WIDTH, return_sequences=True)
    cell, ask, answer = layers.GRUCell(WIDTH), layers.Dense(WIDTH), layers.Dense(WIDTH)
    score, write = layers.Dense(1), layers.Dense(LETTERS)

    def decode(memory: Any, letters: Any) -> Any:
        keys = answer(memory)
        table = tf.TensorArray(tf.float32, length, element_shape=[BATCH, WIDTH])
        table = table.unstack(tf.transpose(letters, [1, 0, 2]))
        made = tf.TensorArray(tf.float32, length, element_shape=[BATCH, WIDTH])

        def body(i: Any, state: Any, made: Any) -> tuple[Any, ...]:
            weights = tf.nn.softmax(score(tf.tanh(keys + ask(state)[:, None])), axis=1)
            context = tf.reduce_sum(weights * memory, axis=1)
            _, (state,) = cell(tf.concat([table.read(i), context], -1), [state])
            return i + 1, state, made.write(i, state)

        first = 0, tf.zeros([BATCH, WIDTH]), made
        made = tf.while_loop(lambda i, *_: i < length, body, first, maximum_iterations=length)[-1]
        return write(tf.transpose(made.stack(), [1, 0, 2]))

    words = tf.random.stateless_uniform([BATCH, length], seed=(1, 2), maxval=LETTERS, dtype=tf.int32)
    state = tf.zeros([1, WIDTH])
    for layer in (encode, ask, answer, score, write):
        layer(state[None])
    embed(words[:1, :1])
    cell(tf.concat([state, state], -1), [state])
    parts = (embed, encode, cell, ask, answer, score, write)
    variables = [v for part in parts for v in part.trainable_variables]
    optimizer = keras.optimizers.Adam(1e-2)
    optimizer.build(variables)

    @tf.function
    def step(words: Any) -> Any:
        target = tf.reverse(words, [1])
        with tf.GradientTape() as tape:
            letters = embed(tf.pad(target[:, :-1], [[0, 0], [1, 0]]))
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(target, decode(encode(embed(words)), letters))
            )
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return step, (words,)


if __name__ == "__main__":
    raise SystemExit(side_by_side(__doc__, make_step, limit="20%", length=100))
