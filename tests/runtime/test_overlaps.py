"""Kernels that run concurrently with those after them: which, what they do to memory, and that values are the same."""

from __future__ import annotations

import dataclasses

import pytest
from processes import on_arena
from test_beside import BYTES, HEADS, RATES, TWO_CORES, TWO_THREADS, costs, facts, named

from tfswap.analysis.dataflow import analyse_dataflow
from tfswap.compiler.compiler import Optimizer
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.passes.contract import Target
from tfswap.passes.order import chain_nodes
from tfswap.passes.tactics.swap import insert_schedule
from tfswap.passes.verify import verify
from tfswap.plan.plan import Overlap, Plan
from tfswap.plan.schedule import FINISH, START, Step, build_schedule
from tfswap.simulator.simulate import simulate_memory, simulate_time

ORDER = "a q k s t r"


def test_what_a_kernel_reads_is_held_until_its_end() -> None:
    flow = facts(HEADS.replace("(%a, %x)", "(%x, %x)"))  # q is the last to read a
    order = named(flow, ORDER)
    steps = build_schedule(order, (), overlaps=(Overlap(1, 3),))
    q = flow.place["q"]
    assert [step for step in steps if step.kind in (START, FINISH)] == [Step(START, q), Step(FINISH, q)]
    assert steps.index(Step(FINISH, q)) == 3
    memory = simulate_memory(flow, steps, live=True)
    # x and a, q, k, and then s in the place of q.
    assert list(memory.during_bytes[:5]) == [2 * BYTES, 3 * BYTES, 4 * BYTES, 4 * BYTES, 3 * BYTES]


def test_a_kernel_runs_while_others_do() -> None:
    flow = facts(HEADS)
    order, cost_s = named(flow, ORDER), costs(flow)
    apart, together = (
        simulate_time(flow, build_schedule(order, (), overlaps=overlaps), cost_s, RATES).total_s
        for overlaps in ((), (Overlap(1, 3),))
    )
    assert together < apart


def test_two_nodes_start_a_kernel_and_wait_for_it() -> None:
    graph = parse_graph(HEADS)
    flow = analyse_dataflow(graph.copy(), TWO_CORES)
    plan = Plan("", None, tuple(ORDER.split()), (), 0, 0, 0, 1.0, "test", overlaps=(Overlap(1, 3), Overlap(2, 3)))
    chain_nodes(graph, insert_schedule(graph, Target(DeviceModel()), flow, plan))
    verify(graph)
    starts = [node for node in graph if node.op == custom_ops.START]
    finishes = [node for node in graph if node.op == custom_ops.FINISH]
    assert "q" not in graph
    assert [kernel.name for node in starts for kernel in node.attrs["kernels"]] == ["q", "k"]
    assert [node.inputs for node in finishes] == [(start.out(0),) for start in starts]
    assert [node.attrs["allocations"] for node in starts] == [1, 1]  # q's end comes between
    assert graph["s"].inputs == (finishes[0].out(0),)
    assert graph["t"].inputs == (finishes[1].out(0),)


def test_what_is_finished_next_wakes_no_thread() -> None:
    graph = parse_graph(HEADS)
    flow = analyse_dataflow(graph.copy(), TWO_CORES)
    plan = Plan("", None, tuple(ORDER.split()), (), 0, 0, 0, 1.0, "test", overlaps=(Overlap(1, 4), Overlap(2, 3)))
    insert_schedule(graph, Target(DeviceModel()), flow, plan)
    assert [node.attrs["allocations"] for node in graph if node.op == custom_ops.START] == [1, 2]


@pytest.mark.parametrize(
    ("overlaps", "message"),
    [
        ([(2, 2)], "from 2 to 2 after one from -1"),
        ([(1, 3), (1, 2)], "from 1 to 2 after one from 1"),
        ([(1, 7)], "from 1 to 7"),
        ([(1, 4)], "runs 'q' concurrently with the kernels up to position 4, and 's' needs it"),
        ([(5, 6)], "runs 'r' concurrently with the kernels up to position 6, and it can't"),  # it is fetched
    ],
)
def test_a_plan_file_names_only_what_can_run_concurrently(overlaps: list[tuple[int, int]], message: str) -> None:
    optimizer = Optimizer(parse_graph(HEADS), TWO_CORES)
    plan = optimizer.plan(None, ordered=True)
    asked = dataclasses.replace(
        plan, order=tuple(ORDER.split()), beside=(), overlaps=tuple(Overlap(*overlap) for overlap in overlaps)
    )
    with pytest.raises(InvalidModel, match=message):
        optimizer.require_fit(Plan.from_json(asked.to_json()))


def test_a_plan_with_overlaps_has_no_pairs() -> None:
    plan = Optimizer(parse_graph(HEADS), TWO_CORES).plan(None, ordered=True)
    assert plan.beside
    asked = dataclasses.replace(plan, overlaps=(Overlap(0, 1),))
    with pytest.raises(InvalidModel, match="a plan with overlaps has no pairs"):
        Plan.from_json(asked.to_json())


STARTED = """
import gc, json, time
import tensorflow as tf
from one_core_programs import serialized
from tfswap.native.load import load
ops = load().ops

def start(*inputs, kernel=serialized("MatMul", 2), allocations=1):
    return ops.tfswap_start(inputs=inputs, kernels=[kernel], allocations=allocations)

def refused(call):
    try:
        call()
    except (tf.errors.InvalidArgumentError, tf.errors.NotFoundError) as error:
        return str(error)
    return ""

def finish(started, types=[tf.float32]):
    return ops.tfswap_finish(started=started, Tout=types)

def in_use():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]

x = tf.random.stateless_normal([300, 300], seed=(1, 2))
wide = tf.zeros([1, 40000])
function = tf.function(lambda: finish(start(x, x))[0]).get_concrete_function()
results = {"same": [bool(tf.reduce_all(finish(start(x, x, allocations=n))[0] == x @ x)) for n in (1, 7)]}
results["shape"] = function.outputs[0].shape.as_list()
results["graph"] = bool(tf.reduce_all(function() == x @ x))
before = in_use()
start(x, x)  # and never waits for it
results["fails"] = refused(lambda: finish(start(x, wide)))
once = start(x, x)
finish(once)
results["twice"] = refused(lambda: finish(once))
results["another type"] = refused(lambda: finish(tf.constant(1.0)))
results["outputs"] = refused(lambda: finish(start(x, x), [tf.float32] * 2))
results["type"] = refused(lambda: finish(start(x, x), [tf.int32]))
results["not a node"] = refused(lambda: start(x, x, kernel=b"\\xff"))
results["inputs"] = refused(lambda: start(x))
large = tf.random.stateless_normal([1200, 1200], seed=(1, 2))

@tf.function(autograph=False)
def aborted():
    started = start(large, large)
    with tf.control_dependencies([started]):
        failed = tf.debugging.check_numerics(tf.constant(float("nan")) + x[0, 0], "no number")
    with tf.control_dependencies([failed]):
        return finish(started)[0]

results["aborted"] = [refused(aborted) for _ in range(5)]
del once, large, aborted
gc.collect()
until = time.monotonic() + 30
while in_use() > before and time.monotonic() < until:
    time.sleep(0.01)  # the kernels have not all ended
results["leaked"] = in_use() - before
print(json.dumps(results))
"""


def test_a_kernel_that_fails_says_why_and_keeps_nothing() -> None:
    found = on_arena(STARTED, 1000, **TWO_THREADS)
    assert found["same"] == [True, True]
    assert found["shape"] == [300, 300]
    assert found["graph"]
    assert "Matrix size-incompatible" in found["fails"]
    assert "{{node MatMul}}" in found["fails"]
    assert "finished already" in found["twice"]
    assert found["another type"]
    assert "Tout" in found["outputs"]
    assert "Tout" in found["type"]
    assert "not a NodeDef" in found["not a node"]
    assert "Tin" in found["inputs"]
    assert all("no number" in error for error in found["aborted"])
    assert found["leaked"] == 0
