"""Training programs as users write them, for test_programs_on_several_gpus.py: loops of their own with a
MirroredStrategy, Keras models and optimizers in them, and pipelines by hand.

Each function of PROGRAMS makes the variables, the step and its calls anew, and says what is particular about it.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from gpu_compare import draws
from replicated_models import (
    half_precision,
    images,
    normalized_in_groups,
    normalized_over_replicas,
    recurrent_layers,
    tokens,
    transformer,
)
from several_gpu_kinds import dense, on, replicated
from several_gpus import gpus, layers, peaks_of, strategy, trained

import tfswap
from tfswap.exporters.function import memory_optimizer_off
from tfswap.report.report import Report
from tfswap.report.reporting import UNCHANGED_NOTE

UNEQUAL = {"GPU:0": "70%", "GPU:1": "60%"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, and its calls.

    Attributes:
        variables: those that the step reads or assigns; their values are compared on each device.
        step: a Python function. Its result is a scalar or a tuple of scalars.
        calls: the arguments of each call.
        arriving_bytes: of a batch that may arrive on a device before, during or after a call.
    """

    variables: Sequence[Any]
    step: Callable[..., Any]
    calls: Sequence[Sequence[Any]]
    arriving_bytes: int = 0


def run(
    program: Program, optimized: Callable[[Any], Any], devices: Sequence[str]
) -> tuple[list[Any], list[dict[str, int]], list[Any]]:
    """The bits of results and variables, and of each call each device's peak and what its function reports.

    A call that fails has the name of its error for a result.
    """
    step = optimized(tf.function(program.step))
    found: list[Any] = []
    peaks, reports = [], []

    def result(arguments: Sequence[Any]) -> Any:
        try:
            return [each.numpy().tobytes().hex() for each in tf.nest.flatten(step(*arguments))]
        except tf.errors.InvalidArgumentError as error:
            return type(error).__name__

    for arguments in program.calls:
        bits, peak = peaks_of(lambda arguments=arguments: result(arguments), devices)
        found.append(bits)
        peaks.append(peak)
        reports.append({device: step.report(device) for device in devices if hasattr(step, "report")})
    for variable in program.variables:
        kept = variable.value if isinstance(variable, tf.keras.Variable) else variable
        found += [each.numpy().tobytes().hex() for each in getattr(kept, "values", (kept,))]
    return found, peaks, reports


def compare(make: Callable[[], Program], limits: Any, devices: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """A program under limits, and before it the same one without tfswap.

    Returns:
        Whether all bits are the same; of each device [peak, promised peak, limit] in bytes in each call; and which
        calls have a peak that is known to the byte: those that do not fail, of the first one's sizes.
    """
    devices = devices or gpus()
    with memory_optimizer_off():
        expected, unoptimised, _ = run(make(), lambda function: function, devices)
    gc.collect()  # the first program's variables
    program = make()
    found, peaks, reports = run(program, lambda f: tfswap.optimize(f, memory_limit=limits, **options), devices)
    failed = [i for i, each in enumerate(found) if each == "InvalidArgumentError"]
    largest = sizes(program.calls[0])
    calls = {
        device: [
            [peak[device], promised_bytes(report[device]), report[device].memory_limit_bytes]
            for peak, report in zip(peaks, reports, strict=True)
        ]
        for device in devices
    }
    return {
        "same": found == expected,
        "differ": [i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other],
        "failed": failed,
        "arriving_bytes": program.arriving_bytes,
        "exact": [i not in failed and sizes(each) == largest for i, each in enumerate(program.calls)],
        "calls": calls,
        "unoptimised": {device: max(each[device] for each in unoptimised) for device in devices},
    }


def promised_bytes(report: Report) -> int | None:
    """The planned peak; the limit of a step that runs unchanged, whose peak differs from run to run."""
    return report.memory_limit_bytes if UNCHANGED_NOTE in report.notes else report.planned_peak_bytes


def sizes(arguments: Sequence[Any]) -> list[Any]:
    """The shapes of a call's tensors, of all replicas."""
    return [each.shape.as_list() for each in tf.nest.flatten(arguments, expand_composites=True)]


def check(found: dict[str, Any]) -> None:
    """Limits and plans are kept, and from the second call on the peak is the planned one, where it is known."""
    assert found["same"] and found["report"] == [], found
    for calls in found["calls"].values():
        assert all(peak <= planned <= limit for peak, planned, limit in calls[1:]) and calls[0][0] <= calls[0][2], found
        exact = [call for call, known in zip(calls, found["exact"], strict=True) if known][1:]
        assert exact and all(peak >= planned - found["arriving_bytes"] for peak, planned, _ in exact), found
    # In all: TensorFlow may run what belongs to one device on another.
    total = sum(max(peak for peak, *_ in calls) for calls in found["calls"].values())
    assert total < sum(found["unoptimised"].values()), found


def distributed(replicas: Any, examples: Any, batch_size: int, epochs: int = 1) -> list[Any]:
    """The calls with the batches of a distributed dataset."""
    data = tf.data.Dataset.from_tensor_slices(examples).batch(batch_size)
    batches = [*replicas.experimental_distribute_dataset(data)]
    return [each if isinstance(each, tuple) else (each,) for each in batches] * epochs


def keras_loop(
    make_model: Callable[[], Any],
    make_optimizer: Callable[[], Any],
    examples: Any,
    batch_size: int,
    *,
    epochs: int = 1,
    change: Callable[[Sequence[Any]], Sequence[Any]] = lambda gradients: gradients,
) -> Program:
    """A loop of one's own around a Keras model: gradients of each replica are changed, and applied by an optimizer."""
    tf.keras.utils.set_random_seed(0)
    replicas = strategy()
    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    with replicas.scope():
        model, optimizer = make_model(), make_optimizer()
        optimizer.build(model.trainable_variables)

    def replica_step(x, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(labels, model(x, training=True))) / batch_size
            scaled = optimizer.scale_loss(loss)  # only a LossScaleOptimizer does
        gradients = change(tape.gradient(scaled, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def step(*batch):
        return replicas.reduce("SUM", replicas.run(replica_step, args=batch), axis=None)

    return Program([*model.variables, *optimizer.variables], step, distributed(replicas, examples, batch_size, epochs))


def scaled_half_precision() -> Program:
    """Float16 with a scale of the loss that changes, and normalization over all replicas."""
    optimizers = tf.keras.optimizers
    return keras_loop(
        half_precision,
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01), dynamic_growth_steps=2),
        images(160),
        40,
    )


def clipped_half_precision() -> Program:
    """As `scaled_half_precision`, with gradients that the optimizer clips, and a last batch of 30 images, not 40."""
    optimizers = tf.keras.optimizers
    return keras_loop(
        half_precision,
        lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, global_clipnorm=0.5), dynamic_growth_steps=2),
        images(150),
        40,
    )


def clipped_over_replicas() -> Program:
    """Gradients are added, clipped by hand by their norm over all replicas, and divided before they are added again."""

    def clipped(gradients):
        gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        return [each / len(gpus()) for each in tf.clip_by_global_norm(gradients, 0.3)[0]]

    return keras_loop(normalized_over_replicas, lambda: tf.keras.optimizers.SGD(0.1), images(160), 40, change=clipped)


def uneven_last_batch() -> Program:
    """Batches of 40, 40 and 20 images, twice."""
    return keras_loop(
        normalized_in_groups, lambda: tf.keras.optimizers.SGD(0.01, momentum=0.9), images(100), 40, epochs=2
    )


def fewer_images() -> Program:
    """Batches of 40, 40 and 7 images, twice: in the last one replicas have different numbers of them."""
    return keras_loop(normalized_in_groups, lambda: tf.keras.optimizers.Adam(0.01), images(87), 40, epochs=2)


def normalized_uneven() -> Program:
    """As `fewer_images`, with normalization over all replicas, and a last batch of 1: one replica has no image."""
    return keras_loop(normalized_over_replicas, lambda: tf.keras.optimizers.Adam(0.01), images(81), 40, epochs=2)


def language_model() -> Program:
    """A transformer by AdamW. The embedding's gradient is made dense before replicas add it up."""

    def dense_gradients(gradients):
        return [tf.convert_to_tensor(each) for each in gradients]

    return keras_loop(
        transformer, lambda: tf.keras.optimizers.AdamW(1e-3, clipnorm=1.0), tokens(64), 16, change=dense_gradients
    )


def without_grappler() -> None:
    """From now on TensorFlow runs no graph optimizers: those are the bits of steps with loops or conditionals."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def recurrent_net() -> Program:
    """Keras' LSTM and GRU in loops, by RMSprop. Bits are those of TensorFlow without its graph optimizers."""
    without_grappler()
    examples = draws(96, 24, 32), np.arange(96) % 10
    return keras_loop(recurrent_layers, lambda: tf.keras.optimizers.RMSprop(1e-3), examples, 32)


def subset_of_gpus() -> Program:
    """Replicas on the first and the third of three GPUs."""
    reduction = tf.distribute.HierarchicalCopyAllReduce()
    replicas = tf.distribute.MirroredStrategy([gpus()[0], gpus()[2]], cross_device_ops=reduction)
    variables, step, _ = replicated(dense, lambda: layers(8), replicas=replicas)
    return Program(variables, step, distributed(replicas, draws(4096, 64), 2048, 2))


def iterator_in_the_step() -> Program:
    """The step takes its batch from the iterator of a distributed dataset."""
    replicas = strategy()
    variables, step, _ = replicated(dense, lambda: layers(8), replicas=replicas)
    data = tf.data.Dataset.from_tensor_slices(draws(8192, 64)).batch(2048, drop_remainder=True)
    batches = iter(replicas.experimental_distribute_dataset(data))
    return Program(variables, lambda iterator: step(next(iterator)), [[batches]] * 3, 1024 * 64 * 4)


def mean_over_examples() -> Program:
    """Losses of examples, whose mean is over all replicas' rows; the last batch is uneven. A metric is added up."""
    replicas = strategy()
    read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.MEAN}
    with replicas.scope():
        variables, metric = layers(8), tf.Variable(0.0, **read)

    def replica_step(x):
        with tf.GradientTape() as tape:
            h = x
            for variable in variables:
                h = tf.nn.relu(tf.sin(h @ variable))
            losses = tf.reduce_mean(h * h, 1)
            loss = tf.reduce_sum(losses) / 2048.0
        found = tf.distribute.get_replica_context().all_reduce("sum", tape.gradient(loss, variables))
        metric.assign_add(loss)
        for variable, gradient in zip(variables, found, strict=True):
            variable.assign_sub(0.1 * gradient)
        return losses

    def step(x):
        return replicas.reduce("MEAN", replicas.run(replica_step, args=(x,)), axis=0)

    return Program([*variables, metric], step, distributed(replicas, draws(4700, 64), 2048, 2))


def accumulated_and_averaged() -> Program:
    """Gradients are added to variables of each replica, applied by a second `run`, and variables averaged."""
    replicas = strategy()
    read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with replicas.scope():
        variables = layers(6)
        averages = [tf.Variable(each) for each in variables]
        sums = [tf.Variable(tf.zeros_like(each), trainable=False, **read) for each in variables]

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = dense(variables, x)
        for total, gradient in zip(sums, tape.gradient(loss, variables), strict=True):
            total.assign_add(gradient)
        return loss

    def apply():
        added = tf.distribute.get_replica_context().all_reduce("sum", [each.read_value() for each in sums])
        for variable, average, total, gradient in zip(variables, averages, sums, added, strict=True):
            variable.assign_sub(0.05 * gradient)
            average.assign(0.9 * average + 0.1 * variable)
            total.assign(tf.zeros_like(gradient))

    def step(x):
        loss = replicas.reduce("MEAN", replicas.run(replica_step, args=(x,)), axis=None)
        replicas.run(apply)
        return loss

    return Program([*variables, *averages], step, distributed(replicas, draws(6144, 64), 2048))


def adversarial() -> Program:
    """Two nets with an optimizer each, one trained against the other."""
    replicas, optimizers = strategy(), tf.keras.optimizers
    with replicas.scope():
        made_by, judged_by = layers(4), [tf.Variable(0.2 * draws(64, 64, seed=20 + i)) for i in range(4)]
        maker, judge = optimizers.Adam(1e-3), optimizers.Adam(1e-3)
        maker.build(made_by)
        judge.build(judged_by)

    def net(h, variables):
        for variable in variables:
            h = tf.nn.leaky_relu(h @ variable)
        return h

    def replica_step(x):
        noise = tf.random.stateless_normal(tf.shape(x), [3, 1])
        with tf.GradientTape() as of_maker, tf.GradientTape() as of_judge:
            made = tf.reduce_mean(net(net(noise, made_by), judged_by))
            losses = -made, made - tf.reduce_mean(net(x, judged_by))
        gradients = of_maker.gradient(losses[0], made_by), of_judge.gradient(losses[1], judged_by)
        maker.apply_gradients(zip(gradients[0], made_by, strict=True))
        judge.apply_gradients(zip(gradients[1], judged_by, strict=True))
        return losses

    def step(x):
        return tuple(replicas.reduce("MEAN", each, axis=None) for each in replicas.run(replica_step, args=(x,)))

    return Program([*made_by, *judged_by], step, distributed(replicas, draws(4096, 64), 1024))


def failing_replicas() -> Program:
    """The second and the fifth call fail in the middle of the second replica, the third call in that of the first."""
    replicas = strategy()

    def loss_of(variables, x):
        for i, variable in enumerate(variables):
            x = tf.nn.relu(tf.sin(x @ variable))
            if i == 4:
                x = tf.debugging.check_numerics(x, "in the middle")
        return tf.reduce_mean(x * x)

    def call(failing):
        def rows(context):
            number = context.replica_id_in_sync_group
            values = draws(1024, 64, seed=number)
            values[3] = np.nan if number == failing else values[3]
            return on(number, values)

        return [replicas.experimental_distribute_values_from_function(rows)]

    variables, step, _ = replicated(loss_of, lambda: layers(8), replicas=replicas)
    return Program(variables, step, [call(failing) for failing in (None, 1, 0, None, 1, None)])


def stages() -> tuple[list[Any], Callable[[Any], Any], Any]:
    """Variables of residual layers on one device after the other, the loss of rows, and four micro-batches of them."""
    devices, variables = gpus(), []
    for i in range(8):
        with tf.device(devices[i * len(devices) // 8]):
            variables.append(tf.Variable(0.1 * draws(64, 64, seed=i)))

    def loss_of(h):
        for variable in variables:
            with tf.device(variable.device):
                h = tf.nn.gelu(h @ variable) + tf.sin(h)
        with tf.device(devices[-1]):
            return tf.reduce_mean(h * h)

    return variables, loss_of, on(0, draws(4, 512, 64))


def gradients_of(loss_of: Callable[[Any], Any], variables: Sequence[Any], x: Any) -> tuple[Any, list[Any]]:
    with tf.GradientTape() as tape:
        loss = loss_of(x)
    return loss, tape.gradient(loss, variables)


def at_each(variables: Sequence[Any], function: Callable[..., Any], *given: Sequence[Any]) -> list[Any]:
    """The function's results for each variable and what is given for it, on the variable's device."""
    results = []
    for variable, *arguments in zip(variables, *given, strict=True):
        with tf.device(variable.device):
            results.append(function(variable, *arguments))
    return results


def pipeline_of_micro_batches() -> Program:
    """Stages on one device after the other; the gradients of four micro-batches are added."""
    variables, loss_of, x = stages()

    def step(x):
        total, sums = gradients_of(loss_of, variables, x[0])
        for i in range(1, 4):
            loss, gradients = gradients_of(loss_of, variables, x[i])
            total += loss
            sums = at_each(variables, lambda _, summed, gradient: summed + gradient, sums, gradients)
        at_each(variables, lambda variable, summed: variable.assign_sub(0.01 * summed), sums)
        return total

    return Program(variables, step, [[x]] * 3)


def pipeline_in_a_loop() -> Program:
    """As `pipeline_of_micro_batches`, with a loop over these. Bits are those of TensorFlow without its optimizers."""
    without_grappler()
    variables, loss_of, x = stages()

    def step(x):
        def body(i, total, *sums):
            loss, gradients = gradients_of(loss_of, variables, x[i])
            added = at_each(variables, lambda _, summed, gradient: summed + gradient, sums, gradients)
            return i + 1, total + loss, *added

        zeros = at_each(variables, lambda _: tf.zeros([64, 64]))
        _, total, *sums = tf.while_loop(lambda i, *_: i < 4, body, [0, 0.0, *zeros], maximum_iterations=4)
        at_each(variables, lambda variable, summed: variable.assign_sub(0.01 * summed), sums)
        return total

    return Program(variables, step, [[x]] * 3)


def table_on_the_host() -> Program:
    """A table and some of the work on the CPU, then layers on the first GPU, and on the second."""
    with tf.device("CPU:0"):
        table = tf.Variable(draws(2000, 64))
        identities = tf.constant(np.arange(1024) * 7 % 2000)
    variables = []
    for i in range(12):
        with tf.device(gpus()[i // 6]):
            variables.append(tf.Variable(0.1 * draws(64, 64, seed=i)))

    def loss_of(identities):
        with tf.device("CPU:0"):
            h = tf.tanh(tf.gather(table, identities))
            h = tf.concat([h[:, :32] * 2.0, tf.sin(h[:, 32:])], 1)
        for variable in variables:
            with tf.device(variable.device):
                h = tf.nn.relu(tf.sin(h @ variable))
        with tf.device(gpus()[1]):
            return tf.reduce_mean(h * h)

    def step(identities):
        return trained([table, *variables], loss_of, identities)

    return Program([table, *variables], step, [[identities]] * 3)


PROGRAMS: dict[str, tuple[Callable[[], Program], Any]] = {
    make.__name__: (make, limits)
    for make, limits in (
        (scaled_half_precision, UNEQUAL),
        (clipped_half_precision, UNEQUAL),
        (clipped_over_replicas, UNEQUAL),
        (uneven_last_batch, UNEQUAL),
        (fewer_images, UNEQUAL),
        (normalized_uneven, UNEQUAL),
        (language_model, UNEQUAL),
        (recurrent_net, {"GPU:0": "80%", "GPU:1": "75%"}),
        (iterator_in_the_step, "70%"),
        (mean_over_examples, "70%"),
        (accumulated_and_averaged, UNEQUAL),
        (adversarial, UNEQUAL),
        (pipeline_of_micro_batches, {"GPU:0": "90%", "GPU:1": "85%"}),
        (pipeline_in_a_loop, "95%"),
    )
}
