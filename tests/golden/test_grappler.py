"""A step after TensorFlow's own optimizers, against the graph that TensorFlow has run."""

from __future__ import annotations

import base64
import functools
import logging
import os
import zlib

import pytest
import tensorflow as tf
from nets import as_traced, bits, unoptimised
from processes import on_arena
from tensorflow.python.eager import context

import tfswap
from tfswap.compiler import grappler
from tfswap.compiler.grappler import as_executed, as_planned
from tfswap.compiler.grappler_function import names_in_function
from tfswap.compiler.marks import marked_to_keep
from tfswap.importers.function import import_function
from tfswap.importers.run_grappler import NO_GPU_KERNEL, run_grappler, without_message
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel

ENDS = {"_Arg", "_Retval", "Placeholder", "NoOp"}


def executed(function, *args) -> list[str]:
    """The ops of the graph that runs when `function` is called, in order, each with its name."""
    context.context().enable_graph_collection()
    context.context().export_run_metadata()  # what other tests have left there
    try:
        function(*args)
        made = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    graphs = [one.post_optimization_graph for one in made.function_graphs]  # oneDNN's kernels are put in place later
    largest = max(graphs, key=lambda graph: len(graph.node))
    return [f"{node.op} {node.name}" for node in largest.node if node.op not in ENDS]


def ops(graph: Graph) -> list[str]:
    return [f"{node.op} {node.name}" for node in graph if node.op not in ENDS]


def silu_net():
    """Masks that are asked for twice, products with one, a constant that is moved, sums of three, a custom gradient."""
    weights = [tf.Variable(tf.random.stateless_normal([32, 32], seed=(i, 1))) for i in range(3)]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w in weights:
                h = h + tf.nn.silu(h @ w, 1.0) * 0.5
                h = tf.where(h > 0, h, 0.1 * h) + h + x
            loss = tf.reduce_mean(tf.nn.relu(h) ** 2)
        for w, g in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    return step, tf.random.stateless_normal([16, 32], seed=(7, 1))


def table():
    """A table that is read and written in part only, so that no op gives its size."""
    rows = tf.Variable(tf.random.stateless_normal([100, 8], seed=(1, 2)))

    @tf.function
    def step(at):
        with tf.GradientTape() as tape:
            found = tf.gather(rows, at)
            loss = tf.reduce_sum(found * found)
        gradient = tape.gradient(loss, rows)
        rows.scatter_sub(gradient)
        return loss

    return step, tf.range(16) * 3


def wide_sums():
    """Sums of which TensorFlow believes that they do not fit a CPU's memory, and makes others."""
    large = 1 << 23

    @tf.function
    def step(x):
        return tf.reduce_sum(
            tf.add_n([tf.sin(x), tf.cos(x), tf.tanh(x), tf.exp(x), tf.sqrt(x), tf.broadcast_to(1.0, [large])])
        )

    return step, tf.ones([large])


@pytest.mark.parametrize("make", [silu_net, table, wide_sums])
def test_it_is_what_tensorflow_runs(make):
    step, argument = make()
    traced = import_function(step.get_concrete_function(argument))
    found = as_executed(traced, DeviceModel())
    assert ops(found) == executed(step, argument) != ops(traced)
    assert [feed.name for feed in found.feeds] == [feed.name for feed in traced.feeds]
    assert [fetch.type for fetch in found.fetches] == [fetch.type for fetch in traced.fetches]
    unknown = [node.name for node in found for kind in node.outputs if kind.shape is None and kind.dtype == "float32"]
    assert unknown == []


def test_a_planned_step_is_not_optimized_again(monkeypatch):
    step, argument = silu_net()
    concrete = step.get_concrete_function(argument)
    traced = import_function(concrete)
    planned, expected = as_planned(traced, concrete, DeviceModel()), as_executed(traced, DeviceModel())
    assert [node.name for node in planned] != [node.name for node in expected]
    monkeypatch.setattr(grappler, "run_grappler", None)
    found = as_executed(planned, DeviceModel())
    assert list(map(str, found)) == list(map(str, expected))
    assert [[t.name for t in node.inputs] for node in found] == [[t.name for t in node.inputs] for node in expected]


def test_what_only_a_loop_reads_has_its_size():
    weights, table = tf.Variable(tf.ones([32, 32])), tf.Variable(tf.ones([9, 32]))

    @tf.function
    def step(x):
        for i in tf.range(3):
            x = tf.tanh(x @ weights + tf.gather(table, i)) if i < 2 else x @ weights
        return x

    found = as_executed(import_function(step.get_concrete_function(tf.ones([8, 32]))), DeviceModel())
    bodies = list(found.all_bodies())
    assert len(bodies) == 4
    assert [
        n.name for body in bodies for n in body for kind in n.outputs if kind.dtype == "float32" and not kind.nbytes
    ] == []


def test_where_they_are_off_it_is_the_step_as_it_was_traced():
    step, argument = silu_net()
    traced = import_function(step.get_concrete_function(argument))
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        assert as_executed(traced, DeviceModel()) is traced
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def test_where_they_fail_it_is_the_step_as_it_was_traced(caplog):
    step, argument = silu_net()
    traced = import_function(step.get_concrete_function(argument))
    next(node for node in traced if node.op == "MatMul").attrs = {}
    with caplog.at_level(logging.WARNING, "tfswap"):
        assert as_executed(traced, DeviceModel()) is traced
    assert "TensorFlow's own optimizers fail on this step" in caplog.text


def test_what_is_computed_beforehand_has_room_or_is_left_to_the_step():
    """TensorFlow's optimizers end the process where what follows from shapes finds no memory."""

    def program():
        import tensorflow as tf

        from tfswap.compiler.grappler import as_executed
        from tfswap.importers.function import import_function
        from tfswap.kernels.device import DeviceModel

        step = tf.function(lambda x: x + tf.reduce_sum(tf.concat([tf.zeros_like(x), tf.ones_like(x)], 0)))
        traced = import_function(step.get_concrete_function(tf.TensorSpec([4 << 20])))
        return [node.op for node in as_executed(traced, DeviceModel())].count("ConcatV2")

    assert (
        on_arena(
            program,
            mib=48,
        )
        == 1
    )


def powers(rows):
    """What Grappler makes other kernels of: squares, divisions by constants, a bias and a ReLU after a product."""
    weights = [tf.Variable(tf.random.stateless_normal([64, 64], seed=(i, 1)) * 0.2) for i in range(4)]
    biases = [tf.Variable(tf.zeros([64])) for _ in weights]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for w, b in zip(weights, biases, strict=True):
                h = tf.nn.relu(tf.nn.bias_add(h @ w, b)) / 3.0 + tf.sin(h)
                h = tfswap.keep(h)
            loss = tf.reduce_mean(tf.pow(h, 2.0))
        trained = [*weights, *biases]
        for v, g in zip(trained, tape.gradient(loss, trained), strict=True):
            v.assign_sub(0.1 * g)
        return loss

    x = tf.random.stateless_normal([rows, 64], seed=(7, 1))
    return step, x, [*weights, *biases]


@pytest.mark.parametrize("rows", [[512, 512], [512, 512, 200]], ids=["fixed", "open"])
def test_values_are_those_of_tensorflow_s_default(rows):
    spec = [tf.TensorSpec([None, 64])] if len(set(rows)) > 1 else None

    def run(make):
        step, x, variables = powers(max(rows))
        called = make(tf.function(step, input_signature=spec))
        return called, [*bits([called(x[:count]) for count in rows]), *bits(variables)]

    _, expected = run(lambda step: functools.partial(unoptimised, step))
    _, off = run(lambda step: functools.partial(as_traced, step))
    step, found = run(lambda step: tfswap.optimize(step, memory_limit="80%"))
    assert found == expected != off
    assert not step.plan().changes_nothing
    concrete = step.get_concrete_function(powers(max(rows))[1])
    ops = {op.type for op in concrete.graph.get_operations()}
    assert {"_FusedMatMul", "Square"} <= ops
    assert "Pow" not in ops


@pytest.mark.parametrize("captured", [True, False])
def test_sums_have_tensorflow_s_order_whatever_an_argument_is_called(captured):
    """Grappler sorts a sum's inputs by name, and in a function an argument's is in lower case: `Sin/x` is `sin_x`."""
    held = tf.random.stateless_normal([300, 300], seed=(3, 1))

    def terms(x):
        return tf.add_n([tf.sin(x), tf.cos(x), tf.tanh(x), x, tf.exp(x), tf.atan(x)])

    named = tf.TensorSpec(held.shape, name="Rows")
    step = tf.function(lambda: terms(held)) if captured else tf.function(terms, input_signature=[named])
    given = [] if captured else [held]
    optimized = tfswap.optimize(step, memory_limit="100%")
    assert bits([optimized(*given)]) == bits([unoptimised(step, *given)])
    assert not optimized.plan().changes_nothing


def test_parts_of_a_function_are_called_as_tensorflow_calls_them():
    held, weight = tf.ones([30, 30]), tf.Variable(tf.ones([30, 30]))

    @tf.function
    def step(x, identity, no_12):
        return tf.identity(held @ x, name="X_0"), tf.sin(identity * weight, name="matmul_a"), no_12 + 1

    concrete = step.get_concrete_function(*(tf.TensorSpec([30, 30], name=name) for name in ("X", None, None)))
    graph = import_function(concrete)
    results, renamed = names_in_function(graph, graph.feeds)
    signature = concrete.function_def.signature
    assert [renamed.get(feed.name, feed.name) for feed in graph.feeds] == [each.name for each in signature.input_arg]
    assert results == [f"{each.name}_RetVal" for each in signature.output_arg]
    nodes = {node.name for node in concrete.function_def.node_def}
    assert {renamed.get(node.name, node.name) for node in graph} - {each.name for each in signature.input_arg} <= nodes


def test_what_was_made_once_is_found_again_unless_it_is_damaged(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TFSWAP_PLAN_CACHE", str(tmp_path))
    step, x, _ = powers(512)
    concrete = tf.function(step).get_concrete_function(x)
    ran = []
    monkeypatch.setattr(grappler, "run_grappler", lambda *given: (ran.append(given), run_grappler(*given))[1])

    def made():
        return ops(as_planned(import_function(concrete), concrete, DeviceModel()))

    expected = made()
    assert made() == expected
    assert len(ran) == 1
    (entry,) = tmp_path.iterdir()
    for damaged in ("", entry.read_text()[:-1], "no such text", base64.b85encode(zlib.compress(b"no graph")).decode()):
        entry.write_text(damaged)
        assert made() == expected
        assert "can't be used" in caplog.text
        caplog.clear()
    assert len(ran) == 5
    assert made() == expected
    assert len(ran) == 5


def test_assertions_are_no_conditionals_to_be_planned_as_they_were_traced():
    def run(make):
        step, x, variables = powers(512)

        def checked(x):
            tf.debugging.assert_less(tf.reduce_max(x), 100.0)
            loss = step(x)
            with tf.control_dependencies([tf.debugging.assert_non_negative(loss)]):
                return tf.identity(loss)

        called = make(tf.function(checked))
        return called, x, [*bits([called(x), called(x)]), *bits(variables)]

    _, _, expected = run(lambda step: functools.partial(unoptimised, step))
    _, _, off = run(lambda step: functools.partial(as_traced, step))
    step, x, found = run(lambda step: tfswap.optimize(step, memory_limit="80%"))
    assert found == expected != off
    assert {"If", "_FusedMatMul"} <= {op.type for op in step.get_concrete_function(x).graph.get_operations()}
    with pytest.raises(tf.errors.InvalidArgumentError, match="assert_less"):
        step(x + 200.0)


def test_what_is_lowered_first_is_planned_as_it_was_traced():
    step, x, _ = powers(512)
    looped = tf.function(lambda x: tf.while_loop(lambda i, _: i < 2, lambda i, _: (i + 1, step(x)), (0, 0.0))[1])
    concrete = looped.get_concrete_function(x)
    graph = import_function(concrete)
    assert as_planned(graph, concrete, DeviceModel()) is graph
    concrete = tf.function(step).get_concrete_function(x)
    graph = import_function(concrete)
    made = as_planned(graph, concrete, DeviceModel())
    assert made.traced is graph
    assert [node.device for node in made if node.device] == []
    assert sorted(marked_to_keep(made)) == sorted(marked_to_keep(graph)) != []


def test_values_behind_a_conditional_are_those_without_tensorflow_s_optimizers():
    def run(make):
        step, x, variables = powers(512)
        called = make(tf.function(lambda x: step(tf.cond(tf.reduce_sum(x) > 0.0, lambda: 2.0 * x, lambda: tf.sin(x)))))
        return called, [*bits([called(x) for _ in range(2)]), *bits(variables)]

    _, optimized = run(lambda step: functools.partial(unoptimised, step))
    _, expected = run(lambda step: functools.partial(as_traced, step))
    step, found = run(lambda step: tfswap.optimize(step, memory_limit="80%"))
    assert found == expected != optimized
    assert not step.plan().changes_nothing


def test_a_graph_that_is_very_large_is_planned_as_it_was_traced(monkeypatch):
    @tf.function
    def step(x):
        return tf.nn.relu(x + 1.0) * 1.0

    concrete = step.get_concrete_function(tf.TensorSpec([4]))
    graph = import_function(concrete)
    device = DeviceModel("cpu", False, 2, 2)
    assert as_planned(graph, concrete, device) is not graph
    monkeypatch.setattr(grappler, "MOST_NODES", len(graph) - 1)
    assert as_planned(graph, concrete, device) is graph
    assert as_executed(graph, device) is graph


def test_kernels_that_an_absent_gpu_would_have_are_not_missed_in_print(capfd):
    first = b"W0000 00:00:1795551201.588416   31944 graph_view.cc:837] No registered '%s' OpKernel for GPU devices\n"
    lines = [
        b"another thread's\n",
        first % b"Conv2D" + b"\t.  Registered:  device='CPU'; T in [DT_FLOAT]\n  device='CPU'; T in [DT_HALF]\n\n",
        first % b"Mean" + b"\t.  Registered:  device='CPU'\n",
        b"W0000 00:00:1795551201.590729   31944 meta_optimizer.cc:1] something else\n  of two lines\n",
        b"2026-11-24 20:00:00.000000: " + first % b"Mul" + b"  device='CPU'\n",
        b"2026-11-24 20:00:00.000000: E another\n",
    ]
    with without_message(NO_GPU_KERNEL):
        os.write(2, b"".join(lines))
    assert capfd.readouterr().err.encode() == b"".join(line for line in lines if b"No registered" not in line)
