"""Steps whose gradients, loops or kernels are unusual. What is unusual about each is in its first line."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from step_kinds.common import Made, integers, minimised, normal, rng, seed, trained


def fno() -> Made:
    """A Fourier neural operator: complex tensors."""
    seed()
    weight_re = [tf.Variable(normal(32, 32, 32) * 0.02) for _ in range(3)]
    weight_im = [tf.Variable(normal(32, 32, 32) * 0.02) for _ in range(3)]
    variables = weight_re + weight_im

    def loss(x):
        h = x
        for a, b in zip(weight_re, weight_im, strict=True):
            f = tf.signal.rfft(tf.transpose(h, [0, 2, 1]))[:, :, :32]
            f = tf.einsum("bim,iom->bom", f, tf.complex(a, b))
            f = tf.pad(f, [[0, 0], [0, 0], [0, 129 - 32]])
            h = tf.nn.gelu(tf.transpose(tf.signal.irfft(f), [0, 2, 1]) + h)
        return tf.reduce_mean(h * h)

    return minimised(loss, variables, keras.optimizers.SGD(0.001, momentum=0.9)), (normal(32, 256, 32),)


def gp() -> Made:
    """A Gaussian process: Cholesky factors and triangular solves."""
    seed()
    v = [tf.Variable(np.float64(0.1)), tf.Variable(np.float64(0.2)), tf.Variable(np.float64(-1.0))]

    def loss(x, y):
        d = tf.reduce_sum((x[:, None] - x[None]) ** 2, -1)
        kernel = tf.exp(v[0]) * tf.exp(-d * tf.exp(v[1])) + tf.exp(v[2]) * tf.eye(400, dtype=tf.float64)
        factor = tf.linalg.cholesky(kernel)
        s = tf.linalg.triangular_solve(factor, y)
        return tf.reduce_sum(s * s) / 2 + tf.reduce_sum(tf.math.log(tf.linalg.diag_part(factor)))

    return minimised(loss, v, keras.optimizers.SGD(0.001)), (
        tf.cast(normal(400, 8), tf.float64),
        tf.cast(normal(400, 1), tf.float64),
    )


def sam() -> Made:
    """Sharpness-aware minimisation: two gradients per step, variables changed between."""
    seed()
    model = keras.Sequential(
        [layers.Input((32, 32, 3))]
        + [
            loss
            for c in (32, 64, 64)
            for loss in (
                layers.Conv2D(c, 3, padding="same"),
                layers.GroupNormalization(8),
                layers.Activation("relu"),
                layers.MaxPooling2D(),
            )
        ]
        + [layers.Flatten(), layers.Dense(10)]
    )
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True)
    variables = model.trainable_variables
    optimizer.build(variables)

    def loss_of(x, y):
        return tf.reduce_mean(
            keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        )

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        g = tape.gradient(loss, variables)
        n = tf.linalg.global_norm(g)
        es = [0.05 * a / (n + 1e-12) for a in g]
        for v, e in zip(variables, es, strict=True):
            v.assign_add(e)
        with tf.GradientTape() as tape:
            l2 = loss_of(x, y)
        g = tape.gradient(l2, variables)
        for v, e in zip(variables, es, strict=True):
            v.assign_sub(e)
        optimizer.apply_gradients(zip(g, variables, strict=True))
        return loss + l2

    step.variables = model.variables
    return step, (normal(64, 32, 32, 3), integers(10, 64))


def accum_cond() -> Made:
    """Gradient accumulation, applied by a conditional."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((128,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(10),
        ]
    )
    variables = model.trainable_variables
    acc = [tf.Variable(tf.zeros_like(v)) for v in variables]
    n = tf.Variable(0)
    optimizer = keras.optimizers.Adam(0.001)
    optimizer.build(variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        for a, g in zip(acc, tape.gradient(loss, variables), strict=True):
            a.assign_add(g)
        n.assign_add(1)
        if n % 4 == 0:
            optimizer.apply_gradients([(a / 4, v) for a, v in zip(acc, variables, strict=True)])
            for a in acc:
                a.assign(tf.zeros_like(a))
        return loss

    step = tf.autograph.experimental.do_not_convert(step) if False else step
    step.variables = model.variables
    return step, (normal(1024, 128), integers(10, 1024))


def map_fn_grad() -> Made:
    """Gradients through tf.map_fn."""
    seed()
    weight = tf.Variable(normal(32, 32) * 0.1)
    variables = [weight]

    def loss(x):
        y = tf.map_fn(
            lambda e: tf.linalg.logdet(tf.matmul(e @ weight, e @ weight, transpose_b=True) + tf.eye(32)),
            x,
            parallel_iterations=4,
        )
        return tf.reduce_mean(y)

    return minimised(loss, variables, keras.optimizers.Adagrad(0.01)), (normal(48, 32, 32),)


def vmap_jac() -> Made:
    """A batch Jacobian by vectorisation."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((16,)),
            layers.Dense(64, activation="tanh"),
            layers.Dense(64, activation="tanh"),
            layers.Dense(16),
        ]
    )

    def loss(model, a):
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = model(a)
        j = tape.batch_jacobian(y, a)
        return tf.reduce_mean(y * y) + tf.reduce_mean(tf.linalg.trace(j) ** 2)

    return (trained(model, loss), (normal(256, 16),))


def xla_inner() -> Made:
    """Blocks that XLA compiles inside of the step."""
    seed()
    weight = [tf.Variable(normal(256, 256) * 0.05) for _ in range(4)]

    @tf.function(jit_compile=True)
    def block(h, w):
        return tf.nn.gelu(h @ w) + h

    def loss(x):
        h = x
        for w in weight:
            h = block(h, w)
        return tf.reduce_mean(h * h)

    return minimised(loss, weight, keras.optimizers.Adam(0.001)), (normal(1024, 256),)


def flow() -> Made:
    """A normalising flow of affine couplings."""
    seed()
    nets = [
        keras.Sequential(
            [
                layers.Input((32,)),
                layers.Dense(256, activation="relu"),
                layers.Dense(256, activation="relu"),
                layers.Dense(64),
            ]
        )
        for _ in range(6)
    ]
    variables = [v for n in nets for v in n.trainable_variables]

    def loss(x):
        ld = 0.0
        h = x
        for _k, n in enumerate(nets):
            a, b = tf.split(h, 2, -1)
            s, tt = tf.split(n(a), 2, -1)
            s = tf.tanh(s)
            h = tf.concat([b * tf.exp(s) + tt, a], -1)
            ld += tf.reduce_sum(s, -1)
        return tf.reduce_mean(0.5 * tf.reduce_sum(h * h, -1) - ld)

    return minimised(loss, variables, keras.optimizers.Adafactor(0.001)), (normal(1024, 64),)


def deq() -> Made:
    """A deep equilibrium model: a fixed point by a loop, its gradient by another."""
    seed()
    weight = tf.Variable(rng.randn(256, 256).astype("f") * 0.02)
    input_weight = tf.Variable(rng.randn(128, 256).astype("f") * 0.05)
    readout = tf.Variable(rng.randn(256, 10).astype("f") * 0.05)

    @tf.custom_gradient
    def fixed(x, weight, input_weight):
        ux = tf.matmul(x, input_weight)
        _, z = tf.while_loop(
            lambda i, z: i < 30, lambda i, z: (i + 1, tf.tanh(tf.matmul(z, weight) + ux)), (0, tf.zeros_like(ux))
        )

        def grad(dz):
            with tf.GradientTape() as tape:
                tape.watch([z, x, weight, input_weight])
                f = tf.tanh(tf.matmul(z, weight) + tf.matmul(x, input_weight))
            slope = 1 - f * f
            _, u = tf.while_loop(
                lambda i, u: i < 30, lambda i, u: (i + 1, dz + tf.matmul(u * slope, weight, transpose_b=True)), (0, dz)
            )
            return tape.gradient(f, [x, weight, input_weight], u)

        return (z, grad)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.matmul(fixed(x, weight, input_weight), readout))
            )
        variables = (weight, input_weight, readout)
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            v.assign_sub(0.1 * g)
        return loss

    step.variables = [weight, input_weight, readout]
    return step, (normal(1024, 128), integers(10, 1024))


def whitening() -> Made:
    """Decorrelation: Cholesky factors, eigenvalues, determinants."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((256,)),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(64),
        ]
    )

    def loss(model, x):
        z = model(x, training=True)
        z = z - tf.reduce_mean(z, 0)
        c = tf.matmul(z, z, transpose_a=True) / 2048.0 + 0.01 * tf.eye(64)
        w = tf.linalg.triangular_solve(tf.linalg.cholesky(c), tf.transpose(z))
        e = tf.linalg.eigvalsh(c)
        return tf.reduce_mean(w**4) + tf.linalg.logdet(c) * -0.01 + tf.reduce_sum(tf.math.log(e)) * 0.001

    return (trained(model, loss), (normal(2048, 256),))


def recompute_inside() -> Made:
    """tf.recompute_grad inside of the step."""
    seed()
    ds = [
        keras.Sequential([layers.Input((256,)), layers.Dense(1024, activation="gelu"), layers.Dense(256)])
        for _ in range(4)
    ]
    variables = [v for d in ds for v in d.trainable_variables]
    fs = [tf.recompute_grad(lambda x, d=d: d(x)) for d in ds]

    def loss(x):
        h = x
        for f in fs:
            h = h + f(h)
        return tf.reduce_mean(h**2)

    return minimised(loss, variables, keras.optimizers.Lion(0.0001)), (normal(1024, 256),)


def switch_experts() -> Made:
    """tf.switch_case by a variable."""
    seed()
    weights = [tf.Variable(rng.randn(256, 256).astype("f") * 0.05) for _ in range(4)]
    k = tf.Variable(0)

    def step(x, y):
        with tf.GradientTape() as tape:
            h = x
            for j in range(4):
                h = tf.switch_case(
                    (k + j) % 4, [lambda weight=weight, h=h: tf.nn.relu(tf.matmul(h, weight)) + h for weight in weights]
                )
            loss = tf.reduce_mean((h - y) ** 2)
        g = tape.gradient(loss, weights)
        k.assign_add(1)
        for v, d in zip(weights, g, strict=True):
            v.assign_sub(0.1 * d)
        return loss

    step.variables = [*weights, k]
    return step, (normal(2048, 256), normal(2048, 256))


def hvp() -> Made:
    """A gradient of the gradient's norm."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((128,)),
            layers.Dense(256, activation="tanh"),
            layers.Dense(256, activation="tanh"),
            layers.Dense(1),
        ]
    )
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as t2:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            g = tape.gradient(loss, variables)
            n = tf.add_n([tf.reduce_sum(d * tf.stop_gradient(d)) for d in g])
        h = t2.gradient(n, variables)
        for v, d, e in zip(variables, g, h, strict=True):
            v.assign_sub(0.01 * d + 0.001 * e)
        return loss

    step.variables = variables
    return step, (normal(2048, 128), normal(2048, 1))


def jvp_forward() -> Made:
    """Forward-mode derivatives inside of the loss."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((128,)),
            layers.Dense(512, activation="tanh"),
            layers.Dense(512, activation="softplus"),
            layers.Dense(16),
        ]
    )
    variables = model.trainable_variables

    def step(x, d):
        with tf.GradientTape() as tape:
            with tf.autodiff.ForwardAccumulator(x, d) as acc:
                y = model(x)
            j = acc.jvp(y)
            loss = tf.reduce_mean(j**2) + tf.reduce_mean(y**2)
        for v, g in zip(variables, tape.gradient(loss, variables), strict=True):
            if g is not None:
                v.assign_sub(0.01 * g)
        return loss

    step.variables = variables
    return step, (normal(1024, 128), normal(1024, 128))


def sinkhorn() -> Made:
    """Optimal transport: log-domain iterations in a tf.range loop."""
    seed()
    model = keras.Sequential([layers.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(32)])

    def loss(model, x, y):
        a, b = (model(x), model(y))
        cost = tf.reduce_sum(a * a, 1)[:, None] + tf.reduce_sum(b * b, 1) - 2 * tf.matmul(a, b, transpose_b=True)
        log_kernel = -cost / 0.5
        u = tf.zeros([x.shape[0]])
        v = tf.zeros([y.shape[0]])
        for _ in tf.range(10):
            u = -tf.reduce_logsumexp(log_kernel + v[None], 1)
            v = -tf.reduce_logsumexp(log_kernel + u[:, None], 0)
        return tf.reduce_sum(tf.exp(log_kernel + u[:, None] + v[None]) * cost)

    return (trained(model, loss), (normal(256, 64), normal(256, 64)))


def pyfunc() -> Made:
    """A Python function inside of the step."""
    seed()
    model = keras.Sequential(
        [
            layers.Input((256,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(10),
        ]
    )

    def loss(model, x, y):
        w = tf.numpy_function(lambda a: (a % 3 + 1).astype(np.float32), [y], tf.float32)
        w = tf.ensure_shape(w, [1024])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
        tf.debugging.assert_all_finite(loss, "loss")
        return tf.reduce_mean(loss * w)

    return (trained(model, loss), (normal(1024, 256), integers(10, 1024)))


def f64_pde() -> Made:
    """A differential equation's residual in float64: second derivatives."""
    seed()
    weights = [tf.Variable(rng.randn(*s) * 0.3) for s in ((2, 64), (64, 64), (64, 1))]

    def u(x):
        for weight in weights[:-1]:
            x = tf.tanh(tf.matmul(x, weight))
        return tf.matmul(x, weights[-1])

    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as t2:
                t2.watch(x)
                with tf.GradientTape() as t1:
                    t1.watch(x)
                    y = u(x)
                g = t1.gradient(y, x)
                gx = g[:, :1]
                gt = g[:, 1:]
            xx = t2.gradient(gx, x)[:, :1]
            loss = tf.reduce_mean((gt + y * gx - 0.01 * xx) ** 2)
        for v, d in zip(weights, tape.gradient(loss, weights), strict=True):
            v.assign_sub(0.001 * d)
        return loss

    step.variables = weights
    return step, (tf.constant(rng.rand(4096, 2)),)
