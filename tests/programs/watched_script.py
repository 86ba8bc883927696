"""A program that does not import tfswap: it trains two layers, and prints its arguments."""

import sys

import tensorflow as tf

weight = tf.Variable(tf.ones([64, 64]))


@tf.function
def train_step(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.tanh(tf.nn.tanh(x @ weight) @ weight))
    weight.assign_sub(0.1 * tape.gradient(loss, weight))
    return loss


for _ in range(3):
    train_step(tf.ones([4096, 64]))
print(sys.argv[1:])
