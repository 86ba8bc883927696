"""Second order through a loop that reads one list and writes another: lists of lists are saved, zeroed and added."""

import tensorflow as tf

STEPS = 6
weight = tf.Variable(0.1 * tf.random.stateless_normal([64, 64], (3, 4)))
x = tf.random.stateless_normal([1536, 64], (1, 2))


def loss(x):
    rows = tf.TensorArray(tf.float32, STEPS, clear_after_read=False).unstack(tf.reshape(x, [STEPS, -1, 64]))

    def body(i, rows, made, total):
        here, ahead = rows.read(i), rows.read((i + 2) % STEPS)
        state = tf.tanh(here @ weight) * ahead
        return i + 1, rows, made.write(i, state), total + tf.reduce_sum(state * here)

    made = tf.TensorArray(tf.float32, STEPS)
    _, rows, made, total = tf.while_loop(lambda i, *_: i < STEPS, body, [0, rows, made, 0.0], maximum_iterations=STEPS)
    return tf.reduce_sum(made.stack() ** 2) + total + tf.reduce_sum(rows.read(3) ** 3)


def raw(x):
    with tf.GradientTape() as second:
        with tf.GradientTape() as first:
            first.watch(x)
            value = loss(x)
        slope = first.gradient(value, x)
        size = tf.reduce_sum(slope * slope)
    return value, *second.gradient(size, [weight])
