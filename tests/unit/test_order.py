"""Orders of kernels, on graphs made without TensorFlow."""

from __future__ import annotations

from functools import partial

from graphs import training_steps
from hypothesis import given
from planner_problems import CPU, costs, facts, kernels, live_peak, named, postponed_order, slow

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.planner import ordering


@slow
@given(training_steps())
def test_orders_are_topological_and_the_chosen_one_holds_no_more_than_the_traced(graph):
    flow = analyse_dataflow(graph, CPU)
    seconds = costs(flow)
    traced = ordering.traced_order(flow)
    demand = ordering.demand_order(flow, traced)
    for order in (
        traced,
        demand,
        ordering.early_update_order(flow, demand),
        ordering.greedy_order(flow, demand),
    ):
        assert sorted(order) == list(range(len(flow.nodes)))
        place = {i: p for p, i in enumerate(order)}
        assert all(place[d] < place[i] for i in order for d in flow.deps[i])
    chosen = ordering.choose_order(flow, seconds)
    assert sorted(chosen) == kernels(flow)
    place = {i: p for p, i in enumerate(chosen)}
    for i in chosen:
        assert all(place[d] < place[i] for d in flow.deps[i] if flow.is_kernel[d])
    kernels_only = [[i for i in order if flow.is_kernel[i]] for order in (traced, demand)]
    best = min(map(partial(live_peak, flow), kernels_only))
    for order in kernels_only:
        postponed = postponed_order(flow, order)
        assert sorted(postponed) == kernels(flow)
        place = {i: p for p, i in enumerate(postponed)}
        assert all(place[d] < place[i] for i in postponed for d in flow.deps[i] if flow.is_kernel[d])
        assert live_peak(flow, postponed) <= live_peak(flow, order)
    assert live_peak(flow, chosen) <= best * ordering.PEAK_TIE


def test_a_comparison_that_is_read_late_runs_when_it_is_the_last_to_read_what_is_larger():
    flow = facts("""
%x = Placeholder() {dtype=float32} -> float32[1024]
%zero = Const() -> float32[]
%a = Exp(%x) {T=float32} -> float32[1024]
%b = Maximum(%a, %zero) {T=float32} -> float32[1024]
%c = Exp(%b) {T=float32} -> float32[1024]
%same = Neg(%b) {T=float32} -> float32[1024]
%more = GreaterEqual(%a, %zero) {T=float32} -> bool[1024]
%g = SelectV2(%more, %c, %same) {T=float32} -> float32[1024]
feeds %x
fetches %g
""")
    order = ordering.greedy_order(flow, ordering.traced_order(flow))
    # Not before `b`, which reads `a` as well; and not `same`, which gains nothing.
    assert [flow.nodes[i].name for i in order if flow.is_kernel[i]] == ["a", "b", "more", "c", "same", "g"]


def test_what_needs_most_itself_waits_for_what_frees_others(monkeypatch):
    """The gradient of a large weight and its update go last, and the larger of two after the smaller; no later than
    that: what holds a map again comes behind them.
    """
    flow = facts("""
%x = Placeholder() {dtype=float32} -> float32[256]
%w = VarHandleOp() -> resource[]
%v = VarHandleOp() -> resource[]
%a = Exp(%x) {T=float32} -> float32[65536]
%b = Tanh(%a) {T=float32} -> float32[256]
%larger = MatMul(%b, %x) {T=float32} -> float32[16,65536]
%update = AssignSubVariableOp(%w, %larger)
%large = MatMul(%b, %b) {T=float32} -> float32[8,65536]
%after = AssignSubVariableOp(%v, %large)
%g = MatMul(%b, %b) {T=float32} -> float32[65536]
%h = MatMul(%g, %a) {T=float32} -> float32[256]
%again = Tanh(%h) {T=float32} -> float32[131072]
%end = MatMul(%again, %h) {T=float32} -> float32[131072]
feeds %x
fetches %end
targets %update, %after
""")
    order = postponed_order(flow, named(flow, "a b larger update large after g h again end"))
    assert order == named(flow, "a b large after g h larger update again end")
    assert order == postponed_order(flow, order)
    chosen = ordering.choose_order(flow, costs(flow))
    assert live_peak(flow, chosen) == live_peak(flow, order)
    assert ordering.lower_order(flow, chosen) is None
    monkeypatch.setattr(ordering, "postponed_order", lambda flow, kernels, memory: (list(kernels), memory))
    chosen = ordering.choose_order(flow, costs(flow))
    assert live_peak(flow, chosen) > live_peak(flow, order)
    lower = ordering.lower_order(flow, chosen)
    assert lower is not None and live_peak(flow, lower) == live_peak(flow, order)


def test_a_step_without_kernels_has_an_order():
    flow = facts("%x = Placeholder() {dtype=float32} -> float32[256]\nfeeds %x\nfetches %x\n")
    assert ordering.choose_order(flow, costs(flow)) == []


def test_what_reads_a_shape_waits_until_it_is_needed():
    flow = facts("""
%x = Placeholder() {dtype=float32} -> float32[1024]
%zero = Const() -> float32[]
%a = Exp(%x) {T=float32} -> float32[1024]
%shape = Shape(%a) {T=float32, out_type=int32} -> int32[1]
%fill = Fill(%shape, %zero) {T=float32} -> float32[1024]
%b = Exp(%a) {T=float32} -> float32[1024]
%c = Exp(%b) {T=float32} -> float32[1024]
%g = Add(%fill, %c) {T=float32} -> float32[1024]
feeds %x
fetches %g
""")
    order = ordering.demand_order(flow, ordering.traced_order(flow))
    assert [flow.nodes[i].name for i in order if flow.is_kernel[i]] == ["a", "shape", "b", "c", "fill", "g"]


@slow
@given(training_steps())
def test_updates_come_as_soon_as_what_they_need_is_there(graph):
    """Between the last thing that others need too and the update there is only the optimiser's arithmetic."""
    flow = analyse_dataflow(graph, CPU)
    order = ordering.early_update_order(flow, ordering.traced_order(flow))
    place = {i: p for p, i in enumerate(order)}
    writes = [i for i in order if flow.updates[i]]
    own = {i for w in writes for i in (w, *flow.deps[w])}
    for w in writes:
        last = max(place[d] for d in flow.deps[w])
        between = order[last + 1 : place[w]]
        assert all(i in own for i in between), [flow.nodes[i].name for i in between]
