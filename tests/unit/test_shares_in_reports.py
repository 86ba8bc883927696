"""A limit that is a share: its report has the bytes that it became, and what they are a share of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.compiler.request import Request
from tfswap.kernels.device import DeviceModel
from tfswap.report.report import Report
from tfswap.simulator.unordered import Baseline

MIB = 1 << 20
LIKELY = 1000 * MIB


@pytest.fixture(scope="module")
def report() -> Report:
    optimizer = Optimizer(training_step([Layer("dense"), Layer("relu")] * 2, 64, 64), DeviceModel(), Options(()))
    made = optimizer.report(optimizer.plan(None))
    baseline = Baseline(LIKELY, 1.0, lowest_bytes=980 * MIB, highest_bytes=1010 * MIB)
    return dataclasses.replace(made, memory_limit_bytes=600 * MIB, requested_share="60%", _baseline=lambda: baseline)


def lines(report: Report) -> dict[str, str]:
    return dict(report.summary())


def test_the_limit_says_what_it_is_a_share_of(report: Report) -> None:
    found = lines(report)
    assert found["memory limit"] == "600.0 MiB is 60% of the likely peak before (1,000.0 MiB)"
    assert found["peak before, predicted"] == "1,000.0 MiB in runs 980.0 MiB to 1,010.0 MiB"


def test_the_page_has_the_range(report: Report, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    report.save(page)
    assert "in runs 980.0 MiB to 1,010.0 MiB" in page.read_text(encoding="utf-8")


def test_a_limit_that_is_not_what_the_share_is(report: Report) -> None:
    """That of another trace, or of the arena."""
    other = dataclasses.replace(report, memory_limit_bytes=500 * MIB)
    assert lines(other)["memory limit"] == "500.0 MiB where 60% of the likely peak before (1,000.0 MiB) is 600.0 MiB"


def test_other_limits_are_no_shares(report: Report) -> None:
    assert lines(dataclasses.replace(report, requested_share=""))["memory limit"] == "600.0 MiB"
    exact = Baseline(LIKELY, 1.0, lowest_bytes=LIKELY, highest_bytes=LIKELY)
    assert lines(dataclasses.replace(report, _baseline=lambda: exact))["peak before, predicted"] == "1,000.0 MiB"


def test_files_have_the_range(report: Report) -> None:
    figures = json.loads(report.to_json())
    assert figures["baseline_range_bytes"] == [980 * MIB, 1010 * MIB]
    assert figures["requested_share"] == "60%"


@pytest.mark.parametrize(
    ("limit", "share"), [("60%", "60%"), ("6GiB", ""), (6, ""), (None, ""), ({"GPU:0": "50%"}, "50%"), ({}, "")]
)
def test_the_share_of_a_request(limit: Any, share: str) -> None:
    assert Request(limit, Options(()), None, "optimize").share("GPU:0") == share
