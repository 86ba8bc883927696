"""Training steps of transformers with Adam, of any size: with values, or to be traced only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """The size of a transformer.

    Attributes:
        causal: whether each position reads the ones before it alone, as in a decoder; else all, as in an encoder.
    """

    layers: int
    width: int
    heads: int
    words: int
    length: int
    batch: int
    causal: bool = True

    @property
    def parameters(self) -> int:
        """The number of weights: four square matrices of attention, two of four squares each, and norms and biases."""
        layer = 12 * self.width**2 + 13 * self.width
        return self.layers * layer + (2 * self.words + self.length + 2) * self.width


def with_values(shape: tuple[int, ...], scale: float, number: int) -> Any:
    """A variable with random values, which are made a slice after the other in a `tfswap.scope`; of zeros, or of ones,
    where `scale` is 0 or negative.
    """
    import tensorflow as tf

    if scale <= 0:
        return tf.Variable(lambda: tf.fill(shape, 1.0 if scale else 0.0), shape=shape, dtype=tf.float32)
    return tf.Variable(lambda: tf.random.stateless_normal(shape, seed=(number, 3)) * scale, dtype=tf.float32)


def without_values(shape: tuple[int, ...], scale: float, number: int) -> Any:
    """A variable that a step can be traced with, and that takes no memory."""
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    return UninitializedVariable(trainable=scale != 0, shape=shape, dtype=tf.float32)


class Transformer:
    """The weights of a transformer, with norms before attention, as in GPT-2, and Adam's two slots of each.

    Args:
        variable: makes one of a shape, with the scale of its values and its number.
    """

    def __init__(self, of: Shape, variable: Callable[[tuple[int, ...], float, int], Any]):
        self.of, self._variable = of, variable
        self.weights: list[Any] = []
        self.slots: list[tuple[Any, Any]] = []
        self.embedding, self.positions = self._weight(of.words, of.width), self._weight(of.length, of.width)
        self.blocks = [self._block() for _ in range(of.layers)]
        self.last, self.head = self._norm(), self._weight(of.width, of.words)
        self.count = variable((), 0, 0)

    @property
    def variables(self) -> list[Any]:
        """All of them."""
        return [*self.weights, *(slot for each in self.slots for slot in each), self.count]

    def _weight(self, *shape: int, scale: float = 0.02) -> Any:
        self.weights.append(self._variable(shape, scale, len(self.weights)))
        self.slots.append((self._variable(shape, 0, 0), self._variable(shape, 0, 0)))
        return self.weights[-1]

    def _norm(self) -> tuple[Any, Any]:
        return self._weight(self.of.width, scale=-1), self._weight(self.of.width, scale=1e-9)

    def _dense(self, inner: int, outer: int) -> tuple[Any, Any]:
        return self._weight(inner, outer), self._weight(outer, scale=1e-9)

    def _block(self) -> tuple[tuple[Any, Any], ...]:
        """Norm and matrices of attention, and those of the two dense layers."""
        width = self.of.width
        attention = self._norm(), self._dense(width, 3 * width), self._dense(width, width)
        return *attention, self._norm(), self._dense(width, 4 * width), self._dense(4 * width, width)

    def loss(self, tokens: Any, labels: Any) -> Any:
        """The mean loss of a batch."""
        import tensorflow as tf

        h = tf.reshape(tf.gather(self.embedding, tokens) + self.positions, [-1, self.of.width])
        for before, inward, outward, between, up, down in self.blocks:
            h += self._attended(_normalized(h, before), inward, outward)
            h += _applied(tf.nn.gelu(_applied(_normalized(h, between), up)), down)
        logits = tf.matmul(_normalized(h, self.last), self.head)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.reshape(labels, [-1]), logits))

    def _attended(self, h: Any, inward: tuple[Any, Any], outward: tuple[Any, Any]) -> Any:
        import tensorflow as tf

        of, parts = self.of, tf.split(_applied(h, inward), 3, -1)
        each = [tf.transpose(tf.reshape(p, [of.batch, of.length, of.heads, -1]), [0, 2, 1, 3]) for p in parts]
        scores = tf.matmul(each[0], each[1], transpose_b=True) * (of.width // of.heads) ** -0.5
        if of.causal:
            past = tf.linalg.band_part(tf.ones([of.length, of.length]), -1, 0)
            scores = scores - 1e9 * (1 - past)
        read = tf.nn.softmax(scores) @ each[2]
        return _applied(tf.reshape(tf.transpose(read, [0, 2, 1, 3]), [-1, of.width]), outward)

    def update(self, gradients: Sequence[Any]) -> None:
        """A step of Adam, in elementary ops as Keras has them."""
        import tensorflow as tf

        self.count.assign_add(1.0)
        rate = 1e-4 * tf.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        for weight, (mean, square), given in zip(self.weights, self.slots, gradients, strict=True):
            gradient = tf.convert_to_tensor(given)
            mean.assign_add((gradient - mean) * 0.1)
            square.assign_add((tf.square(gradient) - square) * 0.001)
            weight.assign_sub(mean * rate / (tf.sqrt(square) + 1e-7))


def _normalized(h: Any, scales: tuple[Any, Any]) -> Any:
    import tensorflow as tf

    mean, variance = tf.nn.moments(h, [-1], keepdims=True)
    return (h - mean) * tf.math.rsqrt(variance + 1e-5) * scales[0] + scales[1]


def _applied(h: Any, by: tuple[Any, Any]) -> Any:
    import tensorflow as tf

    return tf.nn.bias_add(tf.matmul(h, by[0]), by[1])


def training_step(
    of: Shape, variable: Callable[[tuple[int, ...], float, int], Any] = with_values
) -> tuple[Any, list[Any]]:
    """A step, (tokens, labels) -> the loss, and its variables. Arguments as of `Transformer`."""
    import tensorflow as tf

    net = Transformer(of, variable)

    @tf.function
    def train_step(tokens: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = net.loss(tokens, labels)
        net.update(tape.gradient(loss, net.weights))
        return loss

    return train_step, net.variables
