"""Tensors that a backward loop recomputes in place of reading them from a list: found, rewritten, planned and run."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from test_passes import Golden

from tfswap.analysis.accumulators import find_accumulators
from tfswap.analysis.analyse import analyse_dataflow
from tfswap.analysis.loop_recompute import choose_recomputed, find_passages
from tfswap.compiler import unoptimised
from tfswap.compiler.body_orders import choose_body_orders
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InvalidModel
from tfswap.ir.text import format_graph, parse_graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.target import Target
from tfswap.passes.tactics.loop_recompute import recompute_in_loops
from tfswap.passes.verify import verify
from tfswap.plan.plan import Plan
from tfswap.plan.schedule import build_schedule
from tfswap.simulator.memory import simulate_memory

CPU = DeviceModel("cpu", False, 2, 2)
TEXT = Golden("loop_recompute").parts[1]


def found(text: str = TEXT) -> dict[str, list[str]]:
    """By list that need not be saved, the kernels that make its elements."""
    graph = parse_graph(text)
    return {
        name: [kernel.name for kernel in kernels]
        for passage in find_passages(graph, find_accumulators(graph))
        for name, kernels in choose_recomputed(passage, lambda saved, kernels: True).items()
    }


# --- which lists ------------------------------------------------------------------------------------------


def test_the_backward_loop_recomputes_from_saved_tensors():
    assert found() == {"sums": ["shifted", "sum"], "tanhs": ["shifted", "sum", "tanh"]}


def test_kernels_stop_at_what_is_saved():
    (passage,) = find_passages(graph := parse_graph(TEXT), find_accumulators(graph))
    chosen = choose_recomputed(passage, lambda saved, kernels: saved.name == "tanhs")
    assert {name: [k.name for k in kernels] for name, kernels in chosen.items()} == {"tanhs": ["tanh"]}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "%push_state = TensorListPushBack(%states, %h)",
            "%push_state = TensorListPushBack(%states, %keys)",
        ),  # no state
        ("%shifted = AddV2(%h, %read)", "%shifted = Mystery(%h, %read)"),
        ("%shifted = AddV2(%h, %read)", "%shifted = RandomUniform(%h)"),
        ("  %state = Mul", "  %write = AssignSubVariableOp(%bias, %h) {dtype=float32}\n  %state = Mul"),
        (
            "  %state = Mul",
            "  %yes = Const() -> bool[]\n  %choice = If(%yes, %bias) -> float32[1024]\n  %state = Mul",
        ),
        ("fetches %next, %state, %keys, %bias, ", "fetches %next, %state, %tanh, %bias, "),  # it varies
    ],
)
def test_what_can_not_be_recomputed_stays_saved(old, new):
    assert old in TEXT
    assert "sums" not in found(TEXT.replace(old, new))


def test_a_list_whose_length_is_read_keeps_it():
    reading = TEXT.replace("%back = ", "%length = TensorListLength(%loop:5) -> int32[]\n%back = ")
    assert list(found(reading.replace("fetches %back:1", "fetches %back:1, %length"))) == ["tanhs"]


def test_a_list_that_another_loop_fills_is_not_this_one():
    """Of two loops that fill a list one after the other, the backward loop begins with the second one's iterations."""
    twice = TEXT.replace(
        "%back = StatelessWhile(%zero, %loop:1, %loop:4, %loop:5",
        "%back = StatelessWhile(%zero, %loop:1, %loop:4, %sums",
    )
    assert list(found(twice)) == ["tanhs"]


# --- the rewriting ----------------------------------------------------------------------------------------


def test_the_rewritten_bodies():
    golden = Golden("loop_recompute")
    assert recompute_in_loops(golden.graph, Target(DeviceModel()), golden.arguments) == 3
    golden.check()
    assert verify(golden.graph) == 0
    assert [a.name for a in find_accumulators(golden.graph)] == ["states"]


def test_a_list_that_must_be_saved_is_named():
    for name in ("states", "others"):
        with pytest.raises(InvalidModel, match=f"{name!r}.*Plan again"):
            recompute_in_loops(parse_graph(TEXT), Target(DeviceModel()), ["tanhs", name])


def test_fewer_bytes_are_live_at_the_peak():
    peaks = []
    for names in ((), ("sums", "tanhs")):
        graph = parse_graph(TEXT)
        recompute_in_loops(graph, Target(DeviceModel()), names)
        choose_body_orders(graph, Target(CPU))
        flow = analyse_dataflow(graph, CPU)
        peaks.append(simulate_memory(flow, build_schedule(range(len(flow.nodes)), ())).peak_bytes)
    saved, recomputed = peaks
    assert saved - recomputed >= (2 * 5 - 2) * 4096  # two elements are live together, of five


# --- planned ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text names no functions, without which there is no GraphDef to ask TensorFlow's optimizers about."""
    monkeypatch.setattr(unoptimised, "as_executed", lambda graph, device, held: graph)


def optimizer(**options: Any) -> Optimizer:
    return Optimizer(parse_graph(TEXT.replace("1024", "65536")), CPU, Options(**options))


def test_the_floor_is_lower_and_the_plan_says_why():
    made, without = optimizer(tactics=("recompute",)), optimizer(tactics=())
    floor = made.floor_bytes()
    assert floor <= without.floor_bytes() - 2 * 4 * 4 * 65536
    plan = made.plan(floor)
    assert plan.planned_peak_bytes == floor
    assert plan.recomputed == ("sums", "tanhs")
    assert plan.moves >= 2
    rows = {row.name: row for row in made.report(plan).recomputed}
    assert set(rows) == {"sums", "tanhs"}
    assert all(row.nbytes == 5 * 4 * 65536 and row.cost_s > 0 and not row.cost_bytes for row in rows.values())
    assert made.plan("108%", ordered=True).recomputed == ()


def test_what_is_saved_all_the_same_can_be_swapped():
    made = optimizer()
    floor = made.floor_bytes()
    assert floor < optimizer(tactics=("recompute",)).floor_bytes()
    assert made.plan(floor).accumulators


def test_more_memory_never_takes_longer():
    made = optimizer(tactics=("recompute",))
    floor, top = made.floor_bytes(), made.baseline.peak_bytes
    times = [made.plan(floor + (top - floor) * i // 8, ordered=True).seconds for i in range(9)]
    assert times == sorted(times, reverse=True)


def test_a_plan_is_saved_with_it_and_read_back():
    made = optimizer(tactics=("recompute",))
    plan = made.plan(made.floor_bytes())
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert made.adopt(again, None).planned_peak_bytes == plan.planned_peak_bytes
    assert format_graph(made.rewrite(again)) == format_graph(made.rewrite(plan))
    with pytest.raises(InvalidModel, match='leaves "recompute" out'):
        optimizer(tactics=("swap",)).require_fit(plan)
    with pytest.raises(InvalidModel, match="'others'.*Plan again"):
        made.require_fit(Plan.from_json(plan.to_json().replace('"sums"', '"others"')))


# --- run --------------------------------------------------------------------------------------------------


def test_attention_in_a_loop_is_recomputed():
    """The intermediate of additive attention, which is most of what the step saves, is in no list."""
    pytest.importorskip("tensorflow")
    code = "import json, control_flow; print(json.dumps(control_flow.main({!r}, {!r}, {!r})))"
    expected = on_arena(code.format("attention", "unoptimised", None))
    result = on_arena(code.format("attention", "40%", ["recompute"]))
    assert result["digest"] == expected["digest"]
    assert result["peak"] <= result["limit"]
    assert abs(result["planned"] / result["peak"] - 1) < 0.02
    assert result["recomputed"] > 0
