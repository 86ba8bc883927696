"""Requests of GPU kernels, against the record of an H200's allocator: gpu_allocations.json.

Each row there is a kernel of a training step (ResNet-50, VGG19, MobileNetV2, a U-Net, a transformer, Seq2Seq, LSTMs) in
TensorFlow 2.21, with op determinism, TF32 and at most 32 MiB for cuDNN's workspaces: op, attributes, types of inputs
and outputs, and the sizes in bytes of all that it allocated besides its outputs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tfswap.compiler.options import Options
from tfswap.device import cudnn
from tfswap.errors import TfswapError
from tfswap.ir.types import TensorType
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import default_rates, described
from tfswap.kernels.kernel_memory import kernel_memory

MIB = 2**20
WORKSPACE_BYTES = 32 * MIB
H200 = DeviceModel("gpu", name="NVIDIA H200", workspace_bytes=WORKSPACE_BYTES, tf32=True, deterministic=True)
SCRATCH_BYTES = 128 << 10
"""Of reductions and small tables, which no rule counts."""

Row = tuple[str, dict[str, Any], list[tuple[str, list[int]]], list[tuple[str, list[int]]], list[int]]
ROWS: list[Row] = json.loads(Path(__file__).with_name("gpu_allocations.json").read_text())


def types(listed: list[tuple[str, list[int]]]) -> list[TensorType]:
    return [TensorType(dtype, tuple(shape)) for dtype, shape in listed]


def planned(row: Row, device: DeviceModel) -> list[int]:
    op, attrs, inputs, outputs, _ = row
    plain = {k: v.encode() if isinstance(v, str) else tuple(v) for k, v in attrs.items()}
    memory = kernel_memory(op, plain, types(inputs), types(outputs), device)
    return [size for kind, size in memory.events if kind == "temp"]


@pytest.mark.parametrize("op", sorted({row[0] for row in ROWS}))
def test_temporaries_are_those_that_were_recorded(op):
    for row in (row for row in ROWS if row[0] == op):
        recorded, found = sum(row[4]), sum(planned(row, H200))
        at_most = WORKSPACE_BYTES if "Conv2D" in op and "Depthwise" not in op else 0
        assert recorded - SCRATCH_BYTES <= found <= recorded + at_most + SCRATCH_BYTES, row


def test_an_unbounded_workspace_is_not_counted():
    row = next(row for row in ROWS if row[0] == "Conv2DBackpropInput")
    assert planned(row, H200._replace(workspace_bytes=None)) == planned(row, H200)[:-1]


def test_channels_last_are_copied_where_cudnn_does_not_take_them():
    row = next(row for row in ROWS if row[0] == "_FusedConv2D")
    last: Row = (
        row[0],
        {**row[1], "data_format": "NHWC", "strides": [1, 1, 1, 1], "padding": "VALID"},
        row[2],
        row[3],
        row[4],
    )
    image, kernel, result = *types(row[2][:2]), types(row[3])[0]
    assert planned(last, H200) == planned(row, H200)
    copies = [kernel.nbytes, image.nbytes, result.nbytes, WORKSPACE_BYTES]
    assert planned(last, H200._replace(tf32=False)) == copies


def test_a_gpu_has_its_own_sheets_rates():
    assert default_rates(H200) == described("h200").rates
    assert default_rates(DeviceModel("gpu", name="NVIDIA A100-SXM4-80GB")) == described("a100").rates
    assert default_rates(DeviceModel("gpu", name="Somebody's")) == default_rates(DeviceModel("gpu"))


def test_redzones_are_off_unless_a_user_has_set_them():
    with mock.patch.dict(os.environ):
        os.environ.pop(cudnn.REDZONES_OFF, None)
        cudnn.without_redzones()
        assert os.environ[cudnn.REDZONES_OFF] == "1"
        os.environ[cudnn.REDZONES_OFF] = "0"
        cudnn.without_redzones()
        assert os.environ[cudnn.REDZONES_OFF] == "0"


def test_a_gpu_without_codecs_swaps_and_recomputes():
    other = DeviceModel("gpu", name="METAL", codecs=False)
    assert Options().on(other).tactics == tuple(t for t in Options().tactics if t != "encode")
    assert Options().on(H200).tactics == Options().tactics
    with pytest.raises(TfswapError, match="NVIDIA"):
        Options(precision=(("*", "fp16"),)).on(other)


@pytest.mark.parametrize(("given", "nbytes"), [("", None), ("32", 32 * MIB), ("much", None)])
def test_a_workspace_limit_is_read_as_tensorflow_reads_it(given, nbytes):
    with mock.patch.dict(os.environ, {cudnn.WORKSPACE_LIMIT: given}):
        assert cudnn.workspace_limit_bytes() == nbytes
