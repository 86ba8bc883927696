"""Sizes that a trace leaves open, bound at a call: in loops, lists and optionals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

tf: Any = pytest.importorskip("tensorflow")

from nets import as_traced, bits  # noqa: E402 needs TensorFlow

import tfswap  # noqa: E402 as above
from tfswap.exporters.function import memory_optimizer_off  # noqa: E402 as above
from tfswap.frontends.compare_models import compare_models  # noqa: E402 as above
from tfswap.frontends.verify_model import verify_model  # noqa: E402 as above
from tfswap.importers.function import import_function  # noqa: E402 as above
from tfswap.importers.list_elements import joined, merged, of_branches  # noqa: E402 as above
from tfswap.importers.shapes import Argument, Content  # noqa: E402 as above

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


def map_over_rows(x: Any, weight: Any) -> Any:
    """A list of as many elements as the batch has rows, and its gradient, of as many again."""
    return tf.map_fn(lambda row: tf.tanh(row @ weight) + tf.reduce_mean(weight, 0), x @ weight)


def map_inside_a_map(x: Any, weight: Any) -> Any:
    return tf.map_fn(lambda row: tf.map_fn(lambda r: tf.tanh(tf.linalg.matvec(weight, r)), row), x @ weight)


def loop_inside_a_loop(x: Any, weight: Any) -> Any:
    h = x[:, 0]
    for _ in tf.range(2):
        for _ in tf.range(3):
            h = tf.tanh(h @ weight) + tf.reduce_mean(weight, 0)
    return h


def loop_inside_a_conditional(x: Any, weight: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: loop_inside_a_loop(x, weight), lambda: x[:, 0])


def conditional_inside_a_loop(x: Any, weight: Any) -> Any:
    """What its branches save is of different sizes, and shares optionals."""
    h = x[:, 0]
    for _ in tf.range(3):
        h = tf.cond(
            tf.reduce_sum(h) > 0,
            lambda h=h: tf.tanh(tf.concat([h, h], 1) @ tf.concat([weight, weight], 0)),
            lambda h=h: tf.tanh(tf.concat([h, h], 0) * 2.0)[: tf.shape(h)[0]] + tf.reduce_mean(weight, 0),
        )
    return h


def switch(x: Any, weight: Any) -> Any:
    h = x[:, 0]
    return tf.switch_case(
        tf.cast(tf.reduce_sum(h), tf.int32),
        [
            lambda: tf.tanh(h @ weight),
            lambda: tf.tanh(tf.concat([h, h], 1) @ tf.concat([weight, weight], 0)),
            lambda: tf.tanh(tf.concat([h, h], 0) * 2.0)[: tf.shape(h)[0]] + tf.reduce_mean(weight, 0),
        ],
    )


def list_that_grows(x: Any, weight: Any) -> Any:
    found = tf.TensorArray(tf.float32, 0, dynamic_size=True)
    for i in tf.range(tf.shape(x)[0]):
        found = found.write(i, tf.tanh(x[i] @ weight))
    return found.stack()


def loop_over_a_choice(x: Any, weight: Any) -> Any:
    """Which rows there are is decided by values, so that sizes are bounds."""
    return loop(tf.boolean_mask(x, x[:, 0, 0] > 0), weight)


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


@pytest.mark.parametrize(
    "forward",
    [
        loop,
        loop_after_loop,
        conditional,
        scan,
        map_over_rows,
        map_inside_a_map,
        loop_inside_a_loop,
        loop_inside_a_conditional,
        conditional_inside_a_loop,
        switch,
        list_that_grows,
        loop_over_a_choice,
    ],
)
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
        assert bits(step(x)) == bits(as_traced(reference, x))
    assert bits(weight) == bits(twin)
    assert step.plans == 1
    assert not step.plan().changes_nothing


def sizes(graph: Any) -> dict[str, list[str]]:
    """The types of the tensors of each node, those of bodies by where they are."""
    found = {n.name: [str(kind) for kind in n.outputs if kind.nbytes] for n in graph if n.op != "Const"}
    for node, bodies in graph.bodies.items():
        for i, body in enumerate(bodies):
            found.update({f"{node.name} {i} {name}": kinds for name, kinds in sizes(body).items()})
    return found


@pytest.mark.parametrize("forward", [conditional_inside_a_loop, switch, list_that_grows, map_inside_a_map])
def test_sizes_are_those_of_a_trace_with_these_sizes(forward: Any) -> None:
    x = tf.TensorSpec([ROWS, STEPS, WIDTH])
    concrete = step_of(forward, new_weight()).get_concrete_function()
    bound, whole = sizes(import_function(concrete, [x])), tf.function(step_of(forward, new_weight()).python_function)
    traced = sizes(import_function(whole.get_concrete_function(x)))
    shared = bound.keys() & traced.keys()
    assert len(shared) > 0.7 * len(bound)
    differ = [n for n in sorted(shared) if sorted(bound[n]) != sorted(traced[n]) and "?" not in "".join(traced[n])]
    assert [n for n in differ if len(bound[n]) == len(traced[n])] == []


def test_a_map_over_an_open_batch_keeps_its_bits() -> None:
    weight, twin = new_weight(), new_weight()
    step = tfswap.optimize(step_of(map_over_rows, weight), memory_limit="90%")
    x = tf.random.stateless_normal([ROWS // 4, STEPS, WIDTH], seed=(3, 4))
    assert bits(step(x)) == bits(as_traced(step_of(map_over_rows, twin), x))
    assert bits(weight) == bits(twin)
    assert not step.plan().changes_nothing


def grows_as_it_goes(x: Any, weight: Any) -> Any:
    return tf.while_loop(
        lambda i, h: i < 3,
        lambda i, h: (i + 1, tf.concat([h, tf.tanh(h[:, -1:] @ weight)], 1)),
        [0, x[:, :1]],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, None, WIDTH])],
    )[1]


def list_until_done(x: Any, weight: Any) -> Any:
    found, h, i = tf.TensorArray(tf.float32, 0, dynamic_size=True), x[:, 0], 0
    while tf.reduce_sum(h) > 0:
        h = tf.tanh(h @ weight)
        found, i = found.write(i, h), i + 1
    return found.stack()


def counted(x: Any, weight: Any) -> Any:
    return tf.tile(weight[:1], [tf.reduce_sum(tf.cast(x > 0, tf.int32)), 1])


def padded_to_the_longest(x: Any, weight: Any) -> Any:
    lengths = tf.fill([tf.shape(x)[0]], STEPS + tf.cast(0 * weight[0, 0], tf.int32))
    return tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1, WIDTH]), lengths).to_tensor() @ weight


@pytest.mark.parametrize(
    ("forward", "reported"),
    [
        (grows_as_it_goes, r"'while:3' .*the loop gives this one another shape in each iteration"),
        (list_until_done, r"TensorListStack.*how many elements this list gets, or.*size=.*ensure_shape"),
        (counted, r"Tile.*test_contents.py:\d+.*depends on computed values.*tf.ensure_shape"),
        (padded_to_the_longest, r"RaggedTensorToTensor.*to_tensor\(shape="),
    ],
)
def test_what_depends_on_values_is_refused_with_what_can_be_declared(forward: Any, reported: str) -> None:
    step = tfswap.optimize(step_of(forward, new_weight()), memory_limit="80%")
    with pytest.raises(tfswap.UnsupportedGraph, match=reported) as refused:
        step(tf.ones([ROWS, STEPS, WIDTH]))
    assert "batch_size=" not in str(refused.value)


def padded_to_a_length(x: Any, weight: Any) -> Any:
    lengths = tf.fill([tf.shape(x)[0]], STEPS)
    rows = tf.RaggedTensor.from_row_lengths(tf.reshape(x, [-1, WIDTH]), lengths)
    return rows.to_tensor(shape=[None, STEPS, WIDTH]) @ weight


def array() -> Any:
    return tf.TensorArray(tf.float32, 0, dynamic_size=True, infer_shape=False)


def joined_rows(x: Any, weight: Any) -> Any:
    found = array()
    for i in range(3):
        found = found.write(i, tf.tanh(x[i] @ weight))
    return found.concat()


def joined_parts_of_several_sizes(x: Any, weight: Any) -> Any:
    h = tf.tanh(x[0] @ weight)
    return tf.ensure_shape(array().write(0, h).write(1, h[2:]).concat(), [2 * STEPS - 2, WIDTH])


def split_and_joined(x: Any, weight: Any) -> Any:
    parts = array().split(tf.tanh(x[0] @ weight), [1, 2, STEPS - 3])
    return tf.ensure_shape(parts.concat(), [STEPS, WIDTH])


@pytest.mark.parametrize("forward", [joined_rows, joined_parts_of_several_sizes, split_and_joined])
def test_what_lists_are_joined_to_is_known(forward: Any) -> None:
    """Outside of loops and conditionals, where the trace itself leaves sizes open."""
    weight, twin = new_weight(), new_weight()
    step, reference = (tf.function(step_of(forward, w).python_function) for w in (weight, twin))
    x = tf.random.stateless_normal([ROWS, STEPS, WIDTH], seed=(3, ROWS))
    with memory_optimizer_off():
        assert bits(tfswap.optimize(step, memory_limit="1GiB")(x)) == bits(reference(x))
    assert bits(weight) == bits(twin)


def test_a_ragged_tensor_has_as_many_rows_as_it_has_lengths() -> None:
    concrete = step_of(padded_to_a_length, new_weight()).get_concrete_function()
    graph = import_function(concrete, [tf.TensorSpec([ROWS, STEPS, WIDTH])])
    (made,) = [n for n in graph if n.op == "RaggedTensorToTensor"]
    assert str(made.outputs[0]) == f"float32[{ROWS},{STEPS},{WIDTH}]"


def test_what_is_in_a_list() -> None:
    def content(*values: int, length: int | None = None) -> Content:
        return Content((Argument(3, (len(values),), [], value=values),), length)

    empty, other = Content((), 0), content(1, 2, length=3)
    assert joined(empty, other) == joined(other, empty) == content(1, 2)
    assert joined(other, other) == other
    both = joined(other, content(1, 3, length=3))
    assert both is not None
    assert both.length == 3
    assert both.parts == (Argument(3, (2,), []),)
    assert joined(other, None) is joined(None, empty) is None
    assert merged((None, 3), (2, None)) == (2, 3)
    assert merged((None, 3), (2, 4)) == (None, 3)
    assert merged(None, (2,)) == merged((2,), None) == (2,)


def test_what_is_in_an_optional_is_known_by_branch() -> None:
    def optional(shape: tuple[int, ...]) -> Content:
        return Content((Argument(1, shape, []),), optional=True)

    of_both = of_branches([optional((2, 3)), optional((4, 3))])
    assert of_both == Content((Argument(1, (None, 3), []),), None, True, (optional((2, 3)), optional((4, 3))))
    assert of_branches([optional((2, 3)), optional((2, 3))]) == optional((2, 3))


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
