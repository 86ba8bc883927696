"""Which kernels XLA may compile into one block, and what a block recomputes."""

from __future__ import annotations

from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.block_time import block_seconds, in_place_seconds
from tfswap.analysis.cost import Costs
from tfswap.analysis.fusion import find_blocks
from tfswap.ir.graph import Graph, Measured
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.planner.step_orders import kernels_run

KIND = TensorType("float32", (1024, 512))
COSTS = Costs.of(DeviceModel())
FREE = Costs(replace(COSTS.rates, memory_bytes_per_s=1e6, steps_per_s=1e18))
"""Costs with which fusing always pays: all that counts is bytes moved."""


class Made(Graph):
    """A graph that is built line by line."""

    def feed(self, name, kind=KIND):
        node = self.add("Placeholder", name, outputs=[kind])
        self.feeds.append(node)
        return node.out()

    def op(self, op, name, *inputs, kind=KIND, controls=()):
        return self.add(op, name, inputs, outputs=[kind], controls=controls).out()

    def gelu(self):
        """A product, x * erfc(x), another product, and the gradient of the middle."""
        x = self.op("MatMul", "x", self.feed("a"), self.feed("w"))
        n = self.op("Neg", "n", x)
        e = self.op("Erfc", "e", n)
        out = self.op("Mul", "out", x, e)
        dy = self.op("MatMul", "dy", self.op("MatMul", "y", out, self.feed("v")), self.feed("w2"))
        left = self.op("Mul", "left", dy, e)
        right = self.op("Mul", "right", self.op("Exp", "exp", self.op("Square", "square", n)), dy)
        dx = self.op("AddV2", "dx", left, right)
        self.fetches = [self.op("MatMul", "result", dx, self.feed("w3"))]
        return self


def names(nodes):
    return [node.name for node in nodes]


def test_a_backward_block_reads_what_its_forward_block_reads_and_nothing_between():
    forward, backward = find_blocks(Made().gelu(), FREE)
    assert set(names(forward.members)) == {"n", "e", "out", "square", "exp"}
    assert names(forward.nodes) == ["n", "e", "out"], "the others are for the backward block"
    assert [t.name for t in forward.inputs] == ["x:0"]
    assert [t.name for t in forward.outputs] == ["out:0"]
    assert names(backward.members) == ["left", "right", "dx"]
    assert set(names(backward.nodes)) == {"n", "e", "square", "exp", "left", "right", "dx"}
    assert [t.name for t in backward.inputs] == ["x:0", "dy:0"]
    assert backward.seconds < backward.unfused_s


def test_a_small_result_of_a_reduction_is_kept_where_what_it_adds_up_would_be_kept_for_it_alone():
    graph = Made()
    row = TensorType("float32", (1024, 1))
    axes = graph.add("Const", "axes", attrs={"value": (1,)}, outputs=[TensorType("int32", (1,))]).out()
    x = graph.op("MatMul", "x", graph.feed("a"), graph.feed("w"))
    total = graph.op("Sum", "total", graph.op("Square", "square", x), axes, kind=row)
    scale = graph.op("Rsqrt", "scale", total, kind=row)
    y = graph.op("Mul", "y", x, scale)
    dy = graph.op("MatMul", "dy", y, graph.feed("v"))
    dx = graph.op("Mul", "dx", graph.op("Neg", "n", dy), scale)
    graph.fetches = [graph.op("MatMul", "result", dx, graph.feed("w3"))]
    forward, backward = find_blocks(graph, COSTS)
    assert [t.name for t in forward.outputs] == ["total:0", "y:0"]
    assert "x:0" not in {t.name for t in backward.inputs}


def test_a_path_that_leaves_and_comes_back_makes_two_blocks():
    graph = Made()
    a = graph.op("Neg", "a2", graph.op("Exp", "a1", graph.op("MatMul", "x", graph.feed("p"), graph.feed("q"))))
    b = graph.op("AddV2", "b1", graph.op("MatMul", "middle", a, graph.feed("w")), a)
    graph.fetches = [graph.op("MatMul", "result", graph.op("Exp", "b2", b), graph.feed("w3"))]
    assert [names(block.members) for block in find_blocks(graph, COSTS)] == [["a1", "a2"], ["b1", "b2"]]


def chain(kind=KIND, controls=(), graph=None, ops=("Exp", "Neg", "Square")):
    graph = Made() if graph is None else graph
    tensor = graph.op("MatMul", "x", graph.feed("p", kind), graph.feed("q", kind), kind=kind)
    for k, op in enumerate(ops):
        tensor = graph.op(op, f"op_{k}", tensor, kind=kind, controls=controls)
    graph.fetches = [graph.op("MatMul", "result", tensor, graph.feed("w3"))]
    return graph


def test_kernels_that_are_in_no_block():
    assert len(find_blocks(chain(), COSTS)) == 1
    assert not find_blocks(chain(TensorType("float32", (4, 4))), COSTS), "too small to be worth a launch"
    assert not find_blocks(chain(TensorType("float32", ())), COSTS), "scalars"
    assert not find_blocks(chain(TensorType("float16", (1024, 512))), COSTS), "other types"
    assert not find_blocks(chain(TensorType("float32", (1024, 512), bound=True)), COSTS), "unknown sizes"
    assert not find_blocks(chain(ops=("Exp", "RandomStandardNormal", "Neg")), COSTS), "random values"
    graph = Made()
    effect = graph.add("AssignVariableOp", "assign", [graph.feed("handle"), graph.feed("value")])
    assert not find_blocks(chain(controls=[effect], graph=graph), COSTS), "they wait for an effect"


def test_a_block_that_loses_time_stays_where_its_bytes_are_worth_more():
    small = TensorType("float32", (16, 16))
    (block,) = find_blocks(chain(small, ops=("Exp", "Neg")), COSTS, price_s=1.0)
    assert block.gain_s < 0 < block.freed_bytes
    price_s = -block.gain_s / block.freed_bytes
    assert find_blocks(chain(small, ops=("Exp", "Neg")), COSTS, price_s=1.01 * price_s)
    assert not find_blocks(chain(small, ops=("Exp", "Neg")), COSTS, price_s=0.99 * price_s)


def test_no_block_holds_more_than_there_is_room_for():
    (block,) = find_blocks(chain(), COSTS)
    assert block.most_bytes == 2 * KIND.nbytes, "what it reads and what it makes"
    assert find_blocks(chain(), COSTS, room_bytes=block.most_bytes)
    assert not find_blocks(chain(), COSTS, room_bytes=block.most_bytes - 1)


def powers():
    """A power that the backward pass reads too: computing it takes long."""
    graph = Made()
    x = graph.op("MatMul", "x", graph.feed("a"), graph.feed("w"))
    power = graph.op("Pow", "power", graph.op("Neg", "n", x), x)
    y = graph.op("Mul", "y", power, x)
    dy = graph.op("MatMul", "dy", y, graph.feed("v"))
    dx = graph.op("Mul", "dx", graph.op("Mul", "m", dy, power), x)
    graph.fetches = [graph.op("MatMul", "result", dx, graph.feed("w3"))]
    return graph


def test_what_takes_longer_to_recompute_than_to_keep_is_kept_unless_bytes_have_a_price():
    forward, backward = find_blocks(powers(), COSTS)
    assert [t.name for t in forward.outputs] == ["power:0", "y:0"]
    assert names(backward.nodes) == ["m", "dx"]
    forward, backward = find_blocks(powers(), COSTS, price_s=1.0)
    assert [t.name for t in forward.outputs] == ["y:0"]
    assert names(backward.nodes) == ["n", "power", "m", "dx"]


def sums(axis):
    """Seconds of a block that adds up along an axis."""
    graph = Made()
    axes = graph.add("Const", "axes", attrs={"value": (axis,)}, outputs=[TensorType("int32", (1,))])
    graph.small_constants[axes] = (axis,)
    square = graph.op("Square", "square", graph.feed("x"))
    total = graph.op("Sum", "total", square, axes.out(), kind=TensorType("float32", (1024, 512)[1 - axis : 2 - axis]))
    nodes = [square.node, total.node]
    return block_seconds(nodes, [total], COSTS.rates, graph.small_constants)


def test_sums_of_rows_take_arithmetic_and_those_of_columns_none():
    assert sums(1) > 1.5 * sums(0)


def test_each_result_is_a_loop_that_reads_what_it_needs():
    graph = Made()
    x = graph.feed("x")
    low, high = graph.op("Neg", "low", x), graph.op("Abs", "high", x)
    nodes, moved_s = [low.node, high.node], KIND.nbytes / COSTS.rates.memory_bytes_per_s
    one, both = (block_seconds(nodes, made, COSTS.rates, {}) for made in ([low], [low, high]))
    assert both - one == pytest.approx(2 * moved_s)


def test_a_kernel_that_writes_over_its_input_reads_no_memory_for_its_result():
    graph = Made()
    first = graph.op("Neg", "first", graph.feed("x"))
    graph.op("Abs", "second", first)
    uses = {first: 1}
    assert in_place_seconds(graph["second"], uses, COSTS.rates) == 0.0
    assert in_place_seconds(graph["second"], {first: 2}, COSTS.rates) > 0.0


def test_a_block_counts_as_its_kernels_in_the_time_for_planning():
    """Else a step with blocks has more ladders than the step without, and is planned longer."""
    graph = Made()
    graph.fetches = [graph.op("MatMul", "y", graph.feed("a"), graph.feed("b"))]
    flow = analyse_dataflow(graph, DeviceModel())
    order = [flow.place["y"]]
    before = kernels_run(flow, order)
    flow.nodes[order[0]].measured = Measured(kernels=before + 8)
    assert kernels_run(flow, order) == before + 8


def test_nodes_to_keep_stay():
    assert not find_blocks(chain(ops=("Exp", "Neg")), COSTS, lambda name: name == "op_1")


OPS = {"MatMul": 2, "Exp": 1, "Neg": 1, "AddV2": 2, "Mul": 2}


@st.composite
def graphs(draw):
    graph = Made()
    tensors = [graph.feed("first"), graph.feed("second")]
    for k in range(draw(st.integers(3, 30))):
        op = draw(st.sampled_from(sorted(OPS)))
        inputs = [draw(st.sampled_from(tensors[-8:])) for _ in range(OPS[op])]
        tensors.append(graph.op(op, f"node_{k}", *inputs))
    graph.fetches = [graph.op("MatMul", "result", tensors[-1], tensors[-2])]
    return graph


@settings(deadline=None, max_examples=60)
@given(graphs())
def test_blocks_compute_what_their_members_did_and_can_run_one_after_the_other(graph):
    blocks = find_blocks(graph, FREE)
    block_of = {node: k for k, block in enumerate(blocks) for node in block.members}
    whole = networkx.DiGraph()
    for k, block in enumerate(blocks):
        inside = {*block.inputs, *(node.out() for node in block.nodes)}
        assert all(t in inside for node in block.nodes for t in node.inputs), "a node reads what the block has"
        assert {t.node for t in block.outputs} <= set(block.nodes)
        whole.add_edges_from((block_of.get(t.node, t.node.name), k) for t in block.inputs)
        for tensor in block.inputs:
            assert tensor.node not in block_of or tensor in blocks[block_of[tensor.node]].outputs
    for node in graph:
        if node not in block_of:
            whole.add_edges_from((block_of.get(t.node, t.node.name), node.name) for t in node.inputs)
            assert all(t.node not in block_of or t in blocks[block_of[t.node]].outputs for t in node.inputs)
    assert networkx.is_directed_acyclic_graph(whole)
