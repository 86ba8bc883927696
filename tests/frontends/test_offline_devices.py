"""Plans without a process are of one device with an arena: a step on several GPUs is refused."""

from __future__ import annotations

import pytest
from layered_steps import Layer, training_step

from tfswap.compiler.offline import offline_optimizer
from tfswap.compiler.options import Options
from tfswap.errors import UnsupportedGraph
from tfswap.ir.graph import Graph
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import described

GPU = described("a100").device


def placed(*devices: str) -> Graph:
    """A step whose kernels are on these devices in turns."""
    graph = training_step([Layer("dense"), Layer("relu"), Layer("scale", 1)] * 2, 64, 64)
    kernels = [node for node in graph if node not in graph.feeds]
    for number, node in enumerate(kernels):
        node.device = devices[number % len(devices)]
    return graph


def test_a_step_on_several_gpus_is_refused_by_their_names() -> None:
    with pytest.raises(UnsupportedGraph, match=r"the step is on GPU:0, GPU:1, and") as refused:
        offline_optimizer(placed("/job:localhost/replica:0/task:0/device:GPU:1", "/device:GPU:0"), GPU, Options())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("devices", [("/device:GPU:1",), ("/device:GPU:0", "")])
def test_a_step_on_one_gpu_is_planned(devices: tuple[str, ...]) -> None:
    assert offline_optimizer(placed(*devices), GPU, Options()).floor_bytes() > 0


def test_where_there_are_no_gpus_the_step_runs_in_one_arena() -> None:
    assert offline_optimizer(placed("/device:GPU:0", "/device:GPU:1"), DeviceModel(), Options()).floor_bytes() > 0
