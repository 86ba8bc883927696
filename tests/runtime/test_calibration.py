"""The calibration of this machine: measured once, kept, and what happens where that is not possible."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfswap
from tfswap.compiler import calibration, plan_cache
from tfswap.compiler.options import Options
from tfswap.frontends import doctor
from tfswap.kernels.calibration import Calibration
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates
from tfswap.kernels.profile import Profile
from tfswap.report.curve import Curve

CPU = DeviceModel("cpu", intra_op_threads=2, inter_op_threads=2)
FOUND = Calibration(2.0, 1.5, 1.2, 1.1, 1.0, 2e-6)


class Machine:
    """A machine whose measurements are counted."""

    def __init__(self) -> None:
        self.measured = 0
        self.takes_s = 0.0
        self.result: Calibration | None = FOUND

    def measure(self, _: DeviceModel) -> Calibration | None:
        self.measured += 1
        time.sleep(self.takes_s)
        return self.result


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    here = Machine()
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path)  # by the variable, the ops would be built there too
    monkeypatch.setenv("TFSWAP_CALIBRATION", "on")
    monkeypatch.setattr(calibration, "_measured", here.measure)
    monkeypatch.setattr(calibration, "status", lambda: SimpleNamespace(built=True))
    calibration._of_process.cache_clear()
    yield here
    calibration._of_process.cache_clear()


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "calibrations").glob("tfswap_*.json"))


def test_it_is_measured_once_for_each_processor_and_its_settings(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [calibration.find(CPU) for _ in range(2)] == [FOUND, FOUND]
    assert machine.measured == 1
    calibration.find(CPU._replace(onednn=True))
    calibration.find(CPU._replace(intra_op_threads=4))
    assert machine.measured == 3
    monkeypatch.setattr(calibration, "processor", lambda: "another")
    calibration.find(CPU)
    assert machine.measured == len(entries(tmp_path)) == 4


def test_it_is_measured_again_on_demand(machine: Machine) -> None:
    calibration.find(CPU)
    machine.result = FOUND._replace(products=3.0)
    assert calibration.find(CPU) == FOUND
    assert calibration.find(CPU, again=True) == machine.result == calibration.find(CPU)


def test_a_process_keeps_what_it_has_read(machine: Machine) -> None:
    assert calibration.calibrated(CPU).calibration == FOUND
    machine.result = FOUND._replace(products=3.0)
    calibration.find(CPU, again=True)
    assert calibration.calibrated(CPU).calibration == FOUND


def test_processes_that_start_together_measure_once(machine: Machine) -> None:
    machine.takes_s = 0.3
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(calibration.find, [CPU] * 4))
    assert found == [FOUND] * 4
    assert machine.measured == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "[[1, 1, 1]]", "[[1, 1, 1, 1, 900, 1e-6]]", "[[1, 1, 1, 1, 1, -1]]"])
def test_a_damaged_entry_is_measured_anew(
    machine: Machine, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calibration.find(CPU)
    (entry,) = entries(tmp_path)
    entry.write_bytes(plan_cache.HEAD + damage.encode())
    with caplog.at_level(logging.WARNING, logger="tfswap"):
        assert calibration.find(CPU) == FOUND
    assert machine.measured == 2
    assert "replaced" in caplog.text
    assert calibration.find(CPU) == FOUND
    assert machine.measured == 2


def test_where_it_can_t_be_measured_the_default_rates_hold(machine: Machine) -> None:
    machine.result = None
    assert [calibration.find(CPU) for _ in range(2)] == [None, None]
    assert machine.measured == 1  # not by each process


def test_where_it_can_t_be_kept_it_is_not_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path / "file")
    assert calibration.find(CPU) is None
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # a read-only file system; root may write elsewhere
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path / "read-only")
    assert calibration.find(CPU) is None
    monkeypatch.setattr(calibration, "status", lambda: SimpleNamespace(built=False))
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path / "without ops")
    assert calibration.find(CPU) is None
    assert not machine.measured


def test_only_this_machine_s_cpu_is_calibrated(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceModel("gpu")
    profiled = replace(Options(), profile=Profile("cpu", "a test", "", default_rates(CPU), None, ()))
    assert calibration.calibrated(gpu) == gpu
    assert calibration.calibrated(CPU, profiled) == CPU
    monkeypatch.setenv("TFSWAP_CALIBRATION", "off")
    assert calibration.calibrated(CPU) == CPU
    assert not machine.measured
    monkeypatch.setenv("TFSWAP_CALIBRATION", "on")
    assert calibration.calibrated(CPU, Options()).calibration == FOUND


def test_a_measurement_that_fails_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "PROGRAM", "tfswap.no_such_module")
    with caplog.at_level(logging.WARNING, logger="tfswap"):
        assert calibration._measured(CPU) is None
    assert "costs are the default ones" in caplog.text


def test_this_machine_is_measured_in_a_process_of_its_own() -> None:
    found = calibration._measured(CPU._replace(onednn=True))
    assert found is not None
    assert found == found.bounded() == Calibration(*json.loads(json.dumps(found)))
    assert found != Calibration(1.0, 1.0, 1.0, 1.0, 1.0, found.launch_s)


def test_plans_and_predictions_of_this_machine_are_at_its_rates(machine: Machine) -> None:
    tf = pytest.importorskip("tensorflow")

    def step(x: Any) -> Any:
        loss = tf.reduce_sum(tf.matmul(tf.nn.relu(tf.matmul(x, x)), x))
        return tf.gradients(loss, x)[0]

    given = tf.ones([256, 256])
    planned = tfswap.optimize(tf.function(step), memory_limit="90%", mode="analyze")
    planned.get_concrete_function(given)
    assert planned.report().costs == "analytic, at measured rates"
    for device, costs in ((None, "analytic, at measured rates"), ("a100", "analytic")):
        curve = tfswap.simulate(tf.function(step), given, limits=2, device=device)
        assert isinstance(curve, Curve)
        assert curve.costs == costs
    assert machine.measured == 1


def test_the_doctor_shows_it(machine: Machine) -> None:
    content, text = doctor.examine()
    assert content["calibration"] == FOUND._asdict()
    assert "products x2, convolutions x1.5" in text
    machine.result = None
    content, text = doctor.examine(calibrate=True)
    assert content["calibration"] is None
    assert "was not measured" in text
    assert machine.measured == 2
