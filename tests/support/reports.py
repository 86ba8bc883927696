"""Reports of small steps, and what their files have."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import re
import zlib
from itertools import accumulate
from pathlib import Path
from typing import Any

from layered_steps import Layer, training_step

from tfswap.compiler.compiler import Optimizer
from tfswap.compiler.options import Options
from tfswap.kernels.device import DeviceModel
from tfswap.report.report import Report
from tfswap.report.timeline import Timeline

CPU = DeviceModel()
NET = [Layer("dense"), Layer("relu"), Layer("scale", 1)] * 4


@functools.cache
def small_report() -> Report:
    """Of a small step that swaps."""
    optimizer = Optimizer(training_step(NET, 512, 128), CPU, Options(("swap",)))
    floor = optimizer.floor_bytes()
    made = optimizer.report(optimizer.plan(floor + (optimizer.baseline.peak_bytes - floor) // 4))
    assert made.swapped
    return dataclasses.replace(made, step="a <step> & more", measured_peak_bytes=made.planned_peak_bytes - 512)


@functools.cache
def unchanged_report() -> Report:
    """Of the same step with as much memory as it can use."""
    optimizer = Optimizer(training_step(NET, 512, 128), CPU)
    return optimizer.report(optimizer.plan(None))


def saved(report: Report, folder: Path, ending: str) -> Path:
    path = folder / f"report{ending}"
    report.save(path)
    return path


def content(page: str) -> dict[str, Any]:
    """The data of a page, compressed or not."""
    (packed, text), *rest = re.findall(r"<script type=application/json id=data( data-packed)?>(.*?)</script>", page)
    assert not rest
    return json.loads(zlib.decompress(base64.b64decode(text)) if packed else text)


def bytes_in(run: dict[str, Any]) -> list[int]:
    """The bytes in use at each drawn moment of a run."""
    return [sum(kinds) for kinds in zip(*(accumulate(kind) for kind in run["kinds"]), strict=True)]


def timeline(report: Report) -> Timeline:
    assert report._timeline is not None
    return report._timeline()
