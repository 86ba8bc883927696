"""Training scripts that do not import tfswap, in the manner of well-known ones: `unmodified_nets.py NAME`.

Nets for images, volumes, sequences and sound. Each prints losses and a digest of its weights.
"""

import sys
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from unmodified_scripts import STEPS, normal, show

layers = keras.layers


def unet() -> None:
    """Segmentation by a U-Net with skips, a weighted loss, `fit` on a pipeline with augmentation."""

    def block(x: tf.Tensor, width: int) -> tf.Tensor:
        for _ in range(2):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x)))
        return x

    image = keras.Input([64, 64, 3])
    skips, x = [], image
    for width in (16, 32, 64):
        skips.append(block(x, width))
        x = layers.MaxPooling2D()(skips[-1])
    x = block(x, 96)
    for width, skip in zip((64, 32, 16), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.Conv2DTranspose(width, 2, 2)(x), skip])
        x = block(x, width)
    model = keras.Model(image, layers.Conv2D(3, 1)(x))

    def loss(mask: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        mask = tf.cast(mask, tf.int32)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=mask, logits=logits)
        return tf.reduce_mean(each * tf.gather(tf.constant([0.5, 1.0, 2.0]), mask))

    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    images = normal(3 * 16, 64, 64, 3)
    masks = tf.cast(tf.argmax(images, axis=-1), tf.int32)
    data = tf.data.Dataset.from_tensor_slices((images, masks)).batch(16, drop_remainder=True)
    data = data.map(lambda x, y: (tf.reverse(x, [2]), tf.reverse(y, [2]))).prefetch(1)
    history = model.fit(data, epochs=1, verbose=0)
    show(history.history["loss"], model.get_weights())


def voxelmorph() -> None:
    """Registration: a 3D net gives a field of shifts, by which a volume is warped, with gradients through the warp."""
    size = 24
    grid = tf.cast(tf.stack(tf.meshgrid(*[tf.range(size)] * 3, indexing="ij"), axis=-1), tf.float32)

    @tf.function
    def warp(volume: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        """Trilinear interpolation at the shifted places."""
        place = tf.clip_by_value(grid + shift, 0.0, size - 1.001)
        low = tf.floor(place)
        weight, total = place - low, 0.0
        for corner in np.ndindex(2, 2, 2):
            at = tf.cast(low, tf.int32) + tf.constant(corner, tf.int32)
            share = tf.reduce_prod(tf.where(tf.constant(corner) > 0, weight, 1.0 - weight), axis=-1)
            total += share * tf.gather_nd(volume, at, batch_dims=1)
        return total

    pair = keras.Input([size, size, size, 2])
    x = layers.Conv3D(16, 3, padding="same")(pair)
    for _ in range(3):
        x = layers.Conv3D(16, 3, padding="same")(layers.LeakyReLU(negative_slope=0.2)(x))
    net = keras.Model(
        pair, layers.Conv3D(3, 3, padding="same", kernel_initializer=keras.initializers.RandomNormal())(x)
    )
    optimizer = keras.optimizers.Adam(1e-3)

    @tf.function
    def train_step(moving: tf.Tensor, fixed: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            shift = net(tf.stack([moving, fixed], axis=-1), training=True)
            smooth = [tf.reduce_mean((part[0] - part[1]) ** 2) for part in _neighbours(shift)]
            loss = tf.reduce_mean((warp(moving, shift) - fixed) ** 2) + 0.05 * tf.add_n(smooth)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
        )
        return loss

    losses = [
        train_step(normal(8, size, size, size, seed=i), normal(8, size, size, size, seed=9)) for i in range(STEPS)
    ]
    show(losses, net.get_weights())


def _neighbours(shift: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    return [
        (shift[:, 1:], shift[:, :-1]),
        (shift[:, :, 1:], shift[:, :, :-1]),
        (shift[:, :, :, 1:], shift[:, :, :, :-1]),
    ]


def borzoi() -> None:
    """Tracks from DNA: a tower of 1D convolutions and pooling, attention, a Poisson loss, weight decay, clipping."""
    dna = keras.Input([4096, 4])
    x = layers.Conv1D(32, 15, padding="same")(dna)
    for width in (32, 48, 64):
        y = layers.Conv1D(width, 5, padding="same")(layers.Activation("gelu")(layers.BatchNormalization()(x)))
        x = layers.MaxPooling1D(2)(layers.Add()([y, layers.Conv1D(width, 1)(x)]))
    normed = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.Dropout(0.1)(layers.MultiHeadAttention(4, 16)(normed, normed))])
    model = keras.Model(dna, layers.Conv1D(8, 1, activation="softplus")(x))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=1e-4, global_clipnorm=0.2)

    @tf.function
    def train_step(sequence: tf.Tensor, tracks: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = model(sequence, training=True)
            loss = tf.reduce_mean(tf.nn.log_poisson_loss(tracks, tf.math.log(found + 1e-6))) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = []
    for i in range(STEPS):
        letters = tf.argmax(normal(4, 4096, 4, seed=i), axis=-1)
        losses.append(train_step(tf.one_hot(letters, 4), tf.abs(normal(4, 512, 8, seed=i))))
    show(losses, model.get_weights())


def cyclegan() -> None:
    """Two generators and two discriminators, whose four gradients one persistent tape gives."""

    def generator() -> keras.Model:
        image = keras.Input([64, 64, 3])
        x = layers.Conv2D(16, 3, padding="same")(image)
        for _ in range(3):
            y = layers.Conv2D(16, 3, padding="same", activation="relu")(layers.GroupNormalization(-1)(x))
            x = layers.Add()([x, layers.Conv2D(16, 3, padding="same")(y)])
        return keras.Model(image, layers.Conv2D(3, 3, padding="same", activation="tanh")(x))

    def discriminator() -> keras.Model:
        return keras.Sequential(
            [keras.Input([64, 64, 3]), *(layers.Conv2D(w, 4, 2, "same", activation="leaky_relu") for w in (16, 32, 1))]
        )

    to_b, to_a, judge_a, judge_b = generator(), generator(), discriminator(), discriminator()
    models = to_b, to_a, judge_a, judge_b
    optimizers = [keras.optimizers.Adam(2e-4, beta_1=0.5) for _ in models]

    def real(judged: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((judged - 1.0) ** 2)

    @tf.function
    def train_step(a: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            fake_b, fake_a = to_b(a, training=True), to_a(b, training=True)
            cycle = tf.reduce_mean(tf.abs(to_a(fake_b, training=True) - a))
            cycle += tf.reduce_mean(tf.abs(to_b(fake_a, training=True) - b))
            same = [tf.reduce_mean(tf.abs(to_b(b, training=True) - b)), tf.reduce_mean(tf.abs(to_a(a) - a))]
            losses = [
                real(judge_b(fake_b)) + 10.0 * cycle + 5.0 * same[0],
                real(judge_a(fake_a)) + 10.0 * cycle + 5.0 * same[1],
                0.5 * (real(judge_a(a)) + tf.reduce_mean(judge_a(fake_a) ** 2)),
                0.5 * (real(judge_b(b)) + tf.reduce_mean(judge_b(fake_b) ** 2)),
            ]
        for model, loss, optimizer in zip(models, losses, optimizers, strict=True):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return losses

    found = [loss for i in range(STEPS) for loss in train_step(normal(4, 64, 64, 3, seed=i), normal(4, 64, 64, 3))]
    show(found, [weight for model in models for weight in model.get_weights()])


def ddpm() -> None:
    """Denoising diffusion: a net with time embeddings, noise drawn in `train_step`, an average of the weights."""

    class Diffusion(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.average = (self._net() for _ in range(2))
            self.average.set_weights(self.net.get_weights())
            self.average.trainable = False
            kept = np.cumprod(1.0 - np.linspace(1e-4, 0.02, 100)).astype("float32")
            self.signal, self.noise = tf.constant(np.sqrt(kept)), tf.constant(np.sqrt(1.0 - kept))

        @staticmethod
        def _net() -> keras.Model:
            image, time = keras.Input([32, 32, 3]), keras.Input([], dtype="int32")
            embedded = layers.Dense(32, "swish")(layers.Embedding(100, 32)(time))
            x = layers.Conv2D(32, 3, padding="same")(image)
            for _ in range(4):
                y = layers.Conv2D(32, 3, padding="same")(layers.Activation("swish")(layers.GroupNormalization(8)(x)))
                y = layers.Add()([y, layers.Reshape([1, 1, 32])(layers.Dense(32)(embedded))])
                x = layers.Add()([x, layers.Conv2D(32, 3, padding="same")(layers.Activation("swish")(y))])
            return keras.Model([image, time], layers.Conv2D(3, 3, padding="same")(x))

        def train_step(self, images: tf.Tensor) -> dict[str, tf.Tensor]:
            rows = tf.shape(images)[0]
            time = tf.random.uniform([rows], 0, 100, tf.int32)
            noise = tf.random.normal(tf.shape(images))
            signal, level = (tf.gather(each, time)[:, None, None, None] for each in (self.signal, self.noise))
            with tf.GradientTape() as tape:
                found = self.net([signal * images + level * noise, time], training=True)
                loss = tf.reduce_mean((noise - found) ** 2)
            gradients = tape.gradient(loss, self.net.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.net.trainable_weights, strict=True))
            for weight, average in zip(self.net.weights, self.average.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
            return {"noise": loss}

    model = Diffusion()
    model.compile(optimizer=keras.optimizers.Adam(1e-3))
    history = model.fit(normal(3 * 32, 32, 32, 3).numpy(), batch_size=32, shuffle=False, verbose=0)
    show(history.history["noise"], model.get_weights())


def ctc() -> None:
    """Speech: spectrograms computed in the step, convolutions, recurrent layers in both directions, the CTC loss."""
    sound = keras.Input([96, 129])
    x = layers.Reshape([96, 129, 1])(sound)
    x = layers.Conv2D(16, [5, 7], [1, 2], "same", activation="relu")(x)
    x = layers.Reshape([96, 65 * 16])(x)
    for _ in range(2):
        x = layers.Bidirectional(layers.GRU(64, return_sequences=True))(x)
    model = keras.Model(sound, layers.Dense(28)(x))
    optimizer = keras.optimizers.Adam(1e-3)

    @tf.function
    def train_step(waves: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        spectra = tf.math.log1p(tf.abs(tf.signal.stft(waves, 256, 128)))
        spectra = tf.ensure_shape(spectra[:, :96], [None, 96, 129])
        with tf.GradientTape() as tape:
            logits = model(spectra, training=True)
            rows = tf.shape(labels)[0]
            lengths = tf.fill([rows], 96), tf.fill([rows], 12)
            loss = tf.reduce_mean(
                tf.nn.ctc_loss(labels, tf.transpose(logits, [1, 0, 2]), lengths[1], lengths[0], blank_index=27)
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    random = np.random.default_rng(1)
    words = [tf.constant(random.integers(0, 27, [16, 12]), tf.int32) for _ in range(STEPS)]
    losses = [train_step(normal(16, 97 * 128 + 128, seed=i), words[i]) for i in range(STEPS)]
    show(losses, model.get_weights())


SCRIPTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (unet, voxelmorph, borzoi, cyclegan, ddpm, ctc)
}

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    SCRIPTS[sys.argv[1]]()
