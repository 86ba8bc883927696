"""The time of a product of matrices: packing the right one counts where there are few rows."""

from __future__ import annotations

import dataclasses

import pytest

from tfswap.analysis.cost import Costs
from tfswap.ir.text import parse_graph
from tfswap.kernels.device import DeviceModel

CPU, ONEDNN = (DeviceModel("cpu", onednn, 2, 2) for onednn in (False, True))
GPU = DeviceModel("gpu", False, 2, 2)


def seconds(rows: int, columns: int, *, transposed: bool, device: DeviceModel = CPU) -> float:
    """Of a product with 4096 x `columns` weights, or with their transposition."""
    inner, outer = (columns, 4096) if transposed else (4096, columns)
    graph = parse_graph(
        f"""\
%x = Placeholder() {{dtype=float32}} -> float32[{rows}, {inner}]
%w = Placeholder() {{dtype=float32}} -> float32[4096, {columns}]
%y = MatMul(%x, %w) {{transpose_a=false, transpose_b={str(transposed).lower()}}} -> float32[{rows}, {outer}]
feeds %x, %w
fetches %y
"""
    )
    costs = Costs.of(device)
    return dataclasses.replace(costs, rates=dataclasses.replace(costs.rates, packs=True)).seconds(graph["y"])


@pytest.mark.parametrize("device", (CPU, ONEDNN))
def test_few_rows_with_transposed_weights_take_several_times_as_long(device: DeviceModel) -> None:
    """Their rows are a page apart, so that the elements of a column compete for the same cache lines."""
    ratio = seconds(32, 4096, transposed=True, device=device) / seconds(32, 4096, transposed=False, device=device)
    assert 4 < ratio < 8


def test_rows_that_are_no_multiple_of_a_page_are_faster() -> None:
    assert seconds(32, 4100, transposed=True) < 0.4 * seconds(32, 4096, transposed=True)


def test_many_rows_hide_the_packing() -> None:
    ratio = seconds(8192, 4096, transposed=True) / seconds(8192, 4096, transposed=False)
    assert 1 < ratio < 1.05


def test_a_gpu_packs_nothing() -> None:
    assert seconds(32, 4096, transposed=True, device=GPU) == seconds(32, 4096, transposed=False, device=GPU)
