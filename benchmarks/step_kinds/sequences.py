"""Steps on sequences, graphs and points. What is unusual about each is in its first line."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from step_kinds.common import Made, integers, minimised, normal, rng, seed, trained


def ctc_asr() -> Made:
    """Speech recognition: a spectrogram, recurrent layers, connectionist temporal classification."""
    seed()
    i = layers.Input((4096,))
    x = layers.Lambda(lambda v: tf.math.log(tf.abs(tf.signal.stft(v, 256, 64)) + 0.001))(i)
    x = layers.Conv1D(128, 5, padding="same", activation="relu")(x)
    x = layers.Bidirectional(layers.GRU(64, return_sequences=True))(x)
    model = keras.Model(i, layers.Dense(29)(x))

    def loss(model, a, lab):
        lo = model(a, training=True)
        return tf.reduce_mean(
            tf.nn.ctc_loss(
                lab, lo, tf.fill([16], 10), tf.fill([16], lo.shape[1]), logits_time_major=False, blank_index=-1
            )
        )

    return (trained(model, loss), (normal(16, 4096), integers(27, 16, 10) + 1))


def bilstm_mask() -> Made:
    """A bidirectional LSTM with masks."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((40,), dtype="int32"),
            layers.Embedding(2000, 64, mask_zero=True),
            layers.Bidirectional(layers.LSTM(64, return_sequences=True)),
            layers.LSTM(64),
            layers.Dense(2),
        ]
    )
    return (
        trained(
            model,
            lambda model, a, b: tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(b, model(a, training=True), from_logits=True)
            ),
            keras.optimizers.Lamb(0.001),
        ),
        (integers(2000, 64, 40), integers(2, 64)),
    )


def scan_ssm() -> Made:
    """A state-space model by tf.scan."""
    seed()
    transition = tf.Variable(normal(64) * 0.1)
    input_matrix = tf.Variable(normal(64, 64) * 0.1)
    output_matrix = tf.Variable(normal(64, 64) * 0.1)
    variables = [transition, input_matrix, output_matrix]

    def loss(x):
        u = tf.transpose(x @ input_matrix, [1, 0, 2])
        h = tf.scan(lambda h, e: tf.sigmoid(transition) * h + e, u, initializer=tf.zeros([32, 64]))
        return tf.reduce_mean((tf.transpose(h, [1, 0, 2]) @ output_matrix) ** 2)

    return minimised(loss, variables, keras.optimizers.Adam(0.001)), (normal(32, 64, 64),)


def wavenet() -> Made:
    """Dilated causal convolutions."""
    seed()
    x = i = layers.Input((2048, 1))
    x = layers.Conv1D(32, 1)(x)
    s = []
    for d in (1, 2, 4, 8, 16, 32):
        a = layers.Conv1D(32, 2, dilation_rate=d, padding="causal", activation="tanh")(x)
        b = layers.Conv1D(32, 2, dilation_rate=d, padding="causal", activation="sigmoid")(x)
        z = a * b
        s.append(layers.Conv1D(32, 1)(z))
        x = x + layers.Conv1D(32, 1)(z)
    model = keras.Model(i, layers.Conv1D(64, 1)(layers.ReLU()(layers.Add()(s))))
    return (
        trained(
            model,
            lambda model, x, y: tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            ),
        ),
        (normal(8, 2048, 1), integers(64, 8, 2048)),
    )


def stft_loss() -> Made:
    """A loss on spectrograms."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((8192, 1)),
            layers.Conv1D(16, 15, padding="same", activation="elu"),
            layers.Conv1D(16, 15, padding="same", activation="elu"),
            layers.Conv1D(1, 15, padding="same"),
        ]
    )

    def loss(model, x, y):
        optimizer = model(x, training=True)[..., 0]
        loss = 0.0
        for n in (256, 512):
            a = tf.abs(tf.signal.stft(optimizer, n, n // 4))
            b = tf.abs(tf.signal.stft(y[..., 0], n, n // 4))
            loss += tf.reduce_mean(tf.abs(a - b))
        return loss

    return (trained(model, loss), (normal(8, 8192, 1), normal(8, 8192, 1)))


def perceiver() -> Made:
    """Cross attention from few latent vectors to many inputs."""
    seed()
    i = layers.Input((1024, 64))
    latents = layers.Embedding(64, 128)(tf.range(64))
    z = layers.Lambda(lambda v: tf.repeat(latents[None], tf.shape(v)[0], 0))(i)
    for _k in range(3):
        z = z + layers.MultiHeadAttention(4, 32)(layers.LayerNormalization()(z), i)
        z = z + layers.Dense(128)(layers.Dense(256, activation="gelu")(layers.LayerNormalization()(z)))
    model = keras.Model(i, layers.Dense(10)(layers.GlobalMaxPooling1D()(z)))
    return (
        trained(
            model,
            lambda model, x, y: tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            ),
        ),
        (normal(16, 1024, 64), integers(10, 16)),
    )


def convlstm() -> Made:
    """Convolutional LSTM on videos."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((8, 32, 32, 3)),
            layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True),
            layers.BatchNormalization(),
            layers.Conv3D(3, 3, padding="same"),
        ]
    )
    return (
        trained(model, lambda model, x, y: tf.reduce_mean((model(x, training=True) - y) ** 2)),
        (normal(4, 8, 32, 32, 3), normal(4, 8, 32, 32, 3)),
    )


def moe() -> Made:
    """A mixture of experts: routing by the best scores."""
    seed()
    g = tf.Variable(normal(64, 8) * 0.1)
    w1 = tf.Variable(normal(8, 64, 256) * 0.05)
    w2 = tf.Variable(normal(8, 256, 64) * 0.05)
    variables = [g, w1, w2]

    def loss(x):
        p = tf.nn.softmax(x @ g)
        top, idx = tf.math.top_k(p, 2)
        y = tf.zeros_like(x)
        for k in range(2):
            oh = tf.one_hot(idx[:, k], 8)
            pos = tf.cast(tf.reduce_sum((tf.cumsum(oh) - 1) * oh, 1), tf.int32)
            keep = tf.cast(pos < 320, tf.float32)
            slot = idx[:, k] * 320 + tf.minimum(pos, 319)
            buf = tf.scatter_nd(slot[:, None], x * keep[:, None], [8 * 320, 64])
            h = tf.nn.relu(tf.einsum("ecd,edf->ecf", tf.reshape(buf, [8, 320, 64]), w1))
            h = tf.reshape(tf.einsum("ecf,efd->ecd", h, w2), [-1, 64])
            y += tf.gather(h, slot) * (top[:, k] * keep)[:, None]
        return tf.reduce_mean((y - x) ** 2) + 0.01 * tf.reduce_sum(tf.reduce_mean(p, 0) ** 2)

    return minimised(loss, variables, keras.optimizers.Adam(0.001)), (normal(1024, 64),)


def unique_embed() -> Made:
    """Embeddings with sparse gradients under Adagrad."""
    seed()
    embeddings = tf.Variable(rng.randn(20000, 64).astype("f") * 0.05)
    weight = tf.Variable(rng.randn(64 * 8, 256).astype("f") * 0.05)
    readout = tf.Variable(rng.randn(256, 1).astype("f"))

    def loss(ids, y):
        e = tf.nn.embedding_lookup(embeddings, ids)
        h = tf.nn.relu(tf.matmul(tf.reshape(e, [2048, 512]), weight))
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, tf.matmul(h, readout)))

    return minimised(loss, [embeddings, weight, readout], keras.optimizers.Adagrad(0.01)), (
        integers(20000, 2048, 8),
        normal(2048, 1),
    )


def gat() -> Made:
    """Graph attention: gathers and unsorted segment sums over edges."""
    seed()
    nodes, edges = (2000, 20000)
    weight = [tf.Variable(normal(64, 64) * 0.1) for _ in range(3)]
    attention = [tf.Variable(normal(128) * 0.1) for _ in range(3)]
    src, dst = (integers(nodes, edges), integers(nodes, edges))

    def loss(x, src, dst):
        h = x
        for w, a in zip(weight, attention, strict=True):
            h = h @ w
            s, d = (tf.gather(h, src), tf.gather(h, dst))
            e = tf.nn.leaky_relu(tf.linalg.matvec(tf.concat([s, d], 1), a))
            e = tf.exp(e - tf.gather(tf.math.unsorted_segment_max(e, dst, nodes), dst))
            e = e / tf.gather(tf.math.unsorted_segment_sum(e, dst, nodes), dst)
            h = tf.nn.elu(tf.math.unsorted_segment_sum(s * e[:, None], dst, nodes))
        return tf.reduce_mean(h * h)

    return minimised(loss, weight + attention, keras.optimizers.Adam(0.001)), (normal(nodes, 64), src, dst)


def pointnet() -> Made:
    """Point clouds: nearest neighbours in each layer."""
    seed()
    m1 = keras.Sequential(
        [
            layers.Input((256, 16, 6)),
            layers.Dense(64),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dense(64, activation="relu"),
        ]
    )
    m2 = keras.Sequential([layers.Input((256, 16, 128)), layers.Dense(64), layers.BatchNormalization(), layers.ReLU()])
    h = keras.Sequential([layers.Input((64,)), layers.Dense(10)])
    variables = m1.trainable_variables + m2.trainable_variables + h.trainable_variables

    def edge(f, k=16):
        s = tf.reduce_sum(f * f, -1)
        d = s[:, :, None] + s[:, None] - 2 * tf.matmul(f, f, transpose_b=True)
        _, i = tf.math.top_k(-d, k)
        n = tf.gather(f, i, batch_dims=1)
        c = tf.repeat(f[:, :, None], k, 2)
        return tf.concat([c, n - c], -1)

    def loss(p, y):
        f = tf.reduce_max(m1(edge(p), training=True), 2)
        f = tf.reduce_max(m2(edge(f), training=True), 2)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, h(tf.reduce_max(f, 1))))

    step = minimised(loss, variables, keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True))
    step.variables = m1.variables + m2.variables + h.variables
    return step, (normal(16, 256, 3), integers(10, 16))
