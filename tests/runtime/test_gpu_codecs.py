"""Codecs and profiles on emulated GPUs (tests/emulated_gpu): the stand-ins for CUDA's driver, NVRTC and profiler."""

from __future__ import annotations

import ctypes.util
import logging
import tempfile

import pytest
import tensorflow as tf
from emulated_gpu import Link
from gpu_compare import SHAPES, batch, check, compare, draws, made, relu_loss, reporting, trained, weights

import tfswap
import tfswap.ops
import tfswap.ops.codecs

SOME_CODECS = ("mask positive", "select", "max pool", "float8_e4m3fn", "groups of 4 bits")


@pytest.mark.emulated_gpu(cuda=True)
@pytest.mark.parametrize(
    "chosen",
    [
        [f"{name} float32" for name in SOME_CODECS],
        pytest.param([], marks=pytest.mark.slow, id="all"),  # each is compiled, which takes most of the time
    ],
)
def test_codecs_give_the_cpus_bits(on_gpus, chosen):
    """Compiled by the stand-in for NVRTC, and launched by the driver's."""

    def program(gpus):
        import gpu_steps

        calls = gpu_steps.codec_calls()
        calls = {name: calls[name] for name in chosen or calls}
        before = gpus.counts().kernels
        there = {name: gpu_steps.run_on("GPU:0", run) for name, run in calls.items()}
        kernels = gpus.counts().kernels - before
        here = {name: gpu_steps.run_on("CPU:0", run) for name, run in calls.items()}
        differing = [name for name in calls if there[name] != here[name]]
        return {"more": kernels - len(calls), "differing": differing, "report": gpus.report()}

    found = on_gpus(program)
    assert found.pop("more") > 0
    assert found == {"differing": [], "report": ""}


@pytest.mark.emulated_gpu(cuda=True, kernel_us=50.0)
def test_a_step_that_encodes_keeps_its_limit_as_planned(on_gpus):
    def program(gpus):
        def loss_of(variables, x):
            for variable in variables:
                x = tf.nn.relu(x @ variable) + 0.1 * x
            return tf.reduce_mean(x * x)

        return compare(
            gpus, loss_of, [[64, 64]] * 8, draws(1024, 64), limit="75%", tactics=("encode",), precision="fp8"
        )

    found = on_gpus(
        reporting(program),
    )
    assert not found["same"]  # eight bits of each number
    check({**found, "same": True}, swaps=False)


def test_without_cuda_steps_swap_and_one_line_of_the_log_says_that_codecs_are_disabled(on_gpus):
    """As on GPUs of other vendors."""

    def program(gpus):
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("tfswap").addHandler(handler)
        found = compare(gpus, relu_loss, SHAPES, draws(512, 128))
        made()[1](batch())
        try:
            tfswap.ops.codecs.encode_mask(batch(), "positive")
        except tf.errors.FailedPreconditionError as error:
            found["refused"] = error.message
        return {**found, "lines": [line for line in lines if "codecs" in line]}

    found = on_gpus(reporting(program))
    check(found)
    [line] = found["lines"]
    assert line.startswith("tfswap: codecs are disabled") and "\n" not in line
    if ctypes.util.find_library("cuda") is None:
        assert "libcuda.so.1) is not installed" in found["refused"]


@pytest.mark.emulated_gpu(cuda=True, to_device=Link(20e6))
def test_a_codec_that_does_not_wait_for_its_input_is_reported(on_gpus):
    def program(gpus):
        import tensorflow as tf

        import tfswap.ops.codecs
        from tfswap.ops import copies

        @tf.function
        def step(x, wait):
            mask = tfswap.ops.codecs.encode_mask(x, "positive")
            handle = copies.swap_out(mask)
            with tf.control_dependencies([copies.release(handle)]):
                back, ticket = copies.swap_in(handle, mask.dtype, mask.shape)
            if wait:
                back = copies.await_copy(back, ticket)
            return tfswap.ops.codecs.multiply_by_mask(x, back)

        x, reports = tf.ones([1 << 20]), []
        for wait in (True, False):
            step(x, wait).numpy()
            reports.append(gpus.report())
        return reports

    report = on_gpus(program)
    assert report[0] == ""
    assert "Tfswap>MultiplyByMask" in report[1] and "to the device by Tfswap>SwapIn" in report[1]


@pytest.mark.emulated_gpu(kernel_us=200.0, to_device=Link(2e9), to_host=Link(4e9))
def test_a_profile_has_the_times_of_kernels_and_copies(on_gpus):
    """By the streams' clocks, which do not depend on what else the machine does."""

    def program(gpus):
        x = batch()
        from gpu.traces import read_profile

        variables = weights(*SHAPES)
        measured = tfswap.profile(trained(relu_loss, variables), x, steps=2)
        step = tfswap.optimize(trained(relu_loss, variables), memory_limit="60%", tactics=("swap",), profile=measured)
        step(x).numpy()
        with tempfile.TemporaryDirectory() as folder:
            tf.profiler.experimental.start(folder)
            before = gpus.counts()
            step(x).numpy()
            after = gpus.counts()
            tf.profiler.experimental.stop()
            streams = read_profile(folder)
        return {
            "kernels": sorted({round(k.seconds * 1e6) for k in measured.kernels if not k.op.startswith("Tfswap>")}),
            "products": sum(kernel.op == "MatMul" for kernel in measured.kernels),
            "swaps": len(step.plan().evictions),
            "copies": [len(streams.out), len(streams.back)],
            "copied": [after.copies_out - before.copies_out, after.copies_in - before.copies_in],
            "us": [sum(end - begin for begin, end in copies) * 1e6 for copies in (streams.out, streams.back)],
            "bytes": [after.bytes_out - before.bytes_out, after.bytes_in - before.bytes_in],
        }

    found = on_gpus(
        reporting(program),
    )
    assert found["report"] == []
    assert found["kernels"] == [200] and found["products"] == 23
    assert found["copies"] == found["copied"] and min(found["copied"]) >= found["swaps"] > 0
    out_bytes, back_bytes = found["bytes"]
    assert found["us"] == pytest.approx([out_bytes / 4e3, back_bytes / 2e3], abs=0.1)
