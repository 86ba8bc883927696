"""Loops and conditionals, replayed: their requests, the number of runs, and the contents of their lists."""

from __future__ import annotations

import re
from statistics import median_low

import pytest

from tfswap.analysis.analyse import MOST_COURSES, analyse_dataflow
from tfswap.analysis.buffers import Contents, Element
from tfswap.analysis.control_flow import record
from tfswap.analysis.integer_values import LOOKED_AHEAD, AtMost, Integers, Values, common
from tfswap.analysis.records import Record, UnboundedLoop
from tfswap.analysis.variables import resources_used
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.memory_rules import VARIANT_BYTES
from tfswap.kernels.target import Target
from tfswap.plan.schedule import RUN, Step
from tfswap.planner.ordering import choose_order
from tfswap.simulator.memory import simulate_memory
from tfswap.simulator.unordered import simulate_unordered

CPU = DeviceModel("cpu", False, 2, 2)
KIB = 1 << 10

# Multiplies a 4 KiB state in each iteration, pushes what it was on a list, and counts.
LOOP = """\
%i = Placeholder() {dtype=int32} -> int32[]
%h = Placeholder() {dtype=float32} -> float32[1024]
%seen = Placeholder() {dtype=variant} -> variant[]
%n = Placeholder() {dtype=int32} -> int32[]
%loop = While(%i, %h, %seen, %n) -> int32[], float32[1024], variant[], int32[]
feeds %i, %h, %seen, %n
fetches %loop:1, %loop:2
body %loop
  %i = Placeholder() -> int32[]
  %h = Placeholder() -> float32[1024]
  %seen = Placeholder() -> variant[]
  %n = Placeholder() -> int32[]
  %less = Less(%i, %n) -> bool[]
  feeds %i, %h, %seen, %n
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %h = Placeholder() -> float32[1024]
  %seen = Placeholder() -> variant[]
  %n = Placeholder() -> int32[]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %state = MatMul(%h, %h) -> float32[1024]
  %pushed = TensorListPushBack(%seen, %state) -> variant[]
  feeds %i, %h, %seen, %n
  fetches %next, %state, %pushed, %n
"""

CHOICE = """\
%p = Placeholder() {dtype=bool} -> bool[]
%x = Placeholder() {dtype=float32} -> float32[1024]
%chosen = If(%p, %x) -> float32[1024]
feeds %p, %x
fetches %chosen
body %chosen
  %x = Placeholder() -> float32[1024]
  %wide = Concat(%x) -> float32[65536]
  %y = MatMul(%wide, %x) -> float32[1024]
  feeds %x
  fetches %y
body %chosen
  %x = Placeholder() -> float32[1024]
  %y = MatMul(%x, %x) -> float32[1024]
  feeds %x
  fetches %y
"""


def of(text: str, node: str, contents: dict[int, Contents] | None = None, **integers: Values) -> Record:
    """The record of a node, with the integers of the inputs of these names known."""
    graph = parse_graph(text)
    made = graph[node]
    known = [integers.get(t.node.name) for t in made.inputs]
    return record(made, graph.bodies[made], CPU, [(contents or {}).get(i) for i in range(len(known))], known)


def sizes(found: Record, kind: str) -> list[int]:
    return [amount for event, amount in found.events if event == kind]


def outs(found: Record, outputs: int) -> list[int]:
    """Which of the node's own outputs, and how many elements of lists, are allocated."""
    made = sizes(found, "out")
    return [*(o for o in made if o < outputs), sum(o >= outputs for o in made)]


def test_a_loop_keeps_an_element_of_each_iteration():
    found = of(LOOP, "loop", {2: ()}, i=(0,), n=(5,))
    assert found.exact
    # The state is the last element: they share a buffer. The list itself was copied once, being the caller's.
    assert found.part_bytes == (4 * KIB,) * 4
    parts, _, inputs = found.keeps[2]
    assert (len(parts), inputs) == (5, ())
    assert 1 in parts
    assert found.alias == {3: 3}
    assert found.integers == {0: (5,), 3: (5,)}
    assert [e and (e.nbytes, e.output) for e in found.contents[2]] == [(4 * KIB, o) for o in reversed(parts)]


def test_a_counter_is_written_over_from_the_second_iteration_on():
    found = of(LOOP, "loop", {2: ()}, i=(0,), n=(5,))
    # One comparison for each time that the loop asks, and its state, counter and list.
    assert sizes(found, "temp").count(1) == 6
    assert sorted(outs(found, 4)[:-1]) == [0, 1, 2]
    assert sizes(found, "temp").count(4) == 0


def test_no_iteration_at_all():
    found = of(LOOP, "loop", {2: ()}, i=(7,), n=(5,))
    assert found.events == (("temp", 1), ("free", 0))
    assert found.alias == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_loop_that_keeps_something_needs_a_bound():
    with pytest.raises(UnboundedLoop, match="'loop' keeps 4096 bytes of each iteration.*no bound"):
        of(LOOP, "loop", {2: ()}, i=(0,))


def bounded(most: int) -> str:
    """The loop, which ends after a bounded number of iterations."""
    return LOOP.replace("fetches %less\n", "fetches %both\n").replace(
        "  %less = Less(%i, %n) -> bool[]\n",
        f"  %max = Const() -> int32[] = ({most},)\n  %goes = All(%h) -> bool[]\n  %less = Less(%i, %max) -> bool[]\n"
        "  %both = LogicalAnd(%goes, %less) -> bool[]\n",
    )


@pytest.mark.parametrize("most", [3, LOOKED_AHEAD + 100])
def test_a_bound_is_enough(most: int):
    found = of(bounded(most), "loop", {2: ()}, i=(0,))
    assert not found.exact
    assert len(found.keeps[2][0]) == most


@pytest.mark.parametrize("most", [3, MOST_COURSES + 100])
def test_a_plan_is_judged_by_each_end_of_a_loop_that_keeps_something(most: int):
    """By one that covers all where there are many."""
    text = bounded(most)
    for old, new in (
        ("%i = Placeholder() {dtype=int32} -> int32[]", "%i = Const() -> int32[] = (0,)"),
        ("%seen = Placeholder() {dtype=variant}", "%seen = EmptyTensorList()"),
        ("feeds %i, %h, %seen, %n", "feeds %h, %n"),
    ):
        text = text.replace(old, new, 1)
    flow = analyse_dataflow(parse_graph(text), CPU)
    kept = [len(f.kept.get((f.nodes[f.place["loop"]], 2), ())) for f in (flow, *flow.courses)]
    assert kept[0] == most
    assert flow.all_courses == (most < MOST_COURSES)
    if flow.all_courses:
        assert sorted(kept[1:]) == list(range(most + 1))
    else:
        assert len(kept) == 1
        assert flow.covering is not None
        assert len(flow.covering.kept[flow.covering.nodes[flow.place["loop"]], 2]) == most


def test_a_loop_without_end_that_replaces_what_it_keeps_is_covered():
    pushed = "%pushed = TensorListPushBack(%seen, %state)"
    text = LOOP.replace(
        pushed, "%zero = Const() -> int32[] = (0,)\n  %pushed = TensorListSetItem(%seen, %zero, %state)"
    )
    text = text.replace("%seen = Placeholder() {dtype=variant}", "%seen = EmptyTensorList()", 1)
    flow = analyse_dataflow(parse_graph(text.replace("feeds %i, %h, %seen, %n", "feeds %i, %h, %n", 1)), CPU)
    assert not flow.all_courses
    assert flow.covered
    assert flow.others == (flow.covering,)


def test_a_loop_whose_counter_never_ends_it_is_not_followed_for_long(monkeypatch: pytest.MonkeyPatch):
    followed: list[Integers] = []
    follow = Integers.follow
    monkeypatch.setattr(Integers, "follow", lambda self, given: (followed.append(self), follow(self, given))[1])
    with pytest.raises(UnboundedLoop):
        of(LOOP, "loop", {2: ()}, i=(0,))
    assert len(followed) < 3 * LOOKED_AHEAD


def test_a_loop_that_keeps_nothing_needs_none():
    kept = LOOP.replace("%pushed, %n", "%seen, %n")
    kept = kept.replace("  %pushed = TensorListPushBack(%seen, %state) -> variant[]\n", "")
    unknown = of(kept, "loop", {2: ()}, i=(0,))
    assert not unknown.exact
    assert sum(sizes(unknown, "out")) == 1  # the counter, and the state
    many = of(kept, "loop", {2: ()}, i=(0,), n=(1000,))
    assert len(many.events) < 100
    assert many.integers[0] == (1000,)


def test_what_is_popped_is_freed_unless_another_holder_keeps_it():
    popping = LOOP.replace(
        "%pushed = TensorListPushBack(%seen, %state) -> variant[]",
        "%pushed = TensorListPopBack(%seen, %one) -> variant[], float32[1024]",
    )
    given = of(popping, "loop", {2: (Element(4 * KIB, None),) * 5}, i=(0,), n=(5,))
    assert given.contents[2] == ()
    assert given.keeps == {}


def test_integers_travel_in_lists():
    counting = LOOP.replace("TensorListPushBack(%seen, %state)", "TensorListPushBack(%seen, %i)")
    found = of(counting, "loop", {2: ()}, i=(0,), n=(3,))
    assert [e.values for e in found.contents[2] if e] == [(0,), (1,), (2,)]


def test_the_worse_branch_counts():
    found = of(CHOICE, "chosen")
    assert not found.exact
    assert max(sizes(found, "temp")) == 256 * KIB
    assert sizes(found, "out") == [0]


@pytest.mark.parametrize(("predicate", "worst"), [((1,), 256 * KIB), ((0,), 0)])
def test_a_known_branch_counts_alone(predicate, worst):
    found = of(CHOICE, "chosen", p=predicate)
    assert found.exact
    assert max(sizes(found, "temp"), default=0) == worst


def test_a_plan_is_judged_by_each_branch_of_a_conditional():
    """Neither bound is a branch, and another branch leaves other holes."""
    flow = analyse_dataflow(parse_graph(CHOICE), CPU)
    made = [[size for kind, size in found.events[found.place["chosen"]] if kind == "temp"] for found in flow.courses]
    assert sorted(max(temps, default=0) for temps in made) == [0, 256 * KIB]


def test_which_variables_bodies_write():
    text = re.sub(r"%y = MatMul\(%x", "%w = AssignAddVariableOp(%v, %x)\n  %y = MatMul(%x", CHOICE)
    text = text.replace("If(%p, %x)", "If(%p, %x, %v)").replace("%p, %x\n", "%p, %x, %v\n")
    text = text.replace("%chosen =", "%v = Placeholder() {dtype=resource} -> resource[]\n%chosen =")
    text = text.replace("  feeds %x\n", "  %v = Placeholder() -> resource[]\n  feeds %x, %v\n")
    graph = parse_graph(text)
    node = graph["chosen"]
    assert resources_used(node, graph.bodies[node]).written == (2,)


def step_with_loop() -> Graph:
    """A loop whose list is stacked after a kernel that needs the room of 64 elements."""
    text = LOOP.replace("fetches %loop:1, %loop:2\n", "fetches %all\n", 1)
    text = text.replace("%i = Placeholder() {dtype=int32}", "%i = Const()", 1).replace(
        "-> int32[]\n", "-> int32[] = (0,)\n", 1
    )
    text = text.replace("%n = Placeholder() {dtype=int32} -> int32[]", "%n = Const() -> int32[] = (5,)", 1)
    text = text.replace("%seen = Placeholder() {dtype=variant}", "%seen = EmptyTensorList(%n, %n)", 1)
    text = text.replace("feeds %i, %h, %seen, %n", "feeds %h", 1)
    return parse_graph(
        text.replace(
            "feeds %h",
            "%shape = Const() -> int32[1] = (1024,)\n"
            "%all = TensorListStack(%loop:2, %shape) -> float32[5,1024]\nfeeds %h",
            1,
        )
    )


def test_elements_live_until_their_list_is_read():
    graph = step_with_loop()
    assert choose_body_orders(graph, Target(CPU)) == 2
    flow = analyse_dataflow(graph, CPU)
    order = [i for i in choose_order(flow, [1.0] * len(flow.nodes)) if flow.is_kernel[i]]
    memory = simulate_memory(flow, [Step(RUN, i) for i in order], live=True)
    # The state that comes in, five elements, their stack, and three small chunks: counter, list, comparison.
    assert 11 * 4 * KIB <= memory.peak_bytes <= 11 * 4 * KIB + 6 * 256
    stack = flow.place["all"]
    assert len(flow.reads[stack]) == 1 + 5 + 1  # the list, its elements, the shape
    assert all(v in flow.reads[stack] for v in flow.kept[graph["loop"], 2])


def test_bodies_have_one_order():
    graph = step_with_loop()
    choose_body_orders(graph, Target(CPU))
    body = graph.bodies[graph["loop"]][1]
    flow = analyse_dataflow(body, CPU, strict=False)
    names = [n.name for i, n in enumerate(flow.nodes) if flow.is_kernel[i]]
    assert sorted(names) == ["next", "pushed", "state"]
    edges = sum(len(n.controls) for n in body) + sum(t.node.name in names for n in body for t in n.inputs)
    assert edges >= len(names) - 1
    assert body.targets


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%y = AddV2(%a, %b) -> int32[]", (7,)),
        ("%y = Less(%a, %b) -> bool[]", (0,)),
        ("%y = Maximum(%a, %x) -> int32[]", None),
        ("%y = Identity(%a) -> int32[]", (4,)),
        ("%y = Shape(%f) -> int32[2]", (5, 6)),
        ("%y = Size(%f) -> int32[]", (30,)),
        ("%y = Pack(%a, %b) -> int32[2]", (4, 3)),
        ("%y = FloorDiv(%a, %zero) -> int32[]", None),
        ("%y = Sub(%v, %a) -> int32[2]", (-3, -2)),
    ],
)
def test_integers(line, expected):
    graph = parse_graph(
        "%a = Const() -> int32[] = (4,)\n%b = Const() -> int32[] = (3,)\n%zero = Const() -> int32[] = (0,)\n"
        "%v = Const() -> int32[2] = (1, 2)\n%x = Placeholder() -> int32[]\n%f = Placeholder() -> float32[5,6]\n"
        f"{line}\nfetches %y\n"
    )
    assert Integers(graph, graph.topological()).follow({}).get((graph["y"], 0)) == expected


@pytest.mark.parametrize("known", [0, 1])
def test_one_side_can_decide(known):
    graph = parse_graph(
        "%p = Placeholder() -> bool[]\n%q = Placeholder() -> bool[]\n%y = LogicalAnd(%p, %q) -> bool[]\nfetches %y\n"
    )
    found = Integers(graph, graph.topological()).follow({(graph["q"], 0): (known,)}).get((graph["y"], 0))
    assert found == (None if known else (0,))


@pytest.mark.parametrize(
    ("op", "above", "below"),
    [
        ("Less(%i, %n) -> bool[]", (0,), None),
        ("Less(%n, %i) -> bool[]", (1,), None),
        ("GreaterEqual(%n, %i) -> bool[]", (0,), None),
        ("AddV2(%i, %n) -> int32[]", AtMost((11,)), AtMost((1,))),
        ("Sub(%i, %n) -> int32[]", None, None),
        ("Identity(%n) -> int32[]", AtMost((3,)), AtMost((3,))),
    ],
)
def test_what_follows_from_a_bound(op: str, above: Values | None, below: Values | None):
    """Where the exact integer lies above the bound, or below."""
    graph = parse_graph(
        f"%i = Placeholder() -> int32[]\n%n = Placeholder() -> int32[]\n%r = {op}\nfeeds %i, %n\nfetches %r\n"
    )
    i, n, r = (graph[name] for name in "inr")
    follow = Integers(graph, graph.topological()).follow
    found = [follow({(i, 0): (exact,), (n, 0): AtMost((3,))}).get((r, 0)) for exact in (8, -2)]
    assert found == [above, below]


def test_bounds_are_no_values():
    assert AtMost((3,)) != (3,)
    assert AtMost((3,)) == AtMost((3,))
    assert len({AtMost((3,)), (3,)}) == 2
    ways: list[list[Values | None]] = [[(1,), (2,), (5,), None], [(1,), (4,), (5, 6), (1,)]]
    assert common(ways) == [(1,), None, None, None]
    assert common(ways, bounds=True) == [(1,), AtMost((4,)), None, None]


@pytest.mark.parametrize("reads", ("list", "element"))
def test_a_list_of_constants_is_folded_with_what_it_keeps(reads):
    text = """\
%x = Placeholder() {dtype=float32} -> float32[1024]
%ones = Const() -> float32[4, 1024]
%shape = Const() -> int32[1] = (1024,)
%list = TensorListFromTensor(%ones, %shape) -> variant[]
"""
    if reads == "list":
        text += "%i = Placeholder() {dtype=int32} -> int32[]\n"
    else:
        text += "%i = Const() -> int32[] = (2,)\n"
    text += """\
%element = TensorListGetItem(%list, %i, %shape) -> float32[1024]
%y = MatMul(%element, %x) -> float32[1024]
"""
    text += f"feeds %x{', %i' * (reads == 'list')}\nfetches %y\n"
    flow = analyse_dataflow(parse_graph(text), CPU)
    steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
    # The four rows lie in the arena for good; of a single one that is read only that one does.
    there = {"list": 4, "element": 1}[reads] * 4 * KIB
    small = 1024
    assert there + 4 * KIB <= flow.persistent_bytes <= there + 4 * KIB + small
    assert simulate_memory(flow, steps).peak_bytes == flow.persistent_bytes + 4 * KIB
    assert median_low(simulate_unordered(flow, [1e-6] * len(flow.nodes), CPU)) == flow.persistent_bytes + 4 * KIB


@pytest.mark.parametrize(("lowered", "elements"), ((False, 9), (True, 6)))
def test_a_lowered_loop_frees_what_it_has_read(lowered, elements):
    # A list of four 4 KiB rows is read from its end, and as large a row made of each. Not lowered, the loop's caller
    # holds all of them until it has ended. Lowered, one of each pair is gone before the next one comes: but for the
    # state, which is the row made last, and is not written over.
    text = """\
%x = Placeholder() {dtype=float32} -> float32[4, 1024]
%i = Const() -> int32[] = (0,)
%n = Const() -> int32[] = (4,)
%shape = Const() -> int32[1] = (1024,)
%start = Fill(%shape, %f) -> float32[1024]
%f = Placeholder() {dtype=float32} -> float32[]
%given = TensorListFromTensor(%x, %shape) -> variant[]
%made = EmptyTensorList(%shape, %n) -> variant[]
%loop = While(%i, %given, %made, %start) -> int32[], variant[], variant[], float32[1024]
feeds %x, %f
fetches %loop:3
body %loop
  %i = Placeholder() -> int32[]
  %given = Placeholder() -> variant[]
  %made = Placeholder() -> variant[]
  %state = Placeholder() -> float32[1024]
  %n = Const() -> int32[] = (4,)
  %less = Less(%i, %n) -> bool[]
  feeds %i, %given, %made, %state
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %given = Placeholder() -> variant[]
  %made = Placeholder() -> variant[]
  %state = Placeholder() -> float32[1024]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %shape = Const() -> int32[1] = (1024,)
  %pop = TensorListPopBack(%given, %shape) -> variant[], float32[1024]
  %new = MatMul(%pop:1, %state) -> float32[1024]
  %pushed = TensorListPushBack(%made, %new) -> variant[]
  feeds %i, %given, %made, %state
  fetches %next, %pop, %pushed, %new
"""
    flow = analyse_dataflow(parse_graph(text), CPU, lowered=(lambda _: 1e-6) if lowered else None)
    loop = flow.place["loop"]
    steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
    peak = simulate_memory(flow, steps).peak_bytes - flow.persistent_bytes
    assert peak // (4 * KIB) == elements
    assert len(flow.consumes.get(loop, ())) == (8 if lowered else 0)  # the list, its rows, and the other arguments


@pytest.mark.parametrize(("lowered", "threads", "elements"), ((False, 2, 1), (True, 1, 1), (True, 2, 2)))
def test_kernels_of_a_lowered_body_run_side_by_side(lowered, threads, elements):
    # Of four 4 MiB products, each is read by a small one. In an order one is there at a time; else one for each thread.
    text = """\
%x = Placeholder() {dtype=float32} -> float32[1024, 1024]
%i = Const() -> int32[] = (0,)
%loop = While(%i, %x) -> int32[], float32[1024, 1024]
feeds %x
fetches %loop:0
body %loop
  %i = Placeholder() -> int32[]
  %x = Placeholder() -> float32[1024, 1024]
  %n = Const() -> int32[] = (4,)
  %less = Less(%i, %n) -> bool[]
  feeds %i, %x
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %x = Placeholder() -> float32[1024, 1024]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
"""
    for k in range(4):
        text += f"  %large{k} = MatMul(%x, %x) -> float32[1024, 1024]\n"
        text += f"  %small{k} = MatMul(%large{k}, %x) -> float32[1]\n"
    text += "  feeds %i, %x\n  fetches %next, %x\n"
    device = CPU._replace(inter_op_threads=threads)
    flow = analyse_dataflow(parse_graph(text), device, lowered=(lambda _: 1e-3) if lowered else None)
    steps = [Step(RUN, i) for i, kernel in enumerate(flow.is_kernel) if kernel]
    peak = simulate_memory(flow, steps).peak_bytes - flow.persistent_bytes
    assert peak // (4 * KIB * KIB) == elements


LISTS = """\
%x = Placeholder() {dtype=float32} -> float32[4,256]
%shape = Const() -> int32[] = (256,)
%a = TensorListFromTensor(%x, %shape) -> variant[]
%zeros = ZerosLike(%a) -> variant[]
%b = TensorListPushBack(%zeros, %x) -> variant[]
%sum = AddN(%b) -> variant[]
feeds %x
fetches %sum
"""


def test_a_list_of_zeros_or_of_sums_is_a_new_one():
    """An op that only changes a list goes on in its scalar."""
    flow = analyse_dataflow(parse_graph(LISTS), CPU)
    forwards = {node.op: bool(flow.forwards[i]) for i, node in enumerate(flow.nodes) if flow.is_kernel[i]}
    assert forwards == {"TensorListFromTensor": False, "ZerosLike": False, "TensorListPushBack": True, "AddN": False}


def test_a_sum_of_lists_requests_its_elements_first():
    flow = analyse_dataflow(parse_graph(LISTS.replace("AddN(%b)", "AddN(%a, %zeros)")), CPU)
    (requests,) = [r for node, r in zip(flow.nodes, flow.requests, strict=True) if node.op == "AddN"]
    assert [request.nbytes for request in requests] == [KIB] * 4 + [VARIANT_BYTES]
