"""Orders that are searched, compared with all orders of small steps, made without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from graphs import training_steps
from hypothesis import given
from layered_steps import Layer, training_step
from planner_problems import CPU, costs, kernels, live_peak, slow

from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.dataflow import Dataflow
from tfswap.ir.text import parse_graph
from tfswap.kernels.target import Target
from tfswap.planner import exact_order, order_search, ordering
from tfswap.planner.planner import Planner
from tfswap.simulator.kernel_replay import KernelReplay

SIZES = (256, 1024, 4096, 65536)


def small_step(seed: int, count: int = 9) -> Dataflow:
    """A random step of elementwise kernels, so small that all of its orders can be tried."""
    draw = Random(seed)
    lines = ["%x = Placeholder() {dtype=float32} -> float32[1024]", "%v = VarHandleOp() -> resource[]"]
    names = ["x"]
    for n in range(count):
        read = draw.choice(names[-4:]), draw.choice(names[-6:])
        op, size = draw.choice((("Exp", 1), ("MatMul", 2), ("MatMul", 2))), draw.choice(SIZES)
        inputs = ", ".join(f"%{name}" for name in read[: op[1]])
        lines.append(f"%k{n} = {op[0]}({inputs}) {{T=float32}} -> float32[{size}]")
        names.append(f"k{n}")
    lines += [f"%u = AssignSubVariableOp(%v, %{draw.choice(names[1:])})", "feeds %x, %v", f"fetches %{names[-1]}"]
    return analyse_dataflow(parse_graph("\n".join([*lines, "targets %u"])), CPU)


def all_orders(flow: Dataflow) -> Iterator[list[int]]:
    needs = {i: flow.kernels_before(i) for i in kernels(flow)}

    def after(order: list[int]) -> Iterator[list[int]]:
        if len(order) == len(needs):
            yield order
        for i in needs:
            if i not in order and needs[i] <= {*order}:
                yield from after([*order, i])

    return after([])


def is_order(flow: Dataflow, order: list[int]) -> bool:
    place = {i: p for p, i in enumerate(order)}
    return sorted(order) == kernels(flow) and all(place[d] < place[i] for i in order for d in flow.kernels_before(i))


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_a_small_step_peaks_below_the_exact_one(seed: int):
    flow = small_step(seed)
    least, most = 2**60, 0
    for count, order in enumerate(all_orders(flow)):
        if count == 3000:
            break  # those that come first; any lower one would show a fault
        least, most = min(least, live_peak(flow, order)), max(most, live_peak(flow, order))
    found = exact_order.lowest_order(flow, kernels(flow), most_sets=10**6)
    assert found is not None and is_order(flow, found)
    assert live_peak(flow, found) <= least
    if count < 3000:
        assert live_peak(flow, found) == least
    searched = order_search.searched(flow, kernels(flow), 20_000, 300)
    assert is_order(flow, searched)
    assert live_peak(flow, found) <= live_peak(flow, searched) <= live_peak(flow, kernels(flow))


@pytest.mark.parametrize("seed", range(4))
def test_what_is_live_depends_on_which_kernels_have_run(seed: int):
    flow = small_step(seed, 7)
    live: dict[frozenset[int], int] = {}
    for order in all_orders(flow):
        replay, done = KernelReplay(flow, order), frozenset[int]()
        for kernel in order:
            replay.run(kernel)
            done |= {kernel}
            assert live.setdefault(done, replay.live_bytes) == replay.live_bytes


def test_a_step_with_too_many_sets_is_left_to_the_search():
    flow = analyse_dataflow(training_step([Layer("dense", i) for i in range(6)], 256, 64), CPU)
    order = ordering.choose_order(flow, costs(flow))
    assert exact_order.lowest_order(flow, order, most_sets=1) is None
    assert exact_order.lowest_order(flow, order, most_kernels=3) is None


@slow
@given(training_steps())
def test_a_searched_order_peaks_no_higher_and_is_an_order(graph):
    flow = analyse_dataflow(graph, CPU)
    traced = [i for i in ordering.traced_order(flow) if flow.is_kernel[i]]
    found = order_search.searched(flow, traced, 20_000, 200)
    assert is_order(flow, found)
    assert live_peak(flow, found) <= live_peak(flow, traced)
    exact = exact_order.lowest_order(flow, traced, most_sets=300)
    assert exact is None or live_peak(flow, exact) <= live_peak(flow, found)


def branches() -> Dataflow:
    """Several branches, each a large tensor that one kernel reduces: traced side by side, all are held."""
    lines = ["%x = Placeholder() {dtype=float32} -> float32[256]"]
    for n in range(6):
        lines.append(f"%a{n} = MatMul(%x, %x) {{T=float32}} -> float32[65536]")
    for n in range(6):
        lines.append(f"%b{n} = MatMul(%a{n}, %x) {{T=float32}} -> float32[256]")
    lines += ["%s = AddN(%b0, %b1, %b2, %b3, %b4, %b5) {T=float32} -> float32[256]", "feeds %x", "fetches %s"]
    return analyse_dataflow(parse_graph("\n".join(lines)), CPU)


def test_the_search_lowers_the_peak_of_branches_whose_heavy_kernels_were_traced_first():
    flow = branches()
    traced = kernels(flow)
    found = order_search.searched(flow, traced, 50_000, 1000)
    assert live_peak(flow, found) < 0.3 * live_peak(flow, traced)
    exact = exact_order.lowest_order(flow, traced, most_sets=2000)
    assert exact is not None
    assert live_peak(flow, exact) == live_peak(flow, found)


def test_under_a_limit_that_only_the_searched_order_keeps_nothing_moves():
    flow = small_step(35, 14)
    planner = Planner(flow, Target(CPU))
    assert len(planner.problems) > 1  # the last one has the searched order
    others = min(problem.live_peak_bytes for problem in planner.problems[:-1])
    searched = planner.problems[-1].live_peak_bytes
    assert searched < others
    found = planner.candidate((searched + others) // 2)
    assert found is not None
    assert not found.choice.intervals
    assert list(found.choice.order) == list(planner.problems[-1].order)
