"""Sizes that a trace leaves open, once they are bound: they go into loops, through lists and optionals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

tf: Any = pytest.importorskip("tensorflow")

from nets import bits, unoptimised  # noqa: E402 needs TensorFlow

import tfswap  # noqa: E402 as above
from tfswap.frontends.compare_models import compare_models  # noqa: E402 as above
from tfswap.frontends.verify_model import verify_model  # noqa: E402 as above
from tfswap.importers.contents import NOTHING, joined, merged  # noqa: E402 as above
from tfswap.importers.function import import_function  # noqa: E402 as above

STEPS, ROWS, WIDTH = 8, 512, 16


def loop(x: Any, weight: Any) -> Any:
    """Reads a list, fills another, and adds what has to be summed in the gradient, by a shape that the loop saves."""
    inputs, found = (
        tf.TensorArray(tf.float32, STEPS).unstack(tf.transpose(x, [1, 0, 2])),
        tf.TensorArray(tf.float32, STEPS),
    )
    h = tf.zeros([tf.shape(x)[0], WIDTH])
    for i in tf.range(STEPS):
        h = tf.tanh(h @ weight + inputs.read(i)) + tf.reduce_mean(weight, 0)
        found = found.write(i, h)
    return found.stack()


def loop_after_loop(x: Any, weight: Any) -> Any:
    return loop(tf.transpose(loop(x, weight), [1, 0, 2]), weight)


def conditional(x: Any, weight: Any) -> Any:
    h = tf.tanh(x[:, 0] @ weight)
    return tf.cond(tf.reduce_sum(h) > 0, lambda: tf.tanh(h) + tf.reduce_mean(weight, 0), lambda: h * 2.0)


def scan(x: Any, weight: Any) -> Any:
    start = tf.zeros([tf.shape(x)[0], WIDTH])
    return tf.scan(lambda h, row: tf.tanh(h @ weight + row), tf.transpose(x, [1, 0, 2]), start)


def step_of(forward: Any, weight: Any) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, STEPS, WIDTH])])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x, weight) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return step


def new_weight() -> Any:
    return tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], seed=(1, 2)) * 0.1)


@pytest.mark.parametrize("forward", [loop, loop_after_loop, conditional, scan])
def test_no_size_stays_open(forward: Any) -> None:
    concrete = step_of(forward, new_weight()).get_concrete_function()
    graph = import_function(concrete, [tf.TensorSpec([ROWS, STEPS, WIDTH])])
    parts = [graph, *graph.all_bodies()]
    assert len(parts) > 2
    open_ = [n.name for part in parts for n in part for t in n.outputs if t.dtype == "float32" and t.nbytes is None]
    assert open_ == []


def test_a_loop_is_planned_for_the_sizes_of_its_first_call() -> None:
    weight, twin = new_weight(), new_weight()
    step = tfswap.optimize(step_of(loop_after_loop, weight), memory_limit="80%")
    reference = step_of(loop_after_loop, twin)
    for rows in (ROWS, ROWS, ROWS // 3):
        x = tf.random.stateless_normal([rows, STEPS, WIDTH], seed=(3, rows))
        assert bits(step(x)) == bits(unoptimised(reference, x))
    assert bits(weight) == bits(twin)
    assert step.plans == 1
    assert not step.plan().changes_nothing


def test_what_is_in_a_list() -> None:
    assert joined(NOTHING, (1, 2)) == joined((1, 2), NOTHING) == joined((1, 2), (1, 2)) == (1, 2)
    assert joined((1, 2), (1, 3)) is joined((1, 2), None) is joined(None, NOTHING) is None
    assert joined(NOTHING, NOTHING) == NOTHING
    assert merged((None, 3), (2, None)) == (2, 3)
    assert merged((None, 3), (2, 4)) == (None, 3)
    assert merged(None, (2,)) == merged((2,), None) == (2,)


def test_a_saved_step_with_a_loop_is_rewritten_and_verified(tmp_path: Path) -> None:
    owner = tf.Module()
    owner.weight = new_weight()
    step = step_of(loop_after_loop, owner.weight)
    owner.steps = [tf.function(lambda x: {"loss": step(x), "words": tf.constant(["a", "b"]), "none": None})]
    owner.steps[0].get_concrete_function(tf.TensorSpec([None, STEPS, WIDTH]))
    model, out = tmp_path / "model", tmp_path / "out"
    tf.saved_model.save(owner, str(model))
    report = tfswap.optimize_graph(model, out, memory_limit="75%", function="steps.0", batch_size=ROWS)
    assert report.swapped
    ((_, swap_nodes),) = verify_model(out)
    assert swap_nodes
    compared = compare_models(model, out, function="steps.0", batch_size=ROWS)
    assert compared.same
    assert compared.outputs == 6
