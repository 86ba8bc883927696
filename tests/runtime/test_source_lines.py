"""The user's source lines of nodes, also of those in called functions and in loops' bodies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tf = pytest.importorskip("tensorflow")

from nets import WIDTH, Net, batch  # noqa: E402

import tfswap  # noqa: E402 needs TensorFlow to be worth it

HERE = Path(__file__)


def called(layer):
    function = tf.function(layer)
    return lambda h: function(h)


def looped(layer):
    return lambda h: tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, layer(h)), [0, h], maximum_iterations=3)[1]


def chosen(layer):
    return lambda h: tf.cond(h[0, 0] != 1.0, lambda: layer(h), lambda: h)


def as_it_is(layer):
    return layer


WAYS = {
    "as it is": as_it_is,
    "called": called,
    "called by what is called": lambda layer: called(called(layer)),
    "in a loop": looped,
    "in a branch": chosen,
    "called in a loop": lambda layer: looped(called(layer)),
    "in a loop that is called": lambda layer: called(looped(layer)),
    "called in a loop that is called": lambda layer: called(looped(called(layer))),
}


def training_step(layer):
    net = Net(layers=1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(layer(net.weights[0], x) ** 2)
        (gradient,) = tape.gradient(loss, net.weights)
        net.weights[0].assign_sub(0.1 * gradient)
        return loss

    return tf.function(step)


def own_lines(message: str) -> list[int]:
    return [int(line) for line in re.findall(rf'{HERE.name}(?:", line |:)(\d+)', message)]


def marked(mark: str) -> int:
    return next(n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.mark.parametrize("way", WAYS)
def test_a_node_that_fails_was_made_where_tensorflow_says_of_the_plain_step(way):
    def layer(weight, x):
        return WAYS[way](lambda h: tf.nn.relu(tf.debugging.check_numerics(h @ weight, "bad")))(x)  # fails

    step = training_step(layer)
    analysed = tfswap.optimize(step, memory_limit="100%", mode="analyze")
    analysed(batch())
    optimized = tfswap.optimize(step, memory_limit=analysed.report().floor_bytes)  # low enough to be rewritten
    bad = batch() + float("nan")
    messages = []
    for function in (step, optimized):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            function(bad)
        messages.append(own_lines(str(error.value)))
    assert optimized.report().kernels
    assert messages[1][-1] == marked("fails")
    assert messages[0] in (messages[1], []), "TensorFlow itself does not know where functions that are gone were made"


@pytest.mark.parametrize("way", [w for w in WAYS if "loop" not in w])
def test_the_size_that_is_not_known_is_made_there(way):
    def layer(weight, x):
        return WAYS[way](lambda h: (h @ weight) * tf.numpy_function(weight.numpy, [], tf.float32))(x)  # has no size

    with pytest.raises(tfswap.UnsupportedGraph, match="tf.ensure_shape") as error:
        tfswap.optimize(training_step(layer), memory_limit="90%")(batch())
    assert own_lines(str(error.value)) == [marked("has no size")]


@pytest.mark.parametrize("way", [w for w in WAYS if "branch" not in w])
def test_the_loop_without_bound_is_made_there(way):
    def layer(weight, x):
        def grown(h):
            return tf.while_loop(lambda h: tf.reduce_sum(h) > 1.0, lambda h: [tf.nn.relu(h @ weight)], [h])[0]  # loops

        return WAYS[way](grown)(x)

    with pytest.raises(tfswap.UnsupportedGraph, match="has no bound") as error:
        tfswap.optimize(training_step(layer), memory_limit="90%")(batch())
    assert own_lines(str(error.value)) == [marked("loops")]
    assert "maximum_iterations= of tf.while_loop" in str(error.value)


@pytest.mark.slow
def test_the_loop_of_a_library_can_be_done_without():
    """As the message on the loop that has no bound says, and that on vectorized_map: it can't be given one there."""

    def refusal(layer):
        with pytest.raises(tfswap.UnsupportedGraph) as error:
            tfswap.optimize(training_step(layer), memory_limit="110%")(batch(8))
        return str(error.value)

    def square(x):
        return tf.reshape(x, [8, 8, -1])[:, :, :8]

    def bounded(x):
        steps = tf.cast(tf.reduce_max(x), tf.int32)
        return tf.while_loop(lambda i, _: i < steps, lambda i, x: (i + 1, x @ x), [0, x], maximum_iterations=3)[1]

    assert "inside of a library function, as in tf.linalg.expm" in refusal(lambda w, x: tf.linalg.expm(square(x @ w)))
    assert "tf.map_fn" in refusal(lambda w, x: tf.vectorized_map(bounded, square(x @ w)))
    for instead in (
        lambda x: x + tf.stop_gradient(tf.linalg.expm(x)),
        bounded,
        lambda x: tf.map_fn(bounded, x),
    ):
        step = tfswap.optimize(training_step(lambda w, x, of=instead: of(square(x @ w))), memory_limit="110%")
        step(batch(8))


def test_tensors_of_called_functions_are_reported_with_their_lines():
    def layer(weight, x):
        return called(lambda h: tf.nn.relu(h @ weight))(x)  # makes them

    step = tfswap.optimize(training_step(layer), memory_limit="150%")
    step.get_concrete_function(tf.TensorSpec([1024, WIDTH]))
    lines = {row.name: row.source for row in step.report().rows}
    assert lines["StatefulPartitionedCall/Relu:0"] == f"{HERE}:{marked('makes them')}"
