"""Functions without gradients whose branches need much memory when they all run at the same time."""

from pathlib import Path

import keras
import tensorflow as tf

ROWS, WIDTH, HIDDEN, BRANCHES = 4096, 64, 512, 12


def values_of_all(folder: Path) -> list[str]:
    """The values that `evaluate`, `predict`, a forward function and a loaded model give."""
    keras.utils.set_random_seed(1)
    x = tf.random.stateless_normal([ROWS + ROWS // 2, WIDTH], seed=(1, 2)).numpy()
    given = keras.Input([WIDTH])
    branches = [keras.layers.Dense(8)(keras.layers.Dense(HIDDEN, "tanh")(given)) for _ in range(BRANCHES)]
    model = keras.Model(given, keras.layers.Dense(4)(keras.layers.Concatenate()(branches)))
    model.compile("sgd", "mse", jit_compile=False)
    found = [tf.constant(model.evaluate(x, x[:, :4], batch_size=ROWS, verbose=0))]
    found.append(tf.constant(model.predict(x, batch_size=ROWS, verbose=0)))
    module = tf.Module()
    module.weights = [tf.Variable(weight) for weight in model.get_weights() if weight.shape == (WIDTH, HIDDEN)]

    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])])
    def forward(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"sums": tf.stack([tf.reduce_sum(tf.tanh(x @ weight)) for weight in module.weights])}

    module.forward = forward
    found.append(forward(tf.constant(x[:ROWS]))["sums"])
    tf.saved_model.save(module, str(folder), signatures=forward)
    found.append(tf.saved_model.load(str(folder)).signatures["serving_default"](tf.constant(x[:ROWS]))["sums"])
    return [each.numpy().tobytes().hex() for each in found]
