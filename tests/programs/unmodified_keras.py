"""A program that does not import tfswap: Keras models that train by `fit`, `unmodified_keras.py ROWS`.

One is functional, with dropout and batch normalisation; the other is a GAN with a `train_step` of its own and two
optimizers. It prints digests of their weights.
"""

import hashlib
import sys

import keras
import tensorflow as tf

WIDTH = 256


def digest(model: keras.Model) -> str:
    return hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()


def functional() -> keras.Model:
    x = inputs = keras.Input([WIDTH])
    for i in range(8):
        x = keras.layers.Dense(WIDTH, "relu")(x)
        x = keras.layers.Dropout(0.1, seed=i)(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def dense(units: int) -> keras.Sequential:
    layers = [keras.layers.Dense(WIDTH, "tanh") for _ in range(6)]
    return keras.Sequential([keras.Input([WIDTH]), *layers, keras.layers.Dense(units)])


class Gan(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = dense(WIDTH), dense(1)

    def compile(self, generator_optimizer: str, discriminator_optimizer: str) -> None:
        super().compile()
        self.generator_optimizer = keras.optimizers.get(generator_optimizer)
        self.discriminator_optimizer = keras.optimizers.get(discriminator_optimizer)

    def train_step(self, data: tf.Tensor) -> dict[str, tf.Tensor]:
        noise = tf.random.stateless_normal(tf.shape(data), seed=(3, 4))
        with tf.GradientTape() as tape:
            fake, real = self.discriminator(self.generator(noise)), self.discriminator(data)
            loss = tf.reduce_mean(tf.nn.softplus(fake)) + tf.reduce_mean(tf.nn.softplus(-real))
        variables = self.discriminator.trainable_variables
        self.discriminator_optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            tricked = tf.reduce_mean(tf.nn.softplus(-self.discriminator(self.generator(noise))))
        variables = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(tricked, variables), variables, strict=True))
        return {"loss": loss}


def main(rows: int) -> None:
    keras.utils.set_random_seed(1)
    x = tf.random.stateless_normal([3 * rows, WIDTH], seed=(1, 2)).numpy()
    model = functional()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(x, x.argmax(axis=1) % 10, batch_size=rows, verbose=0)
    gan = Gan()
    gan.compile("adam", "sgd")
    gan.fit(x, batch_size=rows, verbose=0)
    print(digest(model), digest(gan))


if __name__ == "__main__":
    main(int(sys.argv[1]))
