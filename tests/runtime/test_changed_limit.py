"""A limit that is changed between two steps: no new trace, the same values, and each step within its own limit."""

from __future__ import annotations

import pytest
from processes import on_arena

pytest.importorskip("tensorflow")

PROGRAM = '''
import json
import tensorflow as tf
import tfswap
from nets import Net, batch, bits

def peak():
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]

def run(step, *arguments):
    tf.config.experimental.reset_memory_stats("CPU:0")
    value = step(*arguments)
    return bits(value), peak()

net, twin = Net(layers=4), Net(layers=4)
step = tfswap.optimize(tf.function(net.step), memory_limit="300%")
reference = tf.function(twin.step)
found = {"same": [], "held": [], "limits": []}

def both(x):
    value, reached = run(step, x)
    found["same"].append(value == bits(reference(x)) and bits(net.weights) == bits(twin.weights))
    planned = step.plan()
    found["held"].append(reached <= planned.limit_bytes)
    found["limits"].append(planned.limit_bytes)
    return step.report()

def warmed_up(x):
    """The report once all functions are made, whose constants count in the floor."""
    both(x)
    step.memory_limit = "60%"
    return both(x)
'''


def program(body: str) -> dict:
    return on_arena(PROGRAM + body + "\nprint(json.dumps(found))", TF_NUM_INTEROP_THREADS="1")


def test_each_step_keeps_the_limit_that_it_has_at_its_call():
    found = program("""
x = batch()
first = warmed_up(x)
floor, high = first.floor_bytes, first.baseline_peak_bytes
for limit in (int(0.8 * high), floor, "70%", "300%", (floor + high) // 2):
    step.memory_limit = limit
    both(x)
    both(x)
found["floor"], found["high"] = floor, high
found["traces"] = step.experimental_get_tracing_count()
""")
    floor, high = found["floor"], found["high"]
    asked = [int(0.6 * high), int(0.8 * high), floor, int(0.7 * high), 3 * high, (floor + high) // 2]
    assert all(found["same"])
    assert all(found["held"])
    assert found["traces"] == 1
    for got, limit in zip(found["limits"][1::2], asked, strict=True):
        assert got == pytest.approx(limit, abs=high // 50)


def test_an_impossible_limit_is_refused_at_the_call_and_nothing_has_run():
    found = program("""
x = batch()
floor = warmed_up(x).floor_bytes
step.memory_limit = floor // 2
before = bits(net.weights)
for _ in range(2):
    try:
        step(x)
        found["refused"] = False
    except tfswap.InfeasibleMemoryLimit as error:
        found["refused"] = error.limit_bytes == floor // 2 and error.floor_bytes <= floor
found["untouched"] = bits(net.weights) == before
step.memory_limit = floor
both(x)
""")
    assert found["refused"]
    assert found["untouched"]
    assert all(found["same"])
    assert all(found["held"])


def test_methods_steps_inside_of_functions_and_other_sizes_follow():
    found = program("""
class Model:
    def __init__(self):
        self.net = Net(layers=4)

    @tf.function
    def traced(self, x):
        return self.net.step(x)

Model.step = tfswap.optimize(Model.__dict__["traced"], memory_limit="300%")
model = Model()
x = batch()
run(model.step, x)
low = model.step.report().floor_bytes + (1 << 20)  # for the constants of the trace
Model.step.memory_limit = low
_, reached = run(model.step, x)
found["held"].append(reached <= low)

low = warmed_up(x).floor_bytes + (1 << 20)  # for the other batch
outer = tf.function(lambda x: step(x) + 1.0)
outer(x), reference(x)
step.memory_limit = low
_, reached = run(outer, x)
reference(x)
found["held"].append(reached <= low)

step.memory_limit = "300%"
both(batch(700))
step.memory_limit = low
both(batch(700))
both(x)
""")
    assert all(found["same"])
    assert all(found["held"])


def test_what_is_no_limit_is_refused_and_changes_nothing():
    found = program("""
x = batch()
both(x)
messages = []
for wrong in ("sixty", -5, "0%", 1.5):
    try:
        step.memory_limit = wrong
    except tfswap.TfswapError as error:
        messages.append(str(error))
fixed = tfswap.optimize(tf.function(net.step), plan=step.plan())
try:
    fixed.memory_limit = "50%"
except tfswap.TfswapError as error:
    messages.append(str(error))
both(x)
found |= {"messages": messages, "kept": step.memory_limit == "300%"}
""")
    assert len(found["messages"]) == 5
    assert all(found["messages"])
    assert found["kept"]
    assert all(found["same"])
