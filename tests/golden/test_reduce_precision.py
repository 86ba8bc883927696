"""Tensors that wait for the backward pass in fewer bits: which tensors, the rewrite, the plans, and steps with them."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
from layered_steps import Layer, training_step
from processes import on_arena
from test_passes import Golden

from tfswap.analysis.phases import backward_nodes
from tfswap.analysis.reduced_precision import FORMATS, Reduction, requested_precisions, saved_tensors
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.request import as_rules
from tfswap.errors import InvalidModel, TfswapError
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.permits import SLICE, TENSOR_TACTICS
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.reduce_precision import reduce_precision
from tfswap.passes.verify import verify
from tfswap.plan.plan import Plan

PLAIN = DeviceModel()


def chain(depth: int = 6) -> Graph:
    return training_step([Layer(kind) for _ in range(depth) for kind in ("dense", "relu")], rows=512, width=128)


def optimizer_of(precision: object = "fp8", **options) -> Optimizer:
    return Optimizer(chain(), PLAIN, Options(precision=as_rules(precision), **options))


# --- which tensors ----------------------------------------------------------------------------------------

STEP = """
%x = Placeholder() {{dtype={dtype}}} -> {dtype}[8,4]
%handle = Placeholder() {{dtype=resource}} -> resource[]
%weights = ReadVariableOp(%handle) {{dtype={dtype}}} -> {dtype}[4,4]
%scaled = Square(%weights) {{T={dtype}}} -> {dtype}[4,4]
%rows = MatMul(%x, %scaled) {{T={dtype}, transpose_a=false, transpose_b=false}} -> {dtype}[8,4]
%map = Sigmoid(%rows) {{T={dtype}}} -> {dtype}[8,4]
%tall = Reshape(%map, %size) {{T={dtype}, Tshape=int32}} -> {dtype}[4,8]
%size = Const() {{dtype=int32}} -> int32[2]
%axis = Const() {{dtype=int32}} -> int32[]
%means = Mean(%map, %axis) {{T={dtype}, Tidx=int32, keep_dims=false}} -> {dtype}[4]
%tanh = Tanh(%map) {{T={dtype}}} -> {dtype}[8,4]
%skip = AddV2(%map, %rows) {{T={dtype}}} -> {dtype}[8,4]
%begun = SigmoidGrad(%map, %tanh) {{T={dtype}}} -> {dtype}[8,4]
%late = Mul(%begun, %tall2) {{T={dtype}}} -> {dtype}[8,4]
%tall2 = Reshape(%tall, %size2) {{T={dtype}, Tshape=int32}} -> {dtype}[8,4]
%size2 = Const() {{dtype=int32}} -> int32[2]
%change = MatMul(%late, %scaled) {{T={dtype}, transpose_a=false, transpose_b=true}} -> {dtype}[8,4]
%norm = Mul(%change, %means) {{T={dtype}}} -> {dtype}[8,4]
feeds %x, %handle
fetches %norm, %tanh, %skip
"""


def step(dtype: str = "float32") -> Graph:
    return parse_graph(STEP.format(dtype=dtype))


def test_only_feature_maps_of_the_forward_pass_are_saved_ones():
    """Not weights and what is made of them, statistics, results, or what only the forward pass reads."""
    graph = step()
    assert {n.name for n in backward_nodes(graph)} == {"begun", "tall2", "late", "change", "norm"}
    saved = saved_tensors(graph)
    assert set(saved) == {"map:0"}
    assert {n.name for n in saved["map:0"].backward} == {"begun", "late"}  # one of them through two views
    assert {n.name for n in saved["map:0"].forward} == {"means", "tanh", "skip"}


@pytest.mark.parametrize(
    ("factor", "is_backward"),
    [
        ("Cos(%map) {T=float32} -> float32[8,4]", True),
        ("Square(%map) {T=float32} -> float32[8,4]", True),
        ("Sign(%map) {T=float32} -> float32[8,4]", False),  # of what is rounded to 0 it would be another
    ],
)
def test_what_makes_factors_for_gradients_is_of_the_backward_pass(factor, is_backward):
    """But not the forward pass where no loss is fetched, which gradients alone read as well."""
    graph = parse_graph(f"""
%x = Placeholder() {{dtype=float32}} -> float32[8,4]
%map = Tanh(%x) {{T=float32}} -> float32[8,4]
%out = Sin(%map) {{T=float32}} -> float32[8,4]
%seed = SigmoidGrad(%out, %out) {{T=float32}} -> float32[8,4]
%factor = {factor}
%change = Mul(%seed, %factor) {{T=float32}} -> float32[8,4]
feeds %x
fetches %change
""")
    assert {n.name for n in backward_nodes(graph)} == {"seed", "change"} | ({"factor"} if is_backward else set())
    assert set(saved_tensors(graph)) == {"out:0", "map:0" if is_backward else "factor:0"}


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_other_types_stay(dtype):
    assert not saved_tensors(step(dtype))


@pytest.mark.parametrize(
    ("op", "backward"),
    [
        ("Conv2DBackpropInput", False),  # a transposed convolution is a layer
        ("Conv2DBackpropFilter", True),
        ("StopGradient", False),
        ("ResourceApplyGradientDescent", False),
        ("SoftmaxCrossEntropyWithLogits", False),  # but what reads its gradient
    ],
)
def test_gradients_are_known_by_their_kernels(op, backward):
    graph = parse_graph(f"""
%x = Placeholder() {{dtype=float32}} -> float32[8,4]
%y = {op}(%x) {{}} -> float32[8], float32[8,4]
%loss = Neg(%y) {{T=float32}} -> float32[8]
%next = Neg(%y:1) {{T=float32}} -> float32[8,4]
feeds %x
fetches %loss, %next
""")
    found = {node.name for node in backward_nodes(graph)}
    by_output = {"next"} if op.startswith("Softmax") else set()
    assert found == ({"y", "loss", "next"} if backward else by_output)


def test_the_first_pattern_that_fits_holds():
    saved = saved_tensors(chain())
    rules = as_rules([("relu3", "exact"), ("relu[15]", "int8"), ("relu*", "fp16")])
    asked = requested_precisions(saved, rules, smallest_bytes=1)
    assert asked == {"relu1:0": "int8", "relu5:0": "int8", "relu7:0": "fp16", "relu9:0": "fp16", "relu11:0": "fp16"}
    assert not requested_precisions(saved, rules, smallest_bytes=1 << 30)
    with pytest.raises(InvalidModel, match="'rellu\\*', and no float .* for example, relu1, relu3"):
        requested_precisions(saved, as_rules({"rellu*": "fp8"}), smallest_bytes=1)


def test_where_nothing_can_be_reduced_the_step_stays_and_one_line_says_so(caplog):
    """One setting may be for a step that trains and for one that evaluates."""
    graph = parse_graph("""
%x = Placeholder() {dtype=float32} -> float32[64,64]
%y = Tanh(%x) {T=float32} -> float32[64,64]
feeds %x
fetches %y
""")
    with caplog.at_level(logging.WARNING, "tfswap"):
        assert not Optimizer(graph, PLAIN, Options(precision=as_rules("fp8"))).plan("1MiB").reduced
    (record,) = caplog.records
    assert "precision={'*': 'fp8'} reduces nothing" in record.getMessage()
    with pytest.raises(InvalidModel, match=r"'y\*', and no float .* for example, none"):
        Optimizer(graph, PLAIN, Options(precision=as_rules({"y*": "fp8"})))


def test_what_has_no_fewer_bits_stays():
    saved = saved_tensors(step("float16"))
    assert requested_precisions(saved, as_rules("fp16"), smallest_bytes=1) == {}
    assert requested_precisions(saved, as_rules("fp8"), smallest_bytes=1) == {"map:0": "fp8"}


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ("fp7", "precision names 'fp7'; known are 'bf16'"),
        ({"a": "magic"}, "precision names 'magic'"),
        (8, "precision is 8, of type int: give one of"),
        ({"a": 8}, "precision is {'a': 8}, of type dict"),
        (["fp8"], "precision is ['fp8'], of type list"),
    ],
)
def test_malformed_rules_are_refused(given, reported):
    with pytest.raises(TfswapError) as error:
        Options(precision=as_rules(given))
    assert reported in str(error.value)


# --- the rewrite ------------------------------------------------------------------------------------------


def test_the_backward_pass_reads_what_is_decoded():
    golden = Golden("reduce_precision")
    before = len(golden.graph)
    reduction = Reduction("map:0", "fp8", (("change",), ("back",)))
    assert reduce_precision(golden.graph, Target(PLAIN), [reduction]) == len(golden.graph) - before == 5
    golden.graph.topological()
    golden.check()


@pytest.mark.parametrize(
    ("tensor", "precision", "readers"),
    [
        ("rows:0", "fp8", (("begun",),)),
        ("map:0", "fp7", (("begun",),)),
        ("map:0", "fp8", (("tanh",),)),  # of the forward pass
        ("map:0", "fp8", ((),)),
    ],
)
def test_what_the_backward_pass_does_not_read_is_not_rounded(tensor, precision, readers):
    with pytest.raises(InvalidModel, match="this plan (keeps|has)"):
        reduce_precision(step(), Target(PLAIN), [Reduction(tensor, precision, readers)])


def test_what_encodes_runs_after_the_forward_pass_and_what_decodes_late():
    optimizer = optimizer_of(tactics=())
    plan = optimizer.plan(optimizer.floor_bytes())
    place = {name: position for position, name in enumerate(plan.order)}
    assert len(plan.reduced) == 4
    for reduction in plan.reduced:
        layer = int(reduction.tensor[4:-2])
        stem = f"tfswap/encoded/relu{layer}_0/"
        assert place[f"dense{layer + 1}"] < place[f"{stem}EncodeFloats"] < place[f"relu{layer + 2}"] + 3
        assert place[f"{stem}DecodeFloats"] == place[f"change{layer + 1}"] - 1


# --- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", FORMATS)
def test_what_is_asked_for_is_done_whatever_the_limit_is(precision):
    optimizer = optimizer_of(precision)
    floor = optimizer.floor_bytes()
    plans = [optimizer.plan(floor), optimizer.plan("99%", ordered=True)]
    assert plans[0].reduced == plans[1].reduced
    assert {r.precision for r in plans[0].reduced} == {precision}
    for plan in plans:
        made = optimizer.rewrite(plan)
        verify(made)
        ops = {n.op for n in made}
        assert {FORMATS[precision].encode, FORMATS[precision].decode, custom_ops.MULTIPLY_BY_MASK} <= ops
        assert "ReluGrad" not in ops  # the sign is kept exactly


def test_nothing_is_rounded_by_default():
    plan = Optimizer(chain(), PLAIN).plan("60%")
    assert plan.reduced == ()


def test_fewer_bits_take_less():
    floors = [optimizer_of(p, tactics=()).floor_bytes() for p in (None, "fp16", "fp8", "int4")]
    assert floors == sorted(floors, reverse=True)
    assert floors[-1] < 0.75 * floors[0]


def test_what_must_stay_is_not_rounded():
    plan = optimizer_of(keep=frozenset({"relu3:0"})).plan("60%")
    assert {r.tensor for r in plan.reduced} == {"relu1:0", "relu5:0", "relu7:0"}


def test_a_saved_plan_says_what_is_rounded():
    optimizer = optimizer_of()
    plan = optimizer.plan("60%")
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.needs == "tfswap.ops.codecs"
    fresh = optimizer_of()
    assert fresh.adopt(read, None).planned_peak_bytes == plan.planned_peak_bytes
    assert [n.name for n in fresh.rewrite(read)] == [n.name for n in optimizer.rewrite(plan)]


def test_a_plan_that_rounds_needs_to_be_asked_for():
    plan = optimizer_of().plan("60%")
    for other in (None, "fp16", {"relu1": "exact", "*": "fp8"}):
        with pytest.raises(InvalidModel, match="keeps 'relu1:0' as fp8 .* precision does not request"):
            optimizer_of(other).rewrite(plan)
    with pytest.raises(InvalidModel, match="plan.order names no kernels"):
        Plan.from_json(dataclasses.replace(plan, order=(), evictions=(), paired=()).to_json())
    content = json.loads(plan.to_json())
    content["reduced"][0]["readers"] = [["loss"]]
    with pytest.raises(InvalidModel, match="has 'loss' read"):
        optimizer_of().rewrite(Plan.from_json(json.dumps(content)))


def test_the_report_states_the_worst_error():
    optimizer = optimizer_of()
    report = optimizer.report(optimizer.plan("60%"))
    assert len(report.reduced) == 4
    for row in report.reduced:
        assert row.precision == "fp8"
        assert row.worst_error == "within 2^-4 of its size, below 2^-6 within 2^-10; beyond 240 it is that"
        assert row.worst_error in row.reason
        assert row.encoded_bytes == row.nbytes // 4 + row.nbytes // 32  # rounded for one kernel, a mask for another
    assert "4 of them rounded, so that gradients differ" in str(report)


def test_a_step_with_rounded_tensors_has_no_kernels_in_slices():
    """A floor tries all forms that the tactics allow."""
    tactics = (*TENSOR_TACTICS, SLICE)
    assert optimizer_of(tactics=tactics).floor_bytes() == optimizer_of(tactics=TENSOR_TACTICS).floor_bytes()


# --- real steps -------------------------------------------------------------------------------------------


def test_the_forward_pass_is_exact_and_gradients_are_as_close_as_their_bits_say():
    pytest.importorskip("tensorflow")

    def program():
        from encoded_nets import RoundedNet, worst
        from nets import floor_of, unoptimised

        import tfswap

        net = RoundedNet()
        reference = net.traced()
        expected, changes, _ = unoptimised(lambda: net.run(reference, net.x))
        result = {}
        for precision in ("fp16", "bf16", "fp10", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4"):
            options = {"precision": precision, "tactics": ("swap", "encode")}
            floor = floor_of(net.traced(), net.x, **options)
            limit = floor + floor // 10
            step = tfswap.optimize(net.traced(), memory_limit=limit, **options)
            losses, made, peak = net.run(step, net.x)
            again, other, _ = net.run(step, net.x)
            net.run(step, net.x[:5])
            same_again = losses == again and [w.tobytes() for w in made] == [w.tobytes() for w in other]
            fits = peak <= limit
            result[precision] = [losses == expected, worst(made, changes), fits, same_again, len(step.plan().reduced)]
        return result

    found = on_arena(program)
    for precision, (same_loss, error, fits, repeats, count) in found.items():
        assert same_loss, precision
        assert fits, precision
        assert repeats, precision
        assert count >= 4, precision
        assert error > 0, precision
    errors = {precision: error for precision, (_, error, *_) in found.items()}
    # A value's worst relative error is half a unit in its last place; a sum of many has less.
    assert errors["fp16"] < 2**-11
    assert errors["bf16"] < 2**-8
    assert errors["fp10"] < 2**-5
    assert max(errors["fp8"], errors["fp8_e4m3"]) < 2**-4
    assert errors["fp8_e5m2"] < 2**-3
    assert errors["int8"] < 2**-7 < errors["int4"] < 2**-3


def test_a_saved_model_carries_the_precision(tmp_path):
    pytest.importorskip("tensorflow")

    def program():
        import tensorflow as tf
        from encoded_nets import RoundedNet, worst
        from nets import unoptimised

        import tfswap.ops.codecs

        net, model = RoundedNet(), tf.Module()
        model.weights, model.train_step = net.weights, net.traced()
        given, made = str(tmp_path / "in"), str(tmp_path / "out")
        tf.saved_model.save(model, given)
        options = {"memory_limit": "70%", "batch_size": 32, "precision": {"Relu*": "fp8"}}
        report = tfswap.optimize_graph(given, made, **options)
        loaded = tf.saved_model.load(made)
        expected, changes, _ = unoptimised(lambda: net.run(model.train_step, net.x))
        net.weights = list(loaded.weights)
        losses, found, _ = net.run(loaded.train_step, net.x)
        return [losses == expected, worst(found, changes), len(report.reduced)]

    found = on_arena(program)
    same_loss, error, count = found
    assert same_loss
    assert 0 < error < 2**-4
    assert count >= 1
