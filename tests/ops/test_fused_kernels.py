"""By how much results of XLA's kernels differ from TensorFlow's: the bounds that reports of blocks name."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfswap.kernels.fused import COMPOSED, FUSABLE, HALF_STEP

R = tf.raw_ops
COUNT = 1 << 16


def values(seed: int, least: float, most: float) -> tf.Tensor:
    """Even between the bounds, and of all magnitudes."""
    draw = np.random.default_rng(seed)
    even, sizes = draw.uniform(least, most, COUNT), np.exp(draw.uniform(-12, np.log(most), COUNT))
    signs = np.where(draw.integers(2, size=COUNT) == 0, 1.0, -1.0 if least < 0 else 1.0)
    return tf.constant(np.concatenate([even, signs * sizes]), tf.float32)


X, Y, P, Q = values(0, -10, 10), values(1, -10, 10), values(2, 1e-6, 10), values(3, 1e-6, 4)
UNARY = ("Abs", "Erf", "Erfc", "Exp", "Expm1", "Neg", "Sigmoid", "Square", "Tanh")
OF_POSITIVE = ("Log", "Log1p", "Reciprocal", "Rsqrt", "Sqrt")
BINARY = ("AddV2", "Div", "Maximum", "Minimum", "Mul", "RealDiv", "SquaredDifference", "Sub")
CASES = {
    **{op: (lambda x, op=op: getattr(R, op)(x=x), [X]) for op in UNARY},
    **{op: (lambda x, op=op: getattr(R, op)(x=x), [P]) for op in OF_POSITIVE},
    **{op: (lambda x, y, op=op: getattr(R, op)(x=x, y=y), [X, Y]) for op in BINARY},
    **{op: (lambda x, y, op=op: getattr(R, op)(y=x, dy=y), [P, Y]) for op in ("RsqrtGrad", "SqrtGrad")},
    "AddN": (lambda x, y: R.AddN(inputs=[x, y, x]), [X, Y]),
    "Pow": (lambda x, y: R.Pow(x=x, y=y), [P, Q]),
    "Relu": (lambda x: R.Relu(features=x), [X]),
    "ReluGrad": (lambda x, y: R.ReluGrad(gradients=x, features=y), [X, Y]),
    "SelectV2": (lambda x, y: R.SelectV2(condition=x > 0, t=x, e=y), [X, Y]),
    "SigmoidGrad": (lambda x, y: R.SigmoidGrad(y=x, dy=y), [tf.minimum(P, 1.0), Y]),
    "Softplus": (lambda x: R.Softplus(features=x), [X]),
    "SoftplusGrad": (lambda x, y: R.SoftplusGrad(gradients=x, features=y), [X, Y]),
    "TanhGrad": (lambda x, y: R.TanhGrad(y=x, dy=y), [tf.clip_by_value(X, -1.0, 1.0), Y]),
    "products in sums": (lambda x, y: x * y + x, [X, Y]),
    "quotients by constants": (lambda x: x / 3.7, [X]),
}
OP_OF = {"products in sums": "AddV2", "quotients by constants": "RealDiv"}


def magnitudes(case: str, result: np.ndarray, given: list[np.ndarray]) -> np.ndarray:
    """Of the results, or of the terms that are added."""
    if case in ("AddN", "AddV2", "Sub"):
        return sum(map(np.abs, given)) + (np.abs(given[0]) if case == "AddN" else 0.0)
    if case == "SquaredDifference":
        return (np.abs(given[0]) + np.abs(given[1])) ** 2
    if case == "products in sums":
        return np.abs(given[0] * given[1]) + np.abs(given[0])
    if case in ("SigmoidGrad", "TanhGrad"):
        return np.abs(given[1])
    return np.maximum(np.abs(result), 1.0 if case == "Erfc" else np.finfo(np.float32).tiny)


@pytest.mark.parametrize("case", CASES)
def test_results_differ_by_no_more_than_the_table_has(case: str) -> None:
    compute, given = CASES[case]
    ours, xla = (tf.function(compute, jit_compile=fused)(*given).numpy().astype(float) for fused in (False, True))
    assert np.isfinite(ours).all()
    assert np.isfinite(xla).all()
    size = magnitudes(case, ours, [each.numpy().astype(float) for each in given])
    terms = 3 if case == "AddN" else 1
    assert (np.abs(ours - xla) <= terms * FUSABLE[OP_OF.get(case, case)] * HALF_STEP * size).all()


def test_each_op_with_a_bound_is_tried() -> None:
    assert {op for op, bound in FUSABLE.items() if bound and op not in ("Mean", COMPOSED)} <= CASES.keys()
