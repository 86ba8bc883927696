"""Training steps of encoders and decoders with additive attention (Bahdanau et al. 2015), in TensorFlow and Keras.

At each of T steps of the decoder a query is added to all T keys: O(T B H) that the gradient needs, O(T^2 B H) in all.
Meng et al. (2017) drop that by hand and compute it again; here it is to be the planner's own finding.

`CASES` has functions that each give a training step and its arguments; a step's `variables` are all that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Made = tuple[Any, tuple[Any, ...]]

TOKENS = 64


def seq2seq(batch: int, length: int = 400, width: int = 128, *, looped: bool = True, cell: str = "GRUCell") -> Made:
    """Characters in, characters out, teacher-forced.

    Args:
        looped: whether the decoder is a `tf.while_loop`; else Python unrolls it.
        cell: Keras' name of the decoder's and the encoder's cell.
    """
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    embed, encoder = layers.Embedding(TOKENS, width), layers.RNN(getattr(layers, cell)(width), return_sequences=True)
    decoder, ask, answer, output = getattr(layers, cell)(width), *(layers.Dense(n) for n in (width, width, TOKENS))
    direction = tf.Variable(0.1 * tf.random.stateless_normal([width], seed=(1, 7)))
    states = len(tf.nest.flatten(decoder.get_initial_state(1)))

    def decode(token: Any, state: list[Any], memory: Any, keys: Any) -> tuple[Any, list[Any]]:
        scores = tf.reduce_sum(direction * tf.tanh(keys + ask(state[0])[:, None]), -1)
        context = tf.reduce_sum(tf.nn.softmax(scores)[:, :, None] * memory, 1)
        made, state = decoder(tf.concat([token, context], -1), state)
        return made, tf.nest.flatten(state)

    def logits(source: Any, target: Any) -> Any:
        memory = encoder(embed(source))
        keys, tokens = answer(memory), tf.unstack(embed(target), axis=1)
        state = [tf.zeros([batch, width]) for _ in range(states)]
        made = []
        if not looped:
            for token in tokens:
                one, state = decode(token, state, memory, keys)
                made.append(one)
            return output(tf.stack(made, 1))
        table = tf.TensorArray(tf.float32, length, element_shape=[batch, width]).unstack(tf.stack(tokens))
        made = tf.TensorArray(tf.float32, length, element_shape=[batch, width])

        def body(i: Any, made: Any, *state: Any) -> tuple[Any, ...]:
            one, after = decode(table.read(i), list(state), memory, keys)
            return i + 1, made.write(i, one), *after

        made = tf.while_loop(lambda i, *_: i < length, body, (0, made, *state), maximum_iterations=length)[1]
        return output(tf.transpose(made.stack(), [1, 0, 2]))

    some, one = tf.zeros([1, 1, width]), tf.zeros([1, width])
    for layer in (encoder, ask, answer, output):
        layer(some)
    embed(tf.zeros([1, 1], tf.int32))
    decoder(tf.concat([one, one], -1), [one] * states)
    parts = (embed, encoder, decoder, ask, answer, output)
    variables = [direction, *(v for part in parts for v in part.trainable_variables)]

    step = trained(logits, variables)
    source = tf.random.stateless_uniform([batch, length], seed=(1, 2), maxval=TOKENS, dtype=tf.int32)
    target = tf.random.stateless_uniform([batch, length], seed=(3, 4), maxval=TOKENS, dtype=tf.int32)
    return step, (source, target)


def trained(logits: Callable[[Any, Any], Any], variables: Sequence[Any]) -> Any:
    """The step of plain gradient descent, teacher-forced, on what `logits` makes of source and target."""
    import tensorflow as tf

    def step(source: Any, target: Any) -> Any:
        with tf.GradientTape() as tape:
            made = logits(source, target)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(target, made))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.01 * tf.convert_to_tensor(gradient))
        return loss

    step.variables = variables
    return step


def _case(**how: Any) -> Callable[[], Made]:
    return lambda: seq2seq(**how)


CASES = {
    "gru_looped": _case(batch=8, length=100),
    "gru_unrolled": _case(batch=8, length=40, looped=False),
    "lstm_looped": _case(batch=8, length=100, cell="LSTMCell"),
    "lstm_unrolled": _case(batch=8, length=40, looped=False, cell="LSTMCell"),
}
