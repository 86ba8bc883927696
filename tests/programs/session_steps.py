"""Steps in sessions of TensorFlow 1."""

from typing import Any

import numpy
import tensorflow as tf
from tensorflow.python.eager import context

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


def decayed(*, resource: bool) -> list[str]:
    """The losses of three steps of a deep net with Adam, whose rate decays by a step counter."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = h = v1.placeholder(tf.float32, [None, 64])
        for i in range(12):
            start = numpy.random.default_rng(i).normal(size=(64, 64)).astype("f") * 0.1
            h = tf.tanh(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=resource))
        loss = tf.reduce_mean(h * h)
        rate = v1.train.exponential_decay(1e-3, v1.train.get_or_create_global_step(), 2, 0.9)
        train = v1.train.AdamOptimizer(rate).minimize(loss, v1.train.get_global_step())
        session.run(v1.global_variables_initializer())
        values = numpy.random.default_rng(1).normal(size=(4096, 64)).astype("f")
        return [session.run([loss, train], {x: values})[0].tobytes().hex() for _ in range(3)]


def keeping() -> list[str]:
    """Fetched values of steps of changing sizes. Each is kept during the next run, and is large: it stays in the
    arena.
    """
    found = []
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(3)
        x = h = v1.placeholder(tf.float32, [None, 128])
        for i in range(6):
            start = numpy.random.default_rng(i).normal(size=(128, 128)).astype("f") * 0.1
            h = tf.nn.dropout(tf.tanh(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=True)), 0.1)
        loss = tf.reduce_mean(h * h)
        train = v1.train.AdamOptimizer(1e-3).minimize(loss)
        session.run(v1.global_variables_initializer())
        kept = None
        for rows in (2048, 1024, 2048, 300, 2100, 2048):
            values = numpy.random.default_rng(rows).normal(size=(rows, 128)).astype("f")
            kept = session.run([loss, h, train], {x: values})
            found += [each.tobytes().hex() for each in kept[:2]]
    return found


def until_it_dies(kind: str, at: int, steps: int) -> list[str]:
    """Steps with dropout and batch norm, of which that at `at` finds less memory than it needs, and all values that
    they leave.

    `kind` is of the variables, or "monitored", for a MonitoredTrainingSession that takes its batches from an iterator.
    """
    values = numpy.random.default_rng(1).normal(size=(2048 + 8 * steps, 256)).astype("f")
    with tf.Graph().as_default():
        v1.set_random_seed(5)
        if kind == "monitored":
            batches = tf.data.Dataset.range(steps).map(lambda i: tf.random.stateless_normal([2048, 256], seed=[i, 1]))
            x = v1.data.make_one_shot_iterator(batches).get_next()
        else:
            x = v1.placeholder(tf.float32, [None, 256])
        calls = v1.get_variable("calls", initializer=0.0, use_resource=kind != "reference")
        with tf.control_dependencies([v1.assign_add(calls, 1.0)]):  # before the step runs out of memory
            h = tf.nn.dropout(x, 0.1) + tf.random.truncated_normal([256])
        h = normalized(h, use_resource=kind != "reference")
        for i in range(16):
            start = numpy.random.default_rng(i).normal(size=(256, 256)).astype("f") * 0.1
            h = tf.tanh(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=kind != "reference"))
        loss = tf.reduce_mean(h * h)
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, v1.train.get_or_create_global_step())
        weights, init = v1.global_variables(), v1.global_variables_initializer()
        mean = tf.reduce_mean(h)
        ballast, found = [], []
        with v1.train.MonitoredTrainingSession() if kind == "monitored" else v1.Session() as session:
            session.run([] if kind == "monitored" else init)
            for i in range(steps):
                if i == at:
                    with context.eager_mode():
                        ballast += [tf.ones([1 << 18]) for _ in range(24)]
                rows = values[8 * i :][: 300 if i % 3 == 1 else 2048]
                fetches = [loss, train] if i % 2 else [loss, mean, train]
                found += session.run(fetches, None if kind == "monitored" else {x: rows})[:-1]
            raw = session if kind != "monitored" else session._tf_sess()
            found += raw.run(weights)
        return [each.tobytes().hex() for each in found]


def normalized(h: tf.Tensor, *, use_resource: bool) -> tf.Tensor:
    """Batch norm, whose moving averages are written before its result is read."""
    mean, variance = tf.nn.moments(h, [0])
    averages = [
        v1.get_variable(name, initializer=numpy.zeros([256], "f"), trainable=False, use_resource=use_resource)
        for name in ("moving_mean", "moving_variance")
    ]
    writes = [v1.assign_sub(a, 0.1 * (a - now)) for a, now in zip(averages, (mean, variance), strict=True)]
    with tf.control_dependencies(writes):
        return tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)


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


def evaluated(*, drops: bool, monitored: bool) -> dict[str, Any]:
    """Three rounds of a step that trains, evaluations of as many rows and of fewer, and a metric: all fetched values,
    and the highest peak of the arena.
    """
    values = numpy.random.default_rng(1).normal(size=(4096, 128)).astype("f")
    with tf.Graph().as_default():
        v1.set_random_seed(5)
        x = v1.placeholder(tf.float32, [None, 128])
        h, layers = tf.nn.dropout(x, 0.1) if drops else x, []
        for i in range(6):
            start = numpy.random.default_rng(i).normal(size=(128, 128)).astype("f") * 0.1
            h = tf.tanh(h @ v1.get_variable(f"w{i}", initializer=start, use_resource=True))
            layers.append(h)
        loss, feeds = tf.reduce_mean(h * h), {x: values}
        mean = tf.add_n([tf.reduce_mean(each * each) for each in layers], name="evaluation")
        metric, update = v1.metrics.mean(mean)
        train = v1.train.AdamOptimizer(0.01).minimize(loss, v1.train.get_or_create_global_step())
        variables = v1.trainable_variables()
        inits = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        found = []
        with v1.train.MonitoredTrainingSession() if monitored else v1.Session() as session:
            session.run([] if monitored else inits)
            for _ in range(3):
                found += [session.run([loss, train], feeds)[0], session.run(mean, feeds), session.run(update, feeds)]
                found += [each.sum() for each in session.run(layers[:2], feeds)]  # whole ones stay in the arena
                found.append(session.run(loss, {x: values[:100]}))
            found += [*session.run(variables), session.run(metric)]
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"values": [each.tobytes().hex() for each in found], "peak": peak}
