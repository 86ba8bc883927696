"""Recommenders' sparse lookups: the number of rows follows from a call's ids, or from the result's stated shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import on_arena
from slow import slow
from step_peaks import measuring

WORDS, WIDTH = 4000, 64


def arguments_of_call(kind, seed, rows):
    """A batch's ids, of up to 11 words in each row, and what `kind` has with them: weights or rows."""
    import numpy as np
    import tensorflow as tf

    draw = np.random.default_rng(seed)
    lengths = draw.integers(0 if kind == "safe" else 1, 12, rows)
    lengths[-1] = 3
    row = np.repeat(np.arange(rows), lengths)
    indices = np.stack([row, np.concatenate([np.arange(n) for n in lengths])], 1).astype(np.int64)
    ids = draw.integers(0, WORDS, len(row))
    if kind == "segments":
        return tf.constant(ids), tf.constant(row)

    def sparse(values):
        return tf.sparse.SparseTensor(indices, values, [rows, 12])

    return sparse(ids), sparse(draw.random(len(row), np.float32))


def looked_up(kind, table, ids, others):
    import tensorflow as tf

    if kind == "segments":
        return tf.sparse.segment_sum(table, ids, others) + tf.math.segment_mean(tf.gather(table, ids), others)
    if kind == "shards":
        table = [table[:2000], table[2000:]]
    if kind == "safe":
        return tf.nn.safe_embedding_lookup_sparse(table, ids, others)
    return tf.nn.embedding_lookup_sparse(table, ids, others if kind == "weighted" else None, combiner="sqrtn")


def program(kind):
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import grappler_off, memory_optimizer_off

    def run(**limit):
        table = tf.Variable(tf.random.stateless_normal([WORDS, WIDTH], (1, 1)))
        sizes = ((WIDTH, 512), *[(512, 512)] * 3, (512, 1))
        weights = [tf.Variable(tf.random.stateless_normal(size, (2, 2)) * size[0] ** -0.5) for size in sizes]

        def step(ids, others):
            with tf.GradientTape() as tape:
                h = looked_up(kind, table, ids, others)
                for weight in weights[:-1]:
                    h = tf.nn.relu(h @ weight)
                loss = tf.reduce_mean(tf.square(h @ weights[-1]))
            gradient, *others = tape.gradient(loss, [table, *weights])
            table.assign_sub(0.1 * tf.convert_to_tensor(gradient))
            for weight, gradient in zip(weights, others, strict=True):
                weight.assign_sub(0.1 * gradient)
            return loss

        tf.config.experimental.reset_memory_stats("CPU:0")
        step = tf.function(step)
        if limit:
            step = tfswap.optimize(step, **limit)
        losses, peaks = [], []
        for seed, rows in enumerate((800, 1024)):
            arguments = arguments_of_call(kind, seed, rows)
            with measuring(peaks):
                losses.append(step(*arguments).numpy().tobytes().hex())
            del arguments
        return [losses, [v.numpy().tobytes().hex() for v in (table, *weights)]], max(peaks), step

    # The second is what a step with conditionals has: the weights' checks are some.
    references = []
    for reference in (memory_optimizer_off, grappler_off):
        with reference():
            references.append(run()[0])
    found, peak, step = run(memory_limit="85%")
    limit = step.report().memory_limit_bytes
    return [found in references, peak <= limit, step.plans <= 2]


@pytest.mark.parametrize("kind", ["plain", "safe", "shards", *slow("weighted", "segments")])
def test_calls_with_other_ids_keep_the_limit(kind: str) -> None:
    assert on_arena(lambda: program(kind)) == [True, True, True]


@pytest.mark.parametrize("weighted", [False, True])
def test_in_a_file_the_declared_shape_of_the_result_counts(weighted: bool, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    import tfswap

    model = tf.Module()
    model.table, model.weight = tf.Variable(tf.ones([500, 32])), tf.Variable(tf.ones([32, 32]))

    def steps(say):
        @tf.function(input_signature=[tf.SparseTensorSpec([64, 5], tf.int64), tf.SparseTensorSpec([64, 5])])
        def step(*given):
            ids, others = given
            with tf.GradientTape() as tape:
                h = tf.nn.embedding_lookup_sparse(model.table, ids, others if weighted else None, combiner="mean")
                h = tf.ensure_shape(h, [64, 32]) if say else h
                loss = tf.reduce_sum(tf.tanh(h @ model.weight))
            model.weight.assign_sub(tape.gradient(loss, model.weight))
            return loss

        return step

    model.declared, model.open = steps(True), steps(False)
    tf.saved_model.save(model, str(tmp_path / "model"))
    shapes = {
        "given_0": (128, 2),
        "given_0_1": (128,),
        "given_0_2": (2,),
        "given_1": (128, 2),
        "given_1_1": (128,),
        "given_1_2": (2,),
    }
    asked = {"memory_limit": "100%", "mode": "analyze", "input_shapes": shapes}
    assert tfswap.optimize_graph(tmp_path / "model", tmp_path / "made", function="declared", **asked).trains
    with pytest.raises(tfswap.UnsupportedGraph, match="save the model anew: y = tf.ensure_shape"):
        tfswap.optimize_graph(tmp_path / "model", tmp_path / "made", function="open", **asked)


@pytest.mark.parametrize("declared", [False, True])
def test_refusals_name_what_the_user_can_change(declared: bool, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    import tfswap

    model = tf.Module()
    model.table, model.weight = tf.Variable(tf.ones([500, 32])), tf.Variable(tf.ones([32, 32]))
    spec = tf.SparseTensorSpec([None, 5], tf.int64)

    def train(ids):
        with tf.GradientTape() as tape:
            h = tf.nn.safe_embedding_lookup_sparse(model.table, ids, None)
            h = tf.ensure_shape(h, [64, 32]) if declared else h
            loss = tf.reduce_sum(tf.tanh(h @ model.weight))
        model.weight.assign_sub(tape.gradient(loss, model.weight))
        return loss

    model.step = tf.function(train, input_signature=[spec])
    tf.saved_model.save(model, str(tmp_path / "model"))
    shapes = {"ids": (128, 2), "ids_1": (128,), "ids_2": (2,)}
    asked = {"memory_limit": "100%", "mode": "analyze", "input_shapes": shapes, "function": "step"}
    with pytest.raises(tfswap.UnsupportedGraph, match="decorate the step with tfswap.optimize"):
        tfswap.optimize_graph(tmp_path / "model", tmp_path / "made", **asked)
    step = tfswap.optimize(tf.function(train), memory_limit="100%")
    with pytest.raises(tfswap.UnsupportedGraph, match="Call the optimized function from Python") as refused:
        tf.function(lambda ids: step(ids) * 2.0, input_signature=[spec]).get_concrete_function()
    assert "tf.ensure_shape" not in str(refused.value)


FILE_ROWS, FILE_MOST, FILE_WORDS = 2048, 3, 1000


def model_of_lookups(kind):
    import tensorflow as tf

    width = 128
    model = tf.Module()
    model.table = tf.Variable(tf.random.stateless_normal([FILE_WORDS, width], (1, 1)))
    model.weights = [tf.Variable(tf.random.stateless_normal([width, width], (2, i)) * 0.09) for i in range(8)]

    def of_kind(ids, others):
        if kind == "safe":
            return tf.nn.safe_embedding_lookup_sparse(model.table, ids, others)
        if kind == "unweighted":
            return tf.nn.safe_embedding_lookup_sparse(model.table, ids, None, combiner="sum")
        return tf.sparse.sparse_dense_matmul(others, model.table[:FILE_MOST]) + tf.gather(
            model.table, tf.sparse.to_dense(ids)[:, 0]
        )

    specs = [tf.SparseTensorSpec([FILE_ROWS, FILE_MOST], dtype) for dtype in (tf.int64, tf.float32)]

    @tf.function(input_signature=specs)
    def train_step(ids, others):
        with tf.GradientTape() as tape:
            h = of_kind(ids, others)
            for weight in model.weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h**2)
        variables = [model.table, *model.weights]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    model.train_step = train_step
    return model


def in_file(kind, folder):
    import contextlib

    import numpy as np
    import tensorflow as tf

    import tfswap
    from tfswap.exporters.function import grappler_off

    tf.saved_model.save(model_of_lookups(kind), f"{folder}/model")
    count = FILE_ROWS * FILE_MOST
    shapes = {f"{a}{b}": s for a in ("ids", "others") for b, s in (("", (count, 2)), ("_1", (count,)), ("_2", (2,)))}
    report = tfswap.optimize_graph(f"{folder}/model", f"{folder}/made", memory_limit="85%", input_shapes=shapes)

    def run(loaded):
        losses, peaks = [], []
        for seed, share in enumerate((1.0, 0.5, 0.8)):
            draw = np.random.default_rng(seed)
            there = np.argwhere(draw.random((FILE_ROWS, FILE_MOST)) <= share).astype(np.int64)
            given = [
                tf.SparseTensor(there, draw.integers(0, FILE_WORDS, len(there)), [FILE_ROWS, FILE_MOST]),
                tf.SparseTensor(there, draw.random(len(there), np.float32), [FILE_ROWS, FILE_MOST]),
            ]
            with measuring(peaks):
                losses.append(float(loaded.train_step(*given)))
        return [losses, [float(tf.reduce_sum(v)) for v in (loaded.table, *loaded.weights)]], max(peaks)

    found = []
    for load, made, context in (
        (tf.saved_model.load, "model", grappler_off()),
        (tfswap.load, "made", contextlib.nullcontext()),
    ):
        with context:
            found.append(run(load(f"{folder}/{made}")))
    (expected, _), (values, peak) = found
    return [values == expected, peak <= report.memory_limit_bytes]


@pytest.mark.parametrize("kind", ["safe", "unweighted", "dense"])
def test_in_a_file_the_dense_shape_of_sparse_arguments_is_known(kind: str, tmp_path: Path) -> None:
    assert on_arena(lambda: in_file(kind, str(tmp_path))) == [True, True]
