"""Kernels side by side in the bodies of loops: which pairs, their memory, and the thread of the second."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from processes import TWO_THREADS, on_arena
from slow import slow
from step_peaks import measuring
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.python.eager import context

import tfswap
from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.control_flow import record
from tfswap.analysis.cost import Costs, concurrent_seconds
from tfswap.analysis.records import Record
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.exporters.function import grappler_off
from tfswap.importers.inline import LOWERING
from tfswap.ir import custom_ops
from tfswap.ir.custom_ops import GROUP
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.body_plan import carry_out_in_body
from tfswap.passes.tactics.pair_kernels import join_groups
from tfswap.passes.verify import verify
from tfswap.plan.plan import Inside, Split
from tfswap.planner.pairing import keep_apart

TWO_CORES = DeviceModel(intra_op_threads=2, inter_op_threads=2)
MIB = 1 << 20

# A state's two products, of which each iteration keeps the sum: 1 MiB each.
LOOP = """\
%i = Placeholder() {dtype=int32} -> int32[]
%h = Placeholder() {dtype=float32} -> float32[4,256,256]
%w = Placeholder() {dtype=float32} -> float32[4,256,256]
%loop = While(%i, %h, %w) -> int32[], float32[4,256,256], float32[4,256,256]
feeds %i, %h, %w
fetches %loop:1
body %loop
  %i = Placeholder() -> int32[]
  %h = Placeholder() -> float32[4,256,256]
  %w = Placeholder() -> float32[4,256,256]
  %five = Const() -> int32[] = (5,)
  %less = Less(%i, %five) -> bool[]
  feeds %i, %h, %w
  fetches %less
body %loop
  %i = Placeholder() -> int32[]
  %h = Placeholder() -> float32[4,256,256]
  %w = Placeholder() -> float32[4,256,256]
  %one = Const() -> int32[] = (1,)
  %next = AddV2(%i, %one) -> int32[]
  %a = BatchMatMulV2(%h, %w) -> float32[4,256,256]
  %b = BatchMatMulV2(%w, %h) -> float32[4,256,256]
  %sum = AddV2(%a, %b) -> float32[4,256,256]
  feeds %i, %h, %w
  fetches %next, %sum, %w
"""
# The second could have the place of what the first alone reads: side by side they hold more.
TIGHT = LOOP.replace("%a = BatchMatMulV2(%h, %w)", "%s = Exp(%h) -> float32[4,256,256]\n  %a = BatchMatMulV2(%s, %w)")


def body_of(graph: Graph) -> Graph:
    return graph.bodies[graph["loop"]][1]


def ordered(text: str = LOOP, device: DeviceModel = TWO_CORES, *, portable: bool = False) -> Graph:
    graph = parse_graph(text)
    choose_body_orders(graph, Target(device, own_ops=not portable))
    return graph


def paired(body: Graph) -> dict[str, str]:
    return {first.name: second.name for first, second in body.paired.items()}


def recorded(graph: Graph) -> Record:
    node = graph["loop"]
    return record(node, graph.bodies[node], TWO_CORES, [None] * 3, [(0,), None, None])


def peak_bytes(made: Record) -> int:
    """Of all that the loop requests."""
    sizes: list[int] = []
    live = most = 0
    for kind, amount in made.events:
        if kind == "free":
            live -= sizes[amount]
            continue
        nbytes = amount if kind == "temp" else 0
        sizes += [nbytes] if kind == "temp" else []
        live += nbytes
        most = max(most, live)
    return most


def test_neighbours_of_one_core_run_side_by_side():
    assert paired(body_of(ordered())) == {"a": "b"}
    assert paired(body_of(ordered(portable=True))) == {}
    assert paired(body_of(ordered(device=TWO_CORES._replace(inter_op_threads=1)))) == {}
    assert paired(body_of(ordered(device=TWO_CORES._replace(onednn=True)))) == {}


SMALL = "%a = Exp(%h) -> float32[4,256,256]\n  %b = Exp(%w) -> float32[4,256,256]"
PRODUCTS = """\
%a = BatchMatMulV2(%h, %w) -> float32[4,256,256]
  %b = BatchMatMulV2(%w, %h) -> float32[4,256,256]"""


def test_small_kernels_that_share_well_run_side_by_side_in_loops():
    """By themselves they would be shared among threads, for which they are too small."""
    body = body_of(ordered(LOOP.replace(PRODUCTS, SMALL)))
    assert paired(body) == {"a": "b"}
    large = LOOP.replace(PRODUCTS, SMALL).replace("[4,", "[64,")
    assert paired(body_of(ordered(large))) == {}


def test_in_a_pair_of_a_body_no_buffer_is_forwarded():
    """From the second iteration on the state is the body's own, and its last reader could write over it."""
    graph = ordered(LOOP.replace(PRODUCTS, "%a = Neg(%h) -> float32[4,256,256]\n  %b = Neg(%w) -> float32[4,256,256]"))
    body = body_of(graph)
    together = recorded(graph)
    assert paired(body) == {"a": "b"}
    body.paired.clear()
    apart = recorded(graph)

    def large(made: Record) -> int:
        return sum(event in (("temp", MIB), ("out", 1)) for event in made.events)

    assert large(together) - large(apart) == 5 - 1  # iterations


def test_what_a_body_returns_may_be_of_a_pair():
    returned = LOOP.replace("fetches %next, %sum, %w", "fetches %next, %a, %b").replace(
        "  %sum = AddV2(%a, %b) -> float32[4,256,256]\n", ""
    )
    assert paired(body_of(ordered(returned))) == {"a": "b"}


def test_a_copy_of_a_graph_has_its_own_pairs():
    graph = ordered()
    twin = graph.copy()
    body_of(graph).paired.clear()
    assert paired(body_of(twin)) == {"a": "b"}
    assert all(node in set(body_of(twin)) for pair in body_of(twin).paired.items() for node in pair)


def test_on_paper_both_hold_their_memory_until_both_have_ended():
    """The state that the first is the last to read stays for the second, which could have had its place."""
    graph = ordered(LOOP.replace("BatchMatMulV2(%w, %h)", "BatchMatMulV2(%w, %w)"))
    assert paired(body_of(graph)) == {"a": "b"}
    together = recorded(graph)
    body_of(graph).paired.clear()
    apart = recorded(graph)
    assert (peak_bytes(together) - peak_bytes(apart)) == MIB
    assert [e for e in together.events if e[0] == "temp"] == [e for e in apart.events if e[0] == "temp"]


@pytest.mark.parametrize(("text", "pairs"), [(LOOP, {"a": "b"}), (TIGHT, {})])
def test_those_stay_apart_that_would_raise_the_peak_of_the_body(text, pairs):
    body = body_of(ordered(text))
    assert paired(body) == {"a": "b"}
    keep_apart(body, analyse_dataflow(body, TWO_CORES, strict=False))
    assert paired(body) == pairs


def test_pairs_of_a_body_in_which_chunks_are_split_are_judged_too():
    body = body_of(ordered())
    flow = analyse_dataflow(body.copy(), TWO_CORES, strict=False)
    order = tuple(node.name for node, kernel in zip(flow.nodes, flow.is_kernel, strict=True) if kernel)
    carry_out_in_body(body, Target(TWO_CORES), flow, Inside("loop[1]", order, splits=(Split(order.index("sum"), 64),)))
    assert any(node.op == custom_ops.FREE_REST for node in body)
    keep_apart(body, analyse_dataflow(body, TWO_CORES, strict=False))
    assert paired(body) == {"a": "b"}


def test_a_pair_takes_as_long_as_cores_take_for_both():
    body, costs = body_of(ordered(LOOP.replace("%b = BatchMatMulV2(%w, %h)", "%b = Exp(%h)"))), Costs.of(TWO_CORES)
    assert not body.paired
    apart_s = costs.body_seconds(body)
    pair = body["a"], body["b"]
    body.paired = dict([pair])
    seconds = [(node, costs.seconds(node)) for node in pair]
    saved_s = sum(s for _, s in seconds) - concurrent_seconds(seconds, costs.rates)
    assert 0 < saved_s < costs.seconds(body["a"]), "else it would do to leave the first out"
    assert apart_s - costs.body_seconds(body) == pytest.approx(saved_s)


def test_one_node_runs_the_two():
    graph = ordered()
    join_groups(graph, Target(TWO_CORES))
    verify(graph)
    body = body_of(graph)
    (both,) = (node for node in body if node.op == custom_ops.GROUP)
    assert [kernel.name for kernel in both.attrs["kernels"]] == ["a", "b"]
    assert both.attrs["chunks"] == (MIB, MIB)
    assert both.attrs["kept"] == (1, 1)
    assert body["sum"].inputs == (both.out(0), both.out(1))
    assert not body.paired


def lstm():
    w = [tf.Variable(tf.random.stateless_normal([256, 1024], seed=(i, 7)) * 0.05) for i in range(2)]
    b = tf.Variable(tf.zeros([1024]))

    def step(xs):
        def cell(i, h, c):
            z = xs[i] @ w[0] + h @ w[1] + b
            i_, f, g, o = tf.split(z, 4, 1)
            c = tf.sigmoid(f) * c + tf.sigmoid(i_) * tf.tanh(g)
            return i + 1, tf.sigmoid(o) * tf.tanh(c), c

        with tf.GradientTape() as tape:
            zero = tf.zeros([64, 256])
            h = tf.while_loop(lambda i, *_: i < 60, cell, (0, zero, zero), maximum_iterations=60)[1]
            loss = tf.reduce_mean(h * h)
        for v, g in zip([*w, b], tape.gradient(loss, [*w, b]), strict=True):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        return loss

    return [*w, b], step


def attention():
    sizes = (128, 128), (128, 128), (128, 128), (128,)
    w = [tf.Variable(tf.random.stateless_normal(size, seed=(i, 7)) * 0.1) for i, size in enumerate(sizes)]

    def step(xs):
        def cell(i, h):
            scores = tf.reduce_sum(w[3] * tf.tanh(keys + (h @ w[1])[:, None]), -1)
            read = tf.reduce_sum(tf.nn.softmax(scores)[:, :, None] * keys, 1)
            return i + 1, tf.tanh(read + h @ w[2])

        with tf.GradientTape() as tape:
            keys = tf.reshape(tf.reshape(xs, [-1, 128]) @ w[0], [64, -1, 128])
            h = tf.while_loop(lambda i, *_: i < 12, cell, (0, tf.ones([64, 128])), maximum_iterations=12)[1]
            loss = tf.reduce_mean(h * h)
        for v, g in zip(w, tape.gradient(loss, w), strict=True):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        return loss

    return w, step


def measured_in_steps(net, limit, rows=64):
    slab = tf.raw_ops.Empty(shape=[500 << 20], dtype=tf.uint8)
    del slab
    xs = tf.random.stateless_normal([60, rows, 256], seed=(1, 2))
    variables, step = net()
    reference = tf.function(step)
    with grappler_off():
        expected = [float(reference(xs)) for _ in range(5)]
    mine, step = net()
    step = tfswap.optimize(tf.function(step), memory_limit=limit)
    losses, measured = [], []
    for _ in range(5):
        with measuring(measured):
            losses.append(float(step(xs)))
    plan = step.plan()
    functions = [context.context().get_function_def(name) for name in context.context().list_function_names()]
    same = all(np.array_equal(a, b) for a, b in zip(variables, mine, strict=True))
    return {
        "pairs": sum(n.op == GROUP for f in functions for n in f.node_def),
        "grouped": plan.grouped,
        "planned": plan.planned_peak_bytes,
        "measured": measured,
        "lists": len(plan.accumulators),
        "same": losses == expected and same,
    }


@pytest.mark.parametrize("limit", ["100%", "50%"])
def test_attention_with_small_kernels_side_by_side_peaks_as_planned_and_has_its_values(limit: str):
    found = on_arena(lambda: measured_in_steps(attention, limit), 600, **TWO_THREADS)
    assert found["pairs"] >= (2 if found["grouped"] else 3), found
    assert found["same"]
    assert set(found["measured"]) == {found["planned"]}


@pytest.mark.parametrize("limit", [*slow("100%"), "60%"])
def test_an_lstm_peaks_as_planned_and_has_its_values(limit: str):
    found = on_arena(lambda: measured_in_steps(lstm, limit), 600, **TWO_THREADS)
    assert found["pairs"], found
    assert found["grouped"], "also where it swaps inside of its loops"
    assert found["lists"] or limit == "100%"
    assert found["same"]
    assert set(found["measured"]) == {found["planned"]}


def python_function(name: str, manager: Any, seen: list[int]) -> Callable[[], Any]:
    """Says which thread it is on; fails, or cancels the step at its eighth call."""

    def reported():
        seen.append(threading.get_ident())
        return np.float32(0)

    def failing():
        raise ValueError("on purpose")

    def cancelling():
        if len(seen) == 7:
            manager.start_cancel()
        return reported()

    return {"reported": reported, "failing": failing, "cancelling": cancelling}[name]


def with_own_kernels(loop: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.while_loop`, of a graph whose loops have tfswap's kernel."""

    def made(*args, **kwargs):
        result = loop(*args, **kwargs)
        for op in tf.compat.v1.get_default_graph().get_operations():
            if "While" in op.type:
                op._set_attr(custom_ops.KERNEL, AttrValue(s=custom_ops.OWN_KERNEL.encode()))
                op._set_attr(LOWERING, AttrValue(b=False))
        return result

    return made


def pair_in_loops(threads: int, function: str) -> Any:
    """A loop in a loop, in whose body a product runs concurrently with a function of Python's."""
    from tensorflow.python.eager import cancellation
    from tensorflow.python.ops import script_ops

    from tfswap.native.load import load

    tf.config.threading.set_inter_op_parallelism_threads(threads)
    ops, seen, manager = load().ops, [], cancellation.CancellationManager()

    def kernel(op, name, *inputs, **attrs):
        made = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
        for key, value in attrs.items():
            made.attr[key].CopyFrom(value)
        return made.SerializeToString()

    floats = AttrValue(type=tf.float32.as_datatype_enum)
    product = kernel("MatMul", "product", "a", "b", T=floats)
    called = python_function(function, manager, seen)  # to which TensorFlow has a weak reference
    token = AttrValue(s=script_ops._py_funcs.insert(called).encode())
    types = {"Tin": AttrValue(list={}), "Tout": AttrValue(list={"type": [floats.type]})}
    python = kernel("PyFunc", "python", token=token, **types)
    x = tf.random.stateless_normal([700, 700], seed=(1, 2))
    while_loop = with_own_kernels(tf.while_loop)

    def inner(n, x):
        where = tf.numpy_function(python_function("reported", manager, seen), [], tf.float32)
        with tf.control_dependencies([where]):
            y, messages = ops.tfswap_pair(
                inputs=[x, x], Tout=[tf.float32] * 2, kernels=[product, python], allocations=1
            )
        return n + 1, tf.ensure_shape(x + 0 * y + messages, x.shape)

    def outer(n, x):
        return n + 1, while_loop(lambda n, x: n < 4, inner, (0, x))[1]

    run = tf.function(lambda x: while_loop(lambda n, x: n < 5, outer, (0, x))[1])

    def in_use():
        return tf.config.experimental.get_memory_info("CPU:0")["current"]

    same, error, before = False, "", in_use()
    try:
        step = manager.get_cancelable_function(run.get_concrete_function(x))
        same = bool(tf.reduce_all(step(x) == x))
    except tf.errors.OpError as caught:
        error = str(caught)
    del called
    elsewhere = sum(a != b for a, b in zip(seen[::2], seen[1::2], strict=False))
    return {"same": same, "elsewhere": elsewhere, "seen": len(seen), "error": error, "in_use": in_use() - before}


PRODUCT_BYTES = 4 * 700**2


def in_loops(threads: int, function: str = "reported") -> Any:
    return on_arena(lambda: pair_in_loops(threads, function), TF_NUM_INTRAOP_THREADS="2")


def test_in_loops_the_second_runs_on_another_thread():
    found = in_loops(3)
    assert (found["same"], found["seen"]) == (True, 40)
    assert found["elsewhere"]


def test_where_there_is_one_thread_it_runs_both():
    found = in_loops(1)
    assert (found["same"], found["seen"]) == (True, 40)
    assert not found["elsewhere"]


def test_a_kernel_of_a_pair_that_fails_in_a_loop_is_reported_by_name():
    found = in_loops(3, "failing")
    assert "on purpose" in found["error"]
    assert "{{node python}}" in found["error"]
    assert found["in_use"] < PRODUCT_BYTES  # constants of the loops stay


def test_a_step_that_is_cancelled_while_a_pair_runs_in_a_loop_ends_and_keeps_nothing():
    found = in_loops(3, "cancelling")
    assert "ancelled" in found["error"], found
    assert found["seen"] < 40
    assert found["in_use"] < PRODUCT_BYTES  # constants of the loops stay
