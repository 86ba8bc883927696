"""The promise where threads are set aside at any moment, as on a machine that has too much to do."""

from __future__ import annotations

import subprocess

import pytest
from processes import ROOT, last_json, on_arena, run_python
from step_peaks import measuring

pytest.importorskip("tensorflow")


def smallest():
    import control_flow

    return control_flow.main("scan", "floor")


def steps(limit):
    import ctypes

    import control_flow
    import models
    import tensorflow as tf

    import tfswap

    models.settle()
    _, step, arguments = control_flow.PROGRAMS["scan"]()
    optimized = tfswap.optimize(tf.function(step), memory_limit=limit)
    optimized(*arguments)
    set_aside = ctypes.CDLL(None)
    set_aside.set_aside_one_in(200)
    peaks = []
    for _ in range(60):
        with measuring(peaks):
            optimized(*arguments)
    set_aside.set_aside_one_in(0)
    return [max(peaks), set_aside.set_aside_times()]


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory) -> str:
    library = tmp_path_factory.mktemp("set_aside") / "set_aside.so"
    source = ROOT / "tests" / "property" / "set_aside.cc"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    return str(library)


def test_a_limit_is_kept_wherever_threads_are_set_aside(preloaded):
    """One step in six passed it with TensorFlow's own While, which is done before it frees them."""
    floor = on_arena(smallest)["floor"]
    limit = int(floor * 1.02)
    arena = {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "LD_PRELOAD": preloaded,
    }
    peak, times = last_json(run_python(lambda: steps(limit), **arena))
    assert times > 100
    assert peak <= limit
