"""Plans that are carried over to a similar step, and the names by which they are."""

from __future__ import annotations

from graphs import training_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_steps import Layer, training_step
from planner_problems import optimizer_of

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.similar_plan import carried_over, fitting, found_like
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dims, Dtype, Graph, Output
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.passes.alike_parts import shared_results
from tfswap.passes.device_carriers import unit
from tfswap.passes.device_parts import cut
from tfswap.passes.join_parts import join
from tfswap.plan.plan import Plan

LAYERS = [Layer("dense", 0)] * 6
SCALAR = TensorType("float32", ())


def tight(graph: Graph) -> tuple[Plan, int]:
    """A plan for a limit at the step's floor, and the limit."""
    optimizer = optimizer_of(graph)
    limit = optimizer.floor_bytes()
    return optimizer.plan(limit), limit


def with_more(graph: Graph, position: int) -> Graph:
    """The step with one more kernel that reads one of its tensors, of few bytes, and is fetched."""
    made = graph.copy()
    large = [n.out() for n in made if n not in made.feeds and n.outputs and n.outputs[0].dtype == "float32"]
    read = large[position % len(large)]
    attrs = {"T": Dtype("float32")}
    total = made.add("L2Loss", "total", (read,), attrs=attrs, outputs=(TensorType("float32", ()),))
    made.fetches.append(total.out())
    return made


@settings(max_examples=60, deadline=None)
@given(training_steps())
def test_the_same_step_takes_the_plan_as_it_is(graph):
    plan, limit = tight(graph)
    if plan.changes_nothing:
        return
    found = fitting(plan, optimizer_of(graph), limit)
    assert found is not None and found.candidate.peak_bytes <= limit
    made = found.plan(
        plan.fingerprint, limit, persistent_bytes=plan.persistent_bytes, margin_bytes=0, solver=plan.solver
    )
    assert (made.order, made.evictions) == (plan.order, plan.evictions)


def kernel_names(optimizer):
    flow = optimizer.flow
    return {node.name for node, is_kernel in zip(flow.nodes, flow.is_kernel, strict=True) if is_kernel}


@settings(max_examples=60, deadline=None)
@given(training_steps(), st.integers(0, 50), st.booleans())
def test_a_step_with_another_kernel_takes_it_only_where_it_fits(graph, position, back):
    more = with_more(graph, position)
    first, second = (more, graph) if back else (graph, more)
    plan, limit = tight(first)
    if plan.changes_nothing:
        return
    optimizer = optimizer_of(second)
    found = fitting(plan, optimizer, limit)
    if found is None:
        return
    made = found.plan(optimizer.fingerprint, limit, persistent_bytes=0, margin_bytes=0, solver="default")
    optimizer.require_fit(made)
    assert found.candidate.peak_bytes <= limit
    # The kernel that is added may read another one that nothing else reads, and that runs for it only.
    assert set(made.order) - set(plan.order) <= kernel_names(optimizer) - kernel_names(optimizer_of(first))


def test_a_kernel_that_only_this_step_has_runs_after_what_it_reads():
    graph = training_step(LAYERS, rows=512, width=128)
    plan, limit = tight(graph)
    optimizer = optimizer_of(with_more(graph, 20))
    found = fitting(plan, optimizer, limit + 4096)
    assert plan.moves and found is not None
    order, evictions = found.candidate.choice.named(optimizer.flow)
    assert order.index("total") == 1 + order.index(optimizer.graph["total"].inputs[0].node.name)
    assert tuple(name for name in order if name != "total") == plan.order
    assert [each.tensor for each in evictions] == [each.tensor for each in plan.evictions]


def test_what_another_device_gives_is_waited_for_as_late_as_it_can_be():
    graph = training_step(LAYERS, rows=512, width=128)
    plan, limit = tight(graph)
    with_receive = graph.copy()
    last = next(node for node in with_receive if node.name == plan.order[-1])
    kind, attrs = TensorType("float32", ()), {"T": Dtype("float32")}
    received = with_receive.add(custom_ops.RECEIVE, "received", attrs={**attrs, "shape": Dims(())}, outputs=(kind,))
    read = with_receive.add("Identity", "read", (received.out(),), attrs=attrs, outputs=(kind,))
    with_receive.add_control(last, read)
    optimizer = optimizer_of(with_receive)
    found = fitting(plan, optimizer, limit + 4096)
    assert found is not None
    order, _ = found.candidate.choice.named(optimizer.flow)
    assert order[-3:] == ("received", "read", last.name) or order[-2:] == ("received", last.name)


def test_a_tensor_that_is_also_read_in_between_leaves_for_the_longer_time():
    graph = training_step(LAYERS, rows=512, width=128)
    plan, _ = tight(graph)
    moved = max(plan.evictions, key=lambda each: each.use - each.release)
    early = graph[plan.order[moved.release + 1]]
    more = graph.copy()
    read = more.add(
        "L2Loss",
        "read",
        (more.tensor(moved.tensor),),
        controls=(more[early.name],),
        attrs={"T": Dtype("float32")},
        outputs=(TensorType("float32", ()),),
    )
    more.fetches.append(read.out())
    optimizer = optimizer_of(more)
    made = carried_over(plan, optimizer.flow, optimizer.fingerprint)
    optimizer.require_fit(made)
    found = next(each for each in made.evictions if each.tensor == moved.tensor)
    assert made.order[found.release - 1] == "read" or made.order[found.release] == "read"
    assert made.order[found.use] == plan.order[moved.use]


def test_a_kernel_that_needs_more_here_runs_later_than_there():
    """As a Send that comes after a Receive on this device, and before it on the other one."""
    graph = training_step(LAYERS, rows=512, width=128)
    for name in ("first", "second"):
        loss = graph.add("L2Loss", name, (graph.feeds[0].out(),), attrs={"T": Dtype("float32")}, outputs=(SCALAR,))
        graph.fetches.append(loss.out())
    graph.add_control(graph["second"], graph["first"])
    turned = graph.copy()
    turned["second"].controls, turned["first"].controls = (), (turned["second"],)
    plan, limit = tight(graph)
    optimizer = optimizer_of(turned)
    order = carried_over(plan, optimizer.flow, optimizer.fingerprint).order
    assert sorted(order) == sorted(plan.order) and order.index("second") < order.index("first")
    assert fitting(plan, optimizer, limit + 4096) is not None


def test_a_step_takes_the_plan_for_its_own_room_from_the_search_of_a_similar_one():
    graph = training_step(LAYERS, rows=512, width=128)
    example = optimizer_of(graph)
    peak, floor = example.baseline.peak_bytes, example.floor_bytes()
    example.plan((peak + floor) // 2)
    for limit in (floor, (peak + 2 * floor) // 3, (2 * peak + floor) // 3):
        step = optimizer_of(graph)
        step.example = example.searched
        assert step.plan(limit) == optimizer_of(graph).plan(limit) and step.searched is example
    for other in (optimizer_of(training_step([Layer("relu", 0)] * 6, rows=512, width=128)), optimizer_of(graph)):
        other.search.planners.assume_lent(4096 if other.fingerprint == example.fingerprint else 0)
        assert found_like(example, other, (peak + floor) // 2) is None


def replicas() -> Graph:
    """Two replicas of one step, with names of their own; the first also adds both results."""
    graph = Graph()
    kind = TensorType("float32", (256,))
    ends = []
    for i, prefix in enumerate(("", "replica_1/")):
        device = f"/device:GPU:{i}"
        x, weights = (graph.add("Placeholder", f"{prefix}{name}", outputs=(kind,), device=device) for name in "xw")
        graph.feeds += [x, weights]
        product = graph.add("Mul", f"{prefix}product", (x.out(), weights.out()), outputs=(kind,), device=device)
        seeds = {"seed": 7, "seed2": 10 + i}
        noise = graph.add("RandomUniform", f"{prefix}noise", attrs=seeds, outputs=(kind,), device=device)
        ends.append(
            graph.add("Add", f"{prefix}end", (product.out(), noise.out()), outputs=(kind,), device=device).out()
        )
    total = graph.add("AddN", "total", ends, outputs=(kind,), device="/device:GPU:0")
    graph.fetches = [total.out()]
    return graph


def test_replicas_have_the_names_of_the_first_until_they_are_joined():
    graph = replicas()
    parts = cut(graph, ("GPU:0", "GPU:1"), DeviceModel("gpu"))
    here, there = ({node.name for node in parts.graphs[device] if "tfswap" not in node.name} for device in parts.graphs)
    assert here - there == {"total"} and not there - here
    joined = join(parts, parts.graphs).graph
    assert {node.name for node in graph} <= {node.name for node in joined}
    for node in graph:
        assert joined[node.name].attrs == node.attrs and joined[node.name].device == node.device


def test_replicas_keep_the_names_where_inputs_are_sorted_and_factors_grouped_otherwise():
    """Of a node that computes otherwise, and of all that reads it. Only then do parts share no results."""
    graph = replicas()
    kind = TensorType("float32", (256,))

    def turned(a: Output, b: Output, is_first: bool) -> tuple[Output, Output]:
        return (a, b) if is_first else (b, a)

    for is_first, prefix in ((True, ""), (False, "replica_1/")):
        device = f"/device:GPU:{1 - is_first}"
        x, noise, end = (graph[prefix + name].out() for name in ("x", "noise", "end"))
        both = turned(x, end, is_first)
        added = graph.add("AddV2", f"{prefix}added", both, outputs=(kind,), device=device)
        grouped = (noise, end) if is_first else (added.out(), noise)
        product = graph.add("Mul", f"{prefix}grouped", grouped, outputs=(kind,), device=device)
        read = graph.add("Relu", f"{prefix}read", (product.out(),), outputs=(kind,), device=device)
        graph.fetches += [added.out(), read.out()]
    parts = cut(graph, ("GPU:0", "GPU:1"), DeviceModel("gpu"))
    here, there = ({node.name for node in part if "tfswap" not in node.name} for part in parts.graphs.values())
    assert here - there == {"total"} and not there - here
    shared = shared_results(parts.graphs)
    assert shared["GPU:0"].alike is not shared["GPU:1"].alike


def test_the_order_of_inputs_that_grappler_sorts_does_not_matter():
    graph = replicas()
    kind = TensorType("float32", (256,))
    for i, (prefix, names) in enumerate((("", ("noise", "end")), ("replica_1/", ("end", "noise")))):
        for name in names:
            both = [graph[prefix + each].out() for each in ("x", name)][:: 1 - 2 * i]
            made = graph.add("AddV2", f"{prefix}{name}_added", both, outputs=(kind,), device=f"/device:GPU:{i}")
            graph.fetches.append(made.out())
    names = cut(graph, ("GPU:0", "GPU:1"), DeviceModel("gpu")).own_names["GPU:1"]
    assert {name: names[name] for name in ("noise_added", "end_added")} == {
        "noise_added": "replica_1/noise_added",
        "end_added": "replica_1/end_added",
    }


def exchange(count: int) -> Graph:
    """Each device computes a tensor, and adds those of all others, as replicas that wait for one another."""
    whole = Graph()
    kind = TensorType("float32", (256,))
    for i in range(count):
        device = f"/device:GPU:{i}"
        x = whole.add("Placeholder", f"x{i}", outputs=(kind,), device=device)
        whole.feeds.append(x)
        whole.add("Relu", f"made{i}", (x.out(),), outputs=(kind,), device=device)
    for i in range(count):
        others = [whole[f"made{j}"].out() for j in range(count) if j != i]
        attrs = {"N": len(others), "T": Dtype("float32")}
        read = whole.add("AddN", f"read{i}", others, attrs=attrs, outputs=(kind,), device=f"/device:GPU:{i}")
        whole.fetches.append(read.out())
    return whole


def test_devices_that_wait_for_one_another_are_prepared_once():
    devices = ("GPU:0", "GPU:1", "GPU:2")
    parts = cut(exchange(3), devices, DeviceModel("gpu"))
    shared = shared_results(parts.graphs)
    made = {where: Optimizer(parts.graphs[where], DeviceModel("gpu"), shared=shared[where]) for where in devices}
    assert len({id(each.search.variants) for each in made.values()}) == 1
    rewritten = {where: each.rewrite(each.plan("100%", ordered=True)) for where, each in made.items()}
    for where, graph in rewritten.items():
        assert {unit(node.device) for node in graph if node.device} == {where}
    assert len(join(parts, rewritten).graph.fetches) == 3


def test_parts_that_differ_in_their_seeds_share_results_but_not_the_prepared_step():
    graph = replicas()
    one, other = shared_results(cut(graph, ("GPU:0", "GPU:1"), DeviceModel("gpu")).graphs).values()
    assert one.alike is not other.alike  # the first adds the results
    graph.fetches = [graph[f"{prefix}end"].out() for prefix in ("", "replica_1/")]
    graph.prune()
    one, other = shared_results(cut(graph, ("GPU:0", "GPU:1"), DeviceModel("gpu")).graphs).values()
    assert one.alike is other.alike and one.same is not other.same
