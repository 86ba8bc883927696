"""A program that does not import tfswap: it trains in a loop of its own, `unmodified_loop.py HOW ROWS`.

It prints the last loss and a digest of the weights. HOW is "plain", or "strategy" for a MirroredStrategy.
"""

import hashlib
import sys

import tensorflow as tf


def main(how: str, rows: int) -> None:
    tf.random.set_seed(7)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"]) if how == "strategy" else tf.distribute.get_strategy()
    with strategy.scope():
        weights = [tf.Variable(tf.random.stateless_normal([256, 256], seed=(i, 1)) * 0.08) for i in range(12)]
    data = tf.data.Dataset.range(5).map(lambda i: tf.random.stateless_normal([rows, 256], seed=(i, 2)))

    def replica_step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.dropout(tf.nn.tanh(x @ weight), 0.1)
            loss = tf.reduce_mean(x * x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    @tf.function
    def train_step(x: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x,)), axis=None)

    loss = tf.constant(0.0)
    for batch in strategy.experimental_distribute_dataset(data):
        loss = train_step(batch)
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
    print(float(loss).hex(), digest.hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
