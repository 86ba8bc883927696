"""The report of a step on several devices: a row for each, and one row for tensors that several plan alike."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.kernels.device import DeviceModel
from tfswap.report.printed import ALIKE, FIGURES
from tfswap.report.report import Report, report_of_devices

NET = [Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4


def planned(net: list[Layer], share: float, device: str) -> Report:
    optimizer = Optimizer(training_step(net, 512, 128), DeviceModel(), Options(("swap",)))
    floor = optimizer.floor_bytes()
    report = optimizer.report(optimizer.plan(floor + int((optimizer.baseline.peak_bytes - floor) * share)))
    return dataclasses.replace(report, step=f"step on {device}", device=device, notes=("rates are assumed",))


@pytest.fixture(scope="module")
def replicas() -> dict[str, Report]:
    first = planned(NET, 0.25, "GPU:0")
    second = dataclasses.replace(first, device="GPU:1", step="step on GPU:1")
    return {"GPU:0": first, "GPU:1": second, "GPU:2": planned(NET, 1.1, "GPU:2")}


def test_the_text_has_a_row_for_each_device_and_one_for_tensors_planned_alike(replicas: dict[str, Report]) -> None:
    report = report_of_devices("step", replicas)
    answers, lines = str(report).splitlines()[: len(replicas)], str(report).splitlines()[len(replicas) + 1 :]
    assert answers == [f"{name}: {each.answer()}" for name, each in replicas.items()]
    assert [len(re.split("  +", line.strip())) for line in lines[:4]] == [len(FIGURES)] * 4
    assert [line.split()[0] for line in lines[1:4]] == list(replicas) and lines[4] == ""
    swapped = [line for line in lines if "  swap  " in line]
    assert len(swapped) == len(report.swapped) > 0
    assert all(line.endswith("  GPU:0, GPU:1") for line in swapped)
    assert lines[-2:] == ["note: rates are assumed", f"note: {ALIKE}"]


def test_a_device_has_its_report_and_the_step_the_figures_of_the_first(replicas: dict[str, Report]) -> None:
    report = report_of_devices("step", replicas)
    assert report.title == "tfswap: step" and dict(report.devices) == replicas
    assert report.planned_peak_bytes == replicas["GPU:0"].planned_peak_bytes
    figures = json.loads(report.to_json())
    assert figures["device"] == "GPU:0" and list(figures["devices"]) == list(replicas)
    assert figures["devices"]["GPU:2"] == json.loads(replicas["GPU:2"].to_json())


def test_of_one_device_there_is_only_its_own_report(replicas: dict[str, Report]) -> None:
    alone = replicas["GPU:1"]
    assert report_of_devices("step", {"GPU:1": alone}) is alone and dict(alone.devices) == {"GPU:1": alone}
    assert "devices" not in json.loads(alone.to_json()) and str(alone).startswith(alone.answer())


def test_files_show_each_device(replicas: dict[str, Report], tmp_path: Path) -> None:
    report = report_of_devices("step", replicas)
    report.save(tmp_path / "step.trace.json")
    content = json.loads((tmp_path / "step.trace.json").read_text())
    events = content["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == [f"step on {d}, {r}" for d in replicas for r in ("planned", "unoptimised")]
    copies = {processes[e["pid"]] for e in events if e.get("cat") == "copy"}
    assert copies == {"step on GPU:0, planned", "step on GPU:1, planned"}
    assert content["otherData"]["devices"]["GPU:2"]["planned_peak_bytes"] == replicas["GPU:2"].planned_peak_bytes
    assert report._repr_html_().count("<details class=device") == 3
