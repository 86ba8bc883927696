"""Plans from files: damaged ones and those of other graphs are refused with the reason; others are carried out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.errors import InvalidModel
from tfswap.kernels.device import DeviceModel
from tfswap.plan.plan import Plan

KINDS = ("dense", "relu", "scale", "add", "dense", "relu", "add", "dense", "scale", "relu") * 2
Change = Callable[[dict[str, Any]], object]


def optimizer(layers: int = len(KINDS), **options: Any) -> Optimizer:
    graph = training_step([Layer(kind, (3 * i) // 4) for i, kind in enumerate(KINDS[:layers])], 512, 128)
    return Optimizer(graph, DeviceModel(), Options(**{"tactics": ("swap",), **options}))


@pytest.fixture(scope="module")
def step() -> Optimizer:
    return optimizer()


@pytest.fixture(scope="module")
def plan(step: Optimizer) -> Plan:
    return step.plan(step.floor_bytes())


def changed(plan: Plan, change: Change) -> str:
    content = json.loads(plan.to_json())
    change(content)
    return json.dumps(content)


def put(*path: Any) -> Change:
    """Puts the last of `path` where the rest of it leads."""

    def change(content: Any) -> None:
        for key in path[:-2]:
            content = content[key]
        content[path[-2]] = path[-1]

    return change


# --- form: whatever the graph is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("order"), "plan has no field 'order'"),
        (lambda c: c.pop("format"), "names no format"),
        (put("format", 99), "format 99"),
        (put("colour", "red"), "the field 'colour'"),
        (put("fingerprint", None), "plan.fingerprint is None, and must be a text"),
        (put("limit_bytes", "6GiB"), "plan.limit_bytes is '6GiB', and must be a whole number"),
        (put("limit_bytes", True), "plan.limit_bytes is True"),
        (put("limit_bytes", -5), "plan.limit_bytes is -5, and no size is"),
        (put("slice_bytes", -1), "plan.slice_bytes is -1, and no size is"),
        (put("slice_bytes", 64), "plan.at_home names no variables"),
        (put("sliced", [[["relu0"], 9, 8]]), r"plan.sliced\[0\] has 9 of 8 rows of 1 kernels in a slice"),
        (put("sliced", [[[], 4, 8]]), r"plan.sliced\[0\] has 4 of 8 rows of 0 kernels in a slice"),
        (put("planned_peak_bytes", 10**30), "plan.planned_peak_bytes"),
        (put("host_bytes", None), "plan.host_bytes is None"),
        (put("host_bytes", 1.5), "plan.host_bytes is 1.5"),
        (put("seconds", float("nan")), "plan.seconds is nan, and must be a finite number"),
        (put("seconds", float("inf")), "plan.seconds is inf"),
        (put("seconds", 10**400), "plan.seconds"),
        (put("seconds", -1.0), "plan.seconds is -1.0, and no time is"),
        (put("order", "relu0"), "plan.order is 'relu0', and must be a list"),
        (put("order", 1, 3), r"plan.order\[1\] is 3, and must be a text"),
        (put("evictions", {}), "plan.evictions is {}, and must be a list"),
        (put("evictions", 0, []), r"plan.evictions\[0\] is \[\], and must be an object"),
        (lambda c: c["evictions"][0].pop("use"), r"plan.evictions\[0\] has no field 'use'"),
        (put("evictions", 0, "why", 1), r"plan.evictions\[0\] has the field 'why'"),
        (put("evictions", 0, "use", 10**9), "must rise in this order, and lie among the"),
        (put("evictions", 0, "out", -1), "must rise in this order"),
        (put("evictions", 0, "back", 0), "must rise in this order"),
        (put("evictions", 0, "release", 2.0), r"plan.evictions\[0\].release is 2.0"),
        (put("order", []), "lie among the 0 kernels"),
        (put("splits", [{"step": 3, "nbytes": 8}, {"step": 2, "nbytes": 8}]), "step 2 with 8 bytes after step 3"),
        (put("splits", [{"step": 3, "nbytes": 0}]), "step 3 with 0 bytes"),
        (put("splits", [{"step": -1, "nbytes": 8}]), "step -1 with 8 bytes"),
    ],
)
def test_a_damaged_plan_is_refused(plan: Plan, change: Change, says: str) -> None:
    with pytest.raises(InvalidModel, match=says) as error:
        Plan.from_json(changed(plan, change))
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "{", "[" * 100_000, '{"format": 1}', "\x00"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(InvalidModel):
        Plan.from_json(text)


def test_a_file_is_named(plan: Plan, tmp_path: Any) -> None:
    (tmp_path / "plan.json").write_text(changed(plan, put("order", 3)))
    with pytest.raises(InvalidModel, match=r"plan.json.*plan.order is 3"):
        Plan.load(tmp_path / "plan.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@given(st.data())
def test_any_change_of_a_value_is_refused_or_carried_out(step: Optimizer, plan: Plan, data: st.DataObject) -> None:
    content = json.loads(plan.to_json())
    place, key = content, data.draw(st.sampled_from(sorted(content)))
    if key == "evictions":
        place = data.draw(st.sampled_from(content[key]))
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(JSON | st.integers(-2, 60))
    with contextlib.suppress(InvalidModel):
        step.rewrite(Plan.from_json(json.dumps(content)))


# --- fit: with the graph ------------------------------------------------------------------------------------


@pytest.mark.tensorflow
def test_what_the_planner_makes_fits(step: Optimizer) -> None:
    for limit in (step.floor_bytes(), step.baseline.peak_bytes, 2 * step.baseline.peak_bytes):
        step.require_fit(Plan.from_json(step.plan(limit).to_json()))


def first_use_moved(content: dict[str, Any]) -> None:
    content["evictions"][0]["use"] += 1


def swap_ends(content: dict[str, Any]) -> None:
    order = content["order"]
    order[0], order[-1] = order[-1], order[0]


def again(content: dict[str, Any]) -> None:
    content["evictions"].append({**content["evictions"][0], "out": None})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("fingerprint", "0" * 64), "another graph"),
        (put("order", 0, "stranger"), "names the node 'stranger'"),
        (lambda c: (c["order"].pop(), c["evictions"].clear()), "has no place for"),
        (swap_ends, "runs .* before .*, which it depends on"),
        (put("evictions", 0, "tensor", "stranger:0"), "moves 'stranger:0', which this graph does not have"),
        (put("evictions", 0, "nbytes", 1), "of 1 bytes, and in this graph it has"),
        (first_use_moved, "used in between, not used there"),
        (again, "or evicted already"),
        (put("evictions", 0, "out", None), "copies .* out before it is made, or not once"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(step: Optimizer, plan: Plan, change: Change, says: str) -> None:
    with pytest.raises(InvalidModel, match=says):
        step.rewrite(Plan.from_json(changed(plan, change)))


def test_a_plan_that_moves_what_must_stay_is_refused(plan: Plan) -> None:
    with pytest.raises(InvalidModel, match="must stay .marked with tfswap.keep"):
        optimizer(keep=frozenset({plan.evictions[0].tensor})).rewrite(plan)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("assignsubvariableop", "runs 'assignsubvariableop' twice, which is not safe"),
        ("dense0", "runs 'dense0' again after a variable that it reads was written"),
    ],
)
def test_a_plan_that_runs_again_what_must_not_is_refused(plan: Plan, name: str, says: str) -> None:
    step = optimizer(tactics=("swap", "recompute"))
    with pytest.raises(InvalidModel, match=says):
        step.rewrite(dataclasses.replace(plan, order=(*plan.order, name)))


def test_a_plan_that_needs_what_is_ruled_out_is_refused(plan: Plan) -> None:
    with pytest.raises(InvalidModel, match='tactics leaves "swap" out'):
        optimizer(tactics=()).rewrite(plan)
    again = dataclasses.replace(plan, order=(*plan.order[:20], plan.order[3], *plan.order[20:]))
    with pytest.raises(InvalidModel, match='tactics leaves "recompute" out'):
        optimizer().rewrite(again)
    with pytest.raises(InvalidModel, match="host_memory_limit is 1.0 KiB"):
        optimizer(host_limit_bytes=1024).rewrite(plan)


# --- under another limit ------------------------------------------------------------------------------------


@pytest.mark.tensorflow
def test_an_adopted_plan_has_the_peak_that_it_has_here(step: Optimizer, plan: Plan) -> None:
    assert step.adopt(plan, None) == plan
    stale = dataclasses.replace(plan, planned_peak_bytes=1, persistent_bytes=3)
    assert step.adopt(stale, None) == plan
    assert step.adopt(stale, plan.limit_bytes).keeps_limit
    assert not step.adopt(stale, plan.planned_peak_bytes - 1).keeps_limit
    assert step.adopt(stale, "100%").limit_bytes == step.baseline.peak_bytes


@pytest.mark.tensorflow
def test_an_analysis_of_a_limit_that_can_t_be_met_changes_nothing(step: Optimizer) -> None:
    found = step.analysis(1)
    assert found.changes_nothing
    assert found.limit_bytes == 1
    assert not found.keeps_limit
    report = step.report(found)
    assert not report.keeps_limit
    assert "NOT KEPT" in str(report)
    assert report.floor_bytes == step.floor_bytes()
    assert step.analysis(step.floor_bytes()) == step.plan(step.floor_bytes())
