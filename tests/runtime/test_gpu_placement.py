"""Which device a step is on, where there are emulated GPUs (tests/emulated_gpu)."""

from __future__ import annotations

import textwrap

import pytest
from gpu_compare import END, PROGRAM, SMALL

tf = pytest.importorskip("tensorflow")

ON_CPU = """
with tf.device("CPU:0"):
    variables, step = made()
    x = tf.identity(x)
    expected = [float(trained(loss_of, weights(*[[128, 128]] * 8))(x))]
    kernels = GPUS.counts().kernels
    tf.config.experimental.reset_memory_stats("CPU:0")
    losses = [float(step(x)) for _ in range(2)]
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
found = {
    "same": losses[:1] == expected,
    "kept": peak <= step.plan().limit_bytes,
    "swaps": bool(step.plan().evictions),
    "kernels": GPUS.counts().kernels - kernels,
}
"""


def test_a_step_on_the_cpu_is_planned_for_the_cpus_arena(on_gpus):
    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256"}
    found = on_gpus(PROGRAM + SMALL + ON_CPU + END, **arena)
    assert found == {"same": True, "kept": True, "swaps": True, "kernels": 0, "report": []}


PARTS = {
    "a variable": ("variables[0] = tf.Variable(variables[0], name='hosted')", "uses a variable that is on the CPU"),
    "a device": ("h = tf.sin(h)", "(Sin) has the device"),
    "an op": ("tf.print('a loss', h[0, 0])", "TensorFlow has no kernel for GPUs of"),
    "a kernel that TensorFlow places by itself": (
        "h += tf.cast(tf.strings.length(tf.strings.as_string(h[0, 0])), tf.float32)",
        "TensorFlow has no kernel for GPUs of",
    ),
    "a GPU that is not there": (
        "with tf.device('GPU:7'): h = tf.sin(h)",
        "has the device GPU:7, and this process has GPU:0",
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_on_the_cpu_is_refused_by_name_before_anything_runs(on_gpus, part):
    code, reported = PARTS[part]
    program = """
        def loss_of(variables, x):
            h = x @ variables[0]
            INSIDE
            for variable in variables[1:]:
                h = tf.nn.relu(h @ variable)
            return tf.reduce_mean(h * h)

        variables = weights(*[[128, 128]] * 8)
        OUTSIDE
        before = [each.numpy() for each in variables]
        step = tfswap.optimize(trained(loss_of, variables), memory_limit="60%", tactics=("swap",))
        try:
            step(tf.constant(draws(512, 128)))
        except tfswap.UnsupportedGraph as error:
            same = all((each.numpy() == value).all() for each, value in zip(variables, before))
            found = {"reported": str(error), "same": same}
    """
    scoped = f"with tf.device('CPU:0'): {code}"
    inside, outside = ("pass", scoped) if part == "a variable" else (scoped if part == "a device" else code, "pass")
    found = on_gpus(PROGRAM + textwrap.dedent(program).replace("INSIDE", inside).replace("OUTSIDE", outside) + END)
    assert reported in found["reported"] and found["same"] and "\n" not in found["reported"]
