"""Which steps have a backward pass: those of linear ops that return gradients, and no inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfswap.analysis.phases import backward_among, is_gradient
from tfswap.ir.text import parse_graph


@pytest.mark.parametrize(
    ("op", "name", "expected"),
    [
        ("MatMul", "gradient_tape/MatMul/MatMul", True),
        ("MatMul", "train/PartitionedCall/gradient_tape/dense/MatMul_1", True),
        ("MatMul", "gradients/dense/MatMul_grad/MatMul", True),
        ("MatMul", "gradient_tape/while/gradients/while/MatMul_grad/MatMul", True),
        ("MatMul", "model/gradients/MatMul", False),  # a layer of that name
        ("Sub", "image_gradients/sub", False),
        ("Conv2DBackpropInput", "decoder/conv2d_transpose", False),  # a layer as well
        ("ReluGrad", "anything", True),
    ],
)
def test_gradients_are_known_by_their_scopes_and_kernels(op: str, name: str, expected: bool) -> None:
    assert is_gradient(op, name) == expected


def test_a_constant_that_both_passes_share_makes_nothing_backward() -> None:
    graph = parse_graph("""\
%x = Placeholder() {dtype=float32} -> float32[8]
%"gradient_tape/mean/reciprocal" = Const() {dtype=float32} -> float32[]
%mean = Mul(%x, %"gradient_tape/mean/reciprocal") -> float32[8]
%activation = Relu(%mean) -> float32[8]
%"gradient_tape/ReluGrad" = ReluGrad(%activation, %activation) -> float32[8]
%"gradient_tape/Mul" = Mul(%"gradient_tape/ReluGrad", %"gradient_tape/mean/reciprocal") -> float32[8]
feeds %x
fetches %"gradient_tape/Mul"
""")
    expected = {"gradient_tape/ReluGrad", "gradient_tape/Mul"}
    assert {node.name for node in backward_among(graph.topological())} == expected


@pytest.mark.parametrize("kind", ["product", "solve", "transposed"])
def test_linear_steps_train_where_they_compute_gradients(kind: str, tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    import tfswap

    model = tf.Module()
    model.weights = [tf.Variable(2 * tf.eye(64) + 0.01 * tf.random.stateless_normal([64, 64], (s, 1))) for s in (1, 2)]
    x = tf.random.stateless_normal([64, 256], (3, 3))

    def infer(x):
        for weight in model.weights:
            if kind == "product":
                x = weight @ x
            elif kind == "solve":
                x = tf.linalg.triangular_solve(tf.linalg.band_part(weight, -1, 0), x)
            else:
                filters = tf.reshape(weight, [1, 1, 64, 64])
                x = tf.nn.conv2d_transpose(tf.reshape(x, [4, 8, 8, 64]), filters, [4, 8, 8, 64], 1)
        return x

    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(infer(x))
        return loss, tape.gradient(loss, model.weights)

    for name, function in (("train", train), ("infer", infer)):
        setattr(model, name, tf.function(function, input_signature=[tf.TensorSpec(x.shape)]))
        step = tfswap.optimize(tf.function(function), memory_limit="300%")
        step(x)
        assert ("no backward pass" in step.report().headline()) == (name == "infer")
    tf.saved_model.save(model, str(tmp_path / "model"))
    report = tfswap.optimize_graph(
        tmp_path / "model", tmp_path / "made", function="train", memory_limit="100%", mode="analyze"
    )
    assert report.trains
    with pytest.raises(tfswap.UnsupportedGraph, match=r"'infer' has no backward pass.*these train: 'train'"):
        tfswap.optimize_graph(tmp_path / "model", tmp_path / "made", function="infer", memory_limit="100%")


def test_a_backward_pass_that_is_written_by_hand_is_one(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    import tfswap

    model = tf.Module()
    model.weights = [tf.Variable(tf.random.stateless_normal([64, 64], (n, 1))) for n in range(3)]
    x = tf.random.stateless_normal([4096, 64], (9, 1))

    def step(x: Any) -> Any:
        states = [x]
        for weight in model.weights:
            states.append(states[-1] @ weight)
        slope, gradients = states[-1] - x, []
        for weight, state in zip(reversed(model.weights), reversed(states[:-1]), strict=True):
            gradients.append(tf.matmul(state, slope, transpose_a=True))
            slope = tf.matmul(slope, weight, transpose_b=True)
        return gradients

    optimized = tfswap.optimize(tf.function(step), memory_limit="100%")
    optimized(x)
    assert "no backward pass" not in f"{optimized.report().headline()} {optimized.report()}"
    model.step = tf.function(step, input_signature=[tf.TensorSpec(x.shape)])
    tf.saved_model.save(model, str(tmp_path / "model"))
    made = tfswap.optimize_graph(tmp_path / "model", tmp_path / "made", function="step", memory_limit="100%")
    assert made.trains
