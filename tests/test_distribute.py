"""`tf.distribute`: several workers, each a process with an arena and a limit of its own."""

from __future__ import annotations

import pytest
from processes import on_workers

from tfswap.ir.text import parse_graph
from tfswap.passes.collectives import apply_collective_order, spans_workers

pytest.importorskip("tensorflow")

WORKERS = """
import json, logging
import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys, CollectiveReplicaLauncher
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import tfswap
from nets import Net, batch, grappler_off, trained

with strategy.scope():
    net = Net()
start = [weight.numpy() for weight in net.weights]

def replica(x):
    with tf.GradientTape() as tape:
        loss = net.loss(x)
    gradients = tape.gradient(loss, net.weights)
    gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
    for weight, gradient in zip(net.weights, gradients):
        weight.assign_sub(0.1 * gradient)
    return loss

def step(x):
    return strategy.reduce("MEAN", strategy.run(replica, (x,)), None)

calls = [(batch(1024, seed=2 * i + RANK),) for i in range(3)]

taken = []  # keys of collectives: who takes others than the other workers do waits for ever
take = CollectiveKeys.get_instance_key

def taking(self, *of):
    taken.append(of)
    return take(self, *of)

def as_undecorated(limit):
    with grappler_off():
        expected, _ = trained(net.weights, start, tf.function(step), *calls)
    CollectiveKeys.get_instance_key = taking
    taken.clear()
    optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
    found, peak = trained(net.weights, start, optimized, *calls)
    assert len(taken) == 2 * len(calls), taken
    return found == expected, peak, optimized
"""


def test_workers_carry_out_one_plan_under_the_limit_of_each():
    # The second worker's arena is in pieces, and its limit is one that it would have an easier plan for.
    code = f"""{WORKERS}
if RANK:
    pieces = [tf.zeros([1000 + 331 * i]) for i in range(40)][::3]
same, peak, optimized = as_undecorated(["60%", "95%"][RANK])
limit, plan = optimized.report().memory_limit_bytes, optimized.plan()
print(json.dumps([same, peak <= limit, limit, plan.order, [(a.tensor, a.release, a.use) for a in plan.absences]]))
"""
    (same, kept, limit, *plan), (same_there, kept_there, limit_there, *plan_there) = on_workers(code)
    assert same
    assert same_there
    assert kept
    assert kept_there
    assert limit < limit_there
    assert plan == plan_there
    assert plan[1], "it moves something"


def test_all_workers_refuse_what_one_can_not_keep_and_train_with_more():
    code = f"""{WORKERS}
try:
    as_undecorated([None, 100_000][RANK])
except tfswap.InfeasibleMemoryLimit as error:
    floor = error.floor_bytes
same, peak, _ = as_undecorated(max(floor, 5 << 20))
print(json.dumps([floor, same, peak <= max(floor, 5 << 20)]))
"""
    (floor, *kept), (floor_there, *kept_there) = on_workers(code)
    assert floor == floor_there > 100_000
    assert all((*kept, *kept_there))


def test_collectives_come_in_one_order_on_all_workers():
    # Without tokens nothing but the traced order is common to two of them; the second worker's graph has lost that.
    code = f"""{WORKERS}
import tfswap.frontends.pipeline as pipeline

CollectiveReplicaLauncher._prefer_ordering_token = False
order = pipeline.apply_collective_order

def of_a_graph_turned_round(graph):
    if RANK:
        graph._nodes = dict(reversed(graph._nodes.items()))
    return order(graph)

pipeline.apply_collective_order = of_a_graph_turned_round

def sums(x):
    reduce = tf.distribute.get_replica_context().all_reduce
    return [reduce("sum", tf.reduce_mean(tf.sin(x @ weight), 0)) for weight in net.weights]

optimized = tfswap.optimize(tf.function(lambda x: strategy.run(sums, (x,))), memory_limit="104%")
for call in calls:
    found = optimized(*call)
names = [name for name in optimized.plan().order if "CollectiveReduce" in name]
print(json.dumps([names, [each.numpy().tobytes().hex() for each in found]]))
"""
    (order, sums), (order_there, sums_there) = on_workers(code)
    assert len(order) == 6
    assert order == order_there
    assert sums == sums_there


COLLECTIVES = """
%key = Placeholder() -> int32[]
%later_key = Placeholder() -> int32[]
%size = Const() -> int32[] = (2,)
%group = Const() -> int32[] = (7,)
%x = Placeholder() -> float32[8]
%later = CollectiveReduceV2(%x, %size, %group, %later_key) -> float32[8]
%first = CollectiveReduceV2(%x, %size, %group, %key) -> float32[8]
feeds %x, %key, %later_key
fetches %later, %first
"""


def test_collectives_wait_for_those_that_were_traced_before_them():
    graph = parse_graph(COLLECTIVES)
    assert spans_workers(graph)
    assert apply_collective_order(graph) == 1
    assert graph["later"].controls == (graph["first"],)
    assert apply_collective_order(graph) == 0


def test_collectives_among_the_devices_of_one_worker_do_not_span_workers():
    graph = parse_graph(COLLECTIVES)
    graph["first"].device, graph["later"].device = "/device:CPU:0", "/device:CPU:1"
    assert not spans_workers(graph)
