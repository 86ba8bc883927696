"""MetaGraphDefs as TensorFlow 1 programs export and import them."""

from __future__ import annotations

import numpy as np
import pytest

import tfswap

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1


@pytest.mark.parametrize("resource", [True, False])
def test_a_meta_graph_imports_with_all_that_it_names(resource):
    """Collections, signatures and the saver name nodes of the step: losses, values of variables."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 64], name="x")
        h = x
        for i in range(6):
            start = v1.random_normal_initializer(stddev=0.1, seed=i)
            h = tf.nn.relu(h @ v1.get_variable(f"w{i}", [64, 64], initializer=start, use_resource=resource))
        answer = tf.nn.softmax(h, name="answer")
        loss = v1.losses.mean_squared_error(x, answer)
        v1.train.AdamOptimizer(0.01).minimize(loss, name="train")
        init = v1.global_variables_initializer().name
        saver = v1.train.Saver()
        meta_graph = v1.train.export_meta_graph(graph=graph, saver_def=saver.as_saver_def())
        step = meta_graph.signature_def["step"]
        step.inputs["x"].name, step.outputs["loss"].name = "x:0", loss.name
        answers = meta_graph.signature_def["answers"]
        answers.inputs["x"].name, answers.outputs["answer"].name = "x:0", "answer:0"
    made = tfswap.optimize_graph(
        meta_graph, signature="step", fetches=["train"], memory_limit="70%", batch_size=1024
    ).meta_graph_def
    rows = np.random.RandomState(0).randn(1024, 64).astype("f")
    losses = []
    for content in (meta_graph, made):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.train.import_meta_graph(content)
            session.run(init)
            got = [session.run([loss.name, "train"], {"x:0": rows})[0] for _ in range(3)]
            losses.append([*got, session.run("answer:0", {"x:0": rows[:3]}).sum()])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)  # a session's optimizers may sum in another order
