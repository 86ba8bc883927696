"""Outer products are computed in the layout of their reader, without a transpose."""

from __future__ import annotations

import pytest

from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare.outer_products import swap_outer_products

CPU = DeviceModel("cpu")
EINSUM = """\
%a = Placeholder() {{dtype=float32}} -> {kind}[{left}]
%b = Placeholder() {{dtype=float32}} -> {kind}[{right}]
%c = Einsum(%a, %b) {{equation=b"{equation}"}} -> {kind}[64,100,256]
feeds %a, %b
fetches %c
"""


@pytest.mark.parametrize(
    ("equation", "left", "right", "swapped"),
    [
        ("bh,bt->bth", "64,256", "64,100", "bt,bh->bth"),
        ("bt,bh->bth", "64,100", "64,256", None),  # is made so
        ("bht,bt->bth", "64,256,100", "64,100", None),  # is transposed either way
        ("hk,btk->bth", "256,8", "64,100,8", None),  # is a sum
        ("...h,...t->...th", "64,256", "64,100", "...t,...h->...th"),
    ],
)
def test_operands_are_swapped_where_the_result_is_transposed_and_nothing_is_added(equation, left, right, swapped):
    graph = parse_graph(EINSUM.format(kind="float32", equation=equation, left=left, right=right))
    assert swap_outer_products(graph, Target(CPU)) == (swapped is not None)
    node = graph["c"]
    assert node.attrs["equation"] == (swapped or equation).encode()
    assert [t.node.name for t in node.inputs] == (["b", "a"] if swapped else ["a", "b"])


def test_types_whose_nans_differ_and_other_devices_are_left_alone():
    text = EINSUM.format(kind="bfloat16", equation="bh,bt->bth", left="64,256", right="64,100")
    assert not swap_outer_products(parse_graph(text), Target(CPU))
    assert not swap_outer_products(parse_graph(text.replace("bfloat16", "float32")), Target(DeviceModel("gpu")))


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_the_bits_are_the_same(kind: str):
    np, tf = pytest.importorskip("numpy"), pytest.importorskip("tensorflow")
    chance = np.random.default_rng(0)
    unusual = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-40, 1e38, -1e38, 1e-20])

    def numbers(*shape: int):
        made = np.where(chance.random(shape) < 0.3, chance.choice(unusual, shape), chance.standard_normal(shape))
        with np.errstate(over="ignore"):
            return tf.constant(made.astype(kind))

    for b, h, t in ((64, 256, 100), (1, 1, 1), (3, 1, 5), (3, 5, 1), (2, 7, 9), (1, 300, 200), (130, 3, 4)):
        x, y = numbers(b, h), numbers(b, t)
        transposed, made_so = tf.einsum("bh,bt->bth", x, y), tf.einsum("bt,bh->bth", y, x)
        assert transposed.numpy().tobytes() == made_so.numpy().tobytes()
