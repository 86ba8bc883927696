"""First calls: TensorFlow makes a step's kernels and constants, runs none, and logs nothing."""

from __future__ import annotations

from processes import run_python

ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256"}


def forward(x, weights):
    import tensorflow as tf

    for weight in weights:
        x = tf.nn.relu(x @ weight)
    return tf.reduce_sum(x * x)


def train(x, weights):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = forward(x, weights)
    for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
        weight.assign_sub(1e-6 * gradient)
    return loss


def of_steps(x, weights):
    """Steps that train, with a loop, with a tape outside, with a limit that is refused, inside of a function."""
    import tensorflow as tf

    import tfswap

    def step(x):
        return train(x, weights)

    def loop(x):
        with tf.GradientTape() as tape:
            loss = tf.while_loop(lambda n, _: n < 3, lambda n, loss: (n + 1, loss + forward(x, weights)), (0, 0.0))[1]
        return tape.gradient(loss, weights)

    simple = tfswap.optimize(tf.function(step), memory_limit="60%")
    simple(x)
    assert simple.plan().moves

    tfswap.optimize(tf.function(loop), memory_limit="80%")(x)

    outside = tfswap.optimize(tf.function(lambda x: forward(x, weights)), memory_limit="70%")
    with tf.GradientTape() as tape:
        loss = outside(x)
    assert None not in tape.gradient(loss, weights) and outside.plan().order

    try:
        tfswap.optimize(tf.function(step), memory_limit="1MiB")(x)
    except tfswap.InfeasibleMemoryLimit as error:
        assert error.floor_bytes
    else:
        raise AssertionError("1 MiB is too little")

    within = tfswap.optimize(tf.function(step), memory_limit="70%")
    tf.function(lambda x: within(x) + 1.0)(x)


def of_replicas(x):
    import tensorflow as tf

    import tfswap

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        shared = tf.Variable(tf.ones([64, 64]))

    def replica(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(tf.nn.relu(x @ shared) @ shared))
        gradient = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, shared))
        shared.assign_sub(1e-6 * gradient)
        return loss

    devices = tfswap.optimize(tf.function(lambda x: strategy.run(replica, (x,))), memory_limit="90%")
    devices(x)
    assert devices.plan().order


def of_keras(x):
    import keras

    import tfswap.keras

    model = keras.Sequential([keras.layers.Dense(64, "relu") for _ in range(6)] + [keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    tfswap.keras.optimize(model, memory_limit="75%")
    model.fit(x, x[:, :1], batch_size=4096, epochs=1, verbose=0)


def of_a_saved_model(x, weights):
    import tempfile

    import tensorflow as tf

    import tfswap

    module = tf.Module()
    module.weights = weights
    step = tfswap.optimize(tf.function(lambda x: {"loss": train(x, weights)}), memory_limit="60%")
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures=step.get_concrete_function(x))
        tf.saved_model.load(folder).signatures["serving_default"](x)


def first_calls():
    import tensorflow as tf

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    weights = [tf.Variable(tf.random.stateless_normal([64, 64], (n, 1)) * 0.1) for n in range(6)]
    x = tf.ones([4096, 64])
    of_steps(x, weights)
    of_replicas(x)
    of_keras(x)
    of_a_saved_model(x, weights)


def test_no_first_call_ends_in_an_error_that_tensorflow_logs():
    run = run_python(first_calls, **ARENA, TF_CPP_MIN_LOG_LEVEL="0")
    # Progress is reported where the machine is slow.
    logged = "\n".join(line for line in run.stderr.splitlines() if not line.startswith("tfswap: "))
    assert "tfswap" not in logged
    assert "abort" not in logged.lower()
