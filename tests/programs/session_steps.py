"""Steps in sessions of TensorFlow 1."""

from typing import Any

import numpy
import tensorflow as tf

v1 = tf.compat.v1


def trained(*, resource: bool) -> list[str]:
    """Three steps with several fetches and feeds, with variables of a kind: all fetched values, and the weights."""
    values = numpy.random.default_rng(1).normal(size=(4096, 128)).astype("f")
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(5)
        rows = tf.data.Dataset.from_tensor_slices(values).batch(1024)
        x = v1.data.make_one_shot_iterator(rows).get_next()
        h, rate = tf.nn.dropout(x, 0.1), v1.placeholder(tf.float32, [], name="rate")
        for i in range(6):
            start = numpy.random.default_rng(i).normal(size=(128, 128)).astype("f") * 0.1
            h = tf.tanh(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=resource))
        loss = tf.reduce_mean(h * h, name="loss")
        train = v1.train.AdamOptimizer(rate).minimize(loss, v1.train.get_or_create_global_step())
        weights, init = v1.trainable_variables(), v1.global_variables_initializer()
        graph.finalize()
        nodes = seen(graph)
        with v1.Session(graph=graph) as session:
            session.run(init)
            found = [session.run([loss, train], {rate: 0.01})[0]]
            found += session.run([train, {"loss": loss, "h": h}], {rate: 0.02})[1].values()
            found.append(session.run([loss, train], {x: values[:100], rate: 0.01})[0])
            found += session.run(weights)
        assert nodes == seen(graph)
        return [each.tobytes().hex() for each in found]


def twice() -> list[str]:
    """The losses of two runs of one step, which is too large for 8 MiB as it is."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = h = v1.placeholder(tf.float32, [4096, 128])
        for i in range(6):
            start = numpy.random.default_rng(i).normal(size=(128, 128)).astype("f") * 0.1
            h = tf.tanh(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=True))
        loss = tf.reduce_mean(h * h)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())
        values = numpy.ones([4096, 128], "f")
        return [session.run([loss, train], {x: values})[0].tobytes().hex() for _ in range(2)]


def seen(graph: tf.Graph) -> Any:
    """What a program sees of a graph."""
    return len(graph.get_operations()), graph.as_graph_def().SerializeToString(deterministic=True)


def branched() -> None:
    """A step with a conditional."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [256, 16])
        w = v1.get_variable("w", initializer=numpy.ones([16, 16], "f"), use_resource=False)
        h = tf.cond(tf.reduce_sum(x) > 0, lambda: x @ w, lambda: x)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(h), name="branched")
        session.run(v1.global_variables_initializer())
        session.run(train, {x: numpy.ones([256, 16], "f")})
