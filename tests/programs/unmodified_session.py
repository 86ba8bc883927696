"""A program of TensorFlow 1 that does not import tfswap: `unmodified_session.py HOW ROWS`.

It prints the losses and a digest of the weights. HOW is "session", in the manner of DeePMD-kit (double precision, a
custom gradient, forces as gradients of an energy, reference variables), or "monitored", in the manner of an Estimator
(tf.data, dropout, a MonitoredTrainingSession with hooks).
"""

import hashlib
import sys
import tempfile

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
STEPS = 6


def digest(values: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values)).hexdigest()


@tf.custom_gradient
def smooth(x: tf.Tensor) -> tuple[tf.Tensor, object]:
    """Tanh, whose gradient is clipped."""
    y = tf.tanh(x)
    return y, lambda upstream: upstream * tf.maximum(1.0 - y * y, tf.constant(1e-3, y.dtype))


def session(rows: int) -> None:
    v1.disable_v2_behavior()
    v1.set_random_seed(3)
    positions = v1.placeholder(tf.float64, [None, 64], name="positions")
    energies = v1.placeholder(tf.float64, [None], name="energies")
    h = positions
    for i, width in enumerate([192] * 6):
        start = np.random.RandomState(i).normal(size=(h.shape[1], width)) * 0.08
        h = smooth(h @ v1.get_variable(f"w{i}", initializer=start))
    energy = tf.reduce_sum(h, axis=1)
    forces = -tf.gradients(energy, positions)[0]
    loss = tf.reduce_mean((energy - energies) ** 2) + tf.reduce_mean(forces**2)
    step = v1.train.get_or_create_global_step()
    rate = v1.train.exponential_decay(1e-3, step, 2, 0.9)
    train = v1.train.AdamOptimizer(rate).minimize(loss, step)
    losses = []
    with v1.Session() as running:
        running.run(v1.global_variables_initializer())
        for i in range(STEPS):
            random = np.random.RandomState(100 + i)
            feeds = {positions: random.normal(size=(rows, 64)), energies: random.normal(size=rows)}
            _, value, _ = running.run([train, loss, step], feeds)
            losses.append(float(value).hex())
        print(losses, digest(running.run(v1.trainable_variables())))
        print(len(v1.get_default_graph().as_graph_def().node), len(v1.get_default_graph().get_operations()))


def monitored(rows: int) -> None:
    v1.disable_eager_execution()
    v1.set_random_seed(3)

    def images(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.random.stateless_normal([64], seed=[i, 1]), i % 10

    batches = tf.data.Dataset.range(rows * (STEPS - 1) + rows // 2).map(images).batch(rows)

    def dense(h: tf.Tensor, width: int, name: str) -> tf.Tensor:
        with v1.variable_scope(name):
            return h @ v1.get_variable("kernel", [h.shape[1], width]) + v1.get_variable("bias", [width])

    x, labels = v1.data.make_one_shot_iterator(batches).get_next()
    h = x
    for i in range(6):
        h = tf.nn.dropout(tf.nn.relu(dense(h, 256, f"d{i}")), rate=0.1)
    logits = dense(h, 10, "logits")
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    train = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss, v1.train.get_or_create_global_step())
    v1.summary.scalar("loss", loss)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=folder, save_checkpoint_steps=4, save_summaries_steps=3, log_step_count_steps=100
        ) as running:
            while not running.should_stop():
                losses.append(float(running.run([loss, train])[0]).hex())
        reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
        print(losses, digest([reader.get_tensor(name) for name in sorted(reader.get_variable_to_shape_map())]))
        meta = v1.MetaGraphDef()
        with open(tf.train.latest_checkpoint(folder) + ".meta", "rb") as file:
            meta.ParseFromString(file.read())
        print(len(meta.graph_def.node), len(meta.graph_def.library.function))


if __name__ == "__main__":
    {"session": session, "monitored": monitored}[sys.argv[1]](int(sys.argv[2]))
