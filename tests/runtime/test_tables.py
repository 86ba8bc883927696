"""Variables that are read or updated in part, as tables of embeddings are.

What TensorFlow's copy-on-read mode does, and steps on an arena, whose peak is the planned one to the byte.
"""

from __future__ import annotations

import pytest
from processes import on_arena

from tfswap.ir import op_traits

pytest.importorskip("tensorflow")

PROGRAM = """
import json
import tensorflow as tf
import tfswap
from models import settle
from tables import NETS, batch

settle()
arguments = batch({count}, {different})
nothing = tf.IndexedSlices(arguments[1] * 0.0, arguments[0])

def floor_of(function):
    try:
        tfswap.optimize(function, memory_limit=1)(*arguments)
    except tfswap.InfeasibleMemoryLimit as error:
        return error.floor_bytes

net = NETS[{net!r}]()
function = tf.function(net.step)
limit = floor_of(function)
step = tfswap.optimize(function, memory_limit=limit)
peaks, losses = [], []

def run():
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses.append(step(*arguments).numpy().tobytes().hex())
    peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])

def digest(net):
    return [v.numpy().tobytes().hex() for v in net.variables]
"""

MODES = """
run()
run()
tf.gather(net.table, arguments[0])  # turns the mode on
run()
tf.raw_ops.DisableCopyOnRead(resource=net.table.handle)  # as saving a checkpoint does
run()
net.table.scatter_add(nothing)
run()

from tfswap.exporters.function import memory_optimizer_off
with memory_optimizer_off():
    reference = NETS[{net!r}]()
    unoptimised = tf.function(reference.step)
    expected = [unoptimised(*arguments).numpy().tobytes().hex() for _ in losses]
plan = step.plan()
same = losses == expected and digest(net) == digest(reference)
print(json.dumps([peaks, plan.planned_peak_bytes, limit, same, len(plan.order), step.plans]))
"""


@pytest.mark.parametrize("net", ["Whole", "Sparse", "Inside", "OnlyInPart"])
def test_the_planned_peak_is_the_measured_one_whatever_the_mode_was(net):
    program = (PROGRAM + MODES).format(net=net, count=2000, different=2000)
    peaks, planned, limit, same, kernels, plans = on_arena(program)
    assert peaks == [planned] * 5
    assert planned <= limit
    assert same
    assert kernels
    assert plans == 1


@pytest.mark.parametrize("different", [2000, 50])
def test_equal_ids_take_less_and_ids_that_all_differ_what_is_planned(different):
    """How many rows are updated is known by a bound; the limit holds for all data."""
    reported = "run()\nrun()\nprint(json.dumps([peaks, step.plan().planned_peak_bytes, limit]))"
    peaks, planned, limit = on_arena((PROGRAM + reported).format(net="Sparse", count=2000, different=different))
    assert max(peaks) <= planned <= limit
    if different == 2000:
        assert min(peaks) == planned


def every_op():
    import tensorflow as tf
    from kernel_cases.variables import variables_in_part
    from kernel_memory import _Program
    from models import settle

    settle()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    kib = 1024

    def requested_precisions(function):
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        function()
        return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before >= 512 * kib  # a variable's size

    found, update = {}, tf.zeros([512, 256])
    for case in variables_in_part():
        program = _Program(case, None)
        handles = [v.handle for v in program.variables.values()]

        def read(handles=handles):
            return [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in handles]

        def whole(handles=handles):
            for handle in handles:
                tf.raw_ops.AssignSubVariableOp(resource=handle, value=update)

        def run(program=program):
            return program.function(*program.arguments)

        run()
        in_part, reads, updates = requested_precisions(run), requested_precisions(read), requested_precisions(whole)
        for handle in handles:
            tf.raw_ops.DisableCopyOnRead(resource=handle)
        shared = requested_precisions(read), requested_precisions(whole)
        _held = read()
        copied = requested_precisions(run)
        found[case.op] = [in_part, reads, updates, *shared, copied]
    return found


def test_what_turns_the_mode_on_and_what_copies_in_it():
    found = on_arena(every_op)
    assert sorted(found) == sorted(op for op in op_traits.TRAITS if op_traits.turns_on_copy_on_read(op))
    for op, asked in found.items():
        # In part; in the mode: a read, an update of the whole; out of it: the same; in part, while a read is held.
        assert asked == [False, True, True, False, False, True], op
