"""Kernels side by side in a planned order: which, and what they do to memory and time."""

from __future__ import annotations

import dataclasses

import pytest
from graphs import draw_kernels
from hypothesis import given
from hypothesis import strategies as st

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import kernel_seconds
from tfswap.analysis.dataflow import Dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.alignment import round_up
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.kernels.target import Target
from tfswap.passes.order import chain_nodes
from tfswap.passes.tactics.swap import insert_schedule
from tfswap.passes.verify import verify
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import Interval, build_schedule
from tfswap.planner import pairing
from tfswap.planner.pairing import bring_together, can_pair, gains, orders_with_room, side_by_side
from tfswap.planner.problem import Choice
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.timing import simulate_time

TWO_CORES = DeviceModel(intra_op_threads=2, inter_op_threads=2)
RATES = default_rates(TWO_CORES)
BYTES = 4 << 20  # of each product

# Two heads that need nothing of each other, with element-wise kernels in between.
HEADS = """\
%x = Placeholder() {dtype=float32} -> float32[16,256,256]
%a = Exp(%x) -> float32[16,256,256]
%q = BatchMatMulV2(%a, %a) {adj_x=false, adj_y=false} -> float32[16,256,256]
%s = Relu(%q) -> float32[16,256,256]
%k = BatchMatMulV2(%a, %x) {adj_x=false, adj_y=false} -> float32[16,256,256]
%t = Relu(%k) -> float32[16,256,256]
%r = BatchMatMulV2(%s, %t) {adj_x=false, adj_y=false} -> float32[16,256,256]
feeds %x
fetches %r
"""


def facts(text: str, device: DeviceModel = TWO_CORES) -> Dataflow:
    return analyse_dataflow(parse_graph(text), device)


def named(flow: Dataflow, words: str) -> list[int]:
    return [flow.place[name] for name in words.split()]


def words(flow: Dataflow, order: list[int]) -> str:
    return " ".join(flow.nodes[i].name for i in order)


def costs(flow: Dataflow) -> list[float]:
    return [kernel_seconds(node, RATES) for node in flow.nodes]


def together(flow: Dataflow, order: str) -> str:
    return words(flow, bring_together(flow, named(flow, order), costs(flow), RATES)[0])


def paired(flow: Dataflow, order: str, intervals: tuple[Interval, ...] = ()) -> tuple[int, ...]:
    return side_by_side(flow, Choice(named(flow, order), list(intervals)), costs(flow), gains(flow, costs(flow), RATES))


def peak(flow: Dataflow, order: str, at: tuple[int, ...]) -> int:
    return simulate_memory(flow, build_schedule(named(flow, order), (), at), live=True).peak_bytes


# --- which ------------------------------------------------------------------------------------------------


def test_kernels_of_one_core_come_together():
    flow = facts(HEADS)
    assert together(flow, "a q s k t r") == "a q k s t r"
    assert paired(flow, "a q k s t r") == (2,)
    assert paired(flow, "a q s k t r") == ()


def test_those_that_are_to_stay_where_they_are_do():
    flow = facts(HEADS)
    order = named(flow, "a q s k t r")
    found, pairs = bring_together(flow, order, costs(flow), RATES)
    assert pairs == [tuple(named(flow, "q k"))]
    assert found != order
    assert bring_together(flow, order, costs(flow), RATES, pairs) == (order, [])


def test_the_first_waits_where_the_second_cannot_come_sooner():
    flow = facts(
        HEADS.replace("%k = BatchMatMulV2(%a, %x)", "%l = Neg(%a) -> float32[16,256,256]\n%k = BatchMatMulV2(%l, %x)")
    )
    assert together(flow, "a q l k s t r") == "a l q k s t r"


def test_readers_of_the_first_wait_with_it():
    flow = facts(
        HEADS.replace("%k = BatchMatMulV2(%a, %x)", "%l = Neg(%a) -> float32[16,256,256]\n%k = BatchMatMulV2(%l, %x)")
    )
    assert together(flow, "a q s l k t r") == "a l q k s t r"


@given(st.data())
def test_any_order_stays_an_order(data):
    """Every kernel runs once, after all that it reads."""
    flow = facts(draw_kernels(data))
    order = [i for i, kernel in enumerate(flow.is_kernel) if kernel]
    cost_s = [data.draw(st.sampled_from([1e-5, 2e-4, 1e-3, 4e-3])) for _ in flow.nodes]
    for looped in (False, True):
        found, pairs = bring_together(flow, order, cost_s, RATES, looped=looped)
        assert sorted(found) == sorted(order)
        at = {i: position for position, i in enumerate(found)}
        assert all(at[d] < at[i] for i in order for d in flow.deps[i] if d in at)
        assert all(abs(at[first] - at[second]) == 1 for first, second in pairs)


def test_where_two_hold_too_much_each_has_another_partner(monkeypatch):
    text = """\
%x = Placeholder() {dtype=float32} -> float32[16,256,256]
%a = Exp(%x) -> float32[16,256,256]
%y = Placeholder() {dtype=float32} -> float32[16,256,128]
%q = BatchMatMulV2(%a, %x) {adj_x=false, adj_y=false} -> float32[16,256,256]
%k = BatchMatMulV2(%x, %a) {adj_x=false, adj_y=false} -> float32[16,256,256]
%m = BatchMatMulV2(%x, %y) {adj_x=false, adj_y=false} -> float32[16,256,128]
%s = Sum(%q, %c) {keep_dims=false} -> float32[]
%t = Sum(%k, %c) {keep_dims=false} -> float32[]
%u = Sum(%m, %c) {keep_dims=false} -> float32[]
%c = Const() -> int32[3] = (0, 1, 2)
feeds %x, %y
fetches %s, %t, %u
"""
    flow = facts(text)
    order = named(flow, "a q s k t m u")
    cost_s = costs(flow)
    assert words(flow, bring_together(flow, order, cost_s, RATES)[0]) == "a q k s t m u"
    tried: list[object] = []
    whole = pairing._Partners.bring_together
    monkeypatch.setattr(
        pairing._Partners, "bring_together", lambda self, order, apart: tried.append(apart) or whole(self, order, apart)
    )
    found = [words(flow, made) for made in orders_with_room(flow, order, cost_s, RATES)]
    assert any("q m" in made or "m q" in made for made in found), found
    assert len(tried) == len(set(tried)), "each is made once for all shares"


def test_kernels_that_need_each_other_stay_apart():
    flow = facts(HEADS.replace("BatchMatMulV2(%a, %x)", "BatchMatMulV2(%s, %x)"))
    assert together(flow, "a q s k t r") == "a q s k t r"
    flow = facts(HEADS.replace("BatchMatMulV2(%a, %x)", "BatchMatMulV2(%q, %x)"))
    assert not can_pair(flow, *named(flow, "q k"))


def test_kernels_that_use_all_cores_stay_apart():
    flow = facts(HEADS.replace("BatchMatMulV2", "Cumsum"))
    assert together(flow, "a q s k t r") == "a q s k t r"
    assert paired(flow, "a q k s t r") == ()


def test_on_one_core_there_are_no_pairs():
    flow = facts(HEADS)
    one = default_rates(DeviceModel(intra_op_threads=1))
    order = named(flow, "a q k s t r")
    cost_s = [kernel_seconds(n, one) for n in flow.nodes]
    assert side_by_side(flow, Choice(order, []), cost_s, gains(flow, cost_s, one)) == ()


@pytest.mark.parametrize(
    "first",
    [
        "%q = AddN(%a, %x, %x)",  # which terms it adds first depends on what it can write over
        "%q = RandomUniform(%a)",  # stateful
    ],
)
def test_what_is_not_part_of_a_pair(first):
    flow = facts(HEADS.replace("%q = BatchMatMulV2(%a, %a) {adj_x=false, adj_y=false}", first))
    assert not can_pair(flow, *named(flow, "q k"))
    assert not can_pair(flow, *named(flow, "k q"))


def test_a_sum_that_adds_in_one_order_is_part_of_a_pair():
    own = "%q = AddN(%a, %x, %x) {_kernel=b'tfswap'}"
    flow = facts(HEADS.replace("%q = BatchMatMulV2(%a, %a) {adj_x=false, adj_y=false}", own))
    assert can_pair(flow, *named(flow, "q k"))
    assert can_pair(flow, *named(flow, "k q"))


def test_what_is_fetched_or_elsewhere_is_not_part_of_a_pair():
    flow = facts(HEADS.replace("fetches %r", "fetches %r, %k"))
    assert not can_pair(flow, *named(flow, "q k"))
    elsewhere = parse_graph(HEADS)
    elsewhere["k"].device = "/device:CPU:1"
    flow = analyse_dataflow(elsewhere, TWO_CORES)
    assert not can_pair(flow, *named(flow, "q k"))


# A convolution's two gradients, each with temporaries.
GRADIENTS = """\
%g = Placeholder() {dtype=float32} -> float32[16,32,32,64]
%s = Const() -> int32[4] = (16, 32, 32, 64)
%f = Const() -> int32[4] = (3, 3, 64, 64)
%w = Placeholder() {dtype=float32} -> float32[3,3,64,64]
%e = Exp(%g) -> float32[16,32,32,64]
%i = Conv2DBackpropInput(%s, %w, %e) {strides=(1, 1, 1, 1), padding=b'SAME'} -> float32[16,32,32,64]
%j = Conv2DBackpropFilter(%e, %f, %e) {strides=(1, 1, 1, 1), padding=b'SAME'} -> float32[3,3,64,64]
%k = Relu(%i) -> float32[16,32,32,64]
%l = Neg(%j) -> float32[3,3,64,64]
feeds %g, %w
fetches %k, %l
"""


def temporary_bytes(flow: Dataflow, i: int) -> int:
    return sum(n for event, n in flow.events[i] if event == "temp")


def test_kernels_may_have_temporaries():
    flow = facts(GRADIENTS)
    i, j = named(flow, "i j")
    assert temporary_bytes(flow, i)
    assert can_pair(flow, i, j)
    assert can_pair(flow, j, i)
    assert flow.allocations(i) == len(flow.events[i]) == 2
    flow = facts(GRADIENTS.replace("%k = Relu(%i)", "%k = Relu(%e)"))
    assert not can_pair(flow, *named(flow, "i k"))  # which may write over e


def test_an_eviction_between_two_kernels_keeps_them_apart():
    flow = facts(HEADS)
    a = flow.value_of[flow.nodes[flow.place["a"]], 0]
    assert paired(flow, "a q k s t r", (Interval(a, 0, 2, 2, 2),)) == ()
    assert paired(flow, "a q k s t r", (Interval(a, 0, 1, 1, 2),)) == (2,)


# --- memory and time ----------------------------------------------------------------------------------------


def test_what_the_two_read_is_held_until_both_have_ended():
    flow = facts(HEADS.replace("(%a, %x)", "(%x, %x)"))  # q is the last to read a
    apart, side = (
        simulate_memory(flow, build_schedule(named(flow, "a q k s t r"), (), at), live=True) for at in ((), (2,))
    )
    assert list(apart.during_bytes[:4]) == [2 * BYTES, 3 * BYTES, 3 * BYTES, 3 * BYTES]  # k takes the place of a
    assert list(side.during_bytes[:4]) == [2 * BYTES, 3 * BYTES, 4 * BYTES, 3 * BYTES]


def test_in_a_pair_no_buffer_is_forwarded():
    """Neither of the last reader of a tensor alone, nor of what the other one reads as well."""
    flow = facts(
        HEADS.replace("%q = BatchMatMulV2(%a, %a) {adj_x=false, adj_y=false}", "%q = Neg(%a)").replace(
            "%a, %x", "%x, %x"
        )
    )
    apart, side = (
        simulate_memory(flow, build_schedule(named(flow, "a q k s t r"), (), at), live=True) for at in ((), (2,))
    )
    assert list(apart.during_bytes[:3]) == [2 * BYTES, 2 * BYTES, 3 * BYTES]
    assert list(side.during_bytes[:3]) == [2 * BYTES, 3 * BYTES, 4 * BYTES]


READS_MORE = """\
%x = Placeholder() {dtype=float32} -> float32[16,256,256]
%c = Placeholder() {dtype=float32} -> float32[16,256,256]
%a = Exp(%x) -> float32[16,256,256]
%q = BatchMatMulV2(%a, %a) {adj_x=false, adj_y=false} -> float32[16,256,256]
%s = Relu(%q) -> float32[16,256,256]
%n = Neg(%c) -> float32[16,256,256]
%k = BatchMatMulV2(%a, %n) {adj_x=false, adj_y=false} -> float32[16,256,256]
%r = BatchMatMulV2(%s, %k) {adj_x=false, adj_y=false} -> float32[16,256,256]
feeds %x, %c
fetches %r
"""


@pytest.mark.parametrize("seconds", [1e-6, 1.0])
def test_what_a_partner_reads_comes_sooner_or_the_first_waits_for_it(seconds: float):
    flow = facts(READS_MORE)
    cost_s = costs(flow)
    cost_s[flow.place["n"]] = seconds
    assert words(flow, bring_together(flow, named(flow, "a q s n k r"), cost_s, RATES)[0]) == "a n q k s r"


def test_two_kernels_of_one_core_take_as_long_as_one():
    flow = facts(HEADS)
    cost_s = costs(flow)
    order = named(flow, "a q k s t r")
    apart, side = (simulate_time(flow, build_schedule(order, (), at), cost_s, RATES).total_s for at in ((), (2,)))
    assert apart - side == pytest.approx(cost_s[flow.place["q"]])


def test_copies_come_before_or_after_the_two():
    flow = facts(HEADS)
    order = named(flow, "a q k s t r")
    a = flow.value_of[flow.nodes[flow.place["a"]], 0]
    q = flow.value_of[flow.nodes[flow.place["q"]], 0]
    steps = build_schedule(order, [Interval(q, 1, 2, 3, 3), Interval(a, 0, 1, 2, 2)], (2,))
    kinds = [step.kind if step.subject not in order else flow.nodes[step.subject].name for step in steps]
    assert [s.kind for s in steps][:8] == [
        "run",
        "swap_out",
        "release",
        "swap_in",
        "await",
        "lead",
        "run",
        "swap_out",
    ], kinds
    assert [s.kind for s in steps][8:11] == ["release", "swap_in", "await"]


def test_temporaries_of_both_are_there_until_both_have_ended():
    flow = facts(GRADIENTS)
    i, j = named(flow, "i j")
    order = named(flow, "e i j k l")
    apart, side = (simulate_memory(flow, build_schedule(order, (), at), live=True) for at in ((), (2,)))
    both = sum(round_up(request.nbytes) for k in (i, j) for request in flow.requests[k])
    before = apart.before_bytes[1]
    assert side.during_bytes[2] == before + both
    assert apart.during_bytes[2] == before + both - round_up(temporary_bytes(flow, i))
    assert side.before_bytes[3] == apart.before_bytes[3]


def test_a_plan_keeps_apart_what_would_raise_its_peak():
    roomy = HEADS.replace("(%a, %x)", "(%x, %x)")
    tight = "".join(line for line in roomy.splitlines(keepends=True) if "%r" not in line) + "fetches %s, %t\n"
    for text, count in (
        (roomy, 1),
        (tight, 0),
    ):  # r has x and three more at the same time; in tight q and k would, a held
        unmoved = Optimizer(parse_graph(text), TWO_CORES).planner.unmoved
        assert {len(judged.within.choice.paired) for judged in unmoved} == {count}


def three_pairs() -> str:
    """Pairs of gradients that take a column buffer each, of 36 to 192 MiB."""
    lines: list[str] = []
    results: list[str] = []
    for height, width in ((128, 128), (192, 256), (256, 256)):
        image = f"%x{height * width}"
        lines.append(f"{image} = Placeholder() {{dtype=float32}} -> float32[1,{height},{width},64]")
        for name, size in ((f"{height * width}_0", 3), (f"{height * width}_1", 4)):
            lines.append(f"%f{name} = Const() -> int32[4] = ({size}, 3, 64, 64)")
            inputs = f"({image}, %f{name}, {image}) {{strides=(1, 1, 1, 1), padding=b'SAME'}}"
            lines.append(f"%g{name} = Conv2DBackpropFilter{inputs} -> float32[{size},3,64,64]")
            lines.append(f"%n{name} = Neg(%g{name}) -> float32[{size},3,64,64]")
            results.append(f"%n{name}")
    feeds = "feeds %x16384, %x49152, %x65536"
    return "\n".join([*lines, feeds, f"fetches {', '.join(results)}", ""])


def test_a_limit_between_is_used_for_the_pairs_that_it_has_room_for():
    planner = Optimizer(parse_graph(three_pairs()), TWO_CORES).planner
    sizes = ("16384", "49152", "65536")
    order = " ".join(f"g{n}_0 g{n}_1 n{n}_0 n{n}_1" for n in sizes)
    judged = planner.judged(Choice(named(planner.flow, order), []))
    all_peak_bytes = judged.fitting(float("inf")).peak_bytes
    room = all_peak_bytes - judged.apart.peak_bytes
    limits = [judged.apart.peak_bytes + room * n // 8 for n in range(9)]
    found = [judged.fitting(limit) for limit in limits]
    counts = [len(one.choice.paired) for one in found]
    assert (counts[0], counts[-1]) == (1, 3)
    assert 2 in counts
    assert [one.timing.total_s for one in found] == sorted((one.timing.total_s for one in found), reverse=True)
    assert [one.peak_bytes for one in found] == sorted(one.peak_bytes for one in found)
    assert all(one.peak_bytes <= limit for one, limit in zip(found, limits, strict=True))


# --- graphs -------------------------------------------------------------------------------------------------


def rewritten(order: str, at: tuple[int, ...]) -> Graph:
    graph = parse_graph(HEADS)
    flow = analyse_dataflow(graph.copy(), TWO_CORES)
    plan = Plan("", None, tuple(order.split()), (), 0, 0, 0, 1.0, "test", at)
    chain_nodes(graph, insert_schedule(graph, Target(DeviceModel()), flow, plan))
    verify(graph)
    return graph


def test_one_node_runs_the_two_and_the_rest_waits_for_both():
    graph = rewritten("a q k s t r", (2,))
    assert "q" not in graph
    assert "k" not in graph
    (both,) = (n for n in graph if n.op == custom_ops.PAIR)
    assert both.inputs == tuple(graph.tensor(name) for name in ("a", "a", "a", "x"))
    assert [(kernel.name, kernel.op) for kernel in both.attrs["kernels"]] == [(n, "BatchMatMulV2") for n in "qk"]
    assert both.attrs["allocations"] == 1
    s, t = graph["s"], graph["t"]
    assert (s.inputs, t.inputs) == ((both.out(0),), (both.out(1),))
    assert s in t.controls


def test_with_onednn_nothing_runs_side_by_side():
    """Its graph pass would not see the two."""
    plain, onednn = (Optimizer(parse_graph(HEADS), device) for device in (TWO_CORES, TWO_CORES._replace(onednn=True)))
    plan = plain.plan(None, ordered=True)
    assert plan.paired
    assert not onednn.plan(None, ordered=True).paired
    with pytest.raises(InvalidModel, match="side by side, which oneDNN's can't"):
        onednn.require_fit(plan)


@pytest.mark.parametrize(
    ("order", "at", "message"),
    [
        ("a q k s t r", (0,), "names the position 0"),
        ("a q k s t r", (2, 3), "names the position 3 after 2"),
        ("a q k s t r", (6,), "names the position 6"),
        ("a q s k t r", (2,), "runs 's' concurrently with 'q', and these two can't overlap"),
    ],
)
def test_a_plan_file_names_only_what_can_run_side_by_side(order, at, message):
    optimizer = Optimizer(parse_graph(HEADS), TWO_CORES)
    plan = optimizer.plan(None, ordered=True)
    assert plan.paired == (2,)
    optimizer.require_fit(Plan.from_json(plan.to_json()))
    damaged = dataclasses.replace(plan, order=tuple(order.split()), paired=at)
    with pytest.raises(InvalidModel, match=message):
        optimizer.require_fit(Plan.from_json(damaged.to_json()))
