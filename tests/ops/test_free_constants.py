"""No node waits for a constant through a control edge: it waits for the constant's control inputs."""

from __future__ import annotations

import pytest
from processes import on_arena
from step_peaks import measuring

from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare.free_constants import free_constants

TEXT = """\
%x = Placeholder() -> float32[1024]
%loop = StatelessWhile(%x) -> float32[1024]
%one = Const() ^loop -> float32[1]
%many = Const() -> int32[1] = (1024,)
%tile = Tile(%one, %many) -> float32[1024]
%third = Const() ^many -> float32[]
%half = Const() ^tile ^third -> float32[]
%scaled = Mul(%tile, %half) ^x -> float32[1024]
%added = AddV2(%scaled, %loop) ^scaled -> float32[1024]
%write = AssignVariableOp(%added, %half) ^tile
%done = NoOp() ^write
%step = Const() ^done ^half -> int64[]
%count = AssignAddVariableOp(%loop, %step)
feeds %x
fetches %added
targets %count
body %loop
  %x = Placeholder() -> float32[1024]
  %yes = Const() ^x -> bool[]
  %no = LogicalNot(%yes) ^yes -> bool[]
  feeds %x
  fetches %no
body %loop
  %x = Placeholder() -> float32[1024]
  feeds %x
  fetches %x
"""


def test_nothing_waits_for_constants_but_for_what_they_wait_for():
    graph = parse_graph(TEXT)
    assert free_constants(graph, Target(DeviceModel())) == 6
    waiting = {node.name: {c.name for c in node.controls} for node in graph if node.controls}
    assert waiting == {
        "one": {"loop"},
        "half": {"loop"},
        "scaled": {"x"},
        "added": {"loop", "x"},
        "write": {"loop"},
        "done": {"write"},
        "step": {"done", "loop"},  # else nothing would keep the first write in the step
    }
    (body, _) = graph.all_bodies()
    assert [c.name for c in body["yes"].controls] == ["x"]
    assert [c.name for c in body["no"].controls] == ["x"]


def test_a_gradient_of_constants_is_not_made_in_each_step():
    """The gradient of log1p makes a constant that waits for the gradient that comes in, which is one itself here."""
    pytest.importorskip("tensorflow")

    def program():
        import tensorflow as tf
        from models import settle

        import tfswap

        settle()
        w = tf.Variable(tf.ones([8192]))

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum(tf.math.log1p(tf.exp(tf.sin(x * w))), 1))
            w.assign_sub(tape.gradient(loss, w))
            return loss

        x = tf.random.stateless_normal([48, 8192], (1, 2))

        def waiting(f):
            return [
                op.name
                for op in f.get_concrete_function(x).graph.get_operations()
                if op.type == "Const" and op.control_inputs
            ]

        assert waiting(tf.function(step))
        optimized = tfswap.optimize(tf.function(step), memory_limit="90%")
        peaks = []
        for _ in range(3):
            with measuring(peaks):
                optimized(x)
        return [optimized.plan().planned_peak_bytes, max(peaks), waiting(optimized)]

    result = on_arena(program)
    planned, measured, waiting = result
    assert waiting == []
    assert measured <= planned <= 1.01 * measured
