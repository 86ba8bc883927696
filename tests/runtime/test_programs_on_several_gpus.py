"""Whole training programs on several GPUs: limits kept, peaks as planned to the byte, bits those of the plain program.

The GPUs are emulated (tests/emulated_gpu).
"""

from __future__ import annotations

import gathering_programs
import mirrored_programs
import placed_programs
import pytest
from gpu_compare import reporting
from mirrored_programs import check
from slow import slow

PROGRAMS = {**mirrored_programs.PROGRAMS, **gathering_programs.PROGRAMS, **placed_programs.PROGRAMS}
QUICK = ("pipeline_of_micro_batches", "wide_gradients")


@pytest.mark.emulated_gpu(count=2, jitter=6, kernel_us=20.0)
@pytest.mark.parametrize("name", [*QUICK, *slow(*sorted(PROGRAMS.keys() - QUICK))])
def test_programs_keep_the_limit_of_each_device(on_gpus, name):
    def program(_):
        return mirrored_programs.compare(*PROGRAMS[name])

    check(on_gpus(reporting(program)))


@pytest.mark.slow
@pytest.mark.emulated_gpu(count=3, jitter=6, kernel_us=20.0)
def test_a_strategy_has_replicas_on_some_of_the_devices(on_gpus):
    def program(_):
        limits = {"GPU:0": "70%", "GPU:2": "60%"}
        return mirrored_programs.compare(mirrored_programs.subset_of_gpus, limits, list(limits))

    check(on_gpus(reporting(program)))


@pytest.mark.slow
@pytest.mark.emulated_gpu(count=2, jitter=6, kernel_us=20.0)
def test_a_table_on_the_host_has_a_limit_next_to_those_of_two_devices(on_gpus):
    def program(_):
        limits = {"GPU:0": "70%", "GPU:1": "70%", "CPU:0": "90%"}
        return mirrored_programs.compare(mirrored_programs.table_on_the_host, limits, list(limits))

    check(on_gpus(reporting(program), TF_CPU_ALLOCATOR_USE_BFC="1", TF_CPU_BFC_MEM_LIMIT_IN_MB="256"))


@pytest.mark.slow
@pytest.mark.emulated_gpu(count=2, jitter=6, kernel_us=20.0)
def test_calls_that_fail_in_the_middle_of_a_replica_leave_the_others_exact(on_gpus):
    def program(_):
        return mirrored_programs.compare(mirrored_programs.failing_replicas, "65%", tactics=("swap", "recompute"))

    found = on_gpus(reporting(program))
    assert found["failed"] == [1, 2, 4]
    check(found)


@pytest.mark.slow
@pytest.mark.emulated_gpu(count=2, jitter=6, kernel_us=20.0)
def test_gradients_go_through_branches_of_other_lengths_on_both_devices(on_gpus):
    """The plan is that of the branch that takes most."""

    def program(_):
        limits = {"GPU:0": "80%", "GPU:1": "90%"}
        return mirrored_programs.compare(placed_programs.branches_of_other_lengths, limits)

    found = on_gpus(reporting(program))
    assert found["same"] and found["report"] == [], found
    for calls in found["calls"].values():
        assert all(peak <= planned <= limit for peak, planned, limit in calls), found
        assert any(peak == planned for peak, planned, _ in calls), found
