"""Programs on several devices with arenas of their own, for emulated GPUs."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from gpu_compare import draws

import tfswap
from tfswap.exporters.function import memory_optimizer_off

Made = tuple[Sequence[Any], Callable[..., Any], Sequence[Any]]
"""The variables of a step, the step as a Python function, and the arguments of each call."""


def gpus() -> list[str]:
    """Those of this process; logical ones are also those of other workers."""
    return [f"GPU:{i}" for i, _ in enumerate(tf.config.list_physical_devices("GPU"))]


def peaks_of(call: Callable[[], Any], devices: Sequence[str] = ()) -> tuple[Any, dict[str, int]]:
    """The result of a call, and each device's peak during it; by default each GPU's."""
    devices = devices or gpus()
    for device in devices:
        tf.config.experimental.reset_memory_stats(device)
    result = call()
    return result, {device: tf.config.experimental.get_memory_info(device)["peak"] for device in devices}


def train(
    made: Made,
    optimized: Callable[[Any], Any],
    steps: int = 3,
    devices: Sequence[str] = (),
    after_step: Callable[[Any, dict[str, int]], None] = lambda step, peaks: None,
) -> tuple[list[str], dict[str, int], Any]:
    """The bits of losses and variables after some steps, the highest peaks, and the function.

    Args:
        after_step: takes the function and each device's peak after each step.
    """
    variables, python_function, inputs = made
    step = optimized(tf.function(python_function))
    losses, highest = [], dict.fromkeys(devices or gpus(), 0)
    for _ in range(steps):
        loss, peaks = peaks_of(lambda: step(*inputs).numpy(), devices)
        losses.append(loss.tobytes().hex())
        highest = {device: max(highest[device], peak) for device, peak in peaks.items()}
        after_step(step, peaks)
    copies = [each for variable in variables for each in getattr(variable, "values", (variable,))]
    return [*losses, *(each.numpy().tobytes().hex() for each in copies)], highest, step


def compare(
    make: Callable[[], Made],
    limit: Any = "60%",
    *,
    devices: Sequence[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """A step under a limit, and the same step without one, which runs first."""
    devices = devices or gpus()
    with memory_optimizer_off():
        expected, unoptimised = train(make(), lambda function: function, devices=devices)[:2]
    gc.collect()  # the first step's variables
    ran: dict[str, list[list[int]]] = {device: [] for device in devices}

    def note(step: Any, peaks: dict[str, int]) -> None:
        for device, peak in peaks.items():
            ran[device].append([step.report(device).planned_peak_bytes, peak])

    planned_step = functools.partial(tfswap.optimize, memory_limit=limit, **options)
    found, _, step = train(make(), planned_step, devices=devices, after_step=note)
    plans = {device: step.plan(device) for device in devices}
    return {
        "same": found == expected,
        # Of each device's step that exceeds its plan the most, or has the highest peak.
        "planned": {device: max(pairs, key=lambda p: (max(0, p[1] - p[0]), p[1])) for device, pairs in ran.items()},
        "limits": {device: plan.limit_bytes for device, plan in plans.items()},
        "unoptimised": unoptimised,
        "predicted": {device: step.report(device).baseline_peak_bytes for device in devices},
        "host_bytes": {device: plan.host_bytes for device, plan in plans.items()},
        "moves": {device: bool(plan.moves) for device, plan in plans.items()},
        "lent": {device: plan.lent_bytes for device, plan in plans.items()},
        "notes": {device: " ".join(step.report(device).notes) for device in plans},
        "copied": [step.stats().lent_out_bytes, step.stats().lent_in_bytes, step.stats().lent_peak_bytes],
        "seconds": max(plan.seconds for plan in plans.values()),
    }


def check(found: dict[str, Any], *, exact: bool = True) -> None:
    assert found["report"] == [] and found["same"], found
    for device, (planned, measured) in found["planned"].items():
        assert measured <= found["limits"][device] < found["unoptimised"][device], found
        assert found["predicted"][device] <= 1.2 * found["unoptimised"][device], found
        assert not exact or measured == planned, found
    assert any(found["moves"].values())


def layers(count: int, width: int = 64) -> list[Any]:
    return [tf.Variable(0.1 * draws(width, width, seed=i)) for i in range(count)]


def trained(variables: Sequence[Any], loss_of: Callable[..., Any], *inputs: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(*inputs)
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return loss


def strategy(reduction: Any = None) -> Any:
    """A MirroredStrategy over all GPUs, by collectives in a ring, since there is no NCCL, or by `reduction`."""
    if reduction is not None:
        return tf.distribute.MirroredStrategy(gpus(), cross_device_ops=reduction)
    from tensorflow.python.distribute import collective_util

    made = tf.distribute.MirroredStrategy(gpus())
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    made.extended._communication_options = collective_util.Options(implementation=ring)
    return made


def descend(tape: tf.GradientTape, loss: Any, variables: Sequence[Any]) -> None:
    """Update a replica's variables by gradients that are added over all replicas."""
    gradients = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, variables))
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)


def mirrored(reduction: Any = None, rows: int = 1024) -> Made:
    """Replicas that are alike, whose gradients are added."""
    return layered(strategy(reduction), rows)


def layered(replicas: Any, rows: int = 1024) -> Made:
    """The replicas of a strategy, each on one of this process's GPUs."""
    with replicas.scope():
        variables = layers(8)

    def replica_step(x):
        with tf.GradientTape() as tape:
            h = x
            for variable in variables:
                h = tf.nn.relu(tf.sin(h @ variable))
            loss = tf.reduce_mean(h)
        descend(tape, loss, variables)
        return loss

    def step(x):
        return replicas.reduce("MEAN", replicas.run(replica_step, args=(x,)), axis=None)

    def given(context):
        number = context.replica_id_in_sync_group
        with tf.device(gpus()[number % len(gpus())]):
            return tf.constant(draws(rows, 64, seed=number))

    return variables, step, [replicas.experimental_distribute_values_from_function(given)]


def pipeline() -> Made:
    """Layers on one device after the other, placed by hand."""
    devices = gpus()
    variables = []
    for i in range(8):
        with tf.device(devices[i * len(devices) // 8]):
            variables.append(tf.Variable(0.1 * draws(64, 64, seed=i)))

    def loss_of(h):
        for i, variable in enumerate(variables):
            with tf.device(devices[i * len(devices) // 8]):
                h = tf.nn.relu(tf.sin(h @ variable))
        with tf.device(devices[-1]):
            return tf.reduce_mean(h * h)

    with tf.device(devices[0]):
        x = tf.constant(draws(1024, 64))
    return variables, lambda x: trained(variables, loss_of, x), [x]


def outside(optimized: Callable[[Any], Any], steps: int = 3) -> tuple[list[str], dict[str, int], Any]:
    """As `train`, of layers on one device after the other whose gradients a tape outside takes. Two of the results, one
    on each of two devices, make the loss; a tensor of the first device is read on the last.
    """
    devices = gpus()
    variables: list[Any] = []
    for i in range(8):
        with tf.device(devices[i * len(devices) // 8]):
            variables.append(tf.Variable(0.1 * draws(64, 64, seed=i)))
    with tf.device(devices[0]):
        x = tf.constant(draws(1024, 64))

    def forward(h):
        made = []  # each is read twice at most: the order of more terms of a gradient is TensorFlow's choice
        for i, variable in enumerate(variables):
            with tf.device(devices[i * len(devices) // 8]):
                h = tf.nn.relu(tf.sin((h + made[1] if i == 6 else h) @ variable))
                made.append(h)
        return h, made[2]

    step = optimized(tf.function(forward))

    def run():
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean(made * made) for made in step(x))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss.numpy()

    losses, highest = [], dict.fromkeys(devices, 0)
    for _ in range(steps):
        loss, peaks = peaks_of(run)
        losses.append(loss.tobytes().hex())
        highest = {device: max(highest[device], peak) for device, peak in peaks.items()}
    return [*losses, *(each.numpy().tobytes().hex() for each in variables)], highest, step


def with_the_host() -> Made:
    """An embedding on the CPU, layers on a GPU, and a message that the CPU prints."""
    with tf.device("CPU:0"):
        table = tf.Variable(draws(100, 64))
    with tf.device("GPU:0"):
        variables = [tf.Variable(0.1 * draws(64, 64, seed=i)) for i in range(8)]

    def loss_of(tokens):
        with tf.device("CPU:0"):
            h = tf.gather(table, tokens)
        for variable in variables:
            h = tf.nn.relu(tf.sin(h @ variable))
        tf.print("largest", tf.reduce_max(h))
        return tf.reduce_mean(h * h)

    def step(tokens):
        return trained([table, *variables], loss_of, tokens)

    with tf.device("CPU:0"):
        tokens = tf.constant(draws(1024).view("i") % 100)
    return [table, *variables], step, [tokens]


def shared_with_the_host() -> Made:
    """An embedding and layers on the CPU, forward and backward, and layers on a GPU behind them."""
    with tf.device("CPU:0"):
        table, below = tf.Variable(draws(1000, 64)), layers(8)
        tokens = tf.constant(draws(1024).view("i") % 100)
    with tf.device("GPU:0"):
        above = layers(8)

    def through(h, variables):
        for variable in variables:
            h = tf.nn.relu(tf.sin(h @ variable))
        return h

    def step(tokens):
        with tf.device("CPU:0"), tf.GradientTape() as host:
            made = through(tf.gather(table, tokens), below)
        with tf.device("GPU:0"), tf.GradientTape() as gpu:
            h = tf.identity(made)
            gpu.watch(h)
            loss = tf.reduce_mean(through(h, above) ** 2)
        with tf.device("GPU:0"):
            back, *found = gpu.gradient(loss, [h, *above])
        with tf.device("CPU:0"):
            found += host.gradient(made, [table, *below], output_gradients=tf.identity(back))
        for variable, gradient in zip([*above, table, *below], found, strict=True):
            with tf.device(variable.device):
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return [table, *below, *above], step, [tokens]


def loops_on_others() -> Made:
    """A loop on the second device and a conditional on the first, with effects of both waited for."""
    with tf.device("GPU:0"):
        variables = layers(4)
        x = tf.constant(draws(512, 64))
    with tf.device("GPU:1"):
        kernel, count = tf.Variable(0.1 * draws(64, 64)), tf.Variable(0.0)

    def loss_of(h):
        with tf.device("GPU:0"):
            for variable in variables:
                h = tf.nn.relu(tf.sin(h @ variable))
            h = tf.cond(tf.reduce_sum(h) > 0.0, lambda: h * 2.0, lambda: tf.sin(h))
        with tf.device("GPU:1"):
            _, h = tf.while_loop(
                lambda i, _: i < 20, lambda i, h: (i + 1, tf.tanh(h @ kernel)), [0, h], maximum_iterations=20
            )
            count.assign_add(1.0)
            return tf.reduce_mean(h * h) + 0.0 * count

    return [*variables, kernel, count], lambda x: trained([*variables, kernel], loss_of, x), [x]


def loop_with_the_host() -> Made:
    """A loop whose body runs on the first device and on the host, with gradients through it."""
    with tf.device("GPU:0"):
        variables = layers(4)
        x = tf.constant(draws(512, 64))
    with tf.device("CPU:0"):
        kernel = tf.Variable(0.1 * draws(64, 64))

    def body(i, h):
        with tf.device("CPU:0"):
            h = tf.tanh(h @ kernel)
        with tf.device("GPU:0"):
            return i + 1, tf.sin(h)

    def loss_of(h):
        for variable in variables:
            h = tf.nn.relu(tf.sin(h @ variable))
        _, h = tf.while_loop(lambda i, _: i < 20, body, [0, h], maximum_iterations=20)
        return tf.reduce_mean(h * h)

    return [*variables, kernel], lambda x: trained([*variables, kernel], loss_of, x), [x]


def normalized_images() -> tuple[list[Any], Any]:
    """Keras layers with normalisation over all replicas, and examples."""
    layers = [tf.keras.layers.Input((16, 16, 3))]
    for _ in range(2):
        normalization = tf.keras.layers.BatchNormalization(synchronized=True)
        layers += [tf.keras.layers.Conv2D(16, 3, padding="same"), normalization]
        layers += [tf.keras.layers.ReLU(), tf.keras.layers.Dropout(0.2)]
    return [*layers, tf.keras.layers.GlobalAveragePooling2D()], draws(80, 16, 16, 3)


def embedded_tokens() -> tuple[list[Any], Any]:
    """Keras layers whose first has sparse gradients, and examples. Bits are those of TensorFlow without its graph
    optimizers.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    hidden = [tf.keras.layers.Dense(64, "tanh") for _ in range(4)]
    layers = [tf.keras.layers.Input((32,), dtype="int32"), tf.keras.layers.Embedding(500, 64), *hidden]
    return [*layers, tf.keras.layers.GlobalAveragePooling1D()], np.arange(80 * 32).reshape(80, 32) * 7 % 500


def fitted(limit: Any = None, make: Callable[[], tuple[list[Any], Any]] = normalized_images) -> dict[str, Any]:
    """A Keras model that trains on all GPUs, with an uneven last batch.

    Args:
        make: its layers, but for the last one, and 80 examples.
    """
    tf.keras.backend.clear_session()
    gc.collect()  # an earlier model's variables
    tf.keras.utils.set_random_seed(0)
    with strategy().scope():
        layers, x = make()
        model = tf.keras.Sequential([*layers, tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(clipnorm=1.0), loss, jit_compile=False)
    callbacks = []
    if limit is not None:
        tfswap.keras.optimize(model, memory_limit=limit)
        callbacks = [tfswap.keras.MemoryReport()]
    options = {"batch_size": 32, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    trained, peaks = peaks_of(lambda: model.fit(x, np.arange(80) % 10, **options).history)
    values = [trained["loss"], *(weight.numpy().tobytes().hex() for weight in model.weights)]
    report = None if limit is None else tfswap.keras.report(model)
    return {"values": values, "peaks": peaks, "report": report, "epochs": [e for c in callbacks for e in c.epochs]}


def looped_with_late_batches(limit: Any) -> list[dict[str, list[int]]]:
    """By step and device, the peak and the limit in a loop over a distributed dataset. Its second batch is made when
    the first step has begun, and is a large part of a step's memory. A step over its limit raises.
    """
    from tfswap.runtime.step import Step

    began, run = threading.Event(), Step._watched
    replicas = strategy()
    with replicas.scope():
        variables = layers(12)

    def batches():
        for i in range(4):
            if i == 1:
                began.wait(60)
            yield draws(2048, 64, seed=i)

    def watched(*arguments):
        began.set()
        time.sleep(0.2)  # the batch arrives
        return run(*arguments)

    def loss_of(h):
        for variable in variables:
            h = tf.nn.relu(tf.sin(h @ variable))
        return tf.reduce_mean(h * h)

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        descend(tape, loss, variables)
        return loss

    def step(x):
        return replicas.reduce("SUM", replicas.run(replica_step, args=(x,)), axis=None)

    optimized = tfswap.optimize(tf.function(step), memory_limit=limit, on_exceeded="raise")
    data = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([2048, 64]))
    measured = []
    with mock.patch.object(Step, "_watched", watched):
        for x in replicas.experimental_distribute_dataset(data):
            _, peaks = peaks_of(lambda x=x: optimized(x).numpy())
            limits = {device: optimized.plan(device).limit_bytes for device in gpus()}
            measured.append({device: [peaks[device], limits[device]] for device in gpus()})
    return measured


def fitted_with_late_batches(limit: Any) -> list[dict[str, list[int]]]:
    """By epoch and device, measured and planned peak and the limit of a Keras model on all GPUs: the second batch is
    made when the first step has begun, the others at any time, and a batch is a large part of a step's memory.
    """
    from tfswap.runtime.step import Step

    began, drawn, runs, run = threading.Event(), random.Random(3), itertools.count(), Step._watched

    def batches():
        for i in range(16):
            if i == 1 and next(runs) == 1:  # the first run only builds the model
                began.wait(60)
            time.sleep(0.03 * drawn.random() * (i > 1))
            yield draws(2048, 64, seed=i), np.arange(2048) % 10

    def watched(*arguments):
        began.set()
        return run(*arguments)

    with strategy().scope():
        hidden = [tf.keras.layers.Dense(64, "softplus") for _ in range(12)]
        model = tf.keras.Sequential([tf.keras.layers.Input((64,)), *hidden, tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.01), loss, jit_compile=False)
    tfswap.keras.optimize(model, memory_limit=limit)
    reported = tfswap.keras.MemoryReport()
    data = tf.data.Dataset.from_generator(
        batches, output_signature=(tf.TensorSpec([2048, 64]), tf.TensorSpec([2048], tf.int64))
    )
    with mock.patch.object(Step, "_watched", watched):
        model.fit(data, epochs=2, verbose=0, callbacks=[reported])
    return [
        {name: [each.measured_peak_bytes, each.planned_peak_bytes, each.limit_bytes] for name, each in found.items()}
        for found in (epoch.devices for epoch in reported.epochs)
    ]
