"""The nets of the headlines: training steps and their arguments, by name.

Those that checkpoints can be set in take `wrap`, which wraps each of their segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import accuracy
import gist
import planning_time
import seq2seq
import step_kinds
from papers.harness import peer_nets

Made = tuple[Any, tuple[Any, ...]]


def _classifies(model: Any, batch: int, size: int, momentum: float, classes: int = 10) -> Made:
    import keras
    import tensorflow as tf

    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = accuracy.trained(model, loss_fn, keras.optimizers.SGD(1e-3, momentum=momentum))
    # By one kernel: what others would need in addition leaves a hole in the arena, which no batch from a file does.
    x = tf.raw_ops.StatelessRandomUniform(shape=[batch, size, size, 3], seed=(1, 2))
    return step, (x, tf.random.stateless_uniform([batch], (3, 4), 0, classes, tf.int32))


def vgg19(batch: int = 16, size: int = 128, wrap: Callable[[Any], Any] | None = None) -> Made:
    """Keras' VGG19 with its five stages and a pooled head; a segment is a stage."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    body = keras.applications.VGG19(weights=None, input_shape=(size, size, 3), include_top=False)
    head = keras.layers.Dense(10)
    head.build((None, 512))
    variables = [*body.trainable_variables, *head.trainable_variables]
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def stage(n: int) -> Callable[[Any], Any]:
        layers = [layer for layer in body.layers if layer.name.startswith(f"block{n}")]

        def run(h: Any) -> Any:
            for layer in layers:
                h = layer(h)
            return h

        return run

    stages = [stage(n) for n in range(1, 6)]

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for one in stages:
                h = (wrap(one) if wrap else one)(h)
            loss = loss_fn(y, head(tf.reduce_mean(h, [1, 2])))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    x = tf.random.stateless_uniform([batch, size, size, 3], seed=(1, 2))
    return step, (x, tf.random.stateless_uniform([batch], (3, 4), 0, 10, tf.int32))


def application(name: str, batch: int, size: int, momentum: float = 0.9) -> Made:
    """One of Keras' applications with a pooled head of ten classes."""
    import keras

    keras.utils.set_random_seed(0)
    body = getattr(keras.applications, name)(
        weights=None, input_shape=(size, size, 3), include_top=False, pooling="avg"
    )
    return _classifies(keras.Model(body.input, keras.layers.Dense(10)(body.output)), batch, size, momentum)


def classic(name: str, batch: int, size: int) -> Made:
    """One of benchmarks/gist.py's, with images of another size."""
    import keras

    keras.utils.set_random_seed(0)
    images = keras.Input((size, size, 3))
    return _classifies(keras.Model(images, gist.NETWORKS[name][0](images)), batch, size, 0.0, 1000)


def deep_resnet(layers: int, batch: int = 8) -> Made:
    """Bottleneck blocks on small images; first and last layer count, though these nets are their blocks alone."""
    import tensorflow as tf

    step, (like,) = planning_time.deep_resnet(round((layers - 2) / 3))
    shape = [batch, *like.shape[1:]]
    return step.python_function, (tf.random.stateless_normal(shape, seed=(1, 2)),)


def peer(name: str, batch: int | None = None, wrap: Callable[[Any], Any] | None = None) -> Made:
    """One of benchmarks/peers.py's, whose segments are blocks."""
    model = peer_nets.MODELS[name](**({} if batch is None else {"batch": batch}))
    return peer_nets.make_step(model, wrap or (lambda block: block)), model.arguments


def gan(batch: int, size: int = 32, width: int = 32) -> Made:
    """A DCGAN (Radford et al. 2016): both nets take a step of Adam, each on its own loss."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers
    generator = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(size // 8 * (size // 8) * 4 * width),
            layers.Reshape((size // 8, size // 8, 4 * width)),
            *_stack(lambda f: layers.Conv2DTranspose(f, 4, 2, "same", use_bias=False), (2 * width, width), "relu"),
            layers.Conv2DTranspose(3, 4, 2, "same", activation="tanh"),
        ]
    )
    discriminator = keras.Sequential(
        [
            keras.Input((size, size, 3)),
            *_stack(
                lambda f: layers.Conv2D(f, 4, 2, "same", use_bias=False), (width, 2 * width, 4 * width), "leaky_relu"
            ),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    nets = generator, discriminator
    optimizers = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        optimizer.build(net.trainable_variables)
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits

    def step(images: Any, noise: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            real, fake = (discriminator(x, training=True) for x in (images, generator(noise, training=True)))
            fools = tf.reduce_mean(cross_entropy(tf.ones_like(fake), fake))
            judges = tf.reduce_mean(cross_entropy(tf.ones_like(real), real))
            judges += tf.reduce_mean(cross_entropy(tf.zeros_like(fake), fake))
        for net, optimizer, loss in zip(nets, optimizers, (fools, judges), strict=True):
            variables = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return fools + judges

    images = tf.random.stateless_uniform([batch, size, size, 3], seed=(1, 2), minval=-1)
    return step, (images, tf.random.stateless_normal([batch, 64], seed=(3, 4)))


def _stack(make: Callable[[int], Any], filters: Sequence[int], activation: str) -> list[Any]:
    import keras

    found = []
    for one in filters:
        found += [make(one), keras.layers.BatchNormalization(), keras.layers.Activation(activation)]
    return found


def lstm_lm(
    layers: int,
    batch: int,
    length: int = 35,
    width: int = 128,
    words: int = 1000,
    use_cudnn: bool | str = "auto",
) -> Made:
    """A language model of LSTMs over 35 words, as Zaremba et al. (2014) train them, without dropout."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    inputs = keras.Input((length,), dtype="int32")
    h = keras.layers.Embedding(words, width)(inputs)
    for _ in range(layers):
        h = keras.layers.LSTM(width, return_sequences=True, use_cudnn=use_cudnn)(h)
    model = keras.Model(inputs, keras.layers.Dense(words)(h))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = accuracy.trained(model, loss_fn, keras.optimizers.SGD(1e-3))
    tokens = tf.random.stateless_uniform([2, batch, length], (1, 2), 0, words, tf.int32)
    return step, (tokens[0], tokens[1])


def nmt(batch: int, length: int, layers: int = 8, width: int = 64, words: int = 500) -> Made:
    """Half of the GRUs read, half write with additive attention over all that was read (Bahdanau et al. 2015)."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    dense, half = keras.layers.Dense, layers // 2
    embed = keras.layers.Embedding(words, width)
    readers = [keras.layers.GRU(width, return_sequences=True) for _ in range(half)]
    cells = [keras.layers.GRUCell(width) for _ in range(half)]
    ask, answer, output = dense(width), dense(width), dense(words)
    direction = tf.Variable(0.1 * tf.random.stateless_normal([width], seed=(1, 7)))
    one, some = tf.zeros([1, width]), tf.zeros([1, 1, width])
    for layer in (*readers, answer, output):
        layer(some)
    ask(one)
    embed(tf.zeros([1, 1], tf.int32))
    for n, cell in enumerate(cells):
        cell(tf.concat([one, one], -1) if not n else one, [one])
    parts = (embed, *readers, *cells, ask, answer, output)
    variables = [direction, *(v for part in parts for v in part.trainable_variables)]

    def logits(source: Any, target: Any) -> Any:
        memory, rows = embed(source), source.shape[0]
        for reader in readers:
            memory = reader(memory)
        keys, embedded = answer(memory), tf.transpose(embed(target), [1, 0, 2])
        table = tf.TensorArray(tf.float32, length, element_shape=[rows, width]).unstack(embedded)
        made = tf.TensorArray(tf.float32, length, element_shape=[rows, width])

        def body(i: Any, made: Any, *states: Any) -> tuple[Any, ...]:
            scores = tf.reduce_sum(direction * tf.tanh(keys + ask(states[-1])[:, None]), -1)
            context = tf.reduce_sum(tf.nn.softmax(scores)[:, :, None] * memory, 1)
            h, after = tf.concat([table.read(i), context], -1), []
            for cell, state in zip(cells, states, strict=True):
                h, new = cell(h, [state])
                after += tf.nest.flatten(new)
            return i + 1, made.write(i, h), *after

        begin = (0, made, *(tf.zeros([rows, width]) for _ in cells))
        made = tf.while_loop(lambda i, *_: i < length, body, begin, maximum_iterations=length)[1]
        return output(tf.transpose(made.stack(), [1, 0, 2]))

    tokens = tf.random.stateless_uniform([2, batch, length], (1, 2), 0, words, tf.int32)
    return seq2seq.trained(logits, variables), (tokens[0], tokens[1])


def kind(name: str) -> Made:
    """One of the steps of step_kinds."""
    return step_kinds.made(name)


NETS: dict[str, Callable[..., Made]] = {
    "vgg19": vgg19,
    "application": application,
    "classic": classic,
    "deep_resnet": deep_resnet,
    "peer": peer,
    "gan": gan,
    "lstm_lm": lstm_lm,
    "nmt": nmt,
    "mlp": accuracy.mlp,
    "kind": kind,
    "transformer": accuracy.transformer,
}
