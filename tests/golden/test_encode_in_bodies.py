"""Encodings in the bodies of loops and conditionals: found, carried out, planned, reported and run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import test_loop_swap
from processes import on_arena
from test_passes import Golden

from tfswap.analysis.accumulators import find_accumulators
from tfswap.analysis.body_encodings import find_inner_encodings
from tfswap.compiler import unoptimised
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InvalidModel
from tfswap.ir import custom_ops
from tfswap.ir.graph import Graph
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.prepare import unroll_loops
from tfswap.passes.tactics.encode_in_bodies import encode_in_bodies
from tfswap.passes.tactics.loop_swap import swap_in_loops
from tfswap.passes.verify import verify
from tfswap.plan.plan import Plan

CPU = DeviceModel("cpu", False, 2, 2)
SAVED = Golden("encode_in_bodies_saved").parts[1]
OPTIONAL = test_loop_swap.OPTIONAL.replace("TanhGrad(%get, %g)", "ReluGrad(%g, %get)").replace("Tanh(%x)", "Relu(%x)")


def found(text: str) -> dict[str, str | None]:
    """By kernel, the list that its tensor was saved in."""
    encodings = find_inner_encodings(parse_graph(text), CPU)
    return {e.name: None if e.saved is None else e.saved.name for e in encodings}


def encoded(graph: Graph, *kernels: str) -> Graph:
    encode_in_bodies(graph, Target(DeviceModel()), [e for e in find_inner_encodings(graph, CPU) if e.name in kernels])
    return graph


# --- which kernels ----------------------------------------------------------------------------------------


def test_what_is_saved_is_found_where_it_is_read():
    assert found(SAVED) == {"back[1]/grad": "saved"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%twice = AddV2(%g, %g)", "%twice = AddV2(%g, %view)"),  # needs all of it
        ("fetches %next, %grad, %pop", "fetches %next, %view, %pop"),  # the caller gets it
        ("ReluGrad(%twice, %view)", "ReluGrad(%view, %twice)"),  # is the gradient
        ("ReluGrad(%twice, %view)", "TanhGrad(%view, %twice)"),
        ("%view = Identity(%pop:1)", "%view = Neg(%pop:1)"),
    ],
)
def test_what_is_needed_whole_stays_saved_so(old, new):
    assert old in SAVED
    assert "saved" not in found(SAVED.replace(old, new)).values()


def test_readers_of_different_predicates_take_no_encoding():
    second = "%grad = ReluGrad(%twice, %view)"
    both = SAVED.replace(second, f"%other = Relu6Grad(%g, %view) -> float32[1024]\n  {second}").replace(
        "AddV2(%g, %g)", "AddV2(%g, %other)"
    )
    assert not found(both)
    assert len(found(both.replace("Relu6Grad", "ReluGrad"))) == 2


def test_branches_save_in_optionals():
    assert found(OPTIONAL) == {"grad[0]/back": "chosen[0]/some"}


# --- the rewriting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "added"), [("encode_in_bodies", 2 + 1), ("encode_in_bodies_saved", 2 - 2)])
def test_the_rewritten_bodies(name, added):
    """Masks, and the shape of one; a mask and a shape that is not known, in the place of another shape and a view."""
    golden = Golden(name)
    nodes = sum(map(len, golden.graph.all_bodies()))
    encoded(golden.graph, *golden.arguments)
    for body in golden.graph.all_bodies():
        body.prune()
    assert sum(map(len, golden.graph.all_bodies())) == nodes + added
    assert not find_inner_encodings(golden.graph, CPU)
    choose_body_orders(golden.graph, Target(CPU))
    golden.check()


def test_an_optional_keeps_a_mask():
    graph = encoded(parse_graph(OPTIONAL), "grad[0]/back")
    bodies = graph.named_bodies()
    assert bodies["chosen[0]"]["some"].attrs["Toutput_types"] == ("uint8",)
    assert bodies["grad[0]"]["get"].outputs[0].nbytes == 1024 // 8
    assert bodies["grad[0]"]["back"].op == custom_ops.MULTIPLY_BY_MASK


def test_a_list_of_masks_can_still_be_swapped():
    graph = encoded(parse_graph(SAVED), "back[1]/grad")
    assert [a.dtype for a in find_accumulators(graph)] == ["uint8"]
    choose_body_orders(graph, Target(CPU))
    assert swap_in_loops(graph, Target(CPU), ["saved"]) == 2
    assert verify(graph) == 4


# --- planned ----------------------------------------------------------------------------------------------

LAYERS, ELEMENTS = 6, 1 << 16


def micro_batches() -> str:
    """A loop with a forward and a backward pass in its body; the maps wait, for their signs."""
    tensor = f"float32[{ELEMENTS}]"
    head = f"  %i = Placeholder() -> int32[]\n  %h = Placeholder() -> {tensor}"
    forward: list[str] = []
    backward: list[str] = []
    for n in range(LAYERS):
        below, above = f"t{n - 1}" if n else "h", f"b{n + 1}" if n < LAYERS - 1 else f"t{LAYERS - 1}"
        forward += [f"  %r{n} = Relu(%{below}) -> {tensor}", f"  %t{n} = Neg(%r{n}) -> {tensor}"]
        backward.append(f"  %b{n} = ReluGrad(%{above}, %r{n}) -> {tensor}")
    return "\n".join(
        [
            "%zero = Const() -> int32[] = (0,)",
            f"%h = Placeholder() -> {tensor}",
            f"%loop = StatelessWhile(%zero, %h) -> int32[], {tensor}",
            f"%end = Neg(%loop:1) -> {tensor}",
            "feeds %h\nfetches %end\nbody %loop",
            head,
            "  %most = Const() -> int32[] = (5,)",
            "  %less = Less(%i, %most) -> bool[]\n  feeds %i, %h\n  fetches %less\nbody %loop",
            head,
            "  %one = Const() -> int32[] = (1,)\n  %next = AddV2(%i, %one) -> int32[]",
            *forward,
            *reversed(backward),
            "  feeds %i, %h\n  fetches %next, %b0\n",
        ]
    )


@pytest.fixture
def as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names no functions, without which there is no GraphDef to ask TensorFlow's optimizers about. Its loops
    stay loops, however few their iterations are.
    """
    monkeypatch.setattr(unoptimised, "as_executed", lambda graph, device, held: graph)
    monkeypatch.setattr(unroll_loops, "MOST_TRIPS", -1)


@pytest.fixture
def optimizer(as_traced: None) -> Optimizer:
    return Optimizer(parse_graph(micro_batches()), CPU, Options(tactics=("encode",)))


def test_encodings_alone_bring_a_body_down(optimizer):
    ordered = Optimizer(parse_graph(micro_batches()), CPU, Options(tactics=()))
    assert optimizer.floor_bytes() < 0.75 * ordered.floor_bytes()
    plan = optimizer.plan(optimizer.floor_bytes())
    assert set(plan.encoded) == {f"loop[1]/b{n}" for n in range(LAYERS - 1)}  # the last is read immediately
    assert plan.moves == 0
    graph = optimizer.rewrite(plan)
    assert graph["loop"].op == "While"  # what encodes has effects for TensorFlow
    rows = {row.name: row for row in optimizer.report(plan).encoded}
    assert set(rows) == {f"loop[1]/r{n}:0" for n in range(LAYERS - 1)}
    assert {(row.nbytes, row.encoded_bytes) for row in rows.values()} == {(4 * ELEMENTS, ELEMENTS // 8)}


def test_bodies_that_encode_can_move_tensors_too(as_traced):
    whole = Optimizer(parse_graph(micro_batches()), CPU, Options(tactics=("swap", "recompute")))
    both = Optimizer(parse_graph(micro_batches()), CPU)
    assert both.floor_bytes() <= whole.floor_bytes()
    plan = both.plan(both.floor_bytes())
    assert Plan.from_json(plan.to_json()) == plan
    both.rewrite(plan)


def test_more_memory_never_takes_longer(optimizer):
    low, high = optimizer.floor_bytes(), optimizer.search.planners.live_peak_bytes
    times = [optimizer.plan(low + (high - low) * n // 8).seconds for n in range(9)]
    assert times == sorted(times, reverse=True)


def test_a_plan_for_another_kernel_is_refused(optimizer):
    plan = optimizer.plan(optimizer.floor_bytes())
    content = json.loads(plan.to_json())
    content["encoded"] = ["loop[1]/next"]
    with pytest.raises(InvalidModel, match=r"gives an encoding to 'loop\[1\]/next'"):
        optimizer.rewrite(Plan.from_json(json.dumps(content)))


# --- run --------------------------------------------------------------------------------------------------


def run(program: str, limit: str, tactics: tuple[str, ...]) -> dict[str, Any]:
    return on_arena(
        f"import json, control_flow; print(json.dumps(control_flow.main({program!r}, {limit!r}, tactics={tactics!r})))"
    )


@pytest.mark.parametrize(("program", "share"), [("pools_in_micro_batches", 0.6), ("dropout_in_loop", 0.6)])
def test_encodings_alone_in_bodies(program, share):
    pytest.importorskip("tensorflow")
    expected = run(program, "floor", ())
    floor = run(program, "floor", ("encode",))["floor"]
    assert floor < share * expected["floor"]
    found = run(program, str(int(1.02 * floor)), ("encode",))
    assert found["digest"] == expected["digest"]
    assert found["planned"] == found["peak"] <= found["limit"]
    assert found["encoded"]
