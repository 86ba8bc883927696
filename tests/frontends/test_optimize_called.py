"""Optimized functions inside other functions, in saved objects, strategies and Keras."""

from __future__ import annotations

import gc
import traceback
import weakref

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from nets import LIMIT, WIDTH, Net, batch, bits, called, unoptimised  # noqa: E402
from processes import run_forked  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it

pytestmark = pytest.mark.usefixtures("nothing_left_in_the_pool")

# --- inside other functions, and other ways to it -----------------------------------------------------------


def test_it_can_be_called_inside_another_tf_function():
    net, twin = Net(), Net()
    step, reference = called(net), tf.function(twin.step)

    @tf.function
    def outer(x):
        total = tf.constant(0.0)
        for _ in tf.range(3):
            total += step(x)
        return total

    @tf.function
    def outer_reference(x):
        total = tf.constant(0.0)
        for _ in tf.range(3):
            total += reference(x)
        return total

    assert bits(outer(batch())) == bits(unoptimised(outer_reference, batch()))
    assert bits(net.weights) == bits(twin.weights)
    assert step.plan().evictions


def test_autograph_leaves_it_as_it_is():
    frames = []

    def body(x):
        frames.append([frame.name for frame in traceback.extract_stack()])
        return tf.reduce_sum(x)

    step = tfswap.optimize(tf.function(body), memory_limit="1GiB")
    tf.function(lambda x: step(x)).get_concrete_function(tf.TensorSpec([4]))
    assert "__call__" in frames[0]
    assert "tf____call__" not in frames[0]


@pytest.mark.parametrize("traced", [False, True], ids=["autograph", "as_it_is"])
def test_a_refusal_inside_another_function_is_what_it_is(traced):
    """AutoGraph has errors of its own for what comes while it traces."""
    step = tfswap.optimize(tf.function(Net().step), memory_limit="1KiB")

    def outer(x):
        return step(x) + 1.0

    with pytest.raises(tfswap.InfeasibleMemoryLimit) as refusal:
        tf.function(outer, autograph=not traced)(batch())
    assert refusal.value.floor_bytes > refusal.value.limit_bytes == 1024


class Model(tf.Module):
    """Holds one optimized function as an attribute, and one as a method."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.weights = self.net.weights
        self.held = tfswap.optimize(tf.function(self.net.step), memory_limit=LIMIT)

    @tfswap.optimize(memory_limit=LIMIT)
    @tf.function(input_signature=[tf.TensorSpec([None, WIDTH])])
    def step(self, x):
        return {"loss": self.net.step(x)}


def test_an_object_that_holds_one_can_be_saved(tmp_path):
    model, twin = Model(), Net()
    reference = tf.function(twin.step)
    for function in (model.step, model.held):
        function(batch())
        unoptimised(reference, batch())
    tf.saved_model.save(model, tmp_path / "model", signatures={})
    loaded = tf.saved_model.load(tmp_path / "model")
    assert b"Tfswap" not in (tmp_path / "model" / "saved_model.pb").read_bytes(), "saved as it was traced"
    expected = bits(unoptimised(reference, batch()))
    assert bits(unoptimised(loaded.held, batch())) == expected
    assert bits(model.held(batch())) == expected
    report = tfswap.optimize_graph(
        tmp_path / "model", tmp_path / "rewritten", memory_limit=LIMIT, function="step", batch_size=1024
    )
    assert report.swapped
    again = tfswap.optimize(loaded.step, memory_limit="80%")
    assert bits(again(batch())) == bits(unoptimised(reference, batch()))
    assert not again.plan().changes_nothing


@pytest.mark.parametrize("rows", [1024, None])
def test_a_concrete_function_that_an_object_holds_is_saved_as_it_was_traced(tmp_path, rows):
    model, twin = Model(), Net()
    reference = tf.function(twin.step)
    model.concrete = called(model.net).get_concrete_function(tf.TensorSpec([rows, WIDTH]))
    for function in (model.concrete, reference):
        unoptimised(function, batch())
    tf.saved_model.save(model, tmp_path / "model")
    assert b"Tfswap" not in (tmp_path / "model" / "saved_model.pb").read_bytes()
    loaded = tf.saved_model.load(tmp_path / "model")
    expected = bits(unoptimised(reference, batch()))
    assert bits(unoptimised(loaded.concrete, x=batch())) == expected
    assert bits(model.concrete(batch())) == expected


@pytest.mark.parametrize("strategy", ["OneDeviceStrategy", "MirroredStrategy"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_strategy_of_one_device_runs_it(strategy, inside):
    device = {"OneDeviceStrategy": "CPU:0", "MirroredStrategy": ["CPU:0"]}[strategy]
    strategy = getattr(tf.distribute, strategy)(device)
    with strategy.scope():
        net = Net()
        step = tfswap.optimize(tf.function(net.step), memory_limit=LIMIT)
    run = tf.function(lambda x: strategy.run(step, (x,))) if inside else lambda x: strategy.run(step, (x,))
    reference = tf.function(Net().step)
    for _ in range(2):
        assert bits(run(batch())) == bits(unoptimised(reference, batch()))
    assert step.plan().evictions
    assert step.report().swapped


def keras_model(layers=6):
    import keras

    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(layers)]
    return keras.Sequential([keras.Input((WIDTH,)), *dense])


def dataset(rows=4096, **options):
    data = tf.random.stateless_normal([rows, WIDTH], seed=(1, 2))
    return tf.data.Dataset.from_tensor_slices((data, data)).batch(1024, **options)


# Each in a process of its own: Keras' optimizers sum gradients by `tf.custom_gradient`, and TensorFlow's registry keeps
# such a gradient, with the step that was traced and its variables, for as long as the process lives.
FIT = {"epochs": 2, "verbose": 0, "shuffle": False}


def test_keras_fit_with_its_train_step_optimised():
    def program():
        plain, model = keras_model(), keras_model()
        for each in (plain, model):
            each.compile("adam", "mse", jit_compile=False)
        model.train_step = tfswap.optimize(model.train_step, memory_limit="80%")
        data = dataset(drop_remainder=True)
        expected = plain.fit(data, **FIT).history["loss"]
        assert np.allclose(model.fit(data, **FIT).history["loss"], expected, rtol=1e-5)
        assert model.train_step.plan().evictions
        assert np.isfinite(model.train_on_batch(*next(iter(data))))

    run_forked(program)


@pytest.mark.slow
def test_keras_fit_with_an_own_train_step():
    def program():
        import keras

        class Trained(keras.Model):
            def __init__(self):
                super().__init__()
                self.net = keras_model()

            def call(self, x, training=False):
                return self.net(x)

            @tfswap.optimize(memory_limit="80%")
            def train_step(self, data):
                return super().train_step(data)

        plain, model = keras_model(), Trained()
        for each in (plain, model):
            each.compile("adam", "mse", jit_compile=False)
        data = dataset(drop_remainder=True)
        expected = plain.fit(data, **FIT).history["loss"]
        assert np.allclose(model.fit(data, **FIT).history["loss"], expected, rtol=1e-5)
        assert model.train_step.plan().evictions

    run_forked(program)


@pytest.mark.parametrize(
    ("jit", "batches", "says"),
    [
        (
            True,
            {"drop_remainder": True},
            r"train_step is called by .* jit_compile=True.*compile\(..., jit_compile=False",
        ),
        (False, {}, r"made at .*test_optimize_called.*drop_remainder=True"),
    ],
)
def test_refusals_name_what_keras_must_be_given(jit, batches, says):
    def program():
        model = keras_model()
        model.compile("adam", "mse", jit_compile=jit)
        model.train_step = tfswap.optimize(model.train_step, memory_limit="80%")
        with pytest.raises(tfswap.UnsupportedGraph, match=says):
            model.fit(dataset(rows=4000, **batches), **FIT)

    run_forked(program)


# --- what a call costs ----------------------------------------------------------------------------------------


def test_a_call_that_has_been_seen_is_not_looked_up_again(monkeypatch):
    net, twin = Net(), Net()
    step, reference = called(net), tf.function(twin.step)
    step(batch()), unoptimised(reference, batch())

    def refuse(*_, **__):
        raise AssertionError("looked up")

    monkeypatch.setattr(step.traced, "_get_concrete_function_garbage_collected", refuse)
    assert bits(step(batch(seed=8))) == bits(unoptimised(reference, batch(seed=8)))
    with pytest.raises(AssertionError, match="looked up"):
        step(batch(), 2.0)


def test_calls_that_look_alike_keep_their_own_traces():
    made = []

    def body(x, y):
        made.append((x.dtype, x.shape))
        return tf.cast(x, tf.float32) * 2.0 + tf.cast(y, tf.float32)

    step = tfswap.optimize(tf.function(body), memory_limit="1GiB")
    plain = tf.function(body)
    one = tf.constant([1.5, 2.5])
    calls = [(one, one), (one, tf.constant([1, 2])), (tf.constant([1, 2]), one), (one, 3.0), (one, tf.constant(3.0))]
    calls += [(tf.ones([n]), tf.ones([1])) for n in (3, 4, 5)]
    for args in calls * 2:
        assert bits(step(*args)) == bits(plain(*args))
    assert step.experimental_get_tracing_count() == plain.experimental_get_tracing_count()
    # A numpy array is a tensor to TensorFlow, and a Python number a trace of its own.
    assert bits(step(np.float32([1.5, 2.5]), one)) == bits(plain(np.float32([1.5, 2.5]), one))
    assert step.experimental_get_tracing_count() == plain.experimental_get_tracing_count()


def test_what_is_cast_to_a_signature_is_cast_each_time():
    step = tfswap.optimize(
        tf.function(lambda x: x * 2.0, input_signature=[tf.TensorSpec([None], tf.float32)]), memory_limit="1GiB"
    )
    for _ in range(2):
        assert step(tf.constant([1.0])).numpy().tolist() == [2.0]
        assert step([1.0, 2.0]).numpy().tolist() == [2.0, 4.0]
        with pytest.raises(TypeError, match="Binding inputs"):
            step(tf.constant([1, 2]))


def test_ops_that_tensorflow_replaces_before_it_places_a_step():
    x = tf.reshape(tf.range(9e4), [300, 300]) - 100

    @tf.function
    def step(x, minus_zero):
        a, b = tf.abs(x), -x
        total = tf.raw_ops.AccumulateNV2(inputs=[a, b, x, a], shape=x.shape)
        zeros = tf.raw_ops.AccumulateNV2(inputs=[minus_zero, -a], shape=x.shape)
        whole = tf.raw_ops.AccumulateNV2(inputs=[tf.cast(a, tf.int32)] * 3, shape=x.shape)
        return total, 1 / zeros, whole, tf.parallel_stack([a, b]), tf.parallel_stack([total])

    given = tf.nn.relu(x), tf.constant(-0.0, shape=x.shape)
    expected = bits(step(*given))
    planned = tfswap.optimize(step, memory_limit="100%")
    assert bits(planned(*given)) == expected
    assert not planned.plan().changes_nothing


def test_a_function_of_which_tensorflow_has_seen_the_class_is_not_kept():
    """TensorFlow's nest keeps the classes of objects that it is asked about."""

    def seen():
        net = Net()
        optimized = called(net)
        optimized(batch())
        concrete = optimized.get_concrete_function(tf.TensorSpec([None, WIDTH]))
        assert not tf.nest.is_nested(concrete)
        assert not tf.nest.is_nested(concrete._inference_function)
        return weakref.ref(net)

    kept = seen()
    gc.collect()
    assert kept() is None
