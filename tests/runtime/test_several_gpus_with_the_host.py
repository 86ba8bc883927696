"""Steps on GPUs of which a part runs on the CPU: the limit of its arena, planned with those of the GPUs.

The GPUs are emulated (tests/emulated_gpu).
"""

from __future__ import annotations

import pytest
import several_gpus
import tensorflow as tf
from gpu_compare import reporting
from several_gpus import check

import tfswap


def test_a_part_on_the_host_has_no_limit(on_gpus):
    check(on_gpus(reporting(lambda gpus: several_gpus.compare(several_gpus.with_the_host))))


ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256"}
WITH_HOST = ("GPU:0", "CPU:0")


@pytest.mark.emulated_gpu(jitter=2, kernel_us=20.0)
@pytest.mark.parametrize("share", ["60%", "45%"])
def test_a_part_on_the_host_may_have_a_limit(on_gpus, share):
    """Both arenas are planned to the byte, with the copies between them."""

    def program(gpus):
        limits = {"GPU:0": "60%", "CPU:0": share}
        return several_gpus.compare(several_gpus.shared_with_the_host, limits, devices=WITH_HOST)

    found = on_gpus(reporting(program), **ARENA)
    check(found)
    assert all(found["moves"].values())


def test_a_step_with_nothing_on_the_host_runs_under_a_limit_of_the_host(on_gpus):
    def program(gpus):
        return several_gpus.compare(several_gpus.pipeline, {"GPU:0": "60%", "CPU:0": "60%"})

    check(on_gpus(reporting(program), **ARENA))


@pytest.mark.slow
def test_the_limit_of_the_host_is_refused_changed_and_left_out(on_gpus):
    def program(gpus):
        traces = []
        _, python_function, inputs = several_gpus.shared_with_the_host()

        def step(x):
            traces.append(x)
            return python_function(x)

        optimized = tfswap.optimize(tf.function(step), memory_limit={"GPU:0": "60%", "CPU:0": "100KiB"})
        with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
            optimized(*inputs)
        floor, count = refused.value.floor_bytes, len(traces)
        kept, names = [], []
        # The step without a limit of the CPU leaves variables there in other chunks, at random: the floor is another.
        again = {"GPU:0": "70%", "CPU:0": 2 * floor}
        for limits in ({"GPU:0": "60%", "CPU:0": floor}, {"GPU:0": "60%"}, again, "60%"):
            optimized.memory_limit = limits
            _, peaks = several_gpus.peaks_of(lambda: optimized(*inputs).numpy(), WITH_HOST)
            names.append(list(optimized.report().devices))
            for device, report in optimized.report().devices.items():
                kept.append([peaks[device] == report.planned_peak_bytes, peaks[device] <= report.memory_limit_bytes])
        return {"refusal": str(refused.value), "kept": kept, "names": names, "traced": len(traces) - count}

    found = on_gpus(reporting(program), **ARENA)
    assert " on CPU:0: memory_limit is 102400 bytes" in found["refusal"] and found["report"] == []
    assert found["names"] == [["GPU:0", "CPU:0"], ["GPU:0"], ["GPU:0", "CPU:0"], ["GPU:0"]]
    assert all(map(all, found["kept"])) and found["traced"] == 0, found


def test_counters_of_a_loop_on_a_device_have_room_under_the_limit_of_the_host(on_gpus):
    """A kernel of a GPU has its small integers in the host's arena."""

    def program(gpus):
        _, step, inputs = several_gpus.loop_with_the_host()
        optimized = tfswap.optimize(tf.function(step), memory_limit={"GPU:0": "80%", "CPU:0": "1KiB"})
        with pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
            optimized(*inputs)
        floor = refused.value.floor_bytes
        optimized.memory_limit = {"GPU:0": "80%", "CPU:0": floor}
        peaks = [several_gpus.peaks_of(lambda: optimized(*inputs), WITH_HOST)[1]["CPU:0"] for _ in range(4)]
        return {"floor": floor, "peaks": peaks, "planned": optimized.report("CPU:0").planned_peak_bytes}

    found = on_gpus(reporting(program), **ARENA)
    assert found["report"] == [] and all(found["planned"] < peak <= found["floor"] for peak in found["peaks"]), found


def test_a_limit_of_the_host_is_planned_for_where_its_memory_is_not_measured(on_gpus):
    """TensorFlow's CPU has no arena by default. Then the plan is carried out, and the peak is not known."""

    def program(gpus):
        _, python_function, inputs = several_gpus.shared_with_the_host()
        optimized = tfswap.optimize(tf.function(python_function), memory_limit={"GPU:0": "60%", "CPU:0": "60%"})
        losses = [float(optimized(*inputs)) for _ in range(3)]
        plain = tf.function(several_gpus.shared_with_the_host()[1])
        report = optimized.report("CPU:0")
        return {
            "same": losses == [float(plain(*inputs)) for _ in range(3)],
            "moves": bool(optimized.plan("CPU:0").moves),
            "planned": report.planned_peak_bytes <= report.memory_limit_bytes,
            "measured": report.measured_peak_bytes,
        }

    expected = {"same": True, "moves": True, "planned": True, "measured": None, "report": []}
    assert on_gpus(reporting(program)) == expected
