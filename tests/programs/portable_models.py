"""Models for portable output."""

from __future__ import annotations

from typing import Any

CHANNELS, SIZE, BLOCKS, WIDTH = 16, 96, 3, 128


def net() -> Any:
    """A residual net with one long skip connection, to serve; and a step that trains, with a loop and a branch."""
    import tensorflow as tf

    def random(seed: int, *shape: int) -> Any:
        return tf.Variable(tf.random.stateless_normal(shape, (seed, 7)) * 0.08)

    def convolved(x: Any, kernel: Any) -> Any:
        return tf.nn.conv2d(x, kernel, 1, "SAME")

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.tail = random(0, 3, 3, 3, CHANNELS), random(1, 3, 3, CHANNELS, 3)
            self.body = [random(2 + i, 3, 3, CHANNELS, CHANNELS) for i in range(2 * BLOCKS)]
            self.weights = [random(i, WIDTH, WIDTH) for i in range(6)]
            self.momentum = tf.Variable(tf.zeros([WIDTH, WIDTH]))

        @tf.function(input_signature=[tf.TensorSpec([None, SIZE, SIZE, 3], name="x")])
        def serve(self, x: Any) -> Any:
            h = tf.nn.relu(convolved(x, self.head))
            y = h
            for i in range(BLOCKS):
                y = y + convolved(tf.nn.relu(convolved(y, self.body[2 * i])), self.body[2 * i + 1])
            return convolved(y + h, self.tail)

        @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], name="x")])
        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                h = x
                for weight in self.weights:
                    h = tf.nn.relu(tf.sin(h @ weight))
                for _ in tf.range(2):
                    h = tf.tanh(h)
                h = tf.cond(tf.reduce_sum(x) > 0.0, lambda: h * 2.0, lambda: h)
                loss = tf.reduce_mean(h * h)
            gradients = tape.gradient(loss, self.weights)
            self.momentum.assign(0.9 * self.momentum + gradients[0])
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

    return Net()


def with_grappler(source: str, target: str) -> None:
    """A copy of a rewritten SavedModel that lets TensorFlow optimize and inline everything."""
    import shutil
    from pathlib import Path

    from tensorflow.core.protobuf import saved_model_pb2

    shutil.copytree(source, target)
    path = Path(target) / "saved_model.pb"
    proto = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    for function in proto.meta_graphs[0].graph_def.library.function:
        function.attr.pop("_noinline", None)
        for node in function.node_def:
            node.attr.pop("_noinline", None)
            if "config_proto" in node.attr:
                node.attr["config_proto"].s = b""
    path.write_bytes(proto.SerializeToString())
