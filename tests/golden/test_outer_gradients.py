"""The passes for a step in two calls, on small graphs; and the ops that pass tensors from one to the other."""

from __future__ import annotations

from processes import last_json, run_forked

from tfswap.ir.custom_ops import CARRY, DELIVER, GATE, OUTSIDE
from tfswap.ir.graph import Graph, Node
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.outer_gradients import cut, fix_sides, outside_of

X = TensorType("float32", (8, 8))
HANDLE = TensorType("resource", ())


def step() -> Graph:
    """y = relu(x w); then dx, dw of it, with a constant and a view on the way."""
    graph = Graph()
    x = graph.add("Placeholder", "x", outputs=(X,))
    variable = graph.add("Placeholder", "variable", outputs=(HANDLE,))
    weight = graph.add("ReadVariableOp", "weight", (variable.out(),), outputs=(X,))
    product = graph.add("MatMul", "product", (x.out(), weight.out()), outputs=(X,))
    y = graph.add("Relu", "y", (product.out(),), outputs=(X,))
    view = graph.add("Identity", "view", (y.out(),), outputs=(X,))
    counted = graph.add("AssignAddVariableOp", "counted", (variable.out(), y.out()))
    half = graph.add("Const", "half", outputs=(TensorType("float32", ()),), controls=(product,))
    outside = graph.add(OUTSIDE, "outside", (y.out(),), outputs=(X,))
    back = graph.add("ReluGrad", "backward/relu", (outside.out(), view.out()), outputs=(X,))
    scaled = graph.add("Mul", "backward/scaled", (back.out(), half.out()), outputs=(X,))
    printed = graph.add("Print", "backward/printed", (half.out(),), outputs=(half.outputs[0],))
    dx = graph.add("MatMul", "backward/dx", (scaled.out(), weight.out()), outputs=(X,))
    dw = graph.add("MatMul", "backward/dw", (x.out(), scaled.out()), outputs=(X,))
    graph.feeds = [x, variable]
    graph.fetches = [y.out(), dx.out(), dw.out(), outside.out()]
    graph.targets = [counted, printed]
    return graph


def is_backward(node: Node) -> bool:
    return node.name.startswith("backward/")


def kernels(graph: Graph) -> list[str]:
    order = ["product", "y", "counted", "outside", "backward/relu", "backward/scaled", "backward/dx", "backward/dw"]
    return [name for name in order if name in graph]


def test_what_acts_is_put_on_its_side():
    graph = step()
    fix_sides(graph, Target(DeviceModel()), 1, is_backward)
    assert {node.name for node in outside_of(graph).controls} == {"weight", "counted", "y"}
    assert graph["backward/printed"].controls == (outside_of(graph),)


def parts() -> tuple[Graph, Graph]:
    graph = step()
    fix_sides(graph, Target(DeviceModel()), 1, is_backward)
    for before, after in zip(kernels(graph), kernels(graph)[1:], strict=False):
        graph.add_control(graph[after], graph[before])
    return cut(graph, 1, kernels(graph), gate=7)


def test_each_kernel_is_in_one_function():
    forward, backward = parts()
    assert [n.name for n in forward if n.name in kernels(step())] == ["product", "y", "counted"]
    assert [n.name for n in backward if n.name in kernels(step())] == [
        "backward/relu",
        "backward/scaled",
        "backward/dx",
        "backward/dw",
    ]
    assert not [n for half in (forward, backward) for n in half if n.op == OUTSIDE]


def test_what_the_second_half_reads_is_carried_once_and_costs_nothing_else():
    forward, backward = parts()
    carried = [n.inputs[0].name for n in forward if n.op == CARRY]
    assert sorted(carried) == ["weight:0", "y:0"], "not the view of y, nor the constant, nor the argument"
    assert len([n for n in backward if n.op == DELIVER]) == 2
    assert len(forward.fetches) == 1 + len(carried)
    assert [f.name.rpartition("/")[2] for f in backward.feeds] == ["carrier", "carrier", "gradient_0", "x"]
    assert "half" in backward
    assert backward["half"].controls == ()
    assert [f.name for f in backward.fetches] == ["backward/dx:0", "backward/dw:0"], "not what the caller gave"


def test_nothing_of_the_second_half_runs_before_its_gate():
    _, backward = parts()
    gate = next(n for n in backward if n.op == GATE)
    assert gate.attrs["gate"] == 7
    waiting = {n.name for n in backward if gate in n.controls}
    assert {"backward/relu", "backward/printed", *(n.name for n in backward if n.op == DELIVER)} <= waiting
    backward.topological()


def test_all_of_the_first_half_runs_also_what_nothing_is_fetched_from():
    forward, _ = parts()
    assert forward["counted"] in forward.live_nodes()


def twice():
    import tensorflow as tf
    from tensorflow.python.framework.op_def_library import apply_op

    def carry(x):
        return apply_op("Tfswap>Carry", tensor=x)

    def deliver(x):
        return apply_op("Tfswap>Deliver", carrier=x, T=tf.float32)

    put, take = tf.function(carry), tf.function(deliver)
    x = tf.random.stateless_normal([64, 64], seed=(1, 2))
    carrier = put(x)
    same = bool(tf.reduce_all(take(carrier) == x))
    reported = []
    for wrong in (carrier, tf.raw_ops.OptionalNone(), put(tf.constant(1))):
        try:
            take(wrong)
        except (tf.errors.FailedPreconditionError, tf.errors.InvalidArgumentError) as error:
            reported.append(error.message)
    return [same, reported]


def test_a_carrier_delivers_once():
    same, messages = last_json(run_forked(twice))
    assert same
    assert len(messages) == 3
    assert "delivered before" in messages[0]
    assert "scalar that Carry returned" in messages[1]
    assert "int32" in messages[2]
