"""Steps on images. What is unusual about each is in its first line."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from step_kinds.common import Made, integers, minimised, normal, rng, seed, trained


def gan() -> Made:
    """A generator and a discriminator, two optimizers, one step."""
    seed()
    generator = keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(8 * 8 * 64),
            layers.Reshape((8, 8, 64)),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(64, 5, 2, "same"),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(3, 5, 2, "same", activation="tanh"),
        ]
    )
    discriminator = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(64, 5, 2, "same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3, seed=3),
            layers.Conv2D(128, 5, 2, "same"),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    og, od = (keras.optimizers.Adam(0.0001), keras.optimizers.Adam(0.0001))
    og.build(generator.trainable_variables)
    od.build(discriminator.trainable_variables)
    bce = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(x, z):
        with tf.GradientTape() as tg, tf.GradientTape() as td:
            f = generator(z, training=True)
            r = discriminator(x, training=True)
            q = discriminator(f, training=True)
            lg = bce(tf.ones_like(q), q)
            ld = bce(tf.ones_like(r), r) + bce(tf.zeros_like(q), q)
        for optimizer, tape, loss, model in ((og, tg, lg, generator), (od, td, ld, discriminator)):
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return lg + ld

    step.variables = generator.variables + discriminator.variables
    return step, (normal(64, 32, 32, 3), normal(64, 64))


def wgan_gp() -> Made:
    """A critic with a gradient penalty: a gradient of a gradient."""
    seed()
    critic = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(32, 5, 2, "same", activation="swish"),
            layers.Conv2D(64, 5, 2, "same", activation="swish"),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.RMSprop(0.0001)
    optimizer.build(critic.trainable_variables)

    def step(x, y):
        e = tf.random.stateless_uniform([x.shape[0], 1, 1, 1], [1, 2])
        with tf.GradientTape() as tape:
            with tf.GradientTape() as t2:
                model = x * e + y * (1 - e)
                t2.watch(model)
                s = critic(model)
            g = t2.gradient(s, model)
            n = tf.sqrt(tf.reduce_sum(g * g, [1, 2, 3]) + 1e-12)
            loss = tf.reduce_mean(critic(y)) - tf.reduce_mean(critic(x)) + 10 * tf.reduce_mean((n - 1) ** 2)
        gradients = tape.gradient(loss, critic.trainable_variables)
        optimizer.apply_gradients(zip(gradients, critic.trainable_variables, strict=True))
        return loss

    step.variables = critic.variables
    return step, (normal(48, 32, 32, 3), normal(48, 32, 32, 3))


def vit() -> Made:
    """A vision transformer on patches, with a schedule, decay and clipping."""
    seed()
    x = i = layers.Input((64, 64, 3))
    x = layers.Lambda(
        lambda v: tf.reshape(
            tf.image.extract_patches(v, [1, 8, 8, 1], [1, 8, 8, 1], [1, 1, 1, 1], "VALID"), [-1, 64, 192]
        )
    )(x)
    x = layers.Dense(128)(x)
    x = x + layers.Embedding(64, 128)(tf.range(64))
    for k in range(4):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 32, dropout=0.1, seed=k)(y, y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(256, activation="gelu")(y)
        x = x + layers.Dense(128)(y)
    model = keras.Model(i, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return (
        trained(
            model,
            lambda model, a, b: tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(b, model(a, training=True), from_logits=True)
            ),
            keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.001, 100), clipnorm=1.0),
        ),
        (normal(32, 64, 64, 3), integers(10, 32)),
    )


def capsule() -> Made:
    """Capsules: routing in a loop."""
    seed()
    weight = tf.Variable(normal(1, 256, 10, 16, 8) * 0.1)
    variables = [weight]

    def squash(s):
        n = tf.reduce_sum(s * s, -1, keepdims=True)
        return n / (1 + n) * s / tf.sqrt(n + 1e-09)

    def loss(u):
        uh = tf.einsum("nidkj,bij->bidk", weight, u)
        b = tf.zeros([u.shape[0], 256, 10, 1])
        for _r in tf.range(3):
            v = squash(tf.reduce_sum(tf.nn.softmax(b, 2) * uh, 1, keepdims=True))
            b += tf.reduce_sum(uh * v, -1, keepdims=True)
        return tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(b, 2) * uh, 1) ** 2)

    return minimised(loss, variables, keras.optimizers.Adam(0.001)), (normal(32, 256, 8),)


def deeplab() -> Made:
    """Segmentation: dilated convolutions, resizing."""
    seed()
    i = layers.Input((96, 96, 3))
    x = layers.Conv2D(32, 3, 2, "same", activation="relu")(i)
    lo = x
    for r in (1, 2):
        x = layers.SeparableConv2D(64, 3, padding="same", strides=2 if r == 1 else 1)(x)
        x = layers.BatchNormalization()(x)
        x = layers.ReLU(6.0)(x)
    p = [layers.Conv2D(32, 3, padding="same", dilation_rate=r, activation="relu")(x) for r in (1, 2, 4)]
    x = layers.Concatenate()(p)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.Concatenate()([x, lo])
    x = layers.Conv2D(21, 1)(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    model = keras.Model(i, x)
    return (
        trained(
            model,
            lambda model, a, b: tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(b, model(a, training=True))
            ),
        ),
        (normal(8, 96, 96, 3), integers(21, 8, 96, 96)),
    )


def contrastive() -> Made:
    """Contrastive learning: two views, all pairs."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.RandomFlip(seed=1),
            layers.RandomTranslation(0.1, 0.1, seed=2),
            layers.RandomContrast(0.2, seed=3),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Conv2D(64, 3, 2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(64),
        ]
    )

    def loss(model, a):
        z = tf.math.l2_normalize(tf.concat([model(a, training=True), model(a, training=True)], 0), 1)
        s = z @ tf.transpose(z) / 0.1 - 1000000000.0 * tf.eye(96)
        y = tf.concat([tf.range(48) + 48, tf.range(48)], 0)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, s))

    return (trained(model, loss), (normal(48, 32, 32, 3),))


def fakequant() -> Made:
    """Fake quantisation."""
    seed()
    weight = [tf.Variable(normal(128, 128) * 0.1) for _ in range(4)]
    lo = tf.Variable(-3.0)
    hi = tf.Variable(3.0)
    variables = weight
    optimizer = keras.optimizers.Nadam(0.001)
    optimizer.build(variables)

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weight:
                h = tf.nn.relu(
                    tf.quantization.fake_quant_with_min_max_vars(h, lo, hi)
                    @ tf.quantization.fake_quant_with_min_max_args(w, -1.0, 1.0)
                )
            loss = tf.reduce_mean(h * h)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        lo.assign(lo * 0.99 + 0.01 * tf.reduce_min(h))
        hi.assign(hi * 0.99 + 0.01 * tf.reduce_max(h))
        return loss

    step.variables = [*variables, lo, hi]
    return step, (normal(2048, 128),)


def mixed_fp16() -> Made:
    """Half precision with loss scaling."""
    seed()
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential(
        [layers.Input((32, 32, 3))]
        + [
            loss
            for c in (32, 64)
            for loss in (
                layers.Conv2D(c, 3, padding="same"),
                layers.BatchNormalization(),
                layers.Activation("relu"),
                layers.MaxPooling2D(),
            )
        ]
        + [layers.Flatten(), layers.Dense(10, dtype="float32")]
    )
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.001))
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            )
            sl = optimizer.scale_loss(loss)
        optimizer.apply_gradients(zip(tape.gradient(sl, variables), variables, strict=True))
        return loss

    step.variables = model.variables
    return step, (normal(64, 32, 32, 3), integers(10, 64))


def diffusion() -> Made:
    """A diffusion U-Net: group norms, attention, moving averages of the weights."""
    seed()
    x = i = layers.Input((32, 32, 3))
    t = layers.Input((1,))
    te = layers.Dense(64, activation="swish")(t)
    hs = []
    for c in (32, 64):
        x = layers.Conv2D(c, 3, padding="same")(x)
        x = x + layers.Reshape((1, 1, c))(layers.Dense(c)(te))
        x = layers.GroupNormalization(8)(x)
        x = layers.Activation("swish")(x)
        hs.append(x)
        x = layers.AveragePooling2D(2)(x)
    y = layers.Reshape((64, 64))(x)
    x = x + layers.Reshape((8, 8, 64))(layers.MultiHeadAttention(2, 32)(y, y))
    for c, h in zip((64, 32), hs[::-1], strict=True):
        x = layers.UpSampling2D()(x)
        x = layers.Concatenate()([x, h])
        x = layers.Conv2D(c, 3, padding="same")(x)
        x = layers.GroupNormalization(8)(x)
        x = layers.Activation("swish")(x)
    model = keras.Model([i, t], layers.Conv2D(3, 3, padding="same")(x))
    optimizer = keras.optimizers.AdamW(0.0001)
    optimizer.build(model.trainable_variables)
    ema = [tf.Variable(v) for v in model.trainable_variables]

    def step(x):
        n = tf.random.stateless_normal(tf.shape(x), [1, 2])
        t = tf.random.stateless_uniform([x.shape[0], 1], [3, 4])
        a = tf.cos(t)[:, :, None, None]
        with tf.GradientTape() as g:
            loss = tf.reduce_mean((model([a * x + tf.sqrt(1 - a * a) * n, t], training=True) - n) ** 2)
        gr = g.gradient(loss, model.trainable_variables)
        gr, _ = tf.clip_by_global_norm(gr, 1.0)
        optimizer.apply_gradients(zip(gr, model.trainable_variables, strict=True))
        for e, v in zip(ema, model.trainable_variables, strict=True):
            e.assign(0.99 * e + 0.01 * v)
        return loss

    step.variables = model.variables + ema
    return step, (normal(32, 32, 32, 3),)


def vqvae() -> Made:
    """A vector-quantised autoencoder: straight-through gradients, codebook updates."""
    seed()
    encoder = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(64, 4, 2, "same", activation="relu"),
            layers.Conv2D(64, 4, 2, "same", activation="relu"),
            layers.Conv2D(32, 1),
        ]
    )
    decoder = keras.Sequential(
        [
            layers.Input((8, 8, 32)),
            layers.Conv2DTranspose(64, 4, 2, "same", activation="relu"),
            layers.Conv2DTranspose(3, 4, 2, "same"),
        ]
    )
    codebook = tf.Variable(rng.randn(512, 32).astype("f"))
    cnt = tf.Variable(tf.ones([512]))
    sm = tf.Variable(codebook)
    optimizer = keras.optimizers.Adam(0.001)
    variables = encoder.trainable_variables + decoder.trainable_variables
    optimizer.build(variables)

    def step(x):
        with tf.GradientTape() as tape:
            z = encoder(x, training=True)
            f = tf.reshape(z, [-1, 32])
            d = (
                tf.reduce_sum(f * f, 1, keepdims=True)
                - 2 * tf.matmul(f, codebook, transpose_b=True)
                + tf.reduce_sum(codebook * codebook, 1)
            )
            k = tf.argmin(d, 1)
            q = tf.reshape(tf.gather(codebook, k), tf.shape(z))
            zq = z + tf.stop_gradient(q - z)
            loss = tf.reduce_mean((decoder(zq, training=True) - x) ** 2) + 0.25 * tf.reduce_mean(
                (tf.stop_gradient(q) - z) ** 2
            )
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        oh = tf.one_hot(k, 512)
        cnt.assign(0.99 * cnt + 0.01 * tf.reduce_sum(oh, 0))
        sm.assign(0.99 * sm + 0.01 * tf.matmul(oh, f, transpose_a=True))
        codebook.assign(sm / cnt[:, None])
        return loss

    step.variables = [*variables, codebook, cnt, sm]
    return step, (normal(64, 32, 32, 3),)


def espcn() -> Made:
    """Super-resolution: depth to space, structural similarity."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((48, 48, 1)),
            layers.Conv2D(64, 5, padding="same", activation="tanh"),
            layers.Conv2D(32, 3, padding="same", activation="tanh"),
            layers.Conv2D(9, 3, padding="same"),
            layers.Lambda(lambda v: tf.nn.depth_to_space(v, 3)),
        ]
    )
    return (
        trained(
            model,
            lambda model, x, y: (
                tf.reduce_mean(tf.sqrt((model(x, training=True) - y) ** 2 + 1e-06))
                + 0.01 * tf.reduce_mean(1 - tf.image.ssim(model(x, training=True), y, 1.0))
            ),
        ),
        (normal(16, 48, 48, 1), normal(16, 144, 144, 1)),
    )


def triplet() -> Made:
    """A triplet loss with the hardest negatives."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(64),
            layers.UnitNormalization(),
        ]
    )

    def loss(model, x, y):
        e = model(x, training=True)
        d = 2 - 2 * tf.matmul(e, e, transpose_b=True)
        s = tf.equal(y[:, None], y[None])
        hp = tf.reduce_max(tf.where(s, d, 0.0), 1)
        hn = tf.reduce_min(tf.where(s, 1000000000.0, d), 1)
        loss = tf.nn.relu(hp - hn + 0.2)
        tf.boolean_mask(loss, tf.ensure_shape(loss > 0, [128]))
        return tf.reduce_sum(tf.where(loss > 0, loss, 0.0)) / (tf.reduce_sum(tf.cast(loss > 0, tf.float32)) + 1e-09)

    return (trained(model, loss), (normal(128, 32, 32, 3), integers(16, 128)))


def rcnn_head() -> Made:
    """Regions of images: crop and resize, non-maximum suppression. TensorFlow's own values differ from run to run."""
    seed()
    b = keras.Sequential(
        [
            layers.Input((128, 128, 3)),
            layers.Conv2D(32, 3, 2, "same", activation="relu"),
            layers.Conv2D(64, 3, 2, "same", activation="relu"),
        ]
    )
    h = keras.Sequential(
        [layers.Input((7, 7, 64)), layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(25)]
    )
    variables = b.trainable_variables + h.trainable_variables
    bx = np.sort(rng.rand(256, 2, 2).astype("f"), 1).reshape(256, 4)

    def loss(x, box, idx, y):
        f = b(x, training=True)
        r = tf.image.crop_and_resize(f, box, idx, [14, 14])
        r = tf.nn.max_pool2d(r, 2, 2, "VALID")
        q = h(r, training=True)
        sc = tf.reduce_max(q[:, :5], 1)
        keep = tf.image.non_max_suppression(box, tf.stop_gradient(sc), 32)
        k = tf.reduce_sum(tf.one_hot(keep, 256), 0)
        return tf.reduce_sum(k * tf.nn.sparse_softmax_cross_entropy_with_logits(y, q[:, :5])) / 32.0 + tf.reduce_mean(
            tf.keras.losses.huber(tf.zeros_like(q[:, 5:]), q[:, 5:])
        )

    return minimised(loss, variables, keras.optimizers.SGD(0.01)), (
        normal(4, 128, 128, 3),
        tf.constant(bx),
        integers(4, 256),
        integers(5, 256),
    )


def augment() -> Made:
    """Random augmentation inside of the step."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((64, 64, 3)),
            layers.RandomFlip(seed=1),
            layers.RandomRotation(0.1, seed=2),
            layers.RandomContrast(0.2, seed=3),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPool2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )

    def loss(model, x, y):
        x = tf.image.stateless_random_brightness(x, 0.2, [1, 2])
        x = tf.image.stateless_random_crop(x, [32, 56, 56, 3], [3, 4])
        x = tf.image.resize(x, [64, 64])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))

    return (trained(model, loss), (normal(32, 64, 64, 3), integers(10, 32)))


def distill() -> Made:
    """A teacher and a student, separable convolutions."""
    seed()
    teacher = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(64, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    student = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.SeparableConv2D(32, 3, activation="relu"),
            layers.DepthwiseConv2D(3, activation="relu"),
            layers.SpatialDropout2D(0.1, seed=1),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )

    def loss(student, x):
        return keras.losses.KLDivergence()(
            tf.nn.softmax(teacher(x, training=False) / 4), tf.nn.softmax(student(x, training=True) / 4)
        )

    return (trained(student, loss, keras.optimizers.Adafactor(0.001)), (normal(64, 32, 32, 3),))
