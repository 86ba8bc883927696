"""`tfswap.watch` and `tfswap watch`: what holds the device's memory at its peak."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import on_arena, run_forked

from tfswap.frontends.unmodified.settings import WATCH, environment
from tfswap.report.peak_owners import LimitCost, Owner, StepCosts, Watched, WatchedDevice, limits_for, merged

HERE = Path(__file__)
SCRIPT = HERE.parents[1] / "programs" / "watched_script.py"
ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}
ROWS, WIDTH, LAYERS = 2048, 64, 8
SAVED_BYTES = ROWS * WIDTH * 4
"""Of each layer's activation."""


def line(mark: str) -> str:
    """The line of this file with this mark, as reports name it."""
    return f"{HERE}:{next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if text.endswith(f'# {mark}'))}"


def training_program() -> Any:
    """A step whose activations are saved on a known line, its batch and its weights."""
    import tensorflow as tf

    weights = [tf.Variable(tf.random.stateless_normal([WIDTH, WIDTH], (i, 1)), name=f"w{i}") for i in range(LAYERS)]
    batch = tf.random.stateless_normal([ROWS, WIDTH], (9, 9))

    @tf.function
    def train_step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.nn.tanh(x @ weight)  # saves
            loss = tf.reduce_mean(x)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return train_step, batch, weights


def test_a_known_tensor_on_a_known_line_is_named_at_the_peak_with_its_bytes() -> None:
    def program() -> Any:
        import tensorflow as tf
        from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

        import tfswap

        step, batch, weights = training_program()
        watch = tfswap.watch().start()
        for _ in range(10):
            step(batch)
        watch.stop()
        seen = watch.devices()["CPU:0"]
        owners = [vars(owner) for owner in seen.owners]
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        restored = ConcreteFunction._call_flat.__qualname__
        return {**vars(seen), "owners": owners, "peak": peak, "restored": restored, "weights": len(weights)}

    seen = on_arena(program, TF_NUM_INTEROP_THREADS="1")  # kernels run in one order
    saved = [owner for owner in seen["owners"] if owner["source"] == line("saves")]
    assert [owner["what"] for owner in saved] == [f"matmul float32 [{ROWS},{WIDTH}]"]
    alive = saved[0]["tensors"]
    assert alive in (LAYERS - 1, LAYERS), "the peak is before or after the last is freed"
    assert SAVED_BYTES * alive <= saved[0]["nbytes"] < 2 * SAVED_BYTES * alive, "a chunk is less than twice its tensor"
    by_name = {owner["what"]: owner for owner in seen["owners"]}
    argument = by_name[f"argument of train_step float32 ({ROWS}, {WIDTH})"]
    assert SAVED_BYTES <= argument["nbytes"] < 2 * SAVED_BYTES
    assert sum(owner["tensors"] for name, owner in by_name.items() if name.startswith("variable 'w")) == LAYERS
    assert seen["during"] == "train_step"
    assert seen["peak_bytes"] == seen["peak"]
    assert 0.98 * seen["peak"] <= seen["nbytes"] <= seen["peak"]
    named = sum(owner["nbytes"] for owner in seen["owners"])
    assert named + seen["unknown_bytes"] == seen["nbytes"]
    assert abs(seen["unknown_bytes"]) <= 0.01 * seen["nbytes"]
    assert seen["restored"] == "ConcreteFunction._call_flat"


def test_eager_code_and_a_profiler_of_the_program_are_seen_too(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def program() -> Any:
        import time

        import tensorflow as tf

        import tfswap

        watch = tfswap.watch().start()
        doubled = tf.function(lambda x: 2 * x)
        x = tf.ones([1024, 256])
        tf.profiler.experimental.start(folder)  # before anything is recorded
        doubled(x)
        tf.profiler.experimental.stop()
        doubled(x)
        tf.profiler.experimental.start(folder)  # while it is recorded
        tf.profiler.experimental.stop()
        end = time.monotonic() + 60
        while time.monotonic() < end and watch.devices()["CPU:0"].nbytes < 16 << 20:
            tf.reduce_sum(tf.tile(x, [16, 1])).numpy()
        watch.stop()
        seen = watch.devices()["CPU:0"]
        assert seen.nbytes == seen.peak_bytes, "a watch of eager code holds none of its tensors"
        return [vars(owner) for owner in seen.owners]

    owners = on_arena(program)
    assert owners[0]["what"] == "Tile float32 [16384,256], in eager code or a pipeline"
    assert owners[0]["nbytes"] == 16 << 20


def test_a_cpu_without_an_arena_has_nothing_to_watch() -> None:
    def program() -> Any:
        import tfswap

        with tfswap.watch() as watch:
            step, batch, _ = training_program()
            step(batch)
        return str(watch.report())

    run = run_forked(program, TF_CPU_ALLOCATOR_USE_BFC="0")
    assert len(run.stderr.strip().splitlines()[-1:]) == 1
    assert "tfswap: nothing was seen: this CPU's allocator keeps no statistics" in run.stderr


def test_the_command_shows_an_unmodified_program_and_what_limits_cost() -> None:
    words = [sys.executable, "-m", "tfswap", "watch", str(SCRIPT), "--epochs", "3"]
    env = {**os.environ, **ARENA, "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256"}
    run = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert run.stdout == "['--epochs', '3']\n"
    heads = [each for each in run.stderr.splitlines() if each.startswith("tfswap: CPU:0 held")]
    assert len(heads) == 1
    assert "in train_step" in heads[0]
    assert f"{SCRIPT}:13" in run.stderr
    costs = run.stderr.splitlines()[-1]
    assert costs.startswith("tfswap: train_step takes ")
    assert "of the time" in costs
    assert "its smallest limit" in costs


def test_the_command_shows_a_program_on_the_terminal_and_as_a_page(tmp_path: Path) -> None:
    own, device = pty.openpty()
    words = [sys.executable, "-m", "tfswap", "watch", "--live", "--html=watch.html", str(SCRIPT), "--epochs", "3"]
    env = {**os.environ, **ARENA, "TERM": "xterm", "COLUMNS": "100"}
    run = subprocess.Popen(words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=device, text=True)
    os.close(device)
    written = b""
    with contextlib.suppress(OSError):  # as its last writer closes it
        while got := os.read(own, 1 << 16):
            written += got
    printed, _ = run.communicate()
    assert run.returncode == 0
    os.close(own)
    assert printed == "['--epochs', '3']\n"
    assert b"held" in written and b"its smallest limit" in written
    page = (tmp_path / "watch.html").read_text()
    assert f"{SCRIPT}:13" in page and "What a limit would cost train_step" in page
    assert "http-equiv=refresh" not in page


def test_a_page_of_another_kind_is_a_usage_error() -> None:
    words = [sys.executable, "-m", "tfswap", "watch", "--html=watch.png", str(SCRIPT)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "end the name with .html for a page" in run.stderr


EXITS = "import sys; sys.exit(3)"
FAILS = "def inner(): raise ValueError('wrong')\ninner()"
ENDS = "import os, sys; print('said'); sys.stdout.flush(); os._exit(5)"
IS_KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize("text", [EXITS, FAILS, ENDS, IS_KILLED, "def :", "import json; print(json.dumps(1))"])
def test_a_watched_process_is_that_of_plain_python(text: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    ran = [
        subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, check=False)
        for env in ({**os.environ}, environment({WATCH: True}))
    ]
    assert len({(each.stdout, each.stderr, each.returncode) for each in ran}) == 1


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        (None, 2, "tfswap: there is no program"),
        ("def :", 1, "line 1 is not Python"),
        (EXITS, 3, "tfswap: no eager code and no function of TensorFlow ran here"),
        (ENDS, 5, ""),
        (IS_KILLED, -signal.SIGTERM, ""),
    ],
)
def test_the_command_ends_as_the_program_does(text: str | None, status: int, message: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    if text is not None:
        program.write_text(text)
    words = [sys.executable, "-m", "tfswap", "watch", str(program)]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert run.returncode == status
    assert message in run.stderr
    assert message or not run.stderr


def test_a_report_sums_up_what_is_small_and_says_what_was_not_recorded() -> None:
    owners = [Owner(600, "MatMul", "train.py:9"), *(Owner(1, f"Const_{i}") for i in range(100)), Owner(300, "batch")]
    device = WatchedDevice("GPU:0", 1100, 2200, "train_step", merged(owners), 100)
    cost = StepCosts("train_step", 1000, (LimitCost(750, 1.0), LimitCost(500, 1.074)))
    refused = StepCosts("other", refusal="XLA compiles it")
    lines = str(Watched({"GPU:0": device}, (cost, refused))).splitlines()
    assert lines[0].endswith("in train_step; the allocator's peak is 2.15 KiB, and was not recorded:")
    assert [each.split()[2:] for each in lines[2:]][:4] == [
        ["55%", "1", "train.py:9", "MatMul"],
        ["27%", "1", "batch"],
        ["9%", "100", "all", "others"],
        ["9%", "-", "allocated", "before,", "and", "freed", "since"],
    ]
    assert "750 B at 1.00 of the time; 500 B at 1.07 of the time, its smallest limit" in lines[-2]
    assert lines[-1] == "tfswap: other: what a limit would cost is not known: XLA compiles it"


def test_limits_below_the_smallest_are_not_tried() -> None:
    assert limits_for(1000, 300, (0.75, 0.5)) == [750, 500, 300]
    assert limits_for(1000, 600, (0.75, 0.5)) == [750, 600]
    assert limits_for(1000, 1000, (0.75, 0.5)) == [1000]


@pytest.mark.emulated_gpu(count=2)
def test_the_arenas_of_gpus_are_watched_too(on_gpus: Any) -> None:
    def program() -> Any:
        import tensorflow as tf

        import tfswap

        step, batch, _ = training_program()
        watch = tfswap.watch().start()
        for _ in range(3):
            step(batch)
        with tf.device("GPU:1"):
            held = [tf.ones([1024, 256]) for _ in range(2)]
        step(batch)
        watch.stop()
        del held
        return {name: [vars(owner) for owner in seen.owners] for name, seen in watch.devices().items()}

    seen = on_gpus(program)
    assert sorted(seen) == ["GPU:0", "GPU:1"]
    assert line("saves") in {owner["source"] for owner in seen["GPU:0"]}
    assert seen["GPU:1"][0]["nbytes"] == 2 * 1024 * 256 * 4


def test_a_fit_with_batches_of_open_sizes_is_planned_for_those_that_it_had() -> None:
    def program() -> Any:
        import keras
        import numpy as np

        import tfswap

        model = keras.Sequential([keras.layers.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        with tfswap.watch() as watch:
            model.fit(np.ones([2500, 64], "float32"), np.ones([2500, 1], "float32"), batch_size=1024, verbose=0)
        (step,) = watch.report().steps
        return step.peak_bytes, step.refusal, len(step.limits)

    peak, refusal, limits = on_arena(program)
    assert refusal == ""
    assert peak >= 2 * 1024 * 64 * 4, "the batch and the hidden layer"
    assert limits >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convolutions", "small_ops"])
def test_a_watch_takes_less_than_three_hundredths_of_the_time(name: str) -> None:
    def program() -> Any:
        import watch_overhead

        return watch_overhead.measured(getattr(watch_overhead, name), rounds=200)

    _, (_, of_cpu, _), _ = on_arena(program)  # other programs on the machine change elapsed time
    assert of_cpu <= 1.03
