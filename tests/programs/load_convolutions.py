"""A model of convolutions that test_load.py rewrites, loads and runs."""

from __future__ import annotations

from typing import Any

from load_programs import peak_of

IMAGES, DRAWN = 64, 6


def convolving() -> Any:
    """Convolutions, one of which requests most of what the step takes, and embeddings, known by bounds only."""
    import tensorflow as tf

    def normal(*shape: int) -> Any:
        return tf.Variable(tf.random.stateless_normal(shape, (len(shape), shape[-2])) * 0.2)

    sparse = [tf.SparseTensorSpec([IMAGES, DRAWN], kind) for kind in (tf.int64, tf.float32)]

    class Convolving(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernels = [normal(3, 3, channels, 16) for channels in (3, 16, 16, 16)]
            self.dense, self.embeddings = normal(16, 10), normal(500, 16)

        @tf.function(input_signature=[tf.TensorSpec([None, 32, 32, 3]), *sparse])
        def train_step(self, x: Any, ids: Any, weights: Any) -> Any:
            with tf.GradientTape() as tape:
                h = x
                for kernel in self.kernels:
                    h = tf.nn.relu(tf.nn.conv2d(h, kernel, 1, "SAME"))
                    h = h - tf.reduce_mean(h, [1, 2], keepdims=True)
                drawn = tf.nn.embedding_lookup_sparse(self.embeddings, ids, weights, combiner="mean")
                loss = tf.reduce_mean(((tf.reduce_mean(h * h, [1, 2]) + drawn) @ self.dense) ** 2)
            variables = [*self.kernels, self.dense]
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

    return Convolving()


def save_convolving(folder: str) -> None:
    import tensorflow as tf

    import tfswap

    tf.saved_model.save(convolving(), f"{folder}/model")
    count = IMAGES * DRAWN
    sizes = {"x": (IMAGES, 32, 32, 3), "ids": (count, 2), "ids_1": (count,), "ids_2": (2,)}
    sizes |= {"weights": (count, 2), "weights_1": (count,), "weights_2": (2,)}
    tfswap.optimize_graph(f"{folder}/model", f"{folder}/made", memory_limit="58%", input_shapes=sizes)


def run_convolving(path: str) -> dict[str, Any]:
    """Runs a rewritten model that TensorFlow loads into an arena that grows; its figures, or its error."""
    import tensorflow as tf

    import tfswap.ops.codecs  # noqa: F401

    model = tf.saved_model.load(path)
    places = [[row, column] for row in range(IMAGES) for column in range(DRAWN)]
    drawn = tf.random.stateless_uniform([len(places)], (3, 3), maxval=500, dtype=tf.int64)
    x, ids, weights = (
        tf.random.stateless_normal([IMAGES, 32, 32, 3], (1, 1)),
        tf.SparseTensor(places, drawn, [IMAGES, DRAWN]),
        tf.SparseTensor(places, tf.ones([len(places)]), [IMAGES, DRAWN]),
    )
    errors: list[str] = []

    def run() -> None:
        try:
            for _ in range(3):
                model.train_step(x, ids, weights)
        except tf.errors.ResourceExhaustedError as error:
            errors.append(error.message)

    return {"peak": peak_of(run), "errors": errors}
