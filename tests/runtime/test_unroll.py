"""Loops of few iterations are unrolled: values as of the loop, and kernels of each iteration planned as the step's."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from slow import slow

from tfswap.compiler import unoptimised
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.ir.custom_ops import DRAWS
from tfswap.ir.graph import Graph
from tfswap.ir.op_traits import is_one_node
from tfswap.ir.permits import Permit
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare import unroll_loops as unrolling
from tfswap.passes.prepare.unroll_loops import MOST_TRIPS, unroll_loops
from tfswap.plan.plan import Plan
from tfswap.simulator import unordered

CPU = DeviceModel("cpu", False, 2, 2)


@pytest.fixture(autouse=True)
def any_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "LEAST_MEAN_S", 0.0)


SUMS = """
%zero = Const() -> int32[] = (0,)
%x = Placeholder() -> float32[8]
%before = NoOp()
%loop = While(%zero, %x, %x, %v) {parallel_iterations=10} ^before -> int32[], float32[8], float32[8], resource[]
%v = Placeholder() -> resource[]
%y = Tanh(%loop:1) -> float32[8]
%after = AssignVariableOp(%v, %y) {dtype=float32} ^loop
feeds %x, %v
fetches %y
targets %after
body %loop
  %i = Placeholder() -> int32[]
  %s = Placeholder() -> float32[8]
  %x = Placeholder() -> float32[8]
  %v = Placeholder() -> resource[]
  %most = Const() -> int32[] = (TRIPS,)
  %less = Less(%i, %most) -> bool[]
  feeds %i, %s, %x, %v
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %s = Placeholder() -> float32[8]
  %x = Placeholder() -> float32[8]
  %v = Placeholder() -> resource[]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %w = ReadVariableOp(%v) -> float32[8]
  %product = Mul(%s, %w) {_class=(b'loc:@s',)} -> float32[8]
  INSIDE
  feeds %i, %s, %x, %v
  fetches %next, %product, %x, %v
"""


def sums(trips: int = 2, inside: str = "") -> Graph:
    return parse_graph(SUMS.replace("TRIPS", str(trips)).replace("INSIDE", inside))


def test_iterations_follow_one_another_by_their_edges() -> None:
    graph = sums()
    assert unroll_loops(graph, Target(CPU)) == len(graph.names_in_bodies)
    assert format_graph(graph) == format_graph(
        parse_graph(
            """
%x = Placeholder() -> float32[8]
%before = NoOp()
%loop/iteration_0/start = NoOp() ^before
%loop/iteration_0/w = ReadVariableOp(%v) ^loop/iteration_0/start -> float32[8]
%loop/iteration_0/product = Mul(%x, %loop/iteration_0/w) -> float32[8]
%loop/iteration_1/w = ReadVariableOp(%v) ^loop/iteration_0/start -> float32[8]
%loop/iteration_1/product = Mul(%loop/iteration_0/product, %loop/iteration_1/w) -> float32[8]
%loop/end = NoOp() ^loop/iteration_0/w ^loop/iteration_1/w
%v = Placeholder() -> resource[]
%y = Tanh(%loop/iteration_1/product) -> float32[8]
%after = AssignVariableOp(%v, %y) {dtype=float32} ^loop/end
feeds %x, %v
fetches %y
targets %after
"""
        )
    )
    assert graph.names_in_bodies["loop/iteration_1/product"] == "product"


def test_effects_come_in_the_order_of_the_iterations() -> None:
    graph = sums(3, "%add = AssignAddVariableOp(%v, %product)\n  %read = ReadVariableOp(%v) ^add -> float32[8]")
    body = next(iter(graph.bodies.values()))[1]
    body.targets = [body["add"], body["read"]]
    unroll_loops(graph, Target(CPU))
    first, second = graph["loop/iteration_0/add"], graph["loop/iteration_1/w"]
    assert first in Graph.needed([second])
    assert graph["loop/iteration_2/read"] in Graph.needed([graph["after"]])
    assert graph["loop/iteration_1/read"].controls == (graph["loop/iteration_1/add"],)
    assert graph["loop/end"] in graph.targets  # they have effects, whether the loop is read or not


def test_what_passes_results_on_does_not_wait_for_effects() -> None:
    """As a kernel of its own it would part those that may run concurrently."""
    effects = "%add = AssignAddVariableOp(%v, %product)\n  %done = NoOp() ^add\n"
    graph = sums(2, f"{effects}  %passed = Identity(%product) ^done -> float32[8]")
    body = next(iter(graph.bodies.values()))[1]
    body.fetches[1] = body["passed"].out()
    body.targets = [body["add"]]
    unroll_loops(graph, Target(CPU))
    passed = [node for node in graph if node.op == "Identity"]
    assert len(passed) == 2
    assert not any(node.controls for node in passed)
    assert graph["loop/iteration_0/add"] in Graph.needed([graph["loop/iteration_1/add"]])


def test_a_loop_that_does_not_run_gives_what_it_was_given() -> None:
    graph = sums(0)
    unroll_loops(graph, Target(CPU))
    assert graph["y"].inputs == (graph["x"].out(),)
    assert graph["after"].controls == (graph["loop/end"],)
    assert graph["loop/end"].controls == (graph["before"],)


def test_what_was_noted_of_tensors_is_noted_of_each_iteration() -> None:
    graph = sums()
    kept = Permit(frozenset(), "kept")
    body = next(iter(graph.bodies.values()))[1]
    body.restrict(body["product"].out(), kept)
    unroll_loops(graph, Target(CPU))
    assert graph.permits == {graph[f"loop/iteration_{k}/product"].out(): kept for k in range(2)}


def test_iterations_that_may_overlap_are_counted_where_a_step_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the prediction has of it: on a busy machine they overlap more."""
    monkeypatch.setattr(
        unoptimised, "as_executed", lambda graph, device, held: graph
    )  # it reads attributes of the loop
    work = (
        "%a = Exp(%x) -> float32[1048576]\n  %b = Sin(%a) -> float32[1048576]\n  %c = Mul(%a, %b) -> float32[1048576]\n"
    )
    text = SUMS.replace("%product = Mul(%s, %w)", f"{work}  %product = Mul(%s, %c)").replace(
        "float32[8]", "float32[1048576]"
    )
    graph = parse_graph(text.replace("TRIPS", "4").replace("INSIDE", ""))
    one_thread = Optimizer(graph, CPU._replace(inter_op_threads=1), Options())
    held_bytes = 3 * (4 << 20)  # by the other iterations, of which each has a tensor at least
    assert one_thread.unoptimised.likely_bound_bytes >= one_thread.baseline.peak_bytes + held_bytes
    assert not one_thread.fits_unchanged(int(1.5 * one_thread.baseline.peak_bytes))


def test_a_step_is_left_alone_where_its_highest_run_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction is the run in the middle. Measured, three micro-batches of poolings came to 1.11 of it."""
    monkeypatch.setattr(unoptimised, "as_executed", lambda graph, device, held: graph)
    monkeypatch.setattr(unordered, "_peaks", lambda program, snapshot: [1 << 30, 1 << 30, 2 << 30])
    step = Optimizer(sums(4), CPU, Options())
    assert step.baseline.peak_bytes < 1.1 * (1 << 30)
    assert step.unoptimised.likely_bound_bytes >= 2 << 30


NOT_UNROLLED = {
    "many iterations": (MOST_TRIPS + 1, ""),
    "a generator's state in a kernel": (2, "%r = RandomUniform(%next) -> float32[]"),
    "a table called after its node": (2, "%r = MutableHashTableV2() -> resource[]"),
    "Python": (2, "%r = EagerPyFunc(%product) -> float32[]"),
    "a collective": (2, "%r = CollectiveReduceV2(%product, %one, %one, %one) -> float32[8]"),
    "an op that is not known": (2, "%r = Unheard>Of(%product) -> float32[8]"),
    "a function that is called": (2, "%r = StatefulPartitionedCall(%product) -> float32[8]"),
}


@pytest.mark.parametrize("kind", NOT_UNROLLED)
def test_stays_a_loop(kind: str) -> None:
    trips, inside = NOT_UNROLLED[kind]
    graph = sums(trips, inside)
    body = next(iter(graph.bodies.values()))[1]
    if inside:
        body.targets = [body["r"]]
    before = format_graph(graph)
    assert not unroll_loops(graph, Target(CPU))
    assert format_graph(graph) == before


def test_a_loop_whose_end_the_step_decides_stays_one() -> None:
    graph = sums()
    condition, _ = next(iter(graph.bodies.values()))
    condition.small_constants.clear()
    assert not unroll_loops(graph, Target(CPU))


def test_loops_that_are_too_much_together_stay_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolling, "MOST_KERNELS", 5)
    assert not unroll_loops(sums(), Target(CPU))
    monkeypatch.setattr(unrolling, "MOST_KERNELS", 6)
    assert unroll_loops(sums(), Target(CPU))


def test_loops_of_small_kernels_stay_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not unroll_loops(sums(), Target(CPU))
    large = parse_graph(format_graph(sums()).replace("float32[8]", f"float32[{1 << 20}]"))
    assert unroll_loops(large, Target(CPU))


CHAINS = """
%zero = Const() -> int32[] = (0,)
%axis = Const() -> int32[] = (0,)
%x = Placeholder() -> float32[4096]
%loop = While(%zero, %x, %x, %x, %x) {parallel_iterations=10} -> int32[], BIG, BIG, BIG, BIG
%a = Sum(%loop:1, %axis) {T=float32, Tidx=int32, keep_dims=false} -> float32[]
%b = Sum(%loop:2, %axis) {T=float32, Tidx=int32, keep_dims=false} -> float32[]
%c = Sum(%loop:3, %axis) {T=float32, Tidx=int32, keep_dims=false} -> float32[]
feeds %x
fetches %a, %b, %c
body %loop
  %i = Placeholder() -> int32[]
  %a = Placeholder() -> BIG
  %b = Placeholder() -> BIG
  %c = Placeholder() -> BIG
  %x = Placeholder() -> BIG
  %most = Const() -> int32[] = (4,)
  %less = Less(%i, %most) -> bool[]
  feeds %i, %a, %b, %c, %x
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %a = Placeholder() -> BIG
  %b = Placeholder() -> BIG
  %c = Placeholder() -> BIG
  %x = Placeholder() -> BIG
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %a1 = Tanh(%a) {T=float32} -> BIG
  %b1 = Exp(%b) {T=float32} -> BIG
  %c1 = Sigmoid(%c) {T=float32} -> BIG
  feeds %i, %a, %b, %c, %x
  fetches %next, %a1, %b1, %c1, %x
""".replace("BIG", "float32[4096]")
"""A loop of which an iteration holds all three tensors, and which could compute one after the other."""


def test_the_smallest_limit_is_the_same_whether_costs_have_a_loop_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    floors: dict[float, int] = {}
    for least_s in (0.0, 1.0):
        monkeypatch.setattr(unrolling, "LEAST_MEAN_S", least_s)
        optimizer = Optimizer(parse_graph(CHAINS), CPU, Options())
        floors[least_s] = optimizer.floor_bytes()
        plan = optimizer.plan(floors[least_s], ordered=True)
        assert plan.planned_peak_bytes == floors[least_s] and plan.unrolled == (least_s > 0.0)
        assert len(optimizer.rewrite(plan).bodies) == 0
    assert floors[0.0] == floors[1.0] < 4 * 4 * 4096  # a loop's results alone, and x
    roomy = optimizer.plan(10 * floors[1.0], ordered=True)
    assert optimizer.report(roomy).largest_kernel != "loop"
    assert not roomy.unrolled and len(optimizer.rewrite(roomy).bodies) == 1
    other = Optimizer(parse_graph(CHAINS), CPU, Options())
    assert len(other.rewrite(Plan.from_json(plan.to_json())).bodies) == 0
    assert other.judged(plan, plan.limit_bytes) == plan


def test_iterations_that_do_not_run_concurrently_are_predicted_so() -> None:
    text = format_graph(sums())
    one = parse_graph(text.replace("parallel_iterations=10", "parallel_iterations=1"))
    assert not unroll_loops(one, Target(CPU), lowered=True)
    assert unroll_loops(one, Target(CPU))
    assert unroll_loops(parse_graph(text), Target(CPU), lowered=True)


def test_lowered_an_iteration_waits_for_what_the_one_before_must_run() -> None:
    """TensorFlow hands no variable on before. Planned, what reads none of what it writes need not wait."""
    for lowered in (True, False):
        graph = sums(2, "%add = AssignAddVariableOp(%v, %product)\n  %free = Tanh(%x) -> float32[8]")
        graph["loop"].attrs = {"parallel_iterations": 10}
        body = graph.bodies[graph["loop"]][1]
        body.fetches[2] = body["free"].out(0)
        body.targets = [body["add"]]
        graph.fetches.append(graph["loop"].out(2))
        unroll_loops(graph, Target(CPU), lowered=lowered)
        waits = graph["loop/iteration_0/add"] in Graph.needed([graph["loop/iteration_1/free"]])
        assert waits == lowered


def test_all_ops_with_a_state_in_their_kernels_are_known_to_have_one() -> None:
    assert all(map(is_one_node, DRAWS))


def test_lines_are_those_of_the_nodes_in_the_body() -> None:
    graph = sums()
    optimizer = Optimizer(graph, CPU, Options(), locate={"product": "model.py:3"}.get)
    assert optimizer.locate("loop/iteration_1/product") == "model.py:3"
    assert list(optimizer.graph.bodies)  # the step itself is as it was


@pytest.mark.parametrize(("make", "shape", "onednn"), [("mlp", (2048, 256), 0), ("convolutions", (128, 32, 32, 3), 1)])
def test_micro_batches_have_the_loops_bits_under_a_limit(make: str, shape: tuple[int, ...], onednn: int) -> None:
    """With oneDNN's kernels too; dropout's seeds and the averages of a batch norm are written in the body."""
    found: dict[str, Any] = on_arena(
        f"from unrolled_steps import *\nprint(json.dumps(measured({make}, {shape}, 0.6)))",
        TF_ENABLE_ONEDNN_OPTS=str(onednn),
    )
    assert found["same"]
    assert found["peak"] <= found["planned"] <= found["limit"]
    # Which of the two it is depends on the unoptimised peak, which TensorFlow's threads decide.
    assert found["concurrent"] or any("iteration_3" in name for name in found["order"])


@pytest.mark.parametrize("seeds", [range(2), *slow(range(2, 40))])
def test_random_loops_have_their_bits_and_no_higher_floor(seeds: range) -> None:
    found = on_arena(f"from unrolled_steps import *\nprint(json.dumps(random_loops({seeds})))")
    assert found == [[True] * 4] * len(seeds)
