"""Tensors that wait in a smaller form with identical bits: ranges, the rewrite, plans, and real steps."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import pairwise

import pytest
from layered_steps import Layer, training_step
from processes import on_arena
from test_passes import Golden

from tfswap.analysis.integer_ranges import Range, Ranges, narrowest
from tfswap.analysis.lossless_forms import Packing, smaller_form, sparse_bytes
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.request import as_rules
from tfswap.errors import InvalidModel
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.kernels.profile import Density, Profile, types_of
from tfswap.kernels.target import Target
from tfswap.passes.tactics.pack import pack_tensors
from tfswap.passes.verify import verify
from tfswap.plan.plan import Plan

PLAIN = DeviceModel()


# --- ranges -----------------------------------------------------------------------------------------------

INTEGERS = """
%x = Placeholder() {dtype=float32} -> float32[5,300,7]
%ids = Placeholder() {dtype=int64} -> int64[5,300]
%bytes = Placeholder() {dtype=uint8} -> uint8[5,300]
%flags = Placeholder() {dtype=bool} -> bool[5,300]
%two = Const() -> int64[] = (2,)
%nine = Const() -> int64[] = (9,)
%minus = Const() -> int64[] = (-4,)
%mixed = Const() -> int64[3] = (-2, 6, 1)
%huge = Const() -> int64[] = (4611686018427387904,)
"""


ANY_INT32, ANY_INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ArgMax(%x, %two) {} -> int64[5,300]", (0, 6)),
        ("ArgMin(%x, %ids) {} -> int64[5,300]", (0, 299)),
        ("MaxPoolWithArgmax(%x) {include_batch_in_index=false} -> float32[5,1,1], int64[5,1,1]", (-1, 2099)),
        ("MaxPoolWithArgmax(%x) {include_batch_in_index=true} -> float32[5,1,1], int64[5,1,1]", (-1, 10499)),
        ("TopKV2(%x, %two) {} -> float32[5,300,2], int32[5,300,2]", (0, 6)),
        ("Unique(%ids) {} -> int64[9], int32[1500]", (0, 1499)),
        ("Cast(%flags) {} -> int64[5,300]", (0, 1)),
        ("Cast(%bytes) {} -> int32[5,300]", (0, 255)),
        ("Cast(%x) {} -> int32[5,300,7]", ANY_INT32),
        ("Cast(%huge) {} -> int32[]", ANY_INT32),
        ("FloorMod(%ids, %nine) {} -> int64[5,300]", (0, 8)),
        ("FloorMod(%ids, %minus) {} -> int64[5,300]", ANY_INT64),
        ("FloorDiv(%mixed, %two) {} -> int64[3]", (-1, 3)),
        ("Minimum(%ids, %nine) {} -> int64[5,300]", (-(2**63), 9)),
        ("Maximum(%ids, %nine) {} -> int64[5,300]", (9, 2**63 - 1)),
        ("AddV2(%mixed, %nine) {} -> int64[3]", (7, 15)),
        ("Sub(%mixed, %nine) {} -> int64[3]", (-11, -3)),
        ("Mul(%mixed, %minus) {} -> int64[3]", (-24, 8)),
        ("Mul(%huge, %nine) {} -> int64[]", ANY_INT64),  # wraps around
        ("AddV2(%ids, %nine) {} -> int64[5,300]", ANY_INT64),
        ("ConcatV2(%mixed, %nine, %minus) {} -> int64[4]", (-2, 9)),  # the last is an axis
        ("OneHot(%ids, %two, %nine, %minus) {} -> int64[5,300,2]", (-4, 9)),
        ("SelectV2(%flags, %mixed, %nine) {} -> int64[5,300]", (-2, 9)),
        ("Range(%two, %nine, %two) {} -> int64[4]", (2, 8)),
        ("Range(%nine, %two, %minus) {} -> int64[2]", ANY_INT64),
        ("StatelessRandomUniformInt(%x, %x, %minus, %nine) {} -> int64[5,300]", (-4, 8)),
        ("StatelessRandomUniformIntV2(%x, %x, %x, %x, %minus, %nine) {} -> int64[5,300]", (-4, 8)),
        ("RandomUniformInt(%x, %minus, %nine) {} -> int64[5,300]", (-4, 8)),
        ("Cumsum(%mixed, %two) {} -> int64[3]", (-6, 18)),
        ("Pad(%nine, %two) {} -> int64[9]", (0, 9)),
        ("Fill(%two, %nine) {} -> int64[9]", (9, 9)),
        ("Tile(%ids, %two) {} -> int64[10,300]", ANY_INT64),
        ("Bitcast(%huge) {} -> uint64[]", (0, 2**64 - 1)),
        ("Identity(%mixed) {} -> int64[3]", (-2, 6)),
        ("Neg(%x) {} -> float32[5,300,7]", None),
        ("Max(%mixed, %two) {} -> int64[]", ANY_INT64),  # of nothing it is the least that there is
    ],
)
def test_ranges_follow_from_shapes_and_constants(line, expected):
    graph = parse_graph(f"{INTEGERS}%y = {line}\nfeeds %x, %ids, %bytes, %flags\nfetches %y\n")
    node = graph["y"]
    found = Ranges(graph)[node.out(len(node.outputs) - 1)]
    assert found == (None if expected is None else Range(*expected))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 255, "uint8"),
        (-1, 255, "uint16"),
        (-(2**31), 2**31 - 1, "uint32"),
        (7, 7, "uint8"),
        (-(2**63), 2**63 - 1, None),
    ],
)
def test_the_narrowest_type_is_counted_from_the_lowest(low, high, expected):
    assert narrowest(Range(low, high)) == expected


def test_on_a_gpu_only_booleans_are_packed():
    graph = parse_graph(f"{INTEGERS}%y = FloorMod(%ids, %nine) {{}} -> int64[5,300]\nfeeds %x\nfetches %y\n")
    gpu = DeviceModel("gpu")
    ranges = Ranges(graph)
    assert smaller_form(graph["y"].out(), ranges, gpu) is None
    assert smaller_form(graph["y"].out(), ranges, PLAIN) is not None
    assert smaller_form(graph["flags"].out(), ranges, gpu) is not None
    assert smaller_form(graph["x"].out(), ranges, PLAIN) is None


@pytest.mark.parametrize(
    ("dtype", "form"), [("float32", "bits"), ("float16", "bits"), ("int32", "uint8"), ("int8", None)]
)
def test_what_is_cast_from_booleans_is_packed(dtype, form):
    graph = parse_graph(f"{INTEGERS}%y = Cast(%flags) {{}} -> {dtype}[5,300]\nfeeds %x\nfetches %y\n")
    found = smaller_form(graph["y"].out(), Ranges(graph), PLAIN)
    assert (found and found.name) == form


# --- the rewrite ------------------------------------------------------------------------------------------


def test_late_readers_read_what_is_decoded():
    golden = Golden("pack")
    before = len(golden.graph)
    packings = [Packing("best:0", "uint8", (("late",),)), Packing("more:0", "bits", (("both",),))]
    assert pack_tensors(golden.graph, Target(PLAIN), packings) == len(golden.graph) - before == 6
    golden.graph.topological()
    golden.check()


@pytest.mark.parametrize(
    ("packing", "reported"),
    [
        (Packing("lost:0", "uint8", (("late",),)), "keeps 'lost:0' as uint8 from 0"),
        (Packing("best:0", "uint16", (("late",),)), "keeps 'best:0' as uint16"),
        (Packing("best:0", "uint8", (("late",),), minimum=1), "keeps 'best:0' as uint8 from 1"),
        (Packing("now:0", "bits", (("than",),)), "keeps 'now:0' as bits"),
        (Packing("best:0", "uint8", (("both",),)), "has 'both' read 'best:0'"),
        (Packing("best:0", "uint8", ((),)), "has None read 'best:0'"),
        (Packing("now:0", "sparse", (("than",),), capacity=9), "keeps 'now:0' as sparse of 9 values"),
    ],
)
def test_what_has_no_such_form_or_reader_is_refused(packing, reported):
    with pytest.raises(InvalidModel, match=reported):
        pack_tensors(Golden("pack").graph, Target(PLAIN), [packing])


# --- plans ------------------------------------------------------------------------------------------------


def read_late(made: str, read: str, axes: str, depth: int = 12, rows: int = 1 << 15) -> Graph:
    """What one line makes at the beginning of a long chain, as `at`, and another reads at its end, as `then`."""
    lines = [
        "%x = Placeholder() {dtype=float32} -> float32[ROWS,16,4]",
        "%axis = Const() {dtype=int32} -> int32[] = (2,)",
        made,
        "%h0 = Tanh(%x) {T=float32} ^at -> float32[ROWS,16,4]",
        *(f"%h{i + 1} = Tanh(%h{i}) {{T=float32}} -> float32[ROWS,16,4]" for i in range(depth)),
        "%axes = Const() {dtype=int32} -> int32[3] = (0, 1, 2)",
        f"%loss = Sum(%h{depth}, %axes) {{T=float32, Tidx=int32, keep_dims=false}} -> float32[]",
        read,
        f"%all = Const() {{dtype=int32}} -> int32[{axes.count(',') + 1}] = {axes}",
        "%sum = Sum(%then, %all) {T=float32, Tidx=int32, keep_dims=false} -> float32[]",
        "feeds %x",
        "fetches %sum, %loss",
    ]
    return parse_graph("\n".join(lines).replace("ROWS", str(rows)) + "\n")


def chosen_by_argmax() -> Graph:
    return read_late(
        "%at = ArgMax(%x, %axis) {T=float32, Tidx=int32, output_type=int64} -> int64[ROWS,16]",
        "%then = Cast(%at) {SrcT=int64, DstT=float32} ^loss -> float32[ROWS,16]",
        "(0, 1)",
    )


def optimizer_of(**options) -> Optimizer:
    return Optimizer(chosen_by_argmax(), PLAIN, Options(**options))


def floor_plan(optimizer: Optimizer) -> Plan:
    return optimizer.plan(optimizer.floor_bytes(), ordered=True)  # unordered is nothing to compare with: no constants


def test_positions_that_wait_long_wait_as_bytes():
    optimizer = optimizer_of(tactics=("encode",))
    plan = floor_plan(optimizer)
    assert plan.packed == (Packing("at:0", "uint8", (("then",),)),)
    assert plan.order.index("tfswap/encoded/at_0/EncodeIntegers") == plan.order.index("at") + 1
    assert plan.order.index("tfswap/encoded/at_0/DecodeIntegers") == plan.order.index("then") - 1
    verify(optimizer.rewrite(plan))
    (row,) = optimizer.report(plan).encoded
    assert (row.name, row.nbytes, row.encoded_bytes) == ("at:0", 8 * 16 << 15, 16 << 15)
    assert row.reason.startswith("512.0 KiB as uint8 for then")


@pytest.mark.parametrize("ready", ["", "^loss "])
def test_a_reader_of_the_shape_alone_reads_nothing_that_is_decoded(ready):
    """Where that comes late, the whole tensor waits for it, and no form helps."""
    late = f"""
%size = Shape(%at) {{T=int64, out_type=int32}} {ready}-> int32[2]
%then = Cast(%at) {{SrcT=int64, DstT=float32}} ^size ^loss -> float32[ROWS,16]
"""
    made = "%at = ArgMax(%x, %axis) {T=float32, Tidx=int32, output_type=int64} -> int64[ROWS,16]"
    optimizer = Optimizer(read_late(made, late.strip(), "(0, 1)"), PLAIN, Options(tactics=("encode",)))
    plan = floor_plan(optimizer)
    assert plan.packed == (() if ready else (Packing("at:0", "uint8", (("then",),)),))
    verify(optimizer.rewrite(plan))


def test_what_no_codec_takes_is_kept_with_the_reason():
    complex_map = "%at = Cast(%x) {SrcT=float32, DstT=complex64} -> complex64[ROWS,16,4]"
    graph = read_late(complex_map, "%then = Abs(%at) {T=complex64} ^loss -> float32[ROWS,16,4]", "(0, 1, 2)")
    optimizer = Optimizer(graph, PLAIN, Options(tactics=("encode",)))
    (row,) = (row for row in optimizer.report(floor_plan(optimizer)).rows if row.name == "at:0")
    assert (row.tactic, row.encoded_bytes) == ("keep", None)
    assert row.reason == "memory suffices without; no codec takes a complex64"


def test_packings_follow_the_tactic_and_what_is_kept():
    assert floor_plan(optimizer_of(tactics=("swap", "recompute"))).packed == ()
    assert floor_plan(optimizer_of(tactics=("encode",), keep=frozenset({"at:0"}))).packed == ()
    plan = floor_plan(optimizer_of(tactics=("encode",)))
    with pytest.raises(InvalidModel, match='tactics leaves "encode" out'):
        optimizer_of(tactics=("swap",)).rewrite(plan)


def test_a_saved_plan_says_what_is_packed():
    optimizer = optimizer_of(tactics=("encode",))
    plan = floor_plan(optimizer)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert read.needs == "tfswap.ops.codecs"
    assert optimizer_of(tactics=("encode",)).adopt(read, None).planned_peak_bytes == plan.planned_peak_bytes
    content = json.loads(plan.to_json())
    content["packed"][0]["form"] = "uint16"
    with pytest.raises(InvalidModel, match="keeps 'at:0' as uint16"):
        optimizer_of(tactics=("encode",)).rewrite(Plan.from_json(json.dumps(content)))
    with pytest.raises(InvalidModel, match="plan.order names no kernels, and a plan that encodes"):
        Plan.from_json(dataclasses.replace(plan, order=(), evictions=(), paired=(), splits=()).to_json())


# --- sparse rows ------------------------------------------------------------------------------------------


def sparse_net(share: float | dict[str, float] | None, **options) -> Optimizer:
    """Products with ReLUs in between, of whose values such a share was measured not to be zero, of all or by node."""
    graph = training_step([Layer(kind) for _ in range(6) for kind in ("dense", "relu")], rows=512, width=128)
    maps = [graph[f"relu{i}"].out() for i in range(1, 12, 2)]
    shares = share if isinstance(share, dict) else dict.fromkeys((t.node.name for t in maps), share)
    measured = tuple(Density(t.name, types_of(t.node), s) for t in maps if (s := shares[t.node.name]) is not None)
    profile = Profile("cpu", "a test", "", default_rates(PLAIN), None, (), measured)
    return Optimizer(graph, PLAIN, Options(profile=profile, **options))


@pytest.mark.parametrize(("share", "expected"), [(None, 0), (0.9, 0), (0.3, 4)])
def test_maps_are_sparse_where_that_was_measured_and_pays(share, expected):
    optimizer = sparse_net(share, tactics=("encode",))
    plan = optimizer.plan(optimizer.floor_bytes())
    assert [p.form for p in plan.packed] == ["sparse"] * expected
    if expected:
        assert {p.capacity for p in plan.packed} == {math.ceil(0.3 * 1.1 * 512 * 128)}
        assert not any(op.op == "ReluGrad" for op in optimizer.rewrite(plan) if op.name in plan.encoded)
        place = {name: position for position, name in enumerate(plan.order)}
        for packing in plan.packed:
            stem = f"tfswap/encoded/{packing.tensor[:-2]}_0/"
            assert place[f"{stem}DecodeSparse"] == place[packing.readers[0][0]] - 1
            assert place[f"{stem}EncodeSparse"] < place[f"{stem}DecodeSparse"] - 4


def test_a_plan_has_no_more_sparse_rows_than_its_limit_needs():
    optimizer = sparse_net(0.3, tactics=("encode",))
    floor, roomy = optimizer.floor_bytes(), optimizer.planner.unmoved[0].apart.peak_bytes
    plans = [optimizer.plan(floor + (roomy - floor) * i // 8, ordered=True) for i in range(9)]
    packed = [{p.tensor for p in plan.packed} for plan in plans]
    assert [len(tensors) for tensors in packed] == [4, 4, 3, 3, 2, 2, 1, 1, 0]
    assert all(less >= more for less, more in pairwise(packed))
    assert all(less.seconds >= more.seconds for less, more in pairwise(plans))
    assert len({plan.seconds for plan in plans}) == 5


def test_the_host_has_room_for_all_that_denser_maps_spill():
    """Where its limit is known: a step must not end by its data."""
    spilled_bytes = 5 * (512 * 128 - math.ceil(0.3 * 1.1 * 512 * 128))  # of one map
    for room in (0, 1, 2, 4):
        optimizer = sparse_net(0.3, tactics=("encode",), host_limit_bytes=room * spilled_bytes)
        assert len(optimizer.plan(optimizer.floor_bytes()).packed) == room


def test_what_frees_most_for_its_time_is_sparse_first():
    shares = {f"relu{i}": 0.1 + i / 40 for i in range(1, 12, 2)}  # sparser where it begins
    optimizer = sparse_net(shares, tactics=("encode",))
    stages = optimizer.search.alternatives.sparse(optimizer.search.planners.of, optimizer.search.variants.base)
    tensors = [[p.tensor for p in stage.packed] for stage in stages]
    assert tensors == [[f"relu{2 * i + 1}:0" for i in range(count)] for count in (1, 2, 3, 4)]
    assert len({stage.encoded for stage in stages}) == 1  # masks cost nothing


def test_sparse_rows_lower_the_floor_and_stay_out_of_what_is_rounded():
    dense, sparse = (sparse_net(share, tactics=("encode",)).floor_bytes() for share in (None, 0.2))
    assert sparse < 0.9 * dense
    rounded = sparse_net(0.2, precision=as_rules("fp16"))
    assert rounded.plan(rounded.floor_bytes()).packed == ()


def test_sparse_rows_have_the_bytes_that_the_op_gives_them():
    codecs = pytest.importorskip("tfswap.ops.codecs")
    import tensorflow as tf

    for shape, capacity in (((3, 100), 7), ((1000,), 256), ((2, 2, 5), 20)):
        tensor = tf.ones(shape)
        encoded, _ = codecs.encode_sparse(tensor, capacity)
        assert encoded.shape[0] == sparse_bytes(TensorType("float32", shape), capacity)


# --- real steps -------------------------------------------------------------------------------------------


def test_a_step_with_packed_integers_keeps_its_bits_and_its_limit():
    pytest.importorskip("tensorflow")

    def program():
        from encoded_nets import PackedNet
        from nets import floor_of, unoptimised

        import tfswap
        from tfswap.compiler import gains

        gains.STAGES = 1  # all that is packed, not as much as the limit needs
        net, options = PackedNet(), {"tactics": ("encode",)}
        floor = floor_of(net.traced(), net.x, **options)
        limit = floor + floor // 50  # the arena is another by then
        step = tfswap.optimize(net.traced(), memory_limit=limit, **options)
        made, peak = net.run(step, net.x, net.x[:5], net.x)
        # Last: what it leaves in the arena parts holes, and a step that is planned after it has another floor at times.
        reference = net.traced()
        expected, _ = unoptimised(lambda: net.run(reference, net.x, net.x[:5], net.x))
        packed = {p.tensor: p.form for p in step.plan().packed}
        return [made == expected, peak, limit, packed, str(step.report())]

    same, peak, limit, packed, report = on_arena(program)
    assert same
    assert peak <= limit, report
    assert packed["MaxPoolWithArgmax:1"] == "uint16", report
    assert "uint8" in packed.values(), report


def test_a_step_with_sparse_maps_keeps_its_bits_and_its_limit_also_where_they_are_denser():
    pytest.importorskip("tensorflow")

    def program():
        from encoded_nets import SparseNet
        from nets import floor_of, unoptimised

        import tfswap
        import tfswap.ops

        net = SparseNet()
        x, sparse, dense = net.x, net.sparse, net.dense
        step = net.traced()
        measured = tfswap.profile(step, x, sparse, steps=1)
        shares = {d.tensor: d.share for d in measured.densities}
        expected, _ = unoptimised(lambda: net.run(step, (x, sparse), (x, dense), (x[:99], sparse), (x, sparse)))
        options = {"tactics": ("encode",), "profile": measured}
        floor = floor_of(net.traced(), x, sparse, **options)
        limit = floor + floor // 25  # the arena is another by then
        optimized = tfswap.optimize(net.traced(), memory_limit=limit, **options)
        net.run(optimized, (x, sparse))
        spilled = [tfswap.ops.stats().spilled_bytes]
        made, peak = net.run(optimized, (x, sparse), (x, dense), (x[:99], sparse), (x, sparse))
        spilled.append(tfswap.ops.stats().spilled_bytes)
        forms = {p.tensor: p.form for p in optimized.plan().packed}
        return [made == expected, peak, limit, forms, spilled, shares, str(optimized.report())]

    same, peak, limit, forms, spilled, shares, report = on_arena(program)
    assert same
    assert peak <= limit, report
    assert set(forms.values()) == {"sparse"}, report
    assert 0 < shares["Relu:0"] < 0.5
    assert spilled[0] == 0 < spilled[1]
