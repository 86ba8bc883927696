"""A session of TensorFlow 1 in double precision that does not import tfswap, in the manner of DeePMD-kit.

The energy of atoms is a net of descriptors of their neighbours; forces are its negative gradient, by an op with a
gradient of its own; the loss has both, so that its gradient is taken through a gradient. The learning rate decays.
Grappler is off: last bits of sums of gradients through gradients differ with it.
"""

import hashlib

import numpy as np
import tensorflow as tf

FRAMES, ATOMS, NEIGHBOURS, WIDTHS = 6, 32, 24, (32, 64, 128)
tf.compat.v1.disable_eager_execution()
v1 = tf.compat.v1
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@tf.custom_gradient
def switched(distance: tf.Tensor) -> object:
    """1 / r, smoothly zero from a distance on."""
    scaled = tf.clip_by_value((distance - 1.0) / 4.0, 0.0, 1.0)
    smooth = scaled**3 * (-6.0 * scaled**2 + 15.0 * scaled - 10.0) + 1.0

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        slope = scaled**2 * (-30.0 * scaled**2 + 60.0 * scaled - 30.0) / 4.0
        return upstream * (slope / distance - smooth / distance**2)

    return smooth / distance, gradient


def dense(x: tf.Tensor, width: int, name: str, act: bool = True) -> tf.Tensor:
    with v1.variable_scope(name, reuse=v1.AUTO_REUSE):
        shape = [x.shape[-1], width]
        start = v1.random_normal_initializer(stddev=1.0 / np.sqrt(sum(shape)), seed=len(name))
        kernel = v1.get_variable("kernel", shape, tf.float64, start)
        bias = v1.get_variable("bias", [width], tf.float64, v1.zeros_initializer())
    made = tf.matmul(x, kernel) + bias
    return tf.tanh(made) if act else made


def energy(places: tf.Tensor, neighbours: tf.Tensor) -> tf.Tensor:
    """The energy of each frame."""
    shift = tf.gather(places, neighbours, batch_dims=1) - places[:, :, None]
    distance = tf.sqrt(tf.reduce_sum(shift**2, axis=-1, keepdims=True) + 1e-2)
    weight = switched(distance)
    x = tf.reshape(weight, [-1, 1])
    for layer, width in enumerate(WIDTHS):
        made = dense(x, width, f"filter_{layer}")
        x = made + tf.concat([x, x], 1) if width == 2 * x.shape[-1] else made
    features = tf.reshape(x, [FRAMES * ATOMS, NEIGHBOURS, WIDTHS[-1]])
    around = tf.reshape(tf.concat([weight, weight * shift / distance], -1), [FRAMES * ATOMS, NEIGHBOURS, 4])
    left = tf.matmul(around, features, transpose_a=True)
    descriptor = tf.reshape(tf.matmul(left, left[:, :, :8], transpose_a=True), [FRAMES * ATOMS, WIDTHS[-1] * 8])
    for layer in range(2):
        descriptor = dense(descriptor, 120, f"fitting_{layer}")
    each = dense(descriptor, 1, "energy", act=False)
    return tf.reduce_sum(tf.reshape(each, [FRAMES, ATOMS]), axis=1)


places = v1.placeholder(tf.float64, [FRAMES, ATOMS, 3])
neighbours = v1.placeholder(tf.int32, [FRAMES, ATOMS, NEIGHBOURS])
known_energy, known_force = v1.placeholder(tf.float64, [FRAMES]), v1.placeholder(tf.float64, [FRAMES, ATOMS, 3])
step = v1.train.get_or_create_global_step()
rate = v1.train.exponential_decay(1e-3, step, 2, 0.9, staircase=True)
found = energy(places, neighbours)
force = -tf.gradients(found, places)[0]
share = tf.cast(rate / 1e-3, tf.float64)
loss = (1.0 - share + 0.02) * tf.reduce_mean((found - known_energy) ** 2)
loss += share * tf.reduce_mean((force - known_force) ** 2)
train = v1.train.AdamOptimizer(rate).minimize(loss, global_step=step)

random = np.random.default_rng(1)
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    losses = []
    for _ in range(3):
        batch = {
            places: random.normal(scale=3.0, size=(FRAMES, ATOMS, 3)),
            neighbours: random.integers(0, ATOMS, (FRAMES, ATOMS, NEIGHBOURS)),
            known_energy: random.normal(size=FRAMES),
            known_force: random.normal(size=(FRAMES, ATOMS, 3)),
        }
        losses.append(session.run([train, loss], batch)[1])
    weights = session.run(v1.trainable_variables())
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights))
print([float(each).hex() for each in losses], digest.hexdigest())
