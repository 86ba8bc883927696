"""Variables at home on the host, in graphs: which may be, and what their accesses become."""

from __future__ import annotations

import pytest

from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Dtype, Graph, Node, Variable
from tfswap.ir.homes import is_at_home
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.state_homes import bytes_at_home, keep_at_home, movable_variables

FLOATS = TensorType("float32", (64, 64))
TARGET = Target(DeviceModel("cpu"))


class Step(Graph):
    """A graph with variables."""

    def variable(self, name: str) -> Node:
        node = self.add("Placeholder", name, attrs={"dtype": Dtype("resource")}, outputs=(TensorType("resource", ()),))
        self.feeds.append(node)
        return node

    def read(self, name: str, variable: Node, *controls: Node) -> Node:
        attrs = {"dtype": Dtype("float32")}
        return self.add("ReadVariableOp", name, (variable.out(),), controls=controls, attrs=attrs, outputs=(FLOATS,))

    def compute(self, name: str, *inputs: Node) -> Node:
        return self.add("AddV2", name, (node.out() for node in inputs), outputs=(FLOATS,))

    def write(self, op: str, name: str, variable: Node, value: Node, *controls: Node) -> Node:
        inputs = (variable.out(), value.out())
        node = self.add(op, name, inputs, controls=controls, attrs={"dtype": Dtype("float32")})
        self.targets.append(node)
        return node


def ops_of(graph: Graph) -> dict[str, str]:
    return {node.name: node.op for node in graph}


def test_reads_of_the_first_version_share_a_copy() -> None:
    step = Step()
    v = step.variable("v")
    first, second = step.read("first", v), step.read("second", v)
    total = step.compute("total", first, second)
    step.write(custom_ops.ASSIGN_IN_PLACE, "write", v, total, first, second)
    assert keep_at_home(step, TARGET, ["v"]) == 2
    step.prune()
    ops = ops_of(step)
    assert ops["first"] == custom_ops.READ_HOME and ops["write"] == custom_ops.COMMIT_HOME
    assert "second" not in ops
    assert [t.node.name for t in step["total"].inputs] == ["first", "first"]
    assert bytes_at_home(step) == 64 * 64 * 4


def test_a_read_after_a_write_is_a_copy_of_its_own() -> None:
    step = Step()
    v = step.variable("v")
    before = step.read("before", v)
    write = step.write(custom_ops.ASSIGN_IN_PLACE, "write", v, step.compute("twice", before, before), before)
    after = step.read("after", v, write)
    step.fetches.append(step.compute("result", after, after).out())
    keep_at_home(step, TARGET, ["v"])
    step.prune()
    assert {step["before"].op, step["after"].op} == {custom_ops.READ_HOME}
    assert step["result"].inputs[0].node is step["after"]
    assert step["write"] in step["after"].controls


@pytest.mark.parametrize(("op", "arithmetic"), [("AssignAddVariableOp", "AddV2"), ("AssignSubVariableOp", "Sub")])
def test_an_update_in_place_becomes_a_read_an_operation_and_a_write(op: str, arithmetic: str) -> None:
    step = Step()
    v, w = step.variable("v"), step.variable("w")
    forward = step.read("forward", v)
    update = step.write(op, "update", v, step.compute("gradient", forward, step.read("other", w)), forward)
    keep_at_home(step, TARGET, ["v"])
    step.prune()
    result = update.inputs[1].node
    assert update.op == custom_ops.COMMIT_HOME and result.op == arithmetic
    assert [t.node.name for t in result.inputs] == ["forward", "gradient"]
    assert step["other"].op == "ReadVariableOp"


def test_an_update_in_place_reads_what_was_written_before_it() -> None:
    step = Step()
    v = step.variable("v")
    write = step.write(custom_ops.ASSIGN_IN_PLACE, "write", v, step.read("other", step.variable("w")))
    change = step.compute("change", step.read("before", v, write), step["other"])
    update = step.write("AssignSubVariableOp", "update", v, change)
    keep_at_home(step, TARGET, ["v"])
    step.prune()
    assert [t.node.name for t in update.inputs[1].node.inputs] == ["other", "change"]
    assert [t.node.name for t in change.inputs] == ["other", "other"]


@pytest.mark.parametrize("op", ["AddV2", "MatMul"])
def test_an_update_gets_a_new_value_where_it_was_computed(op: str) -> None:
    """A kernel that is no part of an update may run much later, and reads it from its home."""
    step = Step()
    slot, weight = step.variable("slot"), step.variable("weight")
    moved = step.compute("moved", step.read("before", slot), step.read("forward", weight))
    write = step.write(custom_ops.ASSIGN_IN_PLACE, "write", slot, moved)
    after = step.read("after", slot, write)
    change = step.add(op, "change", (after.out(), after.out()), outputs=(FLOATS,))
    step.write("AssignSubVariableOp", "update", weight, change)
    keep_at_home(step, TARGET, ["slot", "weight"])
    step.prune()
    assert {t.node.name for t in change.inputs} == {"moved" if op == "AddV2" else "after"}


def test_an_update_of_another_round_reads_the_home() -> None:
    """The new value would wait on the device while the step trains a second time."""
    step = Step()
    v, w = step.variable("v"), step.variable("w")
    slot = step.compute("slot", step.read("before", v), step.read("gradient", w))
    write = step.write(custom_ops.ASSIGN_IN_PLACE, "write", v, slot)
    scaled = step.compute("scaled", step.read("read", v, write), step.read("scale", w))
    update = step.write(custom_ops.ASSIGN_IN_PLACE, "update", w, scaled, step["gradient"], step["scale"])
    used = step.read("used", w, update)
    product = step.add("MatMul", "product", (used.out(), used.out()), outputs=(FLOATS,))
    second = step.compute("second", step.read("again", v, write), product)
    step.write(custom_ops.ASSIGN_IN_PLACE, "last", v, second, step["again"])
    keep_at_home(step, TARGET, ["v", "w"])
    assert [t.node.name for t in step["scaled"].inputs] == ["slot", "gradient"]
    assert step["second"].inputs[0].node.op == custom_ops.READ_HOME
    assert write in step["second"].inputs[0].node.controls


def test_writes_of_a_variable_stay_in_order_where_the_second_needs_the_first_ones_value() -> None:
    """The second waits for the first by way of a read, which is left out."""
    step = Step()
    v = step.variable("v")
    first = step.write(custom_ops.ASSIGN_IN_PLACE, "first", v, step.read("other", step.variable("w")))
    after = step.read("after", v, first)
    second = step.write(custom_ops.ASSIGN_IN_PLACE, "second", v, step.compute("twice", after, after))
    keep_at_home(step, TARGET, ["v"])
    step.prune()
    assert "after" not in step and first in second.controls


def test_a_new_value_that_the_step_returns_is_read_from_its_home() -> None:
    step = Step()
    slot, weight = step.variable("slot"), step.variable("weight")
    write = step.write(custom_ops.ASSIGN_IN_PLACE, "write", slot, step.compute("moved", *[step.read("b", slot)] * 2))
    change = step.compute("change", *[step.read("after", slot, write)] * 2)
    step.fetches.append(change.out())
    step.write("AssignSubVariableOp", "update", weight, change)
    keep_at_home(step, TARGET, ["slot", "weight"])
    assert [t.node.name for t in change.inputs] == ["after", "after"]


def test_waits_of_a_read_that_is_left_out_are_those_of_its_readers() -> None:
    step = Step()
    v, w = step.variable("v"), step.variable("w")
    first = step.read("first", v)
    act = step.write(custom_ops.ASSIGN_IN_PLACE, "act", w, first)
    late = step.read("late", v, act)
    step.fetches.append(step.compute("result", late, late).out())
    keep_at_home(step, TARGET, ["v"])
    step.prune()
    assert step["result"].inputs[0].node is first
    assert act in step["result"].controls


def test_variables_with_other_accesses_stay() -> None:
    step = Step()
    read, called, returned, unknown = (step.variable(name) for name in ("read", "called", "returned", "unknown"))
    values = [step.read(f"of_{node.name}", node) for node in (read, called, returned)]
    step.fetches += [value.out() for value in values]
    step.targets.append(step.add("StatefulPartitionedCall", "call", (called.out(),)))
    rows = step.add("ResourceGather", "rows", (unknown.out(), values[0].out()), outputs=(FLOATS,))
    step.fetches += [rows.out(), returned.out()]
    assert movable_variables(step) == {"read": FLOATS}
    with pytest.raises(InvalidModel, match="'called'.*Plan again"):
        keep_at_home(step, TARGET, ["called"])


@pytest.mark.parametrize("op", ["ResourceApplyMomentum", "ResourceScatterAdd"])
def test_kernels_that_work_in_the_buffer_stay_as_they_are(op: str) -> None:
    step = Step()
    table, gradient = step.variable("table"), step.read("gradient", step.variable("other"))
    step.variables = {"table": Variable(FLOATS, "table")}
    step.add("ResourceGather", "rows", (table.out(), gradient.out()), outputs=(FLOATS,))
    step.write(op, "update", table, gradient, step["rows"])
    assert movable_variables(step)["table"] == FLOATS
    assert keep_at_home(step, TARGET, ["table"]) == 0
    assert {"ResourceGather", op} <= set(ops_of(step).values())
    assert bytes_at_home(step) == 64 * 64 * 4


def test_rows_are_gathered_from_a_read_in_host_memory() -> None:
    step = Step()
    table = step.variable("table")
    read = step.read("read", table)
    ids = step.add("Placeholder", "ids", outputs=(TensorType("int32", (3,)),))
    rows = step.add("GatherV2", "rows", (read.out(), ids.out()), outputs=(TensorType("float32", (3, 64)),))
    step.write(custom_ops.ASSIGN_IN_PLACE, "write", table, step.compute("twice", read, read), read, rows)
    keep_at_home(step, TARGET, ["table"])
    step.prune()
    assert read.op == custom_ops.READ_HOME
    assert [t.node for t in step["twice"].inputs] == [read, read]
    assert rows.inputs[0].node is not read and rows.inputs[0].node.op == "ReadVariableOp"


class Loop(Step):
    """A step with a loop that gets a variable's handle."""

    def __init__(self, update: str = ""):
        super().__init__()
        v = self.variable("v")
        self.add("While", "loop", (v.out(),), attrs={"T": (Dtype("resource"),)}, outputs=(TensorType("resource", ()),))
        condition, body = Step(), Step()
        condition.fetches.append(condition.add("Const", "more", outputs=(TensorType("bool", ()),)).out())
        condition.variable("handle")
        body.fetches.append(body.variable("handle").out())
        read = body.read("read", body["handle"])
        body.targets.append(body.compute("twice", read, read))
        if update:
            body.write(update, "update", body["handle"], body["twice"], read)
        self.bodies[self["loop"]] = (condition, body)
        self.targets.append(self["loop"])
        shape = self.add("VariableShape", "shape", (self["loop"].out(),), outputs=(TensorType("int32", (2,)),))
        self.fetches.append(shape.out())
        self.variables = {"v": FLOATS}


def test_a_loop_that_only_reads_a_variable_gets_its_value() -> None:
    step = Loop()
    keep_at_home(step, TARGET, ["v"])
    step.prune()
    loop, body = step["loop"], step.bodies[step["loop"]][1]
    assert loop.inputs[0].node.op == custom_ops.READ_HOME and loop.attrs["T"] == ("float32",)
    assert loop.outputs == (FLOATS,) and "read" not in body
    assert [t.node for t in body["twice"].inputs] == [body["handle"]] * 2
    assert step["shape"].inputs[0].node is step["v"] and loop in step["shape"].controls


def test_a_loop_that_writes_a_variable_keeps_its_handle() -> None:
    step = Loop("AssignAddVariableOp")
    keep_at_home(step, TARGET, ["v"])
    body = step.bodies[step["loop"]][1]
    assert step["loop"].inputs[0].node is step["v"]
    assert body["read"].op == "ReadVariableOp" and body["update"].op == "AssignAddVariableOp"
    assert is_at_home(step["v"]) and is_at_home(body["handle"])
