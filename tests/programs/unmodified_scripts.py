"""Training scripts that do not import tfswap, in the manner of well-known ones: `unmodified_scripts.py NAME`.

Each prints losses and a digest of its weights.
"""

import hashlib
import sys
from collections.abc import Callable, Iterable

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
STEPS = 3


def show(losses: Iterable[object], weights: Iterable[object]) -> None:
    digest = hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in weights))
    print([float(np.asarray(loss)).hex() for loss in losses], digest.hexdigest())


def normal(*shape: int, seed: int = 1) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed=(seed, 7))


def wgan_gp() -> None:
    """A critic with a gradient penalty, whose gradient is taken through a gradient, and a generator."""
    generator = keras.Sequential([keras.Input([32]), *(layers.Dense(256, "relu") for _ in range(3)), layers.Dense(256)])
    critic = keras.Sequential([keras.Input([256]), *(layers.Dense(256, "tanh") for _ in range(4)), layers.Dense(1)])
    optimizers = keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)

    @tf.function
    def train_critic(real: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            fake = generator(tf.random.normal([real.shape[0], 32]), training=True)
            mixed = real + tf.random.uniform([real.shape[0], 1]) * (fake - real)
            with tf.GradientTape() as inner:
                inner.watch(mixed)
                judged = critic(mixed, training=True)
            slopes = tf.norm(inner.gradient(judged, mixed), axis=1)
            loss = tf.reduce_mean(critic(fake) - critic(real)) + 10.0 * tf.reduce_mean((slopes - 1.0) ** 2)
        gradients = tape.gradient(loss, critic.trainable_variables)
        optimizers[0].apply_gradients(zip(gradients, critic.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_generator(rows: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(tf.random.normal([rows, 32]), training=True)))
        gradients = tape.gradient(loss, generator.trainable_variables)
        optimizers[1].apply_gradients(zip(gradients, generator.trainable_variables, strict=True))
        return loss

    losses = []
    for i in range(STEPS):
        losses += [train_critic(normal(4096, 256, seed=i)), train_generator(tf.constant(1024))]
    show(losses, [*critic.get_weights(), *generator.get_weights()])


def dqn() -> None:
    """Q-learning with a target net, from a replay buffer of NumPy arrays."""

    def net() -> keras.Model:
        return keras.Sequential([keras.Input([64]), *(layers.Dense(512, "relu") for _ in range(4)), layers.Dense(8)])

    online, target, optimizer = net(), net(), keras.optimizers.RMSprop(1e-3)
    random = np.random.default_rng(1)
    states, actions = random.normal(size=(8192, 64)).astype("f"), random.integers(0, 8, 8192)
    rewards = random.normal(size=8192).astype("f")

    @tf.function
    def train_step(state: tf.Tensor, action: tf.Tensor, reward: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
        best = tf.reduce_max(target(after), axis=1)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(online(state) * tf.one_hot(action, 8), axis=1)
            loss = keras.losses.Huber()(reward + 0.99 * best, value)
        gradients = tape.gradient(loss, online.trainable_variables)
        optimizer.apply_gradients(zip(gradients, online.trainable_variables, strict=True))
        return loss

    losses = []
    for i in range(STEPS):
        drawn, after = random.integers(0, 8191, 4096), random.integers(0, 8191, 4096)
        losses.append(train_step(states[drawn], actions[drawn], rewards[drawn], states[after]))
        if i % 2:
            target.set_weights(online.get_weights())
    show(losses, online.get_weights())


def vit() -> None:
    """A vision transformer, subclassed, that `fit` trains."""

    class Block(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layers.MultiHeadAttention(4, 16, dropout=0.1)
            self.norms = [layers.LayerNormalization() for _ in range(2)]
            self.up, self.down = layers.Dense(256, "gelu"), layers.Dense(64)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            normed = self.norms[0](x)
            x = x + self.attention(normed, normed)
            return x + self.down(self.up(self.norms[1](x)))

    class Transformer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.patches = layers.Conv2D(64, 4, 4)
            self.blocks = [Block() for _ in range(3)]
            self.head = layers.Dense(10)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            x = self.patches(x)
            x = tf.reshape(x, [-1, 64, 64])
            for block in self.blocks:
                x = block(x)
            return self.head(tf.reduce_mean(x, axis=1))

    model = Transformer()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    images = normal(3 * 64, 32, 32, 3).numpy()
    history = model.fit(images, images[:, 0, 0, :].argmax(axis=1), batch_size=64, verbose=0, shuffle=False)
    show(history.history["loss"], model.get_weights())


def two_tower() -> None:
    """A recommender by sparse Adagrad: a tower for bags of a user's items, one for the next item."""
    random = np.random.default_rng(1)
    tables = [tf.Variable(0.05 * tf.random.stateless_normal([20_000, 32], seed=(i, 7))) for i in range(2)]
    towers = [
        keras.Sequential([keras.Input([32]), *(layers.Dense(512, "relu") for _ in range(2)), layers.Dense(64)])
        for _ in range(2)
    ]
    weights = [*tables, *(variable for tower in towers for variable in tower.trainable_variables)]
    optimizer = keras.optimizers.Adagrad(0.05)
    optimizer.build(weights)

    @tf.function
    def train_step(bags: tf.SparseTensor, items: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            user = towers[0](tf.nn.embedding_lookup_sparse(tables[0], bags, None, combiner="mean"))
            item = towers[1](tf.nn.embedding_lookup(tables[1], items))
            logits = tf.matmul(user, item, transpose_b=True)
            own = tf.range(tf.shape(items)[0])
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits))
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    losses, rows, each = [], 2048, 8
    places = np.stack(np.divmod(np.arange(rows * each), each), axis=1)
    for _ in range(STEPS):
        bags = tf.SparseTensor(places, random.integers(0, 20_000, rows * each), [rows, each])
        losses.append(train_step(bags, tf.constant(random.integers(0, 20_000, rows))))
    show(losses, weights)


SCRIPTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (wgan_gp, dqn, vit, two_tower)}

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    SCRIPTS[sys.argv[1]]()
