"""Models that tests save, load and train, each in a process of its own."""

from __future__ import annotations

import hashlib
from typing import Any

WIDTH = 256
ARENA_MIB = 2000


def plain() -> Any:
    """Matrices and their momenta as plain variables; steps: one trains, one does not, one is for XLA, one loops."""
    import tensorflow as tf

    batch = tf.TensorSpec([None, WIDTH], tf.float32, name="x")
    target = tf.TensorSpec([None, WIDTH], tf.float32, name="y")

    class Plain(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            random = tf.random.Generator.from_seed(1)
            self.weights = [tf.Variable(random.normal([WIDTH, WIDTH]) * 0.1) for _ in range(6)]
            self.momenta = [tf.Variable(tf.zeros([WIDTH, WIDTH])) for _ in range(6)]

        @tf.function(input_signature=[batch])
        def predict(self, x: Any) -> Any:
            for weight in self.weights:
                x = tf.nn.relu(x @ weight)
            return x

        def _train(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.predict.python_function(x) - y) ** 2)
            gradients = tape.gradient(loss, self.weights)
            for weight, momentum, gradient in zip(self.weights, self.momenta, gradients, strict=True):
                momentum.assign(0.9 * momentum + gradient)
                weight.assign_sub(0.01 * momentum)
            return {"loss": loss}

        @tf.function(input_signature=[batch, target])
        def train_step(self, x: Any, y: Any) -> Any:
            return self._train(x, y)

        @tf.function(input_signature=[batch, target], jit_compile=True)
        def compiled_step(self, x: Any, y: Any) -> Any:
            return self._train(x, y)

        @tf.function(input_signature=[batch, target])
        def looping_step(self, x: Any, y: Any) -> Any:
            loss = 0.0
            for one, other in tf.data.Dataset.from_tensor_slices((x, y)).batch(64, drop_remainder=True):
                loss += self._train(one, other)["loss"]
            return {"loss": loss}

        @tf.function
        def traced_step(self, x: Any, y: Any, training: bool = True) -> Any:
            return self._train(x, y) if training else {"loss": tf.reduce_mean(self.predict.python_function(x))}

    made = Plain()
    for size in (64, 128):
        made.traced_step.get_concrete_function(*(tf.TensorSpec([size, WIDTH]) for _ in range(2)))
    made.traced_step.get_concrete_function(*(tf.TensorSpec([64, WIDTH]) for _ in range(2)), training=False)
    return made


def keras() -> Any:
    """Keras layers and a Keras optimizer with slots."""
    import keras
    import tensorflow as tf

    class Trainer(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            keras.utils.set_random_seed(1)
            layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(6)]
            self.net = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.LayerNormalization()])
            self.optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
            self.optimizer.build(self.net.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None, WIDTH])])
        def train_step(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.net(x, training=True) - y) ** 2)
            variables = self.net.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    return Trainer()


MODELS = {"plain": plain, "keras": keras}


def save(name: str, path: str) -> None:
    import tensorflow as tf

    model = MODELS[name]()
    tf.saved_model.save(model, path, signatures={"train": model.train_step})


def settle_arena() -> None:
    """Make the capped arena one free region, as a GPU's is from the start."""
    import tensorflow as tf

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, 2**20], dtype=tf.uint8)
    del slab
    tf.config.experimental.reset_memory_stats("CPU:0")


def train(path: str, batch: int, reference: bool) -> dict[str, Any]:
    """Load and train; what it takes, and the bits of every loss and of what the model then is."""
    import contextlib

    import tensorflow as tf

    settle_arena()
    import tfswap.ops.codecs
    from tfswap.exporters.function import grappler_off

    model = tf.saved_model.load(path)
    # One kernel each, without temporaries: holes in the arena are what planning from a file can't know.
    x, y = (
        tf.raw_ops.RandomStandardNormal(shape=[batch, WIDTH], dtype=tf.float32, seed=seed, seed2=seed)
        for seed in (1, 2)
    )
    losses = []
    tf.config.experimental.reset_memory_stats("CPU:0")
    with grappler_off() if reference else contextlib.nullcontext():
        for _ in range(3):
            losses.append(model.train_step(x, y)["loss"].numpy())
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        copies = tfswap.ops.stats().out_copies
        losses.append(model.train_step(x[: batch // 3], y[: batch // 3])["loss"].numpy())
        arguments = dict(zip(sorted(model.signatures["train"].structured_input_signature[1]), (x, y), strict=True))
        losses.append(model.signatures["train"](**arguments)["loss"].numpy())
        after = model.train_step(x, y)["loss"].numpy()
    digest = hashlib.sha256(b"".join([*(loss.tobytes() for loss in losses), after.tobytes()])).hexdigest()
    return {"peak": peak, "copies": copies, "losses": [float(loss) for loss in losses], "bits": digest}
