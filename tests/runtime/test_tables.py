"""Variables that are read or updated in part, as tables of embeddings are.

What TensorFlow's copy-on-read mode does, and steps on an arena, whose peak is the planned one to the byte.
"""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from step_peaks import measuring

from tfswap.ir import op_traits
from tfswap.ir.permits import TENSOR_TACTICS

pytest.importorskip("tensorflow")


class PlannedStep:
    """The step of a net of tables on the device under the lowest limit, its peaks and its losses."""

    def __init__(self, net: str, different: int) -> None:
        import tensorflow as tf
        from arena_programs import floor_of
        from models import settle
        from tables import NETS, batch

        import tfswap

        settle()
        self.arguments = batch(2000, different)
        self.nothing = tf.IndexedSlices(self.arguments[1] * 0.0, self.arguments[0])
        self.net = NETS[net]()
        function = tf.function(self.net.step)
        self.limit = floor_of(function, *self.arguments, tactics=TENSOR_TACTICS)
        self.step = tfswap.optimize(function, memory_limit=self.limit, tactics=TENSOR_TACTICS)
        self.peaks: list[int] = []
        self.losses: list[str] = []

    def run(self) -> None:
        with measuring(self.peaks):
            self.losses.append(self.step(*self.arguments).numpy().tobytes().hex())


def digest(net: Any) -> list[str]:
    return [v.numpy().tobytes().hex() for v in net.variables]


def in_all_modes(name: str) -> list[Any]:
    import tensorflow as tf
    from tables import NETS

    from tfswap.exporters.function import memory_optimizer_off

    planned = PlannedStep(name, different=2000)
    net, arguments = planned.net, planned.arguments
    planned.run()
    planned.run()
    tf.gather(net.table, arguments[0])  # turns the mode on
    planned.run()
    tf.raw_ops.DisableCopyOnRead(resource=net.table.handle)  # as saving a checkpoint does
    planned.run()
    net.table.scatter_add(planned.nothing)
    planned.run()
    with memory_optimizer_off():
        reference = NETS[name]()
        unoptimised = tf.function(reference.step)
        expected = [unoptimised(*arguments).numpy().tobytes().hex() for _ in planned.losses]
    plan = planned.step.plan()
    same = planned.losses == expected and digest(net) == digest(reference)
    return [planned.peaks, plan.planned_peak_bytes, planned.limit, same, len(plan.order), planned.step.plans]


@pytest.mark.parametrize("net", ["Whole", "Sparse", "Inside", "OnlyInPart"])
def test_the_planned_peak_is_the_measured_one_whatever_the_mode_was(net):
    peaks, planned, limit, same, kernels, plans = on_arena(lambda: in_all_modes(net))
    assert peaks == [planned] * 5
    assert planned <= limit
    assert same
    assert kernels
    assert plans == 1


@pytest.mark.parametrize("different", [2000, 50])
def test_equal_ids_take_less_and_ids_that_all_differ_what_is_planned(different):
    """How many rows are updated is known by a bound; the limit holds for all data."""

    def program():
        step = PlannedStep("Sparse", different)
        step.run()
        step.run()
        return [step.peaks, step.step.plan().planned_peak_bytes, step.limit]

    peaks, planned, limit = on_arena(program)
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

    def allocates(function):
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
        in_part, reads, updates = allocates(run), allocates(read), allocates(whole)
        for handle in handles:
            tf.raw_ops.DisableCopyOnRead(resource=handle)
        shared = allocates(read), allocates(whole)
        _held = read()
        copied = allocates(run)
        found[case.op] = [in_part, reads, updates, *shared, copied]
    return found


def test_what_turns_the_mode_on_and_what_copies_in_it():
    found = on_arena(every_op)
    assert sorted(found) == sorted(op for op in op_traits.TRAITS if op_traits.turns_on_copy_on_read(op))
    for op, asked in found.items():
        # In part; in the mode: a read, an update of the whole; out of it: the same; in part, while a read is held.
        assert asked == [False, True, True, False, False, True], op
