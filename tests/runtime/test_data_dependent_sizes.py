"""Sizes that depend on the arguments' values: planned call by call, with few plans and the right values."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from slow import slow
from step_peaks import measuring

tf: Any = pytest.importorskip("tensorflow")

import tfswap  # noqa: E402 needs TensorFlow
from tfswap.runtime.dynamic_sizes import find_data_dependent_sizes  # noqa: E402

WIDTH, LAYERS, WORDS = 64, 6, 100
LONGEST = (60, 90, 30, 61, 88, 12)
LIMIT = 4 << 20


class Words:
    """A net of words, with losses of several arguments that give it sizes.

    Args:
        layers: how many.
    """

    def __init__(self, layers=LAYERS):
        self.start = [0.1 * tf.random.stateless_normal([WIDTH, WIDTH], seed=(n, 1)) for n in range(LAYERS)]
        self.weights = [tf.Variable(w) for w in self.start]
        self.table = tf.Variable(tf.random.stateless_normal([WORDS, WIDTH], seed=(7, 7)))
        self.variables = [self.table, *self.weights[:layers]]

    def trained(self, loss_of):
        def step(given):
            with tf.GradientTape() as tape:
                loss = loss_of(given)
            for variable, gradient in zip(self.variables, tape.gradient(loss, self.variables), strict=True):
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            return loss

        return step

    def reset(self):
        for variable, first in zip(self.weights, self.start, strict=True):
            variable.assign(first)
        self.table.assign(tf.random.stateless_normal([WORDS, WIDTH], seed=(7, 7)))

    def through(self, h):
        for weight in self.weights:
            h = tf.nn.gelu(tf.einsum("btd,de->bte", h, weight))
        return h

    def loss_of_padded(self, rows):
        h = self.through(tf.nn.embedding_lookup(self.table, rows.to_tensor()))
        return tf.reduce_mean(h * h)

    def loss_of_targets(self, rows):
        words, following = rows[:, :-1].to_tensor(), rows[:, 1:].to_tensor()
        h = self.through(tf.nn.embedding_lookup(self.table, words))
        return tf.reduce_mean((h - tf.nn.embedding_lookup(self.table, following)) ** 2)

    def loss_of_masked(self, lengths):
        mask = tf.sequence_mask(lengths, dtype=tf.float32)
        h = self.through(tf.nn.embedding_lookup(self.table, tf.cast(3 * mask, tf.int32)))
        return tf.reduce_mean(mask[..., None] * h * h)

    def loss_of_first(self, n):
        h = self.through(tf.tile(tf.nn.embedding_lookup(self.table, tf.range(n))[None], [16, 1, 1]))
        return tf.reduce_mean(h * h)

    def loss_of_recurrent(self, rows):
        h = tf.transpose(tf.nn.embedding_lookup(self.table, rows.to_tensor()), [1, 0, 2])
        for weight in self.weights[:2]:

            def layer(before, x, weight=weight):
                return tf.tanh(before @ weight + tf.nn.gelu(x))

            h = tf.scan(layer, h, tf.zeros([16, WIDTH]))
        return tf.reduce_mean(h * h)


def ragged(longest, seed):
    lengths = tf.random.stateless_uniform([16], (seed, 1), 4, longest, tf.int64).numpy()
    lengths[3] = longest
    return tf.RaggedTensor.from_row_lengths(
        tf.random.stateless_uniform([int(lengths.sum())], (seed, 2), 0, WORDS, tf.int32), lengths
    )


def arguments(name):
    """The arguments of the calls of a step with this loss."""
    if name == "masked":
        return [tf.constant([longest] + [4] * 15) for longest in LONGEST]
    if name == "first":
        return [tf.constant(longest) for longest in LONGEST]
    rows = [ragged(longest, seed) for seed, longest in enumerate(LONGEST)]
    return rows[:2] if name == "recurrent" else rows


def called_with_sizes(name):
    """Values, peaks and plans of a step whose arguments give its sizes, in this limit."""
    net, given = (
        Words(2 if name == "recurrent" else LAYERS),
        arguments(name),
    )  # each recurrent layer is two loops to plan
    loss_of = getattr(net, f"loss_of_{name}")
    signature = [tf.RaggedTensorSpec([None, None], tf.int32)] if name in ("padded", "recurrent") else None
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": name == "recurrent"})  # steps with loops
    step = tf.function(net.trained(loss_of), input_signature=signature)

    def bits(value):
        return value.numpy().tobytes().hex()

    unoptimised = [bits(step(each)) for each in given]
    expected = [bits(v) for v in net.variables]
    net.reset()
    step = tfswap.optimize(tf.function(net.trained(loss_of), input_signature=signature), memory_limit=LIMIT)
    losses, peaks = [], []
    for each in given:
        with measuring(peaks):
            losses.append(bits(step(each)))
    report = step.report()
    return {
        "losses": losses == unoptimised,
        "variables": [bits(v) for v in net.variables] == expected,
        "peak": max(peaks),
        "plans": step.plans,
        "moved": len(report.swapped) + len(report.recomputed),
        "base": report.baseline_peak_bytes,
    }


@pytest.mark.parametrize("name", ["padded", "targets", *slow("first", "recurrent", "masked")])
def test_each_call_keeps_the_limit_with_few_plans_and_the_same_bits(name: str) -> None:
    found = on_arena(lambda: called_with_sizes(name))
    assert found["losses"]
    assert found["variables"]
    assert found["peak"] <= LIMIT < found["base"]
    assert found["moved"]
    assert 2 <= found["plans"] <= 4


def padded(rows: Any) -> Any:
    return tf.reduce_sum(tf.cast(rows.to_tensor(), tf.float32)[:, :, None] * tf.ones([1000]))


def test_inside_of_another_function_arguments_say_nothing() -> None:
    step = tfswap.optimize(tf.function(padded), memory_limit="1MiB")
    rows = tf.ragged.constant([[1, 2, 3], [4]])

    @tf.function
    def outer(rows: Any) -> Any:
        return step(rows)

    with pytest.raises(
        tfswap.UnsupportedGraph, match="is not known before the step runs.*inside of another tf.function"
    ):
        outer(rows)
    assert float(step(rows)) == 10_000.0
    with pytest.raises(tfswap.UnsupportedGraph, match="is not known before the step runs"):
        outer(rows)


@pytest.mark.parametrize("longest", [3, *slow(6, 12), 30])
def test_a_first_batch_of_few_words_is_computed_as_others_are(longest: int) -> None:
    """What a few words make is not small: each takes a row of the table."""

    def program():
        import numpy as np
        import tensorflow as tf

        import tfswap

        table = tf.Variable(0.1 * tf.random.stateless_normal([100, 8192], (1, 1)))

        def ragged(longest, seed):
            draw = np.random.default_rng(seed)
            rows = [draw.integers(1, 100, count).tolist() for count in draw.integers(1, longest, 12)]
            return tf.ragged.constant([[1] * longest, *rows], dtype=tf.int64)

        def loss(rows):
            words = tf.nn.embedding_lookup(table, rows.to_tensor())
            return tf.reduce_sum(tf.sin(words) * tf.cos(words))

        def step(rows):
            with tf.GradientTape() as tape:
                found = loss(rows)
            return found, tf.convert_to_tensor(tape.gradient(found, table))

        rows = ragged(longest, 0)
        expected = [v.numpy().tobytes() for v in tf.function(step)(rows)]
        planned = tfswap.optimize(tf.function(step), memory_limit="90%")
        planned(rows)
        tf.config.experimental.reset_memory_stats("CPU:0")
        same = [v.numpy().tobytes() for v in planned(rows)] == expected
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        report = planned.report()
        return [same, peak, report.planned_peak_bytes, report.memory_limit_bytes]

    found = on_arena(program)
    same, peak, planned, limit = found
    assert same
    assert peak <= planned <= limit


def test_rows_of_a_variable_of_any_shape_are_not_small() -> None:
    table = tf.Variable(tf.zeros([4, 8192]), shape=tf.TensorShape(None))
    step = tfswap.optimize(tf.function(lambda: tf.reduce_sum(tf.sin(table))), memory_limit="1MiB")
    with pytest.raises(tfswap.UnsupportedGraph, match="ReadVariableOp"):
        step()


def test_with_a_tape_outside_arguments_say_nothing() -> None:
    weight = tf.Variable(2.0)
    step = tfswap.optimize(tf.function(lambda rows: padded(rows) * weight), memory_limit="1MiB")
    rows = tf.ragged.constant([[1, 2, 3], [4]])
    with tf.GradientTape(), pytest.raises(tfswap.UnsupportedGraph, match="gradients are taken outside of the function"):
        step(rows)
    assert float(step(rows)) == 20_000.0


def test_arguments_without_values_say_nothing() -> None:
    step = tfswap.optimize(tf.function(lambda n: tf.cast(tf.range(n), tf.float32) * 2.0), memory_limit="1MiB")
    assert step(tf.constant(3000)).shape == [3000]
    with pytest.raises(tfswap.UnsupportedGraph, match=r"'range:0' .*is not known before the step runs"):
        step.get_concrete_function(tf.TensorSpec([], tf.int32))


def test_as_much_of_a_variable_as_an_argument_says_is_computed() -> None:
    table = tf.Variable(tf.ones([4000, 8]))
    step = tfswap.optimize(tf.function(lambda n: tf.reduce_sum(table[:n] * 2.0)), memory_limit="1MiB")
    assert [float(step(tf.constant(n))) for n in (900, 3000)] == [14400.0, 48000.0]


def test_sizes_that_were_small_at_first_are_computed_once_they_may_be_large() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([], tf.int32)])
    def plain(x: Any, n: Any) -> Any:
        numbers = tf.cast(tf.range(n * 300), tf.float32)
        return tf.reduce_sum(tf.tanh(tf.reshape(x, [n, -1]))) + tf.reduce_sum(numbers)

    step = tfswap.optimize(plain, memory_limit="1MiB")
    for rows in (4, 1000, 8, 2000):
        x = tf.ones([rows, 4])
        assert float(step(x, tf.constant(2))) == float(plain(x, tf.constant(2)))
    assert step.plans <= 4


def next_to_others():
    import tensorflow as tf

    import tfswap

    def plain(x):
        masks = [x[:, None] * tf.cast(x[None, :] > float(i), tf.float32) for i in range(4)]
        count = tf.cast(tf.add_n([tf.reduce_max(mask) for mask in masks]), tf.int32)
        return tf.reduce_sum(tf.cast(tf.range(1000 * count), tf.float32))

    x = tf.ones([1000])  # each mask 4 MB: all of them, side by side, take far more than the limit
    step = tfswap.optimize(tf.function(plain), memory_limit="10MiB")
    step(x)
    tf.config.experimental.reset_memory_stats("CPU:0")
    found = float(step(x))
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    try:
        tfswap.optimize(tf.function(plain), memory_limit="3MiB")(x)
    except tfswap.InfeasibleMemoryLimit as error:
        floor = error.floor_bytes
    tf.config.experimental.reset_memory_stats("CPU:0")
    tfswap.optimize(tf.function(plain), memory_limit=floor)(x)
    low = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return {"same": found == float(plain(x)), "peak": peak, "floor": floor, "low": low}


def test_a_computed_size_may_have_other_axes_in_each_call() -> None:
    plain = tf.function(
        lambda x, shape: tf.reshape(x, shape) * 2.0,
        input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)],
    )
    step = tfswap.optimize(plain, memory_limit="1MiB")
    x = tf.ones([6000])
    for shape in ([60, 100], [6000], [6, 10, 100], [30, 200], [6000]):
        assert step(x, tf.constant(shape)).shape == shape


def test_values_that_tensorflow_refuses_are_refused_in_its_own_words() -> None:
    @tf.function
    def numbers(n: Any, by: Any) -> Any:
        return tf.cast(tf.range(0, n, by), tf.float32) * 2.0

    step = tfswap.optimize(numbers, memory_limit="1MiB")
    assert step(tf.constant(5000), tf.constant(3)).shape == [1667]
    for n, by in ((5000, 0), (-5000, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError) as plain:
            numbers(tf.constant(n), tf.constant(by))
        with pytest.raises(tf.errors.InvalidArgumentError) as planned:
            step(tf.constant(n), tf.constant(by))
        assert "Requires" in plain.value.message
        messages = plain.value.message.partition("Requires")[2].splitlines()[0]
        assert messages in planned.value.message


@pytest.mark.parametrize(
    ("size", "good", "bad", "messages"),
    [
        (lambda n, k: [n // k], [3000, 1], [3000, 0], "division by zero"),
        (lambda n, k: [tf.gather([3000, 4000], k)], [0, 1], [0, 7], "not in [0, 2)"),
        (lambda n, k: [n, k], [3000, 2], [1 << 40, 1 << 40], "2**63 - 1"),
    ],
)
def test_errors_of_what_computes_sizes_name_the_line(size: Any, good: Any, bad: Any, messages: str) -> None:
    @tf.function
    def filled(n: Any, k: Any) -> Any:
        return tf.fill(size(n, k), 1.0) * 2.0

    step = tfswap.optimize(filled, memory_limit="1MiB")
    step(*tf.unstack(tf.constant(good, tf.int64)))
    with pytest.raises(tf.errors.InvalidArgumentError) as reported:
        step(*tf.unstack(tf.constant(bad, tf.int64)))
    assert messages in reported.value.message
    assert "test_data_dependent_sizes.py:" in reported.value.message
    assert "stack traces unavailable" not in reported.value.message


def test_what_computes_sizes_and_does_not_fit_is_refused_by_its_own_name() -> None:
    def made(n: Any) -> Any:
        return tf.fill([tf.reduce_max(tf.range(n) % 3000)], 1.0) * 2.0

    step = tfswap.optimize(tf.function(made), memory_limit="1MiB")
    with pytest.raises(
        tfswap.InfeasibleMemoryLimit, match=r"to compute the size of.*made at .*test_data_dependent_sizes.py:"
    ) as reported:
        step(tf.constant(1 << 20))
    assert 4 << 20 < reported.value.floor_bytes < 10 << 20
    assert step(tf.constant(5000)).shape == [2999]


def test_what_computes_sizes_keeps_the_limit_too() -> None:
    found = on_arena(next_to_others)
    assert found["same"]
    assert found["peak"] <= 10 << 20
    assert 4_000_000 < found["low"] <= found["floor"] < 10 << 20


def test_what_depends_on_a_variable_is_not_computed() -> None:
    count = tf.Variable(3)
    traced = tf.function(lambda x: tf.tile(x, [count]))
    x = tf.ones([1000])
    assert find_data_dependent_sizes(traced.get_concrete_function(x), [x], lambda function: function) is None


def test_sizes_that_are_known_give_others() -> None:
    def step(n: Any, m: Any) -> Any:
        return tf.range(tf.size(tf.range(n)) * m) * 2

    n, m = tf.constant(600), tf.constant(2)
    concrete = tf.function(step).get_concrete_function(n, m)
    reported = find_data_dependent_sizes(concrete, [n, m], lambda function: function)
    assert reported is not None
    assert sorted(reported.sizes(concrete, [n, m])) == [(600,), (1200,)]
    assert sorted(reported.sizes(concrete, [tf.constant(700), m])) == [(700,), (1400,)]


def sparse() -> Any:
    return tf.sparse.from_dense(tf.reshape(tf.range(6000) % 7, [60, 100]))


RESULTS: dict[str, tuple[Any, Any]] = {
    "feature cross": (
        lambda x: tf.sparse.cross_hashed([x, x + 1], num_buckets=99).values,
        lambda: tf.ones([900, 1], tf.int64),
    ),
    "set operation": (lambda x: tf.sets.difference(x[:1], x[1:]).values, lambda: tf.reshape(tf.range(4000), [2, 2000])),
    "list difference": (
        lambda x: tf.sparse.from_dense(tf.raw_ops.ListDiff(x=x, y=x[::2]).out).values,
        lambda: tf.range(4000),
    ),
    "sparse maximum": (lambda x: tf.sparse.maximum(x, x).values, sparse),
    "sparse split": (lambda x: tf.sparse.split(x, 2, axis=1)[1].values, sparse),
    "sparse sum": (
        lambda x: tf.sparse.reduce_sum(tf.sparse.reshape(x, [6, 1000]), 0, output_is_sparse=True).values,
        sparse,
    ),
    "ragged to sparse": (lambda x: x.to_sparse().values, lambda: tf.RaggedTensor.from_tensor(tf.ones([60, 90]))),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_number_of_values_of_a_sparse_result_is_computed(name: str) -> None:
    values, argument = RESULTS[name]
    given = argument()

    def doubled(x: Any) -> Any:
        return tf.cast(values(x), tf.float32) * 2.0

    found = tfswap.optimize(tf.function(doubled), memory_limit="1MiB")(given)
    assert found.shape[0] > 256  # smaller tensors of unknown size count as small
    assert found.numpy().tobytes() == doubled(given).numpy().tobytes()


def test_a_refusal_names_a_tensor_whose_size_stays_unknown() -> None:
    count = tf.Variable(3000)
    step = tfswap.optimize(tf.function(lambda n: (tf.range(n) * 2, tf.range(count) * 3)), memory_limit="1MiB")
    with pytest.raises(tfswap.UnsupportedGraph, match="the size of 'range_1:0'"):
        step(tf.constant(3000))
