"""A decorated function that returns a model's output, whose gradients a tape outside takes."""

from __future__ import annotations

import gc
import hashlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from nets import WIDTH, Net, as_traced, batch, bits, pool_in_use
from processes import on_arena

import tfswap
from tfswap.exporters.function import grappler_off

pytestmark = pytest.mark.usefixtures("nothing_left_in_the_pool")

LIMIT = "60%"


def features(net):
    """What `net` makes of a batch: a function whose gradients are taken outside."""

    def run(x):
        h = x
        for weight in net.weights:
            h = tf.nn.relu(tf.sin(h @ weight))
        return h

    return run


def repeated(weight):
    """A loop that saves what its iterations make."""

    def run(x):
        h = x
        for _ in tf.range(20):
            h = tf.tanh(h @ weight)
        return h

    return run


def planned(function, **options):
    return tfswap.optimize(tf.function(function), memory_limit=options.pop("memory_limit", LIMIT), **options)


def gradients(function, sources, *inputs, watch=(), **tape_options):
    """Loss and gradients with a tape outside, without Grappler."""

    def run():
        with tf.GradientTape(**tape_options) as tape:
            for tensor in watch:
                tape.watch(tensor)
            made = function(*inputs)
            loss = tf.add_n([tf.reduce_sum(tf.square(t)) for t in tf.nest.flatten(made) if t.dtype.is_floating])
        return loss, tape.gradient(loss, sources)

    return as_traced(run)


def same(function, sources, *inputs, memory_limit=LIMIT, **options):
    """Whether it gives the bits of the undecorated function, again and again; returns the decorated one."""
    step = planned(function, memory_limit=memory_limit)
    reference = tf.function(function)
    for _ in range(2):
        assert bits(gradients(step, sources, *inputs, **options)) == bits(
            gradients(reference, sources, *inputs, **options)
        )
    return step


def test_it_is_planned_and_gives_the_same_bits(caplog):
    net = Net()
    step = same(features(net), net.weights, batch())
    assert step.plan().evictions
    assert step.stats().out_bytes == step.stats().in_bytes > 0
    assert "tape" not in caplog.text


def test_gradients_of_arguments():
    net, x = Net(), batch()
    step = same(features(net), [x, net.weights[2]], x, watch=[x])
    assert step.plan().evictions


def test_a_forward_pass_alone_is_planned_as_what_it_is():
    net = Net()
    step = planned(features(net))
    gradients(step, net.weights, batch())
    with_gradients = step.report()
    made = step(batch())
    assert bits(made) == bits(as_traced(tf.function(features(net)), batch()))
    assert step.report().baseline_peak_bytes < with_gradients.baseline_peak_bytes
    assert step.plans == 2


def test_several_results_of_which_some_have_no_gradient():
    net = Net()
    first = features(net)

    def run(x):
        h = first(x)
        return {"a": tf.reduce_sum(h, axis=1), "b": tf.argmax(h, axis=1), "c": (h, tf.shape(h)), "d": x}

    step = same(run, net.weights, batch(), memory_limit="80%")
    assert step.plan().moves

    def one(function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(batch())["a"])
        return tape.gradient(loss, net.weights)

    assert bits(one(step)) == bits(as_traced(one, tf.function(run))), "the others' gradients are zeros"


def test_results_without_gradients():
    net = Net()
    run = features(net)

    def step(x):
        return tf.argmax(run(x), axis=1)

    optimized = planned(step, memory_limit="3MiB")
    with tf.GradientTape() as tape:
        made = optimized(batch())
    assert bits(made) == bits(as_traced(tf.function(step), batch()))
    assert tape.gradient(tf.cast(made, tf.float32), net.weights) == [None] * len(net.weights)


def test_what_a_function_writes_is_written_once():
    net, count = Net(), tf.Variable(0)
    run = features(net)

    def step(x):
        count.assign_add(1)
        return run(x)

    optimized = planned(step)
    for _ in range(3):
        gradients(optimized, net.weights, batch())
    assert count.numpy() == 3


def test_variables_that_change_in_between():
    net = Net()
    step, reference = planned(features(net)), tf.function(features(net))

    def run(function):
        initial = [tf.identity(w) for w in net.weights]
        with tf.GradientTape() as tape:
            made = function(batch())
        for weight in net.weights:
            weight.assign_add(tf.ones_like(weight))
        gradients = tape.gradient(made, net.weights)
        for weight, value in zip(net.weights, initial, strict=True):
            weight.assign(value)
        return gradients

    for _ in range(2):
        assert bits(run(step)) == bits(as_traced(run, reference))


def test_dropout_makes_one_mask_for_both():
    net = Net()

    def run(x):
        h = x
        for i, weight in enumerate(net.weights):
            h = tf.nn.experimental.stateless_dropout(tf.nn.relu(h @ weight), 0.3, seed=[i, 1])
        return h

    same(run, net.weights, batch())


def test_a_random_mask_is_the_same_forward_and_backward():
    """By values: such a mask is another one in each function."""
    net = Net()

    def run(x):
        h = x
        for weight in net.weights[:3]:
            h = tf.nn.dropout(h + tf.sin(h @ weight) * 0.0, 0.5)
        return h

    step, x = planned(run, memory_limit="75%"), tf.ones([1024, WIDTH])
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = step(x)
        (given,) = tape.gradient(made, [x])
        assert set(np.unique(made)) == {0.0, 8.0}
        assert bits(made) == bits(given), "d(x * mask)/dx is the mask"
    assert step.plan().order


def test_rows_of_a_table():
    table = tf.Variable(tf.random.stateless_normal([500, WIDTH], seed=(1, 1)))
    net = Net()
    run = features(net)
    ids = tf.random.stateless_uniform([1024], seed=(2, 2), maxval=500, dtype=tf.int32)

    def step(i):
        return run(tf.gather(table, i))

    optimized, reference = planned(step), tf.function(step)
    loss, (rows,) = gradients(optimized, [table], ids)
    loss_before, (rows_before,) = gradients(reference, [table], ids)
    assert isinstance(rows, tf.IndexedSlices)
    assert bits([loss, rows.values, rows.indices]) == bits([loss_before, rows_before.values, rows_before.indices])


def test_custom_gradients_and_recomputation_inside():
    net = Net()

    @tf.custom_gradient
    def clipped(x):
        y = tf.sin(x)
        return y, lambda dy: tf.clip_by_value(dy * tf.cos(x), -0.01, 0.01)

    @tf.recompute_grad
    def block(x):
        return tf.nn.relu(tf.tanh(x @ net.weights[1]) @ net.weights[2])

    def run(x):
        return clipped(block(tf.nn.relu(x @ net.weights[0])) @ net.weights[3])

    step = same(run, net.weights[:4], batch(), memory_limit="85%")
    assert step.plan().order
    assert step.report().trains


def test_what_is_recomputed_reads_variables_as_they_are_then():
    net = Net(layers=3)

    @tf.recompute_grad
    def run(x):
        for weight in net.weights:
            x = tf.sin(x @ weight)
        return x

    def train(function):
        for weight in net.weights:
            weight.assign(tf.ones_like(weight) / WIDTH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(function(batch())))
        for weight in net.weights:
            weight.assign(1.5 * weight)
        return loss, tape.gradient(loss, net.weights)

    step = planned(run, memory_limit="85%")
    for _ in range(2):
        assert bits(train(step)) == bits(as_traced(train, tf.function(run)))
    assert step.plan().moves


def test_a_call_without_a_plan_says_why(caplog):
    net = Net(layers=3)
    step = planned(features(net), memory_limit="200%")
    with tf.autodiff.ForwardAccumulator(x := batch(), x):
        step(x)
    for reported in (step.report, step.plan, step.stats):
        with pytest.raises(tfswap.TfswapError, match="no plan of the latest call.*a forward accumulator does too"):
            reported()
    assert "a forward accumulator does too" in caplog.text
    tf.function(lambda: gradients(step, net.weights, batch(), persistent=True))()
    gradients(step, net.weights, batch())
    with pytest.raises(tfswap.TfswapError, match="no plan of the latest call.*has done so before"):
        step.report()
    step(batch())
    assert step.report().planned_peak_bytes
    within = planned(features(net), memory_limit="90%")
    tf.function(lambda: gradients(within, net.weights, batch()))()
    with pytest.raises(tfswap.TfswapError, match="both are inside of another tf.function"):
        within.report()

    def returns_a_handle(x):
        return x @ net.weights[0], net.weights[0].handle

    handles = planned(returns_a_handle, memory_limit="200%")
    with tf.GradientTape() as tape:
        made, _ = handles(batch())
    assert tape.gradient(made, net.weights[0]) is not None
    with pytest.raises(tfswap.TfswapError, match="it returns handles"):
        handles.report()


def test_batches_of_other_sizes():
    net = Net()
    step, reference = planned(features(net), memory_limit="70%"), tf.function(features(net))
    traced = tf.function(features(net), input_signature=[tf.TensorSpec([None, WIDTH])])
    step = tfswap.optimize(traced, memory_limit="70%")
    for rows in (1024, 700, 1024, 1):
        assert bits(gradients(step, net.weights, batch(rows))) == bits(gradients(reference, net.weights, batch(rows)))
    assert step.plans == 1


def test_two_calls_before_one_backward_pass():
    net = Net()
    step, reference = planned(features(net)), tf.function(features(net))

    def siamese(function):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(function(batch()) - function(batch(seed=8))))
        return loss, tape.gradient(loss, net.weights)

    for _ in range(2):
        assert bits(siamese(step)) == bits(as_traced(siamese, reference))


def test_a_backward_pass_that_never_runs_leaves_nothing():
    net = Net()
    step = planned(features(net))
    gradients(step, net.weights, batch())
    with tf.GradientTape() as tape:
        made = step(batch())
        assert pool_in_use() > 0
    del tape, made
    gc.collect()
    assert pool_in_use() == 0

    def fails():
        with tf.GradientTape():
            step(batch())
            raise KeyError("between the two")

    with pytest.raises(KeyError):
        fails()
    gc.collect()
    assert pool_in_use() == 0
    assert bits(gradients(step, net.weights, batch())) == bits(
        gradients(tf.function(features(net)), net.weights, batch())
    )


def test_a_tape_that_does_not_record():
    net = Net()
    step = planned(features(net), memory_limit="3MiB")
    with tf.GradientTape() as tape, tape.stop_recording():
        made = step(batch())
    assert tape.gradient(made, net.weights) == [None] * len(net.weights)
    assert not step.report().swapped


def test_more_than_once_is_refused():
    net = Net()
    step = planned(features(net), memory_limit="90%")
    x = batch(64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        made = tf.reduce_sum(step(x), axis=0)
    with pytest.raises(tfswap.TfswapError, match=r"tape\.jacobian.*persistent=True"):
        tape.jacobian(made, x)
    with tf.GradientTape() as tape:
        made = step(x)
    seed = tf.ones_like(made)
    with tf.GradientTape() as outer:
        outer.watch(seed)
        with pytest.raises(tfswap.TfswapError, match="under another tape.*persistent=True"):
            tape.gradient(made, net.weights, output_gradients=seed)
    del outer


# --- in an arena of the kind that GPUs have -----------------------------------------------------------------


class Convolutional:
    """A Keras model with small or large results, its optimizer and a batch, in an arena of one free region."""

    def __init__(self, small):
        region = tf.zeros([256 << 20], tf.uint8)
        del region
        keras.utils.set_random_seed(0)
        layers = keras.layers
        h = inputs = layers.Input((32, 32, 3))
        for width in (16, 32):
            for _ in range(2):
                skip = h
                h = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(h)))
                h = layers.Add()([skip, h]) if skip.shape == h.shape else h
            h = layers.MaxPooling2D()(h)
        self.model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(h)) if small else h)
        self.optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.optimizer.build(self.model.trainable_variables)
        self.x = tf.random.stateless_normal([32, 32, 32, 3], seed=(1, 2))

    def run(self, limit, steps=4):
        call = tf.function(lambda x: self.model(x, training=True))
        call = call if limit is None else tfswap.optimize(call, memory_limit=limit)
        before = [v.numpy() for v in (*self.model.variables, *self.optimizer.variables)]
        tf.config.experimental.reset_memory_stats("CPU:0")
        losses = []
        for _ in range(steps):
            with tf.GradientTape() as tape:
                y = call(self.x)
                loss = tf.reduce_mean(tf.square(y - 0.5))
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            losses.append(float(loss))
            del y, loss, gradients
        digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in self.model.variables)).hexdigest()
        for v, value in zip((*self.model.variables, *self.optimizer.variables), before, strict=True):
            v.assign(value)
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        found = {"peak": peak, "losses": losses, "digest": digest}
        if limit is not None:
            report = call.report()
            found |= {
                "limit": report.memory_limit_bytes,
                "baseline": report.baseline_peak_bytes,
                "floor": report.floor_bytes,
                "moved": call.plan().moves,
                "order": len(call.plan().order),
            }
        return found


def keras_steps(small, near_floor):
    """Values and peaks without a limit, with one, and where `near_floor` near the smallest one."""
    with grappler_off():
        net = Convolutional(small)
        reference, found = net.run(None), [net.run("60%")]
        if near_floor:
            found.append(net.run(found[-1]["floor"] * 103 // 100))  # the arena has other constants in it now
    return [reference, *found]


@pytest.mark.parametrize("small", [True, False])
def test_a_keras_model_keeps_its_limit_from_the_forward_pass_to_the_end_of_the_backward_pass(small):
    """With small results, and with large ones, of which the loss makes several more."""
    reference, *found = on_arena(lambda: keras_steps(small, near_floor=small))
    for run in found:
        assert run["peak"] <= run["limit"] < reference["peak"]
        assert (run["losses"], run["digest"]) == (reference["losses"], reference["digest"])
        assert run["order"]
    if small:
        assert found[-1]["moved"]
    assert found[0]["baseline"] == pytest.approx(reference["peak"], rel=0.1)


def loop():
    import tensorflow as tf
    from test_outside_gradients import WIDTH, batch, bits, gradients, planned, repeated

    weight = tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], seed=(1, 3)) * 0.1)
    x = batch()
    reference = bits(gradients(tf.function(repeated(weight)), [weight], x))
    before = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    step = planned(repeated(weight), memory_limit="55%")
    found = [bits(gradients(step, [weight], x)) for _ in range(3)]
    report = step.report()
    return {
        "same": all(one == reference for one in found),
        "accumulators": len(step.plan().accumulators),
        "before": before,
        "limit": report.memory_limit_bytes,
        "baseline": report.baseline_peak_bytes,
        "peak": tf.config.experimental.get_memory_info("CPU:0")["peak"],
    }


def test_what_a_loop_saves_crosses_too():
    found = on_arena(loop)
    assert found["same"]
    assert found["accumulators"]
    assert found["peak"] <= found["limit"] < found["before"]


def left_alone():
    import logging

    import tensorflow as tf
    from nets import Net
    from test_outside_gradients import batch, features

    import tfswap

    reported = []
    logging.getLogger("tfswap").addFilter(lambda record: reported.append(record.getMessage()) or True)
    net, x = Net(), batch()
    step = tfswap.optimize(tf.function(features(net)), memory_limit="200%")
    plans = []
    for large in (False, True, False):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(step(x))
        plans.append(step.plan().changes_nothing)
        taken = tf.zeros([16 << 20], tf.uint8) if large else None
        tape.gradient(loss, net.weights)
        del taken
    return [plans, reported]


def test_a_call_that_was_left_alone_is_planned_when_its_backward_pass_took_too_much():
    plans, reported = on_arena(left_alone)
    assert plans == [True, True, False]
    assert any("over its limit" in message for message in reported)
