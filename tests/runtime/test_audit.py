"""The audit: the graph that TensorFlow ran against the planned one."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest

pytest.importorskip("tensorflow")

import loop_steps
import tensorflow as tf
from nets import Net, batch, called
from processes import on_arena

import tfswap
from tfswap.ir import custom_ops
from tfswap.ir.text import parse_graph
from tfswap.passes.verify import VerificationError
from tfswap.runtime import audit as module
from tfswap.runtime.audit import Expected, audit


class Audits(list):
    """What `audit` is called with from now on: (planned, executed, gate); and what it finds, a number of edges."""

    def __init__(self, monkeypatch):
        def spy(planned, library, gate):
            self.append((planned, library, gate))
            return audit(planned, library, gate)

        monkeypatch.setattr(module, "audit", spy)


@pytest.fixture
def audits(monkeypatch):
    return Audits(monkeypatch)


@pytest.fixture(scope="module")
def audited():
    """A step that swaps: what was planned, what was executed, its gate."""
    with pytest.MonkeyPatch.context() as patch:
        audits = Audits(patch)
        called(Net())(batch())
    (one,) = audits
    return one


def changed(audited, change):
    """The same, with the executed functions changed."""
    planned, library, gate = audited
    copy = type(library).FromString(library.SerializeToString())
    change(copy)
    return planned, copy, gate


def node_of(library, op):
    return next(node for function in library.function for node in function.node_def if node.op == op)


def test_what_was_planned_is_what_runs(audited):
    assert audit(*audited) > len(audited[0].kernels)


@pytest.mark.parametrize("results", [1, 2])
def test_a_result_s_kernel_keeps_its_name(results):
    """Grappler leaves no Identity behind it: TensorFlow calls the result as the node, and renames that."""

    def program():
        from nets import batch, bits, unoptimised

        @tf.function(autograph=False)
        def step(x):
            last = tf.multiply(tf.sigmoid(x), tf.roll(x, 1, 0), name="last")
            return tf.reduce_sum(last), last if results == 1 else [last] * results

        slab = tf.raw_ops.Empty(shape=[400 << 20], dtype=tf.uint8)
        del slab
        x = batch()
        optimized = tfswap.optimize(step, memory_limit="110%")
        optimized(x)
        made = tfswap.optimize(step, memory_limit=optimized.report().planned_peak_bytes + (64 << 10))
        return bits(made(x)) == bits(unoptimised(step, x)) and len(made.plan().order) > 0

    assert on_arena(program)


@pytest.mark.parametrize("op", [custom_ops.RELEASE, "Cos", "Mean"])
def test_a_kernel_that_is_gone_is_named(audited, op):
    def remove(library):
        (function,) = library.function
        node = node_of(library, op)
        for other in function.node_def:
            for i, source in enumerate(other.input):
                if source.startswith((f"{node.name}:", f"^{node.name}")):
                    other.input[i] = f"^{function.node_def[0].name}"
        function.node_def.remove(node)

    with pytest.raises(VerificationError, match="removed the planned node '"):
        audit(*changed(audited, remove))


def test_a_node_that_computes_something_else_is_named(audited):
    def exchange(library):
        node_of(library, "Cos").op = "Sin"

    with pytest.raises(VerificationError, match="made Sin of the planned Cos node '"):
        audit(*changed(audited, exchange))


@pytest.mark.parametrize("form", ["_MklCos", "_MklNativeCos"])
def test_onednn_s_form_of_an_op_is_what_was_planned(audited, form):
    def exchange(library):
        node_of(library, "Cos").op = form

    assert audit(*changed(audited, exchange)) == audit(*audited)


@pytest.mark.parametrize("op", [custom_ops.RELEASE, custom_ops.SWAP_IN])
def test_an_edge_of_the_order_that_is_gone_is_named(audited, op):
    def remove(library):
        node = node_of(library, op)
        node.input.remove(next(i for i in node.input if i.startswith("^")))

    with pytest.raises(VerificationError, match="removed the planned edge '.*' -> '.*(release|in)'"):
        audit(*changed(audited, remove))


def test_a_step_without_its_gate_is_refused(audited):
    with pytest.raises(VerificationError, match="without its gate"):
        audit(*changed(audited, lambda library: node_of(library, custom_ops.GATE).attr["gate"].Clear()))


# --- loops ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def audited_loop():
    _, step, data = loop_steps.while_loop()
    with pytest.MonkeyPatch.context() as patch:
        audits = Audits(patch)
        tfswap.optimize(tf.function(step), memory_limit="105%")(*data)
    (one,) = audits
    return one


def test_bodies_are_compared_too(audited_loop):
    whole = audit(*audited_loop)
    planned = audited_loop[0]
    assert whole > audit(dataclasses.replace(planned, bodies={}), *audited_loop[1:]) > 0


def test_a_node_of_a_body_that_computes_something_else_is_named(audited_loop):
    def exchange(library):
        node_of(library, "Tanh").op = "Identity"

    with pytest.raises(VerificationError, match="made Identity of the planned Tanh node '.*' in '.*body.*', which"):
        audit(*changed(audited_loop, exchange))


def test_a_kernel_that_is_gone_from_a_body_is_named(audited_loop):
    def rename(library):
        node_of(library, "Tanh").name = "another"

    with pytest.raises(VerificationError, match="removed the planned node '.*' in '.*body.*', which '.*' runs"):
        audit(*changed(audited_loop, rename))


def test_an_edge_that_is_gone_from_a_body_is_named(audited_loop):
    def remove(library):
        function = next(f for f in library.function if any(n.op == "Tanh" for n in f.node_def))
        node = next(n for n in function.node_def if any(i.startswith("^") for i in n.input))
        node.input.remove(next(i for i in node.input if i.startswith("^")))

    with pytest.raises(VerificationError, match="removed the planned edge .* in '.*body.*', which '.*' runs"):
        audit(*changed(audited_loop, remove))


def test_a_loop_that_was_lowered_is_no_loop_any_more(audited_loop):
    def lower(library):
        node_of(library, "While").op = "NoOp"

    with pytest.raises(VerificationError, match="made NoOp of the planned While node"):
        audit(*changed(audited_loop, lower))


# --- what stands between ------------------------------------------------------------------------------------

PLANNED = """\
%x = Placeholder() -> float32[4]
%gate = Tfswap>Gate() {gate=7}
%one = Abs(%x) ^gate -> float32[4]
%two = Neg(%one) ^gate -> float32[4]
feeds %x
fetches %two
"""


def functions(*bodies):
    """Functions of one step on several devices: per node its name, op and inputs, or its tensor's name."""
    from tensorflow.core.framework import function_pb2

    library = function_pb2.FunctionDefLibrary()
    for i, body in enumerate(bodies):
        function = library.function.add()
        function.signature.name = f"step_1234_{i}"
        for name, op, *inputs in body:
            node = function.node_def.add(name=name, op=op)
            if op in ("_Send", "_Recv"):
                node.attr["tensor_name"].s = inputs.pop(0).encode()
            if op == custom_ops.GATE:
                node.attr["gate"].i = 7
            node.input.extend(inputs)
    return library


@pytest.fixture
def planned():
    return Expected.of(parse_graph(PLANNED))


GATE = ("gate", custom_ops.GATE)
ONE = ("one", "Abs", "x", "^gate")


def test_an_edge_between_devices_is_followed(planned):
    sent = [GATE, ONE, ("sends_one", "_Send", "one", "one:y:0")]
    reports = [("done", "NoOp", "^gate"), ("sends_done", "_Send", "gate", "^done")]
    heard = [("hears_done", "_Recv", "gate"), ("hears_one", "_Recv", "one")]
    two = ("two", "Neg", "hears_one:tensor:0", "^hears_done")
    assert audit(planned, functions([*sent, *reports], [*heard, two]), 7) == 3
    unordered = [GATE, ("one", "Abs", "x"), *sent[2:]]
    with pytest.raises(VerificationError, match="edge 'gate' -> 'one'"):
        audit(planned, functions([*unordered, *reports], [*heard, two]), 7)


def test_an_edge_that_others_stand_for_is_there(planned):
    assert audit(planned, functions([GATE, ONE, ("two", "Neg", "one:y:0")]), 7) == 3


# --- who calls it -------------------------------------------------------------------------------------------


def test_a_step_inside_another_function_is_audited_when_it_is_asked_about(audits):
    step = called(Net())

    @tf.function
    def outer(x):
        return step(x) + 1.0

    outer(batch())
    assert not audits
    step.report()
    assert len(audits) == 1
    outer(batch())
    step.report()
    assert len(audits) == 1  # nothing has been made anew


def test_a_step_that_runs_inside_and_outside_is_audited_in_both(audits):
    step = called(Net())
    tf.function(lambda x: step(x))(batch())
    step(batch())
    assert len({gate for _, _, gate in audits}) == 1
    assert len(audits) >= 1
    tf.function(lambda x: [step(x) for _ in range(2)])(batch())
    before = len(audits)
    step(batch())
    assert len(audits) > before


def test_a_step_that_is_not_what_was_planned_is_refused_from_then_on(monkeypatch):
    def refuse(*_):
        raise VerificationError("not as planned")

    step = called(Net())
    monkeypatch.setattr(module, "audit", refuse)
    for _ in range(2):
        with pytest.raises(VerificationError, match="not as planned"):
            step(batch())
    with pytest.raises(VerificationError, match="not as planned"):
        step.report()


def test_a_step_that_was_refused_is_freed_with_its_function(monkeypatch):
    def refuse(*_):
        raise VerificationError("not as planned")

    def run():
        net = Net()
        step = called(net)
        monkeypatch.setattr(module, "audit", refuse)
        with pytest.raises(VerificationError, match="not as planned"):
            step(batch())
        return weakref.ref(net.weights[0])

    weight = run()
    gc.collect()
    assert weight() is None


def test_graphs_that_the_user_collects_stay_the_user_s():
    from tensorflow.python.eager import context

    step = called(Net())
    context.enable_run_metadata()
    try:
        tf.function(lambda x: x + 1.0)(batch())
        step(batch())
        tf.function(lambda x: x + 2.0)(batch())
        collected = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    ops = [{node.op for node in graph.pre_optimization_graph.node} for graph in collected]
    assert len(ops) == 3
    assert custom_ops.SWAP_OUT in ops[1]
