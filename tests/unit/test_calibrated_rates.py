"""What a calibration changes: the rates of this machine's CPU, and nothing else."""

from __future__ import annotations

import math

import pytest

from tfswap.analysis.cost import Costs, work_seconds
from tfswap.ir.text import parse_graph
from tfswap.kernels.calibration import LEAST_LAUNCH_S, MOST_RATIO, Calibration
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates, described

CPU = DeviceModel("cpu", intra_op_threads=2, inter_op_threads=2)
TWICE = Calibration(2.0, 4.0, 0.5, 3.0, 1.5, 2e-6)
FAST = CPU._replace(calibration=TWICE)
KERNELS = parse_graph(
    """
    %a = Placeholder() -> float32[2048,2048]
    %x = Placeholder() -> float32[16,64,64,64]
    %f = Placeholder() -> float32[3,3,64,64]
    %product = MatMul(%a, %a) -> float32[2048,2048]
    %convolution = Conv2D(%x, %f) -> float32[16,64,64,64]
    %sum = AddV2(%x, %x) -> float32[16,64,64,64]
    %pow = Pow(%x, %x) -> float32[16,64,64,64]
    feeds %a, %x, %f
    fetches %product, %convolution, %sum, %pow
    """
)


def test_rates_are_multiples_of_the_default_ones() -> None:
    usual, found = default_rates(CPU), default_rates(FAST)
    assert found.flops_per_s == 2 * usual.flops_per_s
    assert found.out_bytes_per_s == 1.5 * usual.out_bytes_per_s
    assert found.in_bytes_per_s == 1.5 * usual.in_bytes_per_s
    assert found.launch_s == 2e-6
    assert (found.cores, found.copy_share) == (usual.cores, usual.copy_share)


@pytest.mark.parametrize(("name", "ratio"), [("product", 2.0), ("convolution", 4.0), ("sum", 3.0), ("pow", 0.5)])
def test_each_kind_of_kernel_has_its_own_rate(name: str, ratio: float) -> None:
    node = next(node for node in KERNELS if node.name == name)
    assert work_seconds(node, default_rates(CPU)) == pytest.approx(ratio * work_seconds(node, default_rates(FAST)))


def test_reports_say_where_rates_are_from() -> None:
    assert Costs.of(CPU).source == "analytic"
    assert Costs.of(FAST).source == "analytic, at measured rates"


def test_described_devices_have_none() -> None:
    assert described("a100").device.calibration is None


@pytest.mark.parametrize("wrong", [0.0, 1e9, -1.0, math.nan, math.inf])
def test_one_bad_figure_changes_rates_within_bounds(wrong: float) -> None:
    found = Calibration(wrong, wrong, wrong, wrong, wrong, wrong).bounded()
    assert all(1 / MOST_RATIO <= ratio <= MOST_RATIO for ratio in found[:-1])
    assert LEAST_LAUNCH_S <= found.launch_s < 1e-4
    assert found == found.bounded()


def test_figures_are_rounded() -> None:
    assert Calibration(1.2345, 1, 1, 1, 1, 1.2345e-6).bounded() == Calibration(1.2, 1, 1, 1, 1, 1.2e-6)
