"""Python functions with gradients: plans count the memory of their tapes, and the functions are not changed."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from slow import slow
from step_peaks import measuring

tf: Any = pytest.importorskip("tensorflow")

from tfswap.analysis.analyse import analyse_dataflow  # noqa: E402 needs TensorFlow
from tfswap.importers.function import import_function  # noqa: E402
from tfswap.ir.python_calls import differentiated, held_until  # noqa: E402
from tfswap.ir.types import TensorType  # noqa: E402
from tfswap.kernels.device import DeviceModel  # noqa: E402
from tfswap.kernels.kernel_memory import kernel_memory  # noqa: E402

WAYS = {
    "as it is": lambda made, h: made,
    "declared": lambda made, h: tf.ensure_shape(made, [ROWS, WIDTH]),
    "declared by a reshape": lambda made, h: tf.reshape(made, tf.shape(h)),
    "set": lambda made, h: (made.set_shape([ROWS, WIDTH]), made)[1],
}
ROWS, WIDTH, LAYERS = 2048, 128, 8


def around_a_python_function(way, limit):
    """A step around a Python function whose result gets its shape this way, with tfswap and without."""
    import tfswap

    start = [0.1 * tf.random.stateless_normal([WIDTH, WIDTH], seed=(n, 1)) for n in range(LAYERS)]
    weights = [tf.Variable(w) for w in start]
    x = tf.random.stateless_normal([ROWS, WIDTH], seed=(1, 2))

    def through(h):
        made = tf.py_function(lambda h: 1.5 * h, [h], tf.float32)
        return WAYS[way](made, h)

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for n, weight in enumerate(weights):
                h = tf.nn.relu(h @ weight)
                h = through(h) if n == 4 else h
            loss = tf.reduce_mean(h * h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=False):
            weight.assign_sub(0.1 * gradient)
        return loss

    def bits(value):
        return value.numpy().tobytes().hex()

    unoptimised = tf.function(step)
    expected = [bits(unoptimised(x)) for _ in range(3)] + [bits(w) for w in weights]
    for weight, first in zip(weights, start, strict=False):
        weight.assign(first)
    optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
    found, peaks = [], []
    for _ in range(3):
        with measuring(peaks):
            found.append(bits(optimized(x)))
    report = optimized.report()
    return {
        "same": found + [bits(w) for w in weights] == expected,
        "peak": max(peaks),
        "planned": report.planned_peak_bytes,
        "limit": report.memory_limit_bytes,
        "named": [n for n in report.unmodelled if "PyFunc" in n],
        "kept": [row.tactic for row in report.rows if "Python function" in row.reason],
        "floor": report.floor_bytes,
    }


@pytest.mark.parametrize("way", ["declared", *slow("as it is", "declared by a reshape", "set")])
def test_a_step_around_one_keeps_its_limit_and_its_bits(way: str) -> None:
    def run(limit: int | str) -> dict[str, Any]:
        return on_arena(lambda: around_a_python_function(way, limit))

    by_share = run("75%")
    at_floor = run(int(1.01 * by_share["floor"]))
    for found in (by_share, at_floor):
        assert found["same"]
        assert max(found["peak"], found["planned"]) <= found["limit"]
        assert found["named"]
        assert set(found["kept"]) == {"keep"}


def test_a_gradient_is_as_large_as_what_the_function_was_given() -> None:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            summed = tf.py_function(lambda h: tf.reduce_sum(h, axis=1), [2.0 * x], tf.float32)
            loss = tf.reduce_sum(tf.ensure_shape(summed, [100]))
        return tape.gradient(loss, x)

    graph = import_function(tf.function(step).get_concrete_function(tf.TensorSpec([100, 8])))
    (gradient,) = [node for node in graph if differentiated(node) is not None]
    assert str(gradient.outputs[0]) == "float32[100,8]"
    flow = analyse_dataflow(graph, DeviceModel())
    held = [flow.value_of[t.node, t.index] for t in held_until(gradient)]
    assert {flow.values[v].nbytes for v in held} == {3200, 400}
    assert set(held) <= set(flow.reads[flow.place[gradient.name]])


def test_a_gradient_is_known_where_another_call_stands_between() -> None:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = tf.py_function(tf.reduce_mean, [2.0 * x], tf.float32)
            loss = tf.ensure_shape(mean, []) + tf.ensure_shape(tf.numpy_function(sum, [x], tf.float32), [])
        return tape.gradient(loss, x)

    graph = import_function(tf.function(step).get_concrete_function(tf.TensorSpec([8])))
    (gradient,) = [node for node in graph if differentiated(node) is not None]
    assert str(gradient.outputs[0]) == "float32[8]"


def test_a_call_has_room_for_its_arguments_and_results_once_more() -> None:
    arguments, results = [TensorType("float32", (100, 8)), TensorType("int32", ())], [TensorType("float32", (100,))]
    memory = kernel_memory("EagerPyFunc", {}, arguments, results, DeviceModel())
    assert memory.events == (("temp", 3200), ("temp", 4), ("temp", 400), ("out", 0)) and not memory.exact


def test_without_a_word_one_returns_as_much_as_it_is_given_at_most() -> None:
    concrete = tf.function(lambda x: tf.numpy_function(abs, [x], tf.float32) + 1.0).get_concrete_function(
        tf.TensorSpec([100, 8])
    )
    found = {node.op: str(node.outputs[0]) for node in import_function(concrete) if node.outputs}
    assert found["AddV2"] == "float32<=[100,8]"


def test_calls_one_after_another_are_not_each_other_s_gradients() -> None:
    def step(a: Any, b: Any) -> Any:
        first = tf.py_function(lambda h: 2.0 * h, [a], tf.float32)
        return first, tf.py_function(lambda h: 3.0 * h, [b], tf.float32)

    concrete = tf.function(step).get_concrete_function(tf.TensorSpec([100]), tf.TensorSpec([7000]))
    calls = [node for node in import_function(concrete) if node.op == "EagerPyFunc"]
    assert [str(node.outputs[0]) for node in calls] == ["float32<=[100]", "float32<=[7000]"]
    assert not any(map(differentiated, calls))
