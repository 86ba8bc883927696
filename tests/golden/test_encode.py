"""Encodings as a tactic: which kernels can read one, the rewrite, and the plans that use it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from graphs import training_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from test_passes import Golden

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.encodings import find_encodings
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.encode import encode_tensors
from tfswap.passes.verify import verify
from tfswap.plan.plan import Plan
from tfswap.planner.ordering import choose_order
from tfswap.report.summary import unit_of
from tfswap.simulator.arena_snapshot import ArenaSnapshot

PLAIN = DeviceModel()


def encoded(golden: Golden) -> int:
    found = {e.kernel.name: e for e in find_encodings(golden.graph, PLAIN)}
    return encode_tensors(golden.graph, Target(DeviceModel()), [found[name] for name in golden.arguments])


# --- the rewrite ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "added"), [("encode_relu", 2), ("encode_pool", 3), ("encode_select", 2)])
def test_encode(name, added):
    golden = Golden(name)
    before = len(golden.graph), {node.name for node in golden.graph}
    assert encoded(golden) == added
    assert len(golden.graph) == before[0] + added
    assert before[1] <= {node.name for node in golden.graph}
    golden.graph.topological()
    golden.check()
    assert not {e.kernel.name for e in find_encodings(golden.graph, PLAIN)} & set(golden.arguments)


def test_the_full_map_has_no_backward_user_left():
    golden = Golden("encode_pool")
    encoded(golden)
    readers = {node.name for node in golden.graph if any(t.name == "map:0" for t in node.inputs)}
    backward = {"gradient", "route", "back"}
    assert not readers & backward
    assert {golden.graph[name].op for name in readers} == {
        "MaxPool",
        "Shape",
        custom_ops.ENCODE_MASK,
        custom_ops.ENCODE_MAX_POOL,
    }
    # And in the order that is chosen for it, it is gone before the backward pass begins.
    flow = analyse_dataflow(golden.graph, PLAIN)
    order = [flow.nodes[i].name for i in choose_order(flow, [1.0] * len(flow.nodes))]
    assert max(order.index(name) for name in readers) < order.index("gradient")


POOL = """
%x = Placeholder() {{dtype={dtype}}} -> {dtype}[2,8,8,3]
%y = MaxPool(%x) {{}} -> {dtype}[2,{rows},{rows},3]
%g = Neg(%y) {{T={dtype}}} -> {dtype}[2,{rows},{rows},3]
%back = MaxPoolGrad(%x, %y, %g) {{T={dtype}, data_format=b'{layout}', explicit_paddings={paddings}, ksize={ksize}, \
padding=b'{padding}', strides={strides}}} -> {dtype}[2,8,8,3]
feeds %x
fetches %back
"""


def pool(**changed: object) -> Graph:
    what = {"dtype": "float32", "rows": 4, "layout": "NHWC", "paddings": "()", "ksize": "(1, 2, 2, 1)"}
    what |= {"padding": "VALID", "strides": "(1, 2, 2, 1)"}
    return parse_graph(POOL.format(**(what | changed)))


@pytest.mark.parametrize(
    ("changed", "encoded_bytes"),
    [
        ({}, 2 * 4 * 4 * 2),  # half a byte each, whole bytes a pixel
        ({"dtype": "float64"}, 2 * 4 * 4 * 2),
        ({"ksize": "(1, 3, 3, 1)", "padding": "SAME"}, 2 * 4 * 4 * 2),
        ({"ksize": "(1, 5, 5, 1)", "padding": "SAME"}, 2 * 4 * 4 * 3),
        ({"ksize": "(1, 17, 17, 1)", "padding": "SAME"}, None),  # more positions than a byte holds
        ({"dtype": "int32"}, None),
        ({"layout": "NCHW"}, None),
        ({"ksize": "(1, 2, 2, 2)"}, None),
        ({"strides": "(2, 2, 2, 1)"}, None),
        ({"padding": "EXPLICIT", "paddings": "(0, 0, 1, 1, 1, 1, 0, 0)"}, 2 * 4 * 4 * 2),
        ({"padding": "EXPLICIT", "paddings": "(0, 0, 2, 1, 1, 1, 0, 0)"}, None),  # a window of padding alone
    ],
)
def test_pools_that_can_be_encoded(changed, encoded_bytes):
    found = find_encodings(pool(**changed), PLAIN)
    assert [e.encoded.nbytes for e in found] == [encoded_bytes] * (encoded_bytes is not None)


@pytest.mark.parametrize(("ksize", "count"), [("(1, 2, 2, 1)", 1), ("(1, 3, 3, 1)", 0)])
def test_pools_that_onednn_sums_in_another_order_stay(ksize, count):
    graph = pool(ksize=ksize, padding="SAME")
    assert len(find_encodings(graph, PLAIN)) == 1
    assert len(find_encodings(graph, DeviceModel(onednn=True))) == count


def test_what_is_computed_before_the_step_runs_takes_no_encoding():
    """A mask of constants, as that of causal attention, is none of the step's kernels."""
    text = "%c = {} -> float32[64,64]\n%d = Const() -> float32[64,64]\n%g = ReluGrad(%c, %d) -> float32[64,64]\n"
    for op, count in (("Const()", 0), ("Placeholder()", 1)):
        assert len(find_encodings(parse_graph(text.format(op)), PLAIN)) == count


def test_on_a_gpu_only_choices_are_encoded():
    for name, count in (("encode_relu", 0), ("encode_pool", 0), ("encode_select", 2)):
        assert len(find_encodings(Golden(name).graph, DeviceModel("gpu"))) == count


@pytest.mark.parametrize(
    ("condition", "then", "dtype"),
    [("4,1", "4,5", "float32"), ("4,5", "1,5", "float32"), ("4,5", "4,5", "int32")],
)
def test_choices_that_broadcast_stay(condition, then, dtype):
    graph = parse_graph(f"""
%c = Placeholder() {{dtype=bool}} -> bool[{condition}]
%t = Placeholder() {{dtype={dtype}}} -> {dtype}[{then}]
%e = Placeholder() {{dtype={dtype}}} -> {dtype}[4,5]
%s = SelectV2(%c, %t, %e) {{T={dtype}}} -> {dtype}[4,5]
feeds %c, %t, %e
fetches %s
""")
    assert not find_encodings(graph, PLAIN)


# --- which kernels take one -------------------------------------------------------------------------------


def chosen(*layers: Layer) -> set[str]:
    """The tensors whose encodings gain something in a step of these layers."""
    optimizer = optimizer_of(training_step(layers, rows=512, width=128))
    found = optimizer.search.alternatives.encoded(optimizer.search.planners.of)
    kernels = found.encoded if found else ()
    return {e.tensor.name for e in find_encodings(optimizer.settled, PLAIN) if e.kernel.name in kernels}


def test_a_tensor_is_encoded_where_it_then_goes_early():
    deep = [Layer("dense") for _ in range(30)]
    # The sum reads the map immediately; the product behind it reads it late, just before the ReLU's own gradient.
    assert chosen(Layer("dense"), Layer("relu"), Layer("add"), *deep) == {"relu1:0"}
    assert chosen(Layer("dense"), Layer("relu"), *deep) == set()


def test_where_what_can_be_encoded_hardly_matters_nothing_is():
    assert chosen(*[Layer("dense") for _ in range(120)], Layer("relu"), Layer("add"), Layer("dense")) == set()


# --- plans ------------------------------------------------------------------------------------------------


def optimizer_of(graph: Graph, **options) -> Optimizer:
    return Optimizer(graph, PLAIN, Options(**options))


def residual(depth: int = 6) -> Graph:
    """Blocks of a product, a ReLU and a sum: nothing but its own gradient reads what the ReLU makes."""
    layers = [layer for i in range(depth) for layer in (Layer("dense"), Layer("relu"), Layer("add", 3 * i))]
    return training_step(layers, rows=512, width=128)


def test_where_a_mask_frees_the_map_the_step_holds_less_and_moves_nothing():
    optimizer = optimizer_of(residual())
    plain = optimizer_of(residual(), tactics=("swap", "recompute"))
    limit = int(plain.planner.unmoved[0].apart.peak_bytes * 0.9)
    plan = optimizer.plan(limit)
    assert len(plan.encoded) == 5  # the last map hardly waits
    assert not plan.evictions
    assert len(plan.order) == len(set(plan.order))
    assert plan.planned_peak_bytes <= limit
    without = plain.plan(limit)
    assert without.evictions or len(without.order) > len(set(without.order))
    assert plan.seconds < without.seconds
    made = optimizer.rewrite(plan)
    verify(made)
    assert sum(node.op == custom_ops.ENCODE_MASK for node in made) == 5


def test_where_the_map_stays_for_another_kernel_masks_are_planned_for_tight_limits_only():
    """What follows is a product, whose gradient needs the map; then the map goes, and the ReLU's need not hold it."""
    chain = training_step([Layer(kind) for _ in range(6) for kind in ("dense", "relu")], rows=512, width=128)
    optimizer, without = optimizer_of(chain), optimizer_of(chain, tactics=("swap", "recompute"))
    assert optimizer.floor_bytes() <= without.floor_bytes()
    tight = int(1.1 * without.floor_bytes())
    plan = optimizer.plan(tight)
    assert plan.encoded
    assert plan.seconds < 0.98 * without.plan(tight).seconds
    roomy = without.planner.unmoved[0].apart.peak_bytes
    assert optimizer.plan(roomy, ordered=True).encoded == ()


def test_encodings_alone_move_nothing():
    optimizer = optimizer_of(residual(), tactics=("encode",))
    plan = optimizer.plan(optimizer.floor_bytes())
    assert plan.encoded
    assert not plan.evictions
    assert len(plan.order) == len(set(plan.order))


def test_what_one_variant_has_made_is_not_in_the_way_of_the_others():
    optimizer = optimizer_of(residual())
    without, within = ArenaSnapshot(1 << 20), ArenaSnapshot(2 << 20, instantiated=True)
    optimizer.assume_arena(without)
    rewriting = optimizer.search.alternatives.encoded(optimizer.search.planners.of)
    assert rewriting is not None
    plain = dataclasses.replace(optimizer.lowest(), encoded=())
    encoded = dataclasses.replace(plain, encoded=rewriting.encoded)
    optimizer.assume_made(encoded, within)
    assert optimizer.has_made(encoded)
    assert not optimizer.has_made(plain)
    assert optimizer.search.planners.of(optimizer.variant_of(encoded)).snapshot is within
    assert optimizer.search.planners.of(optimizer.variant_of(plain)).snapshot is without
    optimizer.assume_made(plain, without)
    assert optimizer.search.planners.of(optimizer.variant_of(encoded)).snapshot is within


def test_what_must_stay_is_not_encoded():
    optimizer = optimizer_of(residual(), keep=frozenset({"relu1:0"}))
    assert "relu1:0" in {e.tensor.name for e in find_encodings(optimizer.settled, PLAIN)}
    plan = optimizer.plan(optimizer.floor_bytes())
    kept = {e.kernel.name for e in find_encodings(optimizer.settled, PLAIN) if e.tensor.name == "relu1:0"}
    assert plan.encoded
    assert not kept & set(plan.encoded)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(training_steps(min_layers=4), st.floats(0, 1))
def test_encodings_never_cost_anything(graph, share):
    """With them no plan is slower, no floor is higher, and what is planned is carried out."""
    without, optimizer = optimizer_of(graph, tactics=("swap", "recompute")), optimizer_of(graph)
    floor = without.floor_bytes()
    assert optimizer.floor_bytes() <= floor
    limit = floor + int(max(0, without.baseline.peak_bytes - floor) * share)
    plain, plan = without.search.fastest(limit), optimizer.plan(limit, ordered=True)
    assert plain is not None
    assert plan.seconds <= plain.candidate.timing.total_s
    assert plan.planned_peak_bytes <= limit
    made = optimizer.rewrite(plan)
    verify(made)
    taken = {node.name for node in made if node.op in custom_ops.FROM_ENCODED}
    assert set(plan.encoded) == {name for name in taken if not name.startswith(custom_ops.AGAIN)}


def encoded_plan() -> tuple[Optimizer, Plan]:
    optimizer = optimizer_of(residual())
    plan = optimizer.plan(optimizer.floor_bytes())
    assert plan.encoded
    return optimizer, plan


def test_a_saved_plan_says_what_is_encoded():
    optimizer, plan = encoded_plan()
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.needs == "tfswap.ops.codecs"
    fresh = optimizer_of(residual())
    assert fresh.adopt(read, None).planned_peak_bytes == plan.planned_peak_bytes
    assert [n.name for n in fresh.rewrite(read)] == [n.name for n in optimizer.rewrite(plan)]


@pytest.mark.parametrize(
    ("encoded", "reported"),
    [
        (["loss"], "'loss', which this graph does not have, or which can't take one"),
        (["nothing"], "'nothing', which this graph does not have"),
        ([], "names the node 'tfswap/encoded/"),
    ],
)
def test_a_plan_for_other_encodings_is_refused(encoded, reported):
    optimizer, plan = encoded_plan()
    content = {**json.loads(plan.to_json()), "encoded": encoded}
    with pytest.raises(InvalidModel, match=reported):
        optimizer.rewrite(Plan.from_json(json.dumps(content)))


def test_a_plan_that_encodes_needs_the_tactic():
    _, plan = encoded_plan()
    with pytest.raises(InvalidModel, match='tactics leaves "encode" out'):
        optimizer_of(residual(), tactics=("swap", "recompute")).rewrite(plan)
    with pytest.raises(InvalidModel, match="plan.order names no kernels, and a plan that encodes fixes an order"):
        Plan.from_json(dataclasses.replace(plan, order=(), evictions=(), paired=()).to_json())


def test_the_report_names_what_is_encoded():
    optimizer, plan = encoded_plan()
    report = optimizer.report(plan)
    assert len(report.encoded) == len(plan.encoded) == 5
    for row in report.encoded:
        assert row.encoded_bytes == row.nbytes // 32
        assert row.reason.startswith("8.0 KiB in place of it for back")
    size = unit_of(report).text
    before, after = (
        sum(each) for each in zip(*((r.nbytes, r.encoded_bytes or 0) for r in report.encoded), strict=True)
    )
    assert f"{size(before)}  in 5 tensors, read as {size(after)}" in str(report)
