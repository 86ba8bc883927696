"""Reports and statistics of a step on several GPUs show each of them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import several_gpus
from gpu_compare import reporting

import tfswap


@pytest.mark.emulated_gpu(count=2)
def test_reports_files_and_statistics_show_each_device(on_gpus):
    def program(gpus):
        limits = {"GPU:0": "70%", "GPU:1": "75%"}
        made = several_gpus.mirrored()
        _, peaks, step = several_gpus.train(made, lambda function: tfswap.optimize(function, memory_limit=limits))
        report = step.report()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "step.trace.json")
            report.save(path)
            trace = json.loads(path.read_text())
            page = Path(folder, "step.html")
            report.save(page)
            details = page.read_text().count("<details class=device")
        return {
            "title": report.title,
            "first": report.planned_peak_bytes == report.devices["GPU:0"].planned_peak_bytes,
            "alone": [step.report(name) == each for name, each in report.devices.items()],
            "measured": {name: each.measured_peak_bytes for name, each in report.devices.items()},
            "figures": {
                name: each["planned_peak_bytes"] for name, each in json.loads(report.to_json())["devices"].items()
            },
            "planned": {name: step.plan(name).planned_peak_bytes for name in report.devices},
            "text": [line.split()[0] for line in str(report).splitlines()[3:6]],
            "processes": [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"],
            "details": details,
            "peaks": peaks,
            "stats": [step.stats().device_peaks, step.stats().device_peak_bytes],
        }

    found = on_gpus(reporting(program))
    runs = [f"step on {device}, {run}" for device in ("GPU:0", "GPU:1") for run in ("planned", "unoptimised")]
    assert found["report"] == [] and found["first"] and found["alone"] == [True, True]
    assert found["figures"] == found["planned"] == found["measured"] == found["peaks"]
    assert found["text"] == ["device", "GPU:0", "GPU:1"] and found["title"] == "tfswap: step"
    assert found["processes"] == runs and found["details"] == 2
    assert found["stats"] == [found["peaks"], found["peaks"]["GPU:0"]]
