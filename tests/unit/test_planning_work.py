"""The work of planning, counted: simulations, and walks through loops."""

from __future__ import annotations

import gc
from collections import Counter

from layered_steps import Layer, training_step
from test_bodies import CHOICE, LOOP
from test_lowered_peak import LOOP as POPS

from tfswap.analysis import control_flow, heap, integer_values, node_records
from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.cost import Costs
from tfswap.analysis.function_runs import PreparedBody
from tfswap.compiler import search
from tfswap.compiler.compiler import Optimizer
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.native import bound
from tfswap.plan.schedule import RUN, Step
from tfswap.planner import step_orders
from tfswap.planner.live_target import LiveTarget
from tfswap.planner.planner import Planner
from tfswap.planner.problem import NEVER
from tfswap.simulator import memory as simulator_memory
from tfswap.simulator.arena_snapshot import NOTHING_KNOWN, ArenaSnapshot
from tfswap.simulator.bfc_allocator import Arena
from tfswap.simulator.memory import Judge

CPU = DeviceModel()


def a_loop_and_a_choice() -> Graph:
    """A loop of five iterations, and a conditional of which the step decides which branch is taken."""
    text = LOOP.replace("%i = Placeholder() {dtype=int32} -> int32[]", "%i = Const() -> int32[] = (0,)", 1)
    text = text.replace("%n = Placeholder() {dtype=int32} -> int32[]", "%n = Const() -> int32[] = (5,)", 1)
    text = text.replace("%seen = Placeholder() {dtype=variant} -> variant[]", "%s = Const() -> int32[] = (1024,)\n"
        "%seen = EmptyTensorList(%s, %n) {element_dtype=float32} -> variant[]", 1)  # fmt: skip
    text = text.replace("feeds %i, %h, %seen, %n\n", "%p = Placeholder() {dtype=bool} -> bool[]\n"
        "%chosen = If(%p, %loop:1) -> float32[1024]\nfeeds %h, %p\n", 1)  # fmt: skip
    text = text.replace("fetches %loop:1, %loop:2\n", "fetches %chosen\n", 1)
    return parse_graph(text + CHOICE[CHOICE.index("body %chosen") :])


def test_a_loop_is_recorded_once_whatever_branches_are_taken_elsewhere(monkeypatch):
    recorded: Counter[str] = Counter()
    whole = control_flow.record

    def counted(node, *args, **kwargs):
        recorded[node.name] += 1
        return whole(node, *args, **kwargs)

    monkeypatch.setattr(node_records, "record", counted)
    flow = analyse_dataflow(a_loop_and_a_choice(), CPU)
    assert len(flow.courses) == 2
    assert recorded == {"loop": 1, "chosen": 3}
    loop = flow.place["loop"]
    assert all(other.events[other.place["loop"]] == flow.events[loop] for other in flow.courses)


def test_a_loop_is_followed_once_for_the_same_integers(monkeypatch):
    """As often as it is recorded, for each sequence of branches that are taken in it."""
    followed: list[object] = []
    whole = control_flow.Loop.run
    monkeypatch.setattr(control_flow.Loop, "run", lambda self, given: followed.append(given) or whole(self, given))
    graph = a_loop_and_a_choice()
    node, prepared = graph["loop"], dict[Graph, PreparedBody]()
    given = [(0,), None, None, (5,)]
    for _ in range(3):
        control_flow.record(node, graph.bodies[node], CPU, [None] * 4, given, prepared=prepared)
    assert followed == [given]


def test_a_schedule_that_is_refused_is_simulated_until_it_passes_the_limit(monkeypatch):
    """And of all sequences of branches the one that refused the schedule before."""
    graph = a_loop_and_a_choice()
    flow = analyse_dataflow(graph, CPU)
    steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
    judge = Judge(flow, NOTHING_KNOWN)
    memory = judge.memory(steps)
    assert memory is not None
    assert judge.memory(steps, (), memory.peak_bytes) == memory
    replays: list[object] = []
    whole = simulator_memory.memory_within
    monkeypatch.setattr(
        simulator_memory, "memory_within", lambda *args, **kw: replays.append(args[0]) or whole(*args, **kw)
    )
    assert judge.memory(steps, (), memory.peak_bytes - 1) is None
    first = len(replays)
    assert judge.memory(steps, (), memory.peak_bytes - 1) is None
    assert len(replays) == first + 1
    requests: list[int] = []
    ask = Arena.allocate
    monkeypatch.setattr(bound, "core", None)  # the replay in Python is the one that can be watched
    monkeypatch.setattr(Arena, "allocate", lambda self, size: requests.append(size) or ask(self, size))
    judge.memory(steps)
    everything = len(requests)
    requests.clear()
    assert judge.memory(steps, (), 1) is None
    assert len(requests) < everything / 3


def test_the_floor_takes_few_simulations(monkeypatch):
    """Of all rungs, those that may lower it; the first has the lowest target."""
    kinds = ("dense", "relu", "scale", "add") * 4
    optimizer = Optimizer(training_step([Layer(kind, (3 * i) // 4) for i, kind in enumerate(kinds)], 512, 128), CPU)
    done: list[bool] = []
    whole = Judge.memory

    def counted(self, *args):
        found = whole(self, *args)
        done.append(found is not None)
        return found

    monkeypatch.setattr(Judge, "memory", counted)
    drafts: list[object] = []
    draft = Planner.draft
    monkeypatch.setattr(Planner, "draft", lambda self, *args: drafts.append(args) or draft(self, *args))
    solved: list[object] = []
    choose = LiveTarget.__init__
    monkeypatch.setattr(LiveTarget, "__init__", lambda self, nbytes: solved.append(self) or choose(self, nbytes))
    floor, few = optimizer.floor_bytes(), len(solved)
    simulated, drafted = len(done), len(drafts)
    whole_ones = sum(done)
    rungs = [rung for ladder in optimizer.planner.ladders for rung in ladder.rungs_within(NEVER)]
    assert len(rungs) > 200
    assert whole_ones < len(rungs) / 20, "to the end"
    assert simulated < len(rungs) / 2
    assert drafted < len(rungs) / 2, "what holds too much is not timed"
    assert few < len(solved) * 0.7, "what holds too much is not solved"
    assert floor == min(found.peak_bytes for rung in rungs if (found := rung.judged.lowest(NEVER)) is not None)
    count = len(done)
    assert optimizer.floor_bytes() == floor
    assert len(done) == count, "asked for again, it is known"


def test_orders_are_made_once_whatever_is_in_the_arena(monkeypatch):
    made: list[tuple[object, ...]] = []
    for name in ("rank_orders", "brought_together", "orders_with_room"):
        whole = getattr(step_orders, name)

        def counted(flow, given, *args, whole=whole):
            made.append((whole, id(flow), tuple(given)))
            return whole(flow, given, *args)

        monkeypatch.setattr(step_orders, name, counted)
    costs = Costs.of_step
    monkeypatch.setattr(Costs, "of_step", lambda self, flow: made.append((costs, id(flow))) or costs(self, flow))
    device = CPU._replace(intra_op_threads=2, inter_op_threads=2)
    optimizer = Optimizer(training_step([Layer("dense", 0), Layer("relu", 0)], 64, 64), device)
    floor = optimizer.floor_bytes()
    assert len({whole for whole, *_ in made}) == 4
    count = len(made)
    optimizer.assume_arena(ArenaSnapshot(total_bytes=2 * floor))
    assert optimizer.floor_bytes() > floor
    assert len(made) == count == len(set(made))


def test_what_follows_from_constants_is_followed_once(monkeypatch):
    """A loop's bound may be computed in its condition, of constants: not again in each iteration."""
    text = """
    %i = Placeholder() {dtype=int32} -> int32[]
    %a = Const() -> int32[] = (7,)
    %b = Const() -> int32[] = (6,)
    %most = Mul(%a, %b) -> int32[]
    %less = Less(%i, %most) -> bool[]
    feeds %i
    fetches %less
    """
    rules = {op: Counter[str]() for op in ("Mul", "Less")}
    for op, count in rules.items():
        whole = integer_values._RULES[op]
        monkeypatch.setitem(
            integer_values._RULES, op, lambda *a, whole=whole, count=count: count.update("r") or whole(*a)
        )
    graph = parse_graph(text)
    followed = integer_values.Integers(graph, graph.topological())
    assert [followed.follow({(graph["i"], 0): (i,)})[graph["less"], 0] for i in (3, 41, 42)] == [(1,), (1,), (0,)]
    assert (rules["Mul"].total(), rules["Less"].total()) == (1, 4)


def test_the_collector_is_off_during_the_search_for_the_floor(monkeypatch):
    on: list[bool] = []
    whole = search.Search.lowest
    monkeypatch.setattr(search.Search, "lowest", lambda self: on.append(gc.isenabled()) or whole(self))
    assert gc.isenabled()
    Optimizer(training_step([Layer("dense", 0)], 64, 64), CPU).floor_bytes()
    assert gc.isenabled()
    assert on == [False]


def test_a_list_is_searched_for_pools_only_where_all_courses_are_covered(monkeypatch):
    """Each op of it would go through all elements, so that a loop's work grows with the square of its iterations."""
    searched: list[object] = []
    monkeypatch.setattr(heap, "is_pooled", searched.append)
    flow = analyse_dataflow(parse_graph(POPS.replace("TRIPS", "8").replace("LATE", "")), CPU)
    assert not flow.covering
    assert searched == []


def test_a_large_lowered_loop_is_run_once(monkeypatch):
    """A small one so often that the run with the median peak is typical."""
    runs: list[object] = []
    whole = control_flow.Lowered
    monkeypatch.setattr(control_flow, "Lowered", lambda *given: runs.append(given) or whole(*given))
    graph = a_loop_and_a_choice()
    flow = analyse_dataflow(graph, CPU, lowered=lambda node: 1e-6)
    assert len(runs) == 2 * control_flow.LOWERED_RUNS
    for most, expected in ((1, 1), (2, 1), (3, 3), (4, 3), (99, 5)):
        runs.clear()
        monkeypatch.setattr(control_flow, "LOWERED_EVENTS", most * len(flow.events[flow.place["loop"]]))
        control_flow.record(
            graph["loop"],
            graph.bodies[graph["loop"]],
            CPU,
            [None, None, (), None],
            [(0,), None, None, (5,)],
            lowered=lambda node: 1e-6,
        )
        assert len(runs) == expected
