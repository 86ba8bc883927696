"""What would lower the smallest limit: bounds hold, planned figures are those of plans, nothing is made up."""

from __future__ import annotations

import dataclasses

import pytest
from layered_steps import Layer, training_step

from tfswap.compiler import floor_levers
from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.ir.permits import SLICE, STATE, TENSOR_TACTICS
from tfswap.kernels.device import DeviceModel
from tfswap.report.levers import AT_HOME, HALF_BATCH, IN_SLICES, SMALLER_FLOATS, Floor, Lever
from tfswap.report.report import Report
from tfswap.report.summary import unit_of

pytestmark = pytest.mark.fast

NET = [Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4


def optimizer(rows: int = 512, tactics: tuple[str, ...] = TENSOR_TACTICS, width: int = 128) -> Optimizer:
    return Optimizer(training_step(NET, rows, width), DeviceModel(), Options(tactics))


@pytest.fixture(scope="module")
def report() -> Report:
    made = optimizer()
    return made.report(made.plan(made.floor_bytes() + 100_000))


def levers(report: Report) -> dict[str, Lever]:
    return {lever.what: lever for lever in report.levers}


def test_half_the_batch_needs_at_most_what_is_reported(report: Report) -> None:
    said = levers(report)[HALF_BATCH]
    assert said.known == "at most" and said.how == "batches of 256 rows instead of 512"
    needed = optimizer(256).floor_bytes()
    assert needed <= said.floor_bytes < report.floor_bytes
    assert said.floor_bytes <= 1.05 * needed


def test_a_plan_in_slices_has_the_limit_that_is_reported(report: Report) -> None:
    said = levers(report)[IN_SLICES]
    assert said.known == "planned"
    assert optimizer(tactics=(*TENSOR_TACTICS, SLICE)).floor_bytes() <= said.floor_bytes < report.floor_bytes


def test_variables_at_home_need_at_least_what_is_reported(report: Report) -> None:
    said = levers(report)[AT_HOME]
    assert said.known == "at least"
    assert said.floor_bytes <= optimizer(tactics=(*TENSOR_TACTICS, STATE)).floor_bytes()


def test_what_is_allowed_already_is_no_lever() -> None:
    made = optimizer(tactics=(*TENSOR_TACTICS, STATE, SLICE))
    assert {*levers(made.report(made.plan(None, ordered=True)))} <= {HALF_BATCH, SMALLER_FLOATS}


def test_a_batch_that_looks_like_the_variables_is_not_halved() -> None:
    """Which tensors have the batch's rows is not known where variables have as many."""
    made = optimizer(128)
    assert HALF_BATCH not in levers(made.report(made.plan(None, ordered=True)))


def test_large_steps_have_a_note_in_place_of_plans_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_levers, "MOST_KERNELS", 5)
    made = optimizer()
    report = made.report(made.plan(made.floor_bytes() + 100_000))
    assert IN_SLICES not in levers(report)
    assert "not planned here, since the step has" in str(report)


def test_a_printed_report_begins_with_the_answer(report: Report) -> None:
    size = unit_of(report).text
    limit = report.memory_limit_bytes
    assert limit is not None
    first, *_ = str(report).splitlines()
    room = size(limit - report.planned_peak_bytes)
    assert first == f"Fits {size(limit)} with {room} to spare, at {report.time_ratio:.2f} of the time, predicted."
    assert report.reason() in str(report)
    for lever in report.levers:
        assert f"{lever.what}  " in str(report) and lever.how in str(report)


def test_the_answer_says_what_is_missing_and_what_is_unchanged() -> None:
    made = optimizer()
    floor_bytes = made.floor_bytes()
    lacking = made.report(made.analysis(floor_bytes - 1000_000))
    size = unit_of(lacking).text
    limit, floor, more = size(floor_bytes - 1000_000), size(floor_bytes), size(1000_000)
    assert lacking.answer() == f"Does not fit {limit}: the smallest limit is {floor}, {more} more."
    assert lacking.levers
    fitting = made.report(made.plan(1 << 30))
    assert fitting.answer().startswith("Fits 1,024.00 MiB as it is, with ")
    assert "would lower" not in str(fitting) and fitting.reason() not in str(fitting)
    unlimited = made.report(made.plan(None))
    assert unlimited.answer().endswith("nothing is changed. No limit was given.")


def test_levers_that_lower_nothing_are_left_out() -> None:
    same = Lever(HALF_BATCH, 100, "at most", "")
    assert Floor.of(100, (same, None, dataclasses.replace(same, floor_bytes=99))).levers == (
        dataclasses.replace(same, floor_bytes=99),
    )
