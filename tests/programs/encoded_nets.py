"""Nets whose saved tensors are encoded, packed or rounded, each in an arena of one free region."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from nets import floor_of, trained, unoptimised

import tfswap


def settle():
    """Makes the arena one free region."""
    slab = tf.raw_ops.Empty(shape=[500 << 20], dtype=tf.uint8)
    del slab


class _Net:
    """A net of one argument.

    Attributes:
        weights: its variables; the first `learns` of them are trained.
        start: their values before the first step.
    """

    learns = None

    def train(self, x):
        learning = self.weights[: self.learns]
        with tf.GradientTape() as tape:
            loss = self.forward(x)
        for w, g in zip(learning, tape.gradient(loss, learning), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    def run(self, function, *batches):
        return trained(self.weights, self.start, function, *((x,) for x in batches))


PACKED = [tf.TensorSpec([None, 24, 24, 8])]


class PackedNet(_Net):
    """A net with positions of maxima, predicates and the best of each."""

    def __init__(self):
        settle()
        self.weights = [tf.Variable(tf.random.stateless_normal([8], seed=(i, 1))) for i in range(2)]
        self.start = [w.numpy() for w in self.weights]
        self.mixed = tf.Variable(tf.random.stateless_normal([12 * 12 * 2] * 2, seed=(9, 9)) * 0.05)
        self.x = tf.random.stateless_normal([64, 24, 24, 8], seed=(3, 3))

    def forward(self, x):
        h, _ = tf.nn.max_pool_with_argmax(x * self.weights[0], 2, 2, "SAME")
        some = tf.reduce_any(h > 0.2, -1, keepdims=True)
        h = tf.where(some, h * self.weights[1], 0.1 * h)
        _, best = tf.math.top_k(h, 2)
        h = tf.reshape(tf.gather(h, best, batch_dims=3), [-1, 12 * 12 * 2])
        for _ in range(8):  # for so long everything waits
            h = h @ self.mixed
        return tf.reduce_mean(h**2)

    def traced(self):
        return tf.function(self.train, input_signature=PACKED)


class SparseNet:
    """A net whose maps are mostly zeros for one bias, and not for another."""

    def __init__(self):
        settle()
        self.weights = [tf.Variable(tf.random.stateless_normal([256, 256], seed=(i, 1)) * 0.08) for i in range(7)]
        self.start = [w.numpy() for w in self.weights]
        self.x = tf.random.stateless_normal([4096, 256], seed=(3, 3))
        self.sparse, self.dense = tf.constant(0.5), tf.constant(-0.5)

    def train(self, x, bias):
        with tf.GradientTape() as tape:
            h = x
            for w in self.weights:
                h = tf.nn.relu(h @ w - bias)
            loss = tf.reduce_mean(h**2)
        for w, g in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    def run(self, function, *calls):
        return trained(self.weights, self.start, function, *calls)

    def traced(self):
        return tf.function(self.train, input_signature=[tf.TensorSpec([None, 256]), tf.TensorSpec([])])


ROUNDED = [tf.TensorSpec([None, 48, 48, 8])]


class RoundedNet:
    """A net of convolutions."""

    def __init__(self):
        self.weights = [tf.Variable(tf.random.stateless_normal([3, 3, 8, 8], seed=(i, 1)) * 0.2) for i in range(5)]
        self.start = [w.numpy() for w in self.weights]
        settle()
        self.x = tf.random.stateless_normal([32, 48, 48, 8], seed=(3, 3))

    def forward(self, x):
        h = tf.nn.relu(tf.nn.conv2d(x, self.weights[0], 1, "SAME"))
        h = tf.nn.max_pool2d(h, 2, 2, "VALID")
        h = tf.nn.gelu(tf.nn.conv2d(h, self.weights[1], 1, "SAME")) + h
        h = tf.nn.relu(tf.nn.conv2d(h, self.weights[2], 1, "SAME"))
        h = tf.tanh(tf.nn.conv2d(h, self.weights[3], 1, "SAME"))
        return tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(h, self.weights[4], 1, "SAME")) ** 2)

    def train(self, x):
        with tf.GradientTape() as tape:
            loss = self.forward(x)
        for w, g in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            w.assign_sub(g)
        return loss

    def run(self, function, *batches):
        (found, _), peak = trained(self.weights, self.start, function, *((x,) for x in batches))
        return found, [w.numpy() - value for w, value in zip(self.weights, self.start, strict=True)], peak

    def traced(self):
        return tf.function(self.train, input_signature=ROUNDED)


def worst(changes, expected):
    return max(float(np.linalg.norm(c - e) / np.linalg.norm(e)) for c, e in zip(changes, expected, strict=True))


ENCODED = [tf.TensorSpec([None, 48, 48, 8])]


class EncodedNet(_Net):
    """A net with all activations whose gradients read encodings."""

    learns = 4

    def __init__(self):
        settle()
        self.weights = [tf.Variable(tf.random.stateless_normal([3, 3, 8, 8], seed=(i, 1)) * 0.2) for i in range(6)]
        self.start = [w.numpy() for w in self.weights]
        self.mixed = tf.Variable(tf.random.stateless_normal([12 * 12 * 8] * 2, seed=(9, 9)) * 0.03)
        self.x = tf.random.stateless_normal([32, 48, 48, 8], seed=(3, 3))

    def forward(self, x):
        h = tf.nn.relu(tf.nn.conv2d(x, self.weights[0], 1, "SAME"))
        h = tf.nn.max_pool2d(h, 2, 2, "VALID")
        h = tf.nn.conv2d(h, self.weights[1], 1, "SAME")
        h = tf.nn.relu6(3 * h) + tf.nn.leaky_relu(h, 0.1)
        h = tf.nn.experimental.stateless_dropout(h, 0.3, seed=[1, 2])
        h = tf.nn.max_pool2d(tf.nn.conv2d(h, self.weights[2], 1, "SAME"), 3, 2, "SAME")
        h = tf.reshape(tf.nn.relu(tf.nn.conv2d(h, self.weights[3], 1, "SAME")), [-1, 12 * 12 * 8])
        for _ in range(8):  # for so long everything waits
            h = h @ self.mixed
        return tf.reduce_mean(h**2)

    def traced(self):
        return tf.function(self.train, input_signature=ENCODED)


class Activated:
    """A net of products, each with an activation whose result no gradient needs."""

    def __init__(self, activation):
        slab = tf.raw_ops.Empty(shape=[400 << 20], dtype=tf.uint8)
        del slab
        self.activation = activation
        self.weights = [tf.Variable(tf.random.stateless_normal([64, 64], seed=(i, 1)) * 0.2) for i in range(4)]
        self.start = [w.numpy() for w in self.weights]
        self.x = tf.random.stateless_normal([1 << 14, 64], seed=(3, 3))

    def train(self, x):
        with tf.GradientTape() as tape:
            h = x
            for w in self.weights:
                h = self.activation(h @ w) + x
                h = tf.reshape(tf.reduce_sum(tf.reshape(h, [-1, 8, 8, 1]), 3, True) * 0.5, [-1, 64]) + x
            loss = tf.reduce_mean(h * h)
        for w, g in zip(self.weights, tape.gradient(loss, self.weights), strict=True):
            w.assign_sub(0.01 * g)
        return loss

    def traced(self):
        return tf.function(self.train, input_signature=[tf.TensorSpec([None, 64])])


class SwappedNets:
    """A net whose gradients need only the signs of its maps ("masks"), and one whose products read them ("floats")."""

    def __init__(self):
        settle()
        self.layers = {
            "masks": lambda h, w: h + tf.nn.relu(tf.roll(h, 1, 1) + w),
            "floats": lambda h, w: tf.tanh(h @ w),
        }
        shapes = {"masks": [1024], "floats": [128, 128]}
        self.weights = {
            name: [tf.Variable(tf.random.stateless_normal(shape, seed=(i, 1)) * 0.1) for i in range(12)]
            for name, shape in shapes.items()
        }
        self.start = {name: [w.numpy() for w in each] for name, each in self.weights.items()}

    def traced(self, name):
        weights, layer = self.weights[name], self.layers[name]

        def train(x):
            with tf.GradientTape() as tape:
                h = x
                for w in weights:
                    h = layer(h, w)
                loss = tf.reduce_mean(h)
            for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
                w.assign_sub(g)
            return loss

        return tf.function(train)

    def batch(self, name):
        return tf.random.stateless_normal([512, 1024] if name == "masks" else [4096, 128], seed=(3, 3))

    def unoptimised(self, name):
        x, step = self.batch(name), self.traced(name)
        return unoptimised(lambda: trained(self.weights[name], self.start[name], step, (x,), (x,)))[0]

    def near_floor(self, name, **options):
        floor = floor_of(self.traced(name), self.batch(name), **options)
        return floor + floor // 50

    def run(self, name, limit, **options):
        """Values of two steps in this limit, and the bytes of each swapped tensor."""
        x = self.batch(name)
        step = tfswap.optimize(self.traced(name), memory_limit=limit, **options)
        found, peak = trained(self.weights[name], self.start[name], step, (x,), (x,))
        stays, stats = step.plan().evictions, step.stats()
        assert stats.out_bytes == sum(s.nbytes for s in stays if s.out is not None)
        assert stats.in_bytes == sum(s.nbytes for s in stays)
        assert peak <= limit
        return found, {s.tensor: s.nbytes for s in stays}
