"""A step on a GPU: under its limit, to the bit, with copies concurrent with kernels; and the codecs' bits there.

Tests marked `gpu` need one and skip without. So that they can be trusted where there is one, all that they are made
of runs here too: the same programs on a CPU's arena, and the reading of profiles on made-up ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from folders import TESTS
from gpu.process import EMULATED, SMALL
from gpu.traces import IN, OUT, overlap_s, streams_of, total_s, union
from hypothesis import given
from hypothesis import strategies as st
from processes import last_json, run_forked, run_python

tf = pytest.importorskip("tensorflow")

LIMIT = "60%"
LEAST_CONCURRENT = 0.5
"""Of the copies' time, or of the kernels' where that is less, what must pass side by side. Where a step swaps so much,
memory makes some kernels wait.
"""
# cuDNN's workspaces come from the arena and are not in the plan: small ones leave the promise to the plan.
GPU = {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "0" if SMALL else "4"}
# Longer than the host takes to launch one, or the device would be idle in between.
GPU |= {"EMULATED_GPU_KERNEL_US": "1000"} if EMULATED else {}
ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512", "TF_ENABLE_ONEDNN_OPTS": "0"}
NETS = ("mlp", "resnet")


@pytest.fixture(scope="module")
def gpu() -> str:
    if not EMULATED and not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU")
    return "GPU:0"


def run_program(*arguments: str, **env: str) -> Any:
    """What gpu_steps.py prints, in a process of its own."""
    program = str(TESTS / "programs" / "gpu_steps.py")
    attach = "from gpu import process; process.attach_emulated(); " if EMULATED and "GPU:0" in arguments else ""
    code = f"import runpy, sys; sys.argv = {[program, *arguments]!r}; runpy.run_path({program!r}, run_name='__main__')"
    run = run_python if "GPU:0" in arguments else run_forked
    return last_json(run(attach + code, **env))


def check_trained(net: str, device: str, **env: str) -> None:
    reference = run_program("train", net, device, "unoptimised", **env)
    optimised = run_program("train", net, device, LIMIT, **env)
    assert optimised["peak"] <= optimised["limit"] < reference["peak"]
    assert optimised["digest"] == reference["digest"]


@pytest.mark.gpu
@pytest.mark.parametrize("net", NETS)
def test_a_step_on_a_gpu_keeps_its_limit_and_its_bits(gpu, net):
    check_trained(net, gpu, **GPU)


@pytest.mark.parametrize("net", NETS)
def test_the_same_program_keeps_them_on_a_cpus_arena(net):
    check_trained(net, "CPU:0", **ARENA)


@pytest.mark.gpu
@pytest.mark.parametrize("net", NETS)
def test_copies_are_concurrent_with_kernels(gpu, net):
    found = run_program("overlap", net, gpu, LIMIT, **GPU)
    assert found["swapped"]
    assert min(found["out"], found["back"]) >= found["swapped"]
    assert found["concurrent_s"] >= LEAST_CONCURRENT * min(found["copies_s"], found["kernels_s"])


def test_a_cpus_profile_has_no_streams():
    found = run_program("overlap", "mlp", "CPU:0", LIMIT, **ARENA)
    assert found["swapped"]
    assert (found["kernels"], found["out"], found["back"], found["copies_s"]) == (0, 0, 0, 0.0)


@pytest.mark.gpu
def test_codecs_on_a_gpu_give_the_cpus_bits(gpu):
    found = run_program("codecs", gpu)
    assert found["compared"] and not found["differing"]


def test_codecs_are_compared_with_themselves_here():
    found = run_program("codecs", "CPU:0", TF_ENABLE_ONEDNN_OPTS="0")
    assert found["compared"] > 30 and not found["differing"]


# --- reading profiles -------------------------------------------------------------------------------------------------


def made_up(lines: dict[str, Iterable[tuple[str, int, int]]], plane: str = "/device:GPU:0") -> Any:
    """A profile with these lines of (event, begin, end), in picoseconds after a line's own begin of 1 ns."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    made = space.planes.add(name=plane)
    for name, events in lines.items():
        line = made.lines.add(name=name, timestamp_ns=1)
        for event, began, ended in events:
            number = len(made.event_metadata) + 1
            made.event_metadata[number].name = event
            line.events.add(metadata_id=number, offset_ps=began, duration_ps=ended - began)
    return space


def test_copies_are_distinguished_from_kernels_and_streams_from_what_is_made_of_them():
    space = made_up(
        {
            "Stream #1(Compute)": [("sgemm", 0, 1000), ("Memset", 1000, 1500), ("relu", 2000, 3000)],
            "Stream #2(MemcpyD2H)": [(OUT, 500, 2500), ("MemcpyD2D", 0, 9000)],
            "Stream #3(MemcpyH2D)": [(IN, 4000, 5000)],
            "TensorFlow Ops": [("node:MatMul", 0, 9000)],
        }
    )
    space.MergeFrom(made_up({"Stream #9": [("eigen", 0, 9000)]}, plane="/host:CPU"))
    kernels, out, back = streams_of(space)
    assert [(round(b * 1e12), round(e * 1e12)) for b, e in kernels] == [(1000, 2000), (3000, 4000)]
    assert (len(out), len(back)) == (1, 1)
    assert total_s(out + back) == pytest.approx(3e-9)
    assert overlap_s(out, kernels) == pytest.approx(1e-9)
    assert overlap_s(back, kernels) == 0.0


spans = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda begin_length: (begin_length[0], sum(begin_length))),
    max_size=12,
)


@given(some=spans, others=spans)
def test_the_overlap_is_that_of_the_moments_in_both(some, others):
    def moments(many):
        return {moment for began, ended in many for moment in range(began, ended)}

    assert overlap_s(some, others) == len(moments(some) & moments(others))
    assert total_s(some) == len(moments(some))
    joined = union(some)
    assert all(before[1] < after[0] for before, after in pairwise(joined))
