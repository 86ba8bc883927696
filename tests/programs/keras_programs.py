"""Keras programs, as Keras' own guides and examples write them, on small data: what test_keras.py runs.

Each is a function that makes a compiled model, and one that trains it and returns what it reports.
"""

from __future__ import annotations

import functools
import logging
import logging.handlers
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops
from models import settle

import tfswap

ROWS, WIDTH = 600, 64

Program = tuple[Callable[[], Any], Callable[[Any], Any]]


def normal(*shape: int) -> np.ndarray:
    return np.random.RandomState(0).randn(*shape).astype("float32")


def labels(classes: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(1).randint(0, classes, shape)


# --- real models ----------------------------------------------------------------------------------------------


def mobilenet() -> Program:
    def build() -> Any:
        model = keras.applications.MobileNetV2(alpha=0.35, weights=None, input_shape=(96, 96, 3), classes=10)
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return build, lambda model: model.fit(normal(20, 96, 96, 3), labels(10, 20), batch_size=8, verbose=0).history


def transformer() -> Program:
    """Keras' example of timeseries classification with a transformer."""

    def encoder(inputs: Any) -> Any:
        x = layers.MultiHeadAttention(key_dim=32, num_heads=4, dropout=0.25)(inputs, inputs)
        x = layers.Dropout(0.25)(x)
        x = layers.LayerNormalization(epsilon=1e-6)(x)
        res = x + inputs
        x = layers.Conv1D(filters=4, kernel_size=1, activation="relu")(res)
        x = layers.Dropout(0.25)(x)
        x = layers.Conv1D(filters=inputs.shape[-1], kernel_size=1)(x)
        x = layers.LayerNormalization(epsilon=1e-6)(x)
        return x + res

    def build() -> Any:
        inputs = keras.Input((64, 1))
        x = encoder(inputs)
        x = layers.GlobalAveragePooling1D(data_format="channels_last")(x)
        x = layers.Dropout(0.4)(layers.Dense(128, activation="relu")(x))
        model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
        model.compile(
            loss="sparse_categorical_crossentropy",
            optimizer=keras.optimizers.Adam(learning_rate=1e-4),
            metrics=["sparse_categorical_accuracy"],
        )
        return model

    def fit(model: Any) -> Any:
        return model.fit(normal(80, 64, 1), labels(2, 80), validation_split=0.2, batch_size=24, verbose=0).history

    return build, fit


class Sampling(layers.Layer):
    """Of Keras' example of a variational autoencoder, as is the next."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        z_mean, z_log_var = inputs
        batch = ops.shape(z_mean)[0]
        dim = ops.shape(z_mean)[1]
        epsilon = keras.random.normal(shape=(batch, dim), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    def __init__(self, encoder: Any, decoder: Any, **kwargs: Any):
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> Any:
        return [self.total_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            reconstruction_loss = ops.mean(
                ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2)),
            )
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {"loss": self.total_loss_tracker.result(), "kl_loss": self.kl_loss_tracker.result()}


def vae() -> Program:
    def build() -> Any:
        inputs = keras.Input((28, 28, 1))
        x = layers.Conv2D(16, 3, activation="relu", strides=2, padding="same")(inputs)
        x = layers.Conv2D(32, 3, activation="relu", strides=2, padding="same")(x)
        x = layers.Dense(16, activation="relu")(layers.Flatten()(x))
        z_mean, z_log_var = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
        encoder = keras.Model(inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])])
        latent = keras.Input((2,))
        x = layers.Reshape((7, 7, 32))(layers.Dense(7 * 7 * 32, activation="relu")(latent))
        x = layers.Conv2DTranspose(32, 3, activation="relu", strides=2, padding="same")(x)
        x = layers.Conv2DTranspose(16, 3, activation="relu", strides=2, padding="same")(x)
        decoder = keras.Model(latent, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x))
        model = VAE(encoder, decoder)
        model.compile(optimizer=keras.optimizers.Adam())
        return model

    images = np.random.RandomState(0).rand(160, 28, 28, 1).astype("float32")
    return build, lambda model: model.fit(images, batch_size=64, verbose=0).history


def lstm() -> Program:
    """Keras' example of a text classifier, of texts of any length."""

    def build() -> Any:
        inputs = keras.Input(shape=(None,), dtype="int32")
        x = layers.Embedding(2000, 32)(inputs)
        x = layers.Bidirectional(layers.LSTM(16))(x)
        model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
        model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
        return model

    return build, lambda model: model.fit(labels(2000, 32, 20), labels(2, 32), batch_size=16, verbose=0).history


# --- examples of Keras ----------------------------------------------------------------------------------------


def convnet() -> Program:
    def build() -> Any:
        model = keras.Sequential(
            [
                keras.Input(shape=(28, 28, 1)),
                layers.Conv2D(32, kernel_size=(3, 3), activation="relu"),
                layers.MaxPooling2D(pool_size=(2, 2)),
                layers.Conv2D(64, kernel_size=(3, 3), activation="relu"),
                layers.MaxPooling2D(pool_size=(2, 2)),
                layers.Flatten(),
                layers.Dropout(0.5),
                layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
        return model

    def fit(model: Any) -> Any:
        y = keras.utils.to_categorical(labels(10, 150), 10)
        return model.fit(normal(150, 28, 28, 1), y, batch_size=64, validation_split=0.1, verbose=0).history

    return build, fit


def unet() -> Program:
    """Keras' example of image segmentation with a U-Net of Xception's kind."""

    def build() -> Any:
        inputs = keras.Input(shape=(32, 32, 3))
        x = layers.Conv2D(32, 3, strides=2, padding="same")(inputs)
        x = layers.BatchNormalization()(x)
        x = layers.Activation("relu")(x)
        previous = x
        for filters in [64]:
            x = layers.Activation("relu")(x)
            x = layers.SeparableConv2D(filters, 3, padding="same")(x)
            x = layers.BatchNormalization()(x)
            x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
            residual = layers.Conv2D(filters, 1, strides=2, padding="same")(previous)
            x = layers.add([x, residual])
            previous = x
        for filters in [64, 32]:
            x = layers.Activation("relu")(x)
            x = layers.Conv2DTranspose(filters, 3, padding="same")(x)
            x = layers.BatchNormalization()(x)
            x = layers.UpSampling2D(2)(x)
            residual = layers.UpSampling2D(2)(previous)
            residual = layers.Conv2D(filters, 1, padding="same")(residual)
            x = layers.add([x, residual])
            previous = x
        model = keras.Model(inputs, layers.Conv2D(3, 3, activation="softmax", padding="same")(x))
        model.compile(optimizer=keras.optimizers.Adam(1e-4), loss="sparse_categorical_crossentropy")
        return model

    def fit(model: Any) -> Any:
        masks = labels(3, 40, 32, 32, 1).astype("uint8")
        data = tf.data.Dataset.from_tensor_slices((normal(40, 32, 32, 3), masks))
        return model.fit(data.map(lambda image, mask: (image / 2, mask)).batch(16).prefetch(2), verbose=0).history

    return build, fit


class GAN(keras.Model):
    """Of Keras' guide to what happens in fit: two optimizers in one step."""

    def __init__(self, discriminator: Any, generator: Any, latent_dim: int):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(1337)

    @property
    def metrics(self) -> Any:
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real_images: Any) -> Any:
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        generated_images = self.generator(vectors)
        combined_images = tf.concat([generated_images, real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply(grads, self.discriminator.trainable_weights)
        vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        misleading_labels = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading_labels, self.discriminator(self.generator(vectors)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(grads, self.generator.trainable_weights)
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


def gan() -> Program:
    def build() -> Any:
        discriminator = keras.Sequential(
            [
                keras.Input(shape=(28, 28, 1)),
                layers.Conv2D(32, (3, 3), strides=(2, 2), padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2D(64, (3, 3), strides=(2, 2), padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.GlobalMaxPooling2D(),
                layers.Dense(1),
            ]
        )
        generator = keras.Sequential(
            [
                keras.Input(shape=(16,)),
                layers.Dense(7 * 7 * 16),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Reshape((7, 7, 16)),
                layers.Conv2DTranspose(32, (4, 4), strides=(2, 2), padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2DTranspose(32, (4, 4), strides=(2, 2), padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Conv2D(1, (7, 7), padding="same", activation="sigmoid"),
            ]
        )
        model = GAN(discriminator, generator, 16)
        model.compile(
            d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
            g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
            loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    images = np.random.RandomState(0).rand(80, 28, 28, 1).astype("float32")
    data = tf.data.Dataset.from_tensor_slices(images).batch(32)
    return build, lambda model: model.fit(data, verbose=0).history


# --- what fit and compile are given -------------------------------------------------------------------------


def dense(**compiled: Any) -> Any:
    hidden = [layers.Dense(128, activation="gelu") for _ in range(4)]
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(1)])
    for layer in model.layers[:2]:
        layer.trainable = "frozen" not in compiled
    compiled.pop("frozen", None)
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def dense_data() -> tuple[np.ndarray, np.ndarray]:
    return normal(ROWS, WIDTH), normal(ROWS, 1)


def fit_dense(model: Any, **options: Any) -> Any:
    return model.fit(
        *dense_data(), **{"batch_size": 256, "epochs": 2, "shuffle": False, "verbose": 0, **options}
    ).history


def several_inputs() -> Program:
    """Callbacks, metrics, sample weights, several steps at a time, clipping, frozen layers."""

    def build() -> Any:
        return dense(
            optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.1),
            metrics=["mae", keras.metrics.RootMeanSquaredError()],
            weighted_metrics=["mse"],
            steps_per_execution=2,
            frozen=True,
        )

    def fit(model: Any) -> Any:
        callbacks = [  # of each fit's own: those of Keras 3.12 keep what they saw in the one before
            keras.callbacks.EarlyStopping(patience=3),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        ]
        weights = np.linspace(0, 1, ROWS)
        return fit_dense(model, sample_weight=weights, validation_split=0.1, callbacks=callbacks)

    return build, fit


def accumulated() -> Program:
    """Gradients of two batches for each update, weight decay, averaged weights."""

    def build() -> Any:
        optimizer = keras.optimizers.AdamW(
            gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3, clipnorm=1.0
        )
        return dense(optimizer=optimizer)

    return build, fit_dense


def mixed() -> Program:
    """Half precision, with the loss scaled as `compile` makes it."""

    def build() -> Any:
        keras.mixed_precision.set_global_policy("mixed_float16")
        try:
            return dense()
        finally:
            keras.mixed_precision.set_global_policy("float32")

    return build, functools.partial(fit_dense, epochs=1)  # plain kernels take long for halves


class Shifted(layers.Layer):
    """By an input that may be absent: Keras 3.12 has no inputs that nothing reads."""

    def call(self, given: Any, shift: Any = None) -> Any:
        return given if shift is None else given + shift


def parts() -> Program:
    """Inputs and outputs by name, an input that is absent, class weights."""

    def build() -> Any:
        given, absent = keras.Input((WIDTH,), name="given"), keras.Input((1,), name="absent", optional=True)
        hidden = Shifted()(given, absent)
        for _ in range(4):
            hidden = layers.Dense(128, activation="gelu")(hidden)
        inputs = {"given": given, "absent": absent}
        model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
        model.compile("rmsprop", "binary_crossentropy", metrics=["accuracy"])
        return model

    def fit(model: Any) -> Any:
        x, y = dense_data()
        weights = {0: 1.0, 1: 3.0}
        return model.fit({"given": x, "absent": None}, y > 0, batch_size=256, class_weight=weights, verbose=0).history

    return build, fit


def on_batches() -> Program:
    """`train_on_batch`, with batches of several sizes, between two fits."""

    def train(model: Any) -> Any:
        x, y = dense_data()
        reported = [fit_dense(model, epochs=1)]
        reported += [model.train_on_batch(x[:rows], y[:rows], return_dict=True) for rows in (256, 100, 256, 31)]
        return [*reported, fit_dense(model, epochs=1)]

    return lambda: dense(metrics=["mae"]), train


PROGRAMS: dict[str, Callable[[], Program]] = {
    program.__name__: program
    for program in (
        mobilenet,
        transformer,
        vae,
        lstm,
        convnet,
        unet,
        gan,
        several_inputs,
        accumulated,
        mixed,
        parts,
        on_batches,
    )
}


def digest(model: Any, reported: Any) -> list[str]:
    """Every variable, the optimizers' included, and every figure that was reported, to the bit."""
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    variables = [*model.variables, *(v for optimizer in optimizers for v in optimizer.variables)]
    return [repr(reported), *(np.asarray(variable).tobytes().hex() for variable in variables)]


def main(name: str, limit: str) -> dict[str, Any]:
    """Train with tfswap, then without, and compare."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # evaluation has it otherwise
    settle()
    made = logging.getLogger("tfswap")
    made.setLevel(logging.INFO)
    made.addHandler(headlines := logging.handlers.BufferingHandler(1000))
    build, fit = PROGRAMS[name]()
    keras.utils.set_random_seed(0)
    model = tfswap.keras.optimize(build(), memory_limit=limit, on_exceeded="raise")
    found = digest(model, fit(model))
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    report = tfswap.keras.report(model)
    keras.utils.set_random_seed(0)
    plain = build()
    if plain.optimizer is not None:
        plain.optimizer.build(plain.trainable_variables)  # or TensorFlow traces a step twice, which has made them
    expected = digest(plain, fit(plain))
    return {
        "same": found == expected,
        "variables": len(found) - 1,
        "peak": peak,
        "limit": report.memory_limit_bytes,
        "planned": report.planned_peak_bytes,
        "baseline": report.baseline_peak_bytes,
        "moved": len(report.swapped) + len(report.recomputed),
        "plans": model.make_train_function.plans,
        "plannings": sum(": peak " in record.getMessage() for record in headlines.buffer),
    }
