"""Models that tests save, load and train, each in a process of its own."""

from __future__ import annotations

import gc
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


def batch_of(rows: int) -> Any:
    """Inputs and targets. One kernel each, without temporaries: holes in the arena are what planning from a file can't
    know.
    """
    import tensorflow as tf

    return [
        tf.raw_ops.RandomStandardNormal(shape=[rows, WIDTH], dtype=tf.float32, seed=seed, seed2=seed) for seed in (1, 2)
    ]


def run(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Train a loaded model; what it takes, and the bits of every loss and of what the model then is."""
    import tensorflow as tf

    import tfswap.ops

    before = tfswap.ops.stats().out_copies
    losses = []
    tf.config.experimental.reset_memory_stats("CPU:0")
    for _ in range(3):
        losses.append(model.train_step(x, y)["loss"].numpy())
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    copies = tfswap.ops.stats().out_copies - before
    rows = len(x) // 3
    losses.append(model.train_step(x[:rows], y[:rows])["loss"].numpy())
    arguments = dict(zip(sorted(model.signatures["train"].structured_input_signature[1]), (x, y), strict=True))
    losses.append(model.signatures["train"](**arguments)["loss"].numpy())
    after = model.train_step(x, y)["loss"].numpy()
    digest = hashlib.sha256(b"".join([*(loss.tobytes() for loss in losses), after.tobytes()])).hexdigest()
    whole = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"peak": peak, "whole": whole, "copies": copies, "losses": [float(loss) for loss in losses], "bits": digest}


def train(path: str, batch: int, reference: bool) -> dict[str, Any]:
    """Load with TensorFlow alone, and train."""
    import contextlib

    import tensorflow as tf

    settle_arena()
    import tfswap.ops.codecs  # noqa: F401 the rewritten model's
    from tfswap.exporters.function import grappler_off

    model = tf.saved_model.load(path)
    with grappler_off() if reference else contextlib.nullcontext():
        return run(model, *batch_of(batch))


def load_and_train(path: str, batch: int, others_mib: int = 0, one_region: bool = True) -> list[dict[str, Any]]:
    """Load with `tfswap.load` and train, and then do the same with the first still there.

    Args:
        others_mib: bytes of other tensors, which are there before.
        one_region: whether the arena is one from the start.
    """
    import tensorflow as tf

    import tfswap

    if one_region:
        settle_arena()
    others = [tf.ones([2**18]) for _ in range(others_mib)]
    found, models = [], []
    x, y = batch_of(batch)
    for _ in range(2):
        models.append(tfswap.load(path))
        made = run(models[-1], x, y)
        report = models[-1].train_step.report()
        made |= {"limit": report.memory_limit_bytes, "order": list(models[-1].train_step.plan().order)}
        made["measured"] = models[-1].signatures["train"].report().measured_peak_bytes
        found.append(made)
    del others
    return found


def refused(path: str, batch: int) -> dict[str, Any]:
    """What happens in a process whose other tensors leave no room for a step within its limit, loaded in either way."""
    import tensorflow as tf

    import tfswap.ops.codecs

    settle_arena()
    others = [tf.ones([2**18]) for _ in range(30)]
    x, y = batch_of(batch)
    plain, loaded = tf.saved_model.load(path), tfswap.load(path)
    before = [v.numpy().tobytes() for model in (plain, loaded) for v in (*model.weights, *model.momenta)]
    tf.config.experimental.reset_memory_stats("CPU:0")
    start = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    try:
        plain.train_step(x, y)
        error = ""
    except tf.errors.ResourceExhaustedError as exhausted:
        error = exhausted.message
    rise = tf.config.experimental.get_memory_info("CPU:0")["peak"] - start
    try:
        loaded.train_step(x, y)
        floor = 0
    except tfswap.InfeasibleMemoryLimit as infeasible:
        floor = infeasible.floor_bytes
    after = [v.numpy().tobytes() for model in (plain, loaded) for v in (*model.weights, *model.momenta)]
    del plain, loaded
    gc.collect()  # another one's first step begins without their variables
    enough = run(tfswap.load(path, memory_limit=floor), x, y)
    del others
    return {"error": error, "rise": rise, "floor": floor, "same": before == after, "enough": enough}


def passes(path: str, batch: int) -> dict[str, Any]:
    """Whether a rewritten step that TensorFlow has loaded runs, with 6 MiB of other tensors, and its peak."""
    import tensorflow as tf

    import tfswap.ops.codecs  # noqa: F401 the model's

    settle_arena()
    others = [tf.ones([2**18]) for _ in range(6)]
    x, y = batch_of(batch)
    model = tf.saved_model.load(path)
    tf.config.experimental.reset_memory_stats("CPU:0")
    try:
        model.train_step(x, y)
        ran = True
    except tf.errors.ResourceExhaustedError:
        ran = False
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    model.train_step(x[: batch // 2], y[: batch // 2])  # may pass it, and is not refused
    del others
    return {"ran": ran, "peak": peak}
