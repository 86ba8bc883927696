"""Steps with many loops, as a recurrent layer that is called for every token: the time of their import."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena

from tfswap.importers import bodies
from tfswap.importers.function import import_function


def recurrent(tokens: int) -> Any:
    """The ConcreteFunction of a step that calls a layer for each token."""
    import keras
    import tensorflow as tf

    layer = keras.layers.GRU(4, return_sequences=True, return_state=True)
    layer.build([2, 3, 4])

    def step(x):
        with tf.GradientTape() as tape:
            state, loss = tf.zeros([2, 4]), 0.0
            for _ in range(tokens):
                made, state = layer(x, initial_state=state)
                loss += tf.reduce_sum(made)
        return tape.gradient(loss, layer.trainable_variables)

    return tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([2, 3, 4]))


def test_shapes_are_inferred_as_often_however_many_loops_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for tokens in (3, 9):
        concrete = recurrent(tokens)
        sizes: list[int] = []

        def counted(graph_def: Any, *rest: Any, infer: Any = bodies.infer_shapes, sizes: Any = sizes) -> Any:
            sizes.append(len(graph_def.node))
            return infer(graph_def, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(bodies, "infer_shapes", counted)
            graph = import_function(concrete)
        assert len(graph.bodies) == 2 * tokens
        assert all(kind.nbytes is not None for n in graph for kind in n.outputs if kind.dtype == "float32")
        counts.append(sizes.count(max(sizes)))
    assert counts[0] == counts[1] < 6


def test_nothing_of_what_shapes_are_inferred_with_stays() -> None:
    def program():
        import tensorflow as tf

        def used(what):
            return tf.config.experimental.get_memory_info("CPU:0")[what]

        made = recurrent(12)
        graph_def, start = made.graph.as_graph_def(), used("current")
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(graph_def, name="")
        whole = used("current") - start
        start = used("current")
        tf.config.experimental.reset_memory_stats("CPU:0")
        import_function(made)
        return [used("peak") - start, whole]

    # TensorFlow holds a graph's constants in the arena of a CPU.
    grown, whole = on_arena(program)
    assert 0 < grown < 4 * whole


def nested(depth: int) -> Any:
    """The ConcreteFunction of a step with that many loops, each in the one before."""
    import tensorflow as tf

    def inner(x, level):
        if not level:
            return tf.sin(x)
        return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, inner(x, level - 1)), (0, x))[1]

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(inner(x, depth))
        return tape.gradient(loss, x)

    return tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([4]))


def test_a_further_loop_around_others_is_as_much_work_as_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for depth in (1, 2, 3):
        called: list[str] = []

        def counted(function: Any, *rest: Any, convert: Any = bodies.as_graph_def, called: Any = called) -> Any:
            called.append(function.signature.name)
            return convert(function, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(bodies, "as_graph_def", counted)
            import_function(nested(depth))
        counts.append(len(called))
    assert counts[2] - counts[1] <= counts[1] - counts[0]


def test_functions_that_inlining_makes_in_a_body_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grappler gives branches and loops next to an inlined call names of its own, in the body's library."""

    def inlined(function: Any, library: Any, *, convert: Any = bodies.as_graph_def) -> Any:
        graph_def, *rest = convert(function, library)
        made = graph_def.library.function
        names = {f.signature.name for f in made}
        for node in (*graph_def.node, *(n for f in made for n in f.node_def)):
            for attribute in node.attr.values():
                if attribute.func.name in names:
                    attribute.func.name += "_specialized"
        for f in made:
            f.signature.name += "_specialized"
        return graph_def, *rest

    expected = import_function(nested(2))
    monkeypatch.setattr(bodies, "as_graph_def", inlined)
    found = import_function(nested(2))
    assert [len(body) for body in found.all_bodies()] == [len(body) for body in expected.all_bodies()]
