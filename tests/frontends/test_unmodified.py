"""Programs that do not import tfswap: `tfswap run`, and the hook of TFSWAP_MEMORY_LIMIT."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from folders import ROOT
from processes import on_arena, run_forked
from slow import slow
from unmodified_process import begin

from tfswap.frontends import cli
from tfswap.frontends.unmodified import installed_hook
from tfswap.frontends.unmodified.settings import LIMIT, environment

PROGRAMS = ROOT / "tests" / "programs"
ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2"}

CONDITIONAL = {"two_tower"}
"""Programs whose steps have conditionals: Keras adds sparse gradients in one."""


def needs(*packages: str) -> list[pytest.MarkDecorator]:
    """The marks of a slow test of packages that tfswap's own environment does not have."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")]


def python(*words: str, text: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python, with `text` as its standard input."""
    command = [sys.executable, *words]
    given = {**(os.environ if env is None else env)}
    return subprocess.run(command, env=given, input=text, capture_output=True, text=True, check=False)


def as_main(program: str, arguments: Sequence[str]) -> Callable[[], None]:
    """Runs a program as Python does, without Grappler's memory optimizer. Programs of CONDITIONAL run without Grappler:
    theirs are the bits of that (docs/limits.md).
    """

    def run() -> None:
        import runpy

        import tensorflow as tf

        from tfswap.exporters.function import memory_optimizer_off

        sys.argv = [program, *arguments]
        conditional = not CONDITIONAL.isdisjoint(arguments)
        if conditional:
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        with contextlib.nullcontext() if conditional else memory_optimizer_off():
            runpy.run_path(program, run_name="__main__")

    return run


@pytest.mark.parametrize(
    ("name", "arguments", "mib", "steps"),
    [
        ("unmodified_keras.py", ["4096"], 64, ["model 'functional'", "model 'gan'"]),
        *slow(
            ("unmodified_loop.py", ["strategy", "4096"], 64, ["train_step"]),
            ("unmodified_loop.py", ["plain", "4096"], 64, ["train_step"]),
            ("unmodified_session.py", ["session", "4096"], 94, ["run of Adam"]),
            ("unmodified_session.py", ["monitored", "8192"], 72, ["run of Momentum"]),
            ("unmodified_scripts.py", ["dqn"], 48, ["train_step"]),
            ("unmodified_scripts.py", ["wgan_gp"], 68, ["train_critic"]),
            ("unmodified_scripts.py", ["two_tower"], 44, ["train_step"]),
            ("unmodified_scripts.py", ["vit"], 84, ["model 'transformer'"]),
            ("unmodified_nets.py", ["unet"], 80, ["model 'functional'"]),
            ("unmodified_nets.py", ["voxelmorph"], 64, ["train_step"]),
            ("unmodified_nets.py", ["borzoi"], 84, ["train_step"]),
            ("unmodified_nets.py", ["cyclegan"], 84, ["train_step"]),
            ("unmodified_nets.py", ["ddpm"], 100, ["model 'diffusion'"]),
            ("unmodified_nets.py", ["ctc"], 60, ["train_step"]),
            ("unmodified_deepmd.py", [], 52, ["run of Adam"]),
        ),
        pytest.param("unmodified_packages.py", ["gpflow"], 72, ["step"], marks=needs("gpflow")),
        pytest.param(
            "unmodified_packages.py", ["minibatches"], 40, ["optimization_step"], marks=needs("gpflow", "keras")
        ),
        pytest.param("unmodified_packages.py", ["tuner"], 78, ["model 'sequential'"], marks=needs("keras_tuner")),
        pytest.param("unmodified_packages.py", ["gpt2"], 100, ["model 'gpt2_causal_lm'"], marks=needs("keras_hub")),
    ],
)
def test_a_program_that_dies_alone_ends_with_the_values_of_an_uncapped_run(
    name: str, arguments: list[str], mib: int, steps: list[str]
) -> None:
    program = str(PROGRAMS / name)
    alone = as_main(program, arguments)
    died = run_forked(alone, status=1, **ARENA, TF_CPU_BFC_MEM_LIMIT_IN_MB=str(mib))
    assert "OOM when allocating" in died.stderr
    uncapped = run_forked(alone, **ARENA, TF_CPU_BFC_MEM_LIMIT_IN_MB="1024")
    env = {**os.environ, **ARENA, "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(mib)}
    planned = python("-m", "tfswap", "run", f"--memory_limit={mib - 4}MiB", program, *arguments, env=env)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout == uncapped.stdout
    summary = planned.stderr[planned.stderr.index("tfswap: steps under a limit:") :]
    assert all(step in summary for step in steps)
    peaks = [line for line in summary.splitlines() if "whole process" in line]
    assert len(peaks) == 1
    assert float(peaks[0].split()[-2]) <= mib - 4


EXITS = "import sys; sys.exit({})"
FAILS = "def inner(): raise ValueError('wrong')\ninner()"
ENDS = "import os, sys; print('said'); sys.stdout.flush(); os._exit(5)"
IS_INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
IS_KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    "text", [None, EXITS.format(3), EXITS.format("'no'"), FAILS, ENDS, IS_INTERRUPTED, IS_KILLED, "def :"]
)
def test_a_process_is_that_of_plain_python(text: str | None, tmp_path: Path) -> None:
    program = PROGRAMS / "unmodified_shows.py"
    if text is not None:
        program = tmp_path / "program.py"
        program.write_text(text)
    plain = python(str(program), "--limit", "1", text="stdin")
    requested = python(str(program), "--limit", "1", text="stdin", env=environment({"memory_limit": "6GiB"}))
    assert (requested.stdout, requested.stderr, requested.returncode) == (plain.stdout, plain.stderr, plain.returncode)


def test_the_command_becomes_the_program(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text("import os, sys; print(sys.argv[1:], os.getpid()); sys.exit(7)")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    words = [sys.executable, "-m", "tfswap", "run", "--memory_limit", "6GiB", "-m", "package.program", "--json", "-x"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        out, err = process.communicate()
    assert process.returncode == 7
    assert out == f"['--json', '-x'] {process.pid}\n"
    assert err == "tfswap: no training step was seen in this process, so none was put under a limit\n"


@pytest.mark.parametrize(
    ("end", "arena", "status", "message"),
    [
        ("abrupt", "1", 3, "tfswap: the allocator's peak on CPU:0, of the whole process: "),
        *slow(
            ("usual", "0", 0, "tfswap: nothing measures the peak on CPU:0"),
            ("own limit", "1", 0, "tfswap: the program itself gave its steps limits, which they keep"),
        ),
    ],
)
def test_each_end_has_a_message(end: str, arena: str, status: int, message: str) -> None:
    env = environment({"memory_limit": "6GiB"}) | {"TF_CPU_ALLOCATOR_USE_BFC": arena}
    words = ["-m", "tfswap", "run", "--memory_limit=6GiB", str(PROGRAMS / "unmodified_ends.py"), end]
    done = python(*words, env=env)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith(message)


def test_a_signal_ends_the_program_that_the_command_became(tmp_path: Path) -> None:
    program = tmp_path / "waits.py"
    program.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)")
    words = [sys.executable, "-m", "tfswap", "run", str(program)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["/nowhere/train.py"], cli.USAGE, "there is no program '/nowhere/train.py'"),
        ([], cli.USAGE, "no program is given"),
        (["-m"], cli.USAGE, "no module is given"),
        (["-x", "train.py"], cli.USAGE, "-x is neither an option of tfswap run nor a program"),
        (["--memory_limit=6XB", "train.py"], cli.USAGE, "6XB"),
        (["--limit=6GiB", "train.py"], cli.USAGE, "--limit=6GiB"),
        ([str(ROOT / "Makefile")], cli.FAILED, "is not Python"),
        (["--spill_limit=6GiB", str(PROGRAMS / "unmodified_loop.py")], cli.FAILED, "spill_dir"),
    ],
)
def test_what_can_t_run_is_refused_in_one_line(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *arguments]) == status
    out, err = capsys.readouterr()
    assert not out
    first, *rest = err.splitlines()
    assert first.startswith("tfswap: ")
    assert message in first
    assert [line.split()[0] for line in rest] == (["Try:"] if status == cli.USAGE else [])


def test_children_keep_the_limit_and_a_hidden_sitecustomize_runs(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("print('hidden')")
    env = environment({})
    folder, *rest = env["PYTHONPATH"].split(os.pathsep)
    program = str(PROGRAMS / "unmodified_children.py")
    done = python(program, env={**env, "PYTHONPATH": os.pathsep.join([folder, str(hidden), *rest])})
    assert done.stdout.split().count("True") == 3, done.stderr
    assert "False" not in done.stdout
    assert "hidden" in done.stdout


def test_the_hook_acts_where_the_variable_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / installed_hook.NAME
    monkeypatch.setattr(installed_hook, "hook_path", lambda: path)
    assert cli.main(["hook", "--install"]) == cli.OK
    code = f"import site, sys; site.addsitedir({str(tmp_path)!r}); print('tfswap_startup' in sys.modules)"
    assert python("-c", code, env={**os.environ, LIMIT: "6GiB"}).stdout == "True\n"
    untouched = python("-c", code)
    assert (untouched.stdout, untouched.stderr) == ("False\n", "")
    assert cli.main(["hook", "--remove"]) == cli.OK
    assert not path.exists()
    assert cli.main(["hook", "--remove"]) == cli.OK
    path.write_text("import another\n")
    assert cli.main(["hook", "--install"]) == cli.main(["hook", "--remove"]) == cli.FAILED
    assert path.read_text() == "import another\n"


def test_what_is_planned_and_what_runs_as_it_is() -> None:
    def program() -> Any:
        import tensorflow as tf

        import tfswap
        from tfswap.frontends.unmodified import summary

        begin(memory_limit="1MiB")
        weight = tf.Variable(tf.ones([64, 64]))

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(x @ weight))
            weight.assign_sub(0.01 * tape.gradient(loss, weight))
            return loss

        def all_steps(batches: tf.data.Dataset) -> tf.Tensor:
            return batches.reduce(step(tf.ones([32, 64])), lambda loss, x: loss + step(x))

        def forward(x: tf.Tensor) -> tf.Tensor:
            return tf.tanh(x @ weight)

        def named(name: str, run: Any, **options: Any) -> Any:
            def traced(given: Any) -> Any:
                return run(given)

            traced.__name__ = name
            return tf.function(traced, **options)

        x = tf.ones([32, 64])
        own = tfswap.optimize(memory_limit="2MiB")(named("own", step))
        own(x)
        planned = named("planned", step)
        planned(x)
        planned.get_concrete_function(x)(x)
        named("forward", forward)(x)
        with tf.GradientTape() as tape:
            loss = named("forward", forward)(x)
        assert tape.gradient(loss, weight) is not None
        for _ in range(2):
            named("compiled", step, jit_compile=True)(x)
            named("looping", all_steps)(tf.data.Dataset.from_tensors(x).repeat(3))
        try:
            named("large", step)(tf.ones([8192, 64]))
        except tfswap.InfeasibleMemoryLimit as error:
            refused = str(error)
        return {"text": summary.text(), "own": own.report().memory_limit_bytes, "refused": refused}

    found = on_arena(program, mib=64)
    assert found["own"] == 2 << 20
    rows = {words[1]: words for line in found["text"].splitlines() if (words := line.split())[0].isdecimal()}
    assert rows.keys() == {"planned"}
    assert rows["planned"][:5] == ["2", "planned", "CPU:0", "1.0", "MiB"]
    as_they_were = [line for line in found["text"].splitlines() if "ran as it is" in line]
    assert [line.split(": ")[1] for line in as_they_were] == ["compiled", "looping"]
    assert "XLA" in as_they_were[0]
    assert "loop over a dataset" in as_they_were[1]
    assert "memory_limit is 1048576 bytes" in found["refused"]


def test_a_keras_model_that_can_t_be_planned_trains_by_keras_alone() -> None:
    def program() -> Any:
        import keras
        import numpy
        import tensorflow as tf

        from tfswap.frontends.unmodified import summary

        class Unknown(keras.layers.Layer):
            """It computes a tensor whose size only Python knows."""

            def call(self, x: tf.Tensor) -> tf.Tensor:
                found = tf.numpy_function(lambda: numpy.ones([32, 64], numpy.float32), [], tf.float32)
                return tf.exp(x) + tf.stop_gradient(tf.reduce_sum(found))

        def trained(**options: Any) -> list[Any]:
            keras.utils.set_random_seed(1)
            model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64), Unknown()], name="model")
            model.compile("sgd", lambda y, found: tf.reduce_sum(found), **options)
            x = tf.random.stateless_normal([96, 64], seed=(1, 2))
            model.fit(x, x, batch_size=32, verbose=0, shuffle=False)
            return [weight.tolist() for weight in model.get_weights()]

        plain = trained(jit_compile=False)
        begin(memory_limit="40MiB")
        left = trained(jit_compile=False)
        eager = trained(run_eagerly=True)
        return {"same": plain == left == eager, "text": summary.text()}

    found = on_arena(program, mib=64)
    assert found["same"]
    unknown, eager = found["text"].splitlines()
    assert unknown.startswith("tfswap: model 'model': ran as it is, without a limit: ")
    assert "is not known before the step runs" in unknown
    assert "run_eagerly=True" in eager


def test_evaluate_predict_forward_functions_and_loaded_models_keep_the_limit(tmp_path: Path) -> None:
    def run(options: dict[str, Any] | None) -> Any:
        def program() -> Any:
            import contextlib

            import tensorflow as tf
            from forward_steps import values_of_all

            from tfswap.exporters.function import memory_optimizer_off
            from tfswap.frontends.unmodified import summary

            if options is not None:
                begin(**options)
            with memory_optimizer_off() if options is None else contextlib.nullcontext():
                values = values_of_all(tmp_path)
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            return {"values": values, "peak": peak, "text": summary.text()}

        return on_arena(program, mib=512)

    limit: dict[str, Any] = {"memory_limit": "20MiB"}  # plain steps peak at 27 to 29, by what overlaps
    plain, planned, left = run(None), run(limit), run({**limit, "training_only": True})
    assert planned["values"] == plain["values"]
    peaks = [each["peak"] >> 20 for each in (planned, plain, left)]
    assert peaks[0] < 20 < min(peaks[1:]), peaks
    assert "ran as it is" not in planned["text"]
    assert left["text"] == ""


def test_a_step_whose_limit_is_refused_was_seen() -> None:
    def program() -> Any:
        from tfswap.errors import InfeasibleMemoryLimit
        from tfswap.frontends.unmodified import summary
        from tfswap.frontends.unmodified.unplannable import planning

        before = summary.saw_nothing()
        with contextlib.suppress(InfeasibleMemoryLimit), planning():
            raise InfeasibleMemoryLimit("no", floor_bytes=2, limit_bytes=1)
        return [before, summary.saw_nothing(), summary.is_empty()]

    assert on_arena(program) == [True, False, True]
