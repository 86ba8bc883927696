"""The largest size that fits: the search, its axes, and a run that confirms it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_models
from layered_steps import Layer, training_step
from processes import last_json, on_arena, run_forked

from tfswap.analysis.cost import Costs
from tfswap.compiler.options import Options, Spill
from tfswap.compiler.request import Request
from tfswap.compiler.resident_margin import fastest
from tfswap.errors import TfswapError
from tfswap.frontends import cli
from tfswap.frontends import max_batch as max_batch_module
from tfswap.frontends.function import OptimizedFunction
from tfswap.frontends.max_batch import (
    CONFIRMATIONS,
    PROBED_SHARE,
    PROBES,
    Search,
    axes_of,
    largest_that_runs,
    max_batch,
)
from tfswap.frontends.resizable_step import TrainingStep
from tfswap.kernels.device import DeviceModel
from tfswap.kernels.hardware import Machine, default_rates

CPU = DeviceModel()
HERE = Machine("here", "a test", CPU, default_rates(CPU), None, None)


def search(start: int, limit_bytes: int = 0, unit: int = 1) -> Search:
    layers = [Layer("dense"), Layer("relu")] * 3

    def make(sizes: Any) -> Any:
        return training_step(layers, rows=sizes["x"][0], width=64)

    step = TrainingStep("step", {"x": (start, 64)}, {"x": (0, 1)}, (), make)
    return Search(step, {"x": (0,)}, unit, limit_bytes, HERE, Options(), Costs.of(CPU))


LIMIT = 10**6
"""Bytes that the largest size just needs in the searches of what a formula says."""

SHAPES: dict[str, tuple[Callable[[float], float], int]] = {
    "line": (lambda n: 0.2 + 0.8 * n, 11),
    "square": (lambda n: 0.1 + 0.3 * n + 0.6 * n**2, 17),
    "root": (lambda n: n**0.5, 14),
    "step": (lambda n: 0.5 if n <= 1 else 9.0, 24),
}
"""What sizes need, as shares of the limit, by share of the largest; and how many may be tried to find it."""


@pytest.mark.parametrize("start", [1, 7, 100, 4000])
@pytest.mark.parametrize("largest", [0, 1, 2, 99, 100, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_search_finds_the_largest_from_any_start(start: int, largest: int, shape: str):
    asked: list[int] = []
    needed, most = SHAPES[shape]

    def needs(size: int) -> int:
        asked.append(size)
        return int(LIMIT * needed(size / largest)) if largest else LIMIT + size

    assert search(start, LIMIT).largest(needs) == largest
    assert len(set(asked)) == len(asked) <= most


def test_the_search_ends_where_needs_rise_and_fall():
    for largest in range(3, 300):
        found = search(7, LIMIT).largest(lambda n, at=largest: int(LIMIT * (n / at + 0.02 * math.sin(50 * n / at))))
        assert 0.95 * largest < found + 1 < 1.1 * largest + 2


def test_the_search_looks_beyond_holes():
    """A size can fit where a smaller one does not."""
    holes = {512, 513, 514, 515}
    fitting = Fitting(lambda n: n <= 530 and n not in holes)
    assert search(1, LIMIT).largest(fitting.bytes_of) == 530
    step = round(499 * PROBED_SHARE / PROBES)
    fitting = Fitting(lambda n: n < 500 or n == 499 + step)
    assert search(1, LIMIT).largest(fitting.bytes_of) == 499 + step


class Fitting:
    """Sizes that a rule says fit; they need more and more, and those that do not fit a little too much."""

    def __init__(self, fits: Callable[[int], bool]):
        self._fits = fits

    def bytes_of(self, size: int) -> int:
        return min(LIMIT, 1900 * size) if self._fits(size) else LIMIT + size


@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("runs", [16, 400, 700, 970, 1000])
def test_the_largest_size_that_runs_is_found_below_one_that_does_not(runs: int, unit: int):
    """However little the failed runs were over by: 1 of 1000 here."""
    tried: list[int] = []

    def takes(size: int) -> float:
        tried.append(size)
        return 0.99 if size <= runs else 1.001

    found = largest_that_runs(1000 // unit * unit, unit, takes)
    assert len(tried) <= CONFIRMATIONS
    assert 0 < found <= runs
    assert found > 0.95 * runs or runs < 700


def test_what_a_run_was_over_by_is_taken_off_immediately():
    assert largest_that_runs(1000, 1, lambda size: size / 300) > 290
    assert largest_that_runs(1000, 1, lambda size: math.inf if size > 500 else 0.5) > 250
    assert largest_that_runs(1000, 1, lambda size: 1.5) == 0


def test_only_multiples_are_tried():
    asked: list[int] = []
    found = search(1, 1000, unit=32).largest(lambda n: asked.append(n) or n)
    assert found == 992
    assert all(n % 32 == 0 for n in asked)


def test_a_size_that_does_not_matter_is_reported():
    with pytest.raises(TfswapError, match="does not depend on x"):
        search(1, LIMIT).largest(lambda _: 5)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"vary": {"x": 5}}, "give the axes that are searched by argument"),
        ({"vary": "x"}, "give the axes"),
        ({"vary": {"x": (-1,)}}, "give the axes"),
        ({"device": 3}, "device is 3: give the name of one"),
        ({"device": "abacus"}, "no device is called 'abacus'"),
    ],
)
def test_arguments_of_a_search_are_checked_first(given: dict[str, Any], match: str):
    pytest.importorskip("tensorflow")
    with pytest.raises(TfswapError, match=match):
        max_batch(lambda x: x, memory_limit="1MiB", **given)


def test_planned_sizes_keep_the_limit_and_the_next_does_not():
    at = search(64, limit_bytes=3 << 20)
    size = at.largest(at.floor_bytes)
    found = fastest(at.optimizer(size), 3 << 20)
    assert found is not None
    assert found.candidate.peak_bytes <= 3 << 20
    assert fastest(at.optimizer(size + 1), 3 << 20) is None
    assert size > at.largest(at.peak_bytes) > 0


def test_what_is_searched_is_the_batch_or_what_the_user_says():
    step = TrainingStep(
        "step", {"x": (8, 64, 64), "y": (8,), "n": (3,)}, {"x": (0, 1, 2), "y": (0,), "n": (0,)}, (), None
    )  # type: ignore[arg-type]
    assert axes_of(step, None) == {"x": (0,), "y": (0,)}
    assert axes_of(step, {"x": (1, 2)}) == {"x": (1, 2)}
    for vary, says in (
        ({"z": (0,)}, "arguments of step are x, y, n"),
        ({"y": (1,)}, "those that are open"),
        ({"x": ()}, "open"),
    ):
        with pytest.raises(TfswapError, match=says):
            axes_of(step, vary)  # type: ignore[arg-type]


@pytest.mark.slow
def test_fit_on_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = str(tmp_path / "model")
    saved_models.save("plain", model)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    status, out, _ = run("fit", model, "--memory_limit=16MiB", "--multiple_of=64", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["varied"] == [["x", [0]], ["y", [0]]]
    assert found["size"] % 64 == 0
    assert found["size"] > found["unoptimised_size"] > 0
    assert found["peak_bytes"] <= found["limit_bytes"] == 16 << 20
    status, out, _ = run("fit", model, "--memory_limit=16MiB", "--multiple_of=64", "--vary=x:0;y:0")
    assert status == 0
    assert f"under tfswap     {found['size']}" in out
    assert run("fit", model, "--memory_limit=16KiB")[0] == 3
    status, _, err = run("fit", model, "--memory_limit=16MiB", "--vary=x:1", "--batch_size=4")
    assert status == 1
    assert "those that are open are (0,)" in err.replace("\n", " ")
    for vary, says in (("zz:0", "vary names 'zz'"), ("x:9", "vary has axis 9 of 'x', whose shape is [?, 256]")):
        status, _, err = run("fit", model, "--memory_limit=16MiB", f"--vary={vary}")
        assert status == 1
        assert says in err.replace("\n", " ")
    for bad in ("--vary=x", "--memory_limit=60%", "--device=abacus"):
        assert run("fit", model, bad)[0] == 2


def test_tensors_that_a_saved_step_captures_are_not_its_arguments(tmp_path: Path):
    tf = pytest.importorskip("tensorflow")
    module = tf.Module()
    module.weight = tf.Variable(tf.ones([256, 256]))
    scale = tf.range(256.0)

    @tf.function(input_signature=[tf.TensorSpec([None, 256], name="x")])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x * scale @ module.weight))
        module.weight.assign_sub(tape.gradient(loss, module.weight))
        return loss

    module.train_step = step
    tf.saved_model.save(module, str(tmp_path / "model"))
    found = max_batch(tmp_path / "model", memory_limit="8MiB")
    assert found.varied == (("x", (0,)),)
    assert found.size > 1


def confirmed():
    import tensorflow as tf
    from nets import Net

    import tfswap

    slab = tf.raw_ops.Empty(shape=[198, 2**20], dtype=tf.uint8)
    del slab
    net = Net(8, width=256)
    step = tf.function(net.step)
    before = [w.numpy().tobytes() for w in net.weights]
    found = tfswap.max_batch(step, tf.ones([64, 256]), memory_limit="24MiB", multiple_of=512)
    assert "confirmed by a run" in str(found)
    peak = found.measured_bytes
    kept = [w.numpy().tobytes() for w in net.weights] == before
    curve = tfswap.simulate(step, tf.TensorSpec([found.size, 256]), limits=2)
    return {
        "size": found.size,
        "plain": found.unoptimised_size,
        "confirmed": found.confirmed,
        "kept": kept,
        "peak": peak,
        "plain_peak": curve.baseline_peak_bytes,
    }


def test_the_largest_batch_of_a_function_runs():
    pytest.importorskip("tensorflow")
    found = on_arena(confirmed, 200)
    assert found["confirmed"] and found["kept"]
    assert found["size"] > 1.5 * found["plain"] > 0
    # It ran, and kept the limit, whatever the peak had been before.
    assert 16 << 20 < found["peak"] <= 24 << 20 < found["plain_peak"]


def saved():
    import tempfile

    import saved_models
    import tensorflow as tf

    import tfswap

    slab = tf.raw_ops.Empty(shape=[198, 2**20], dtype=tf.uint8)
    del slab
    model = tempfile.mkdtemp()
    saved_models.save("plain", model)
    found = tfswap.max_batch(model, memory_limit="16MiB", multiple_of=256)
    peak = found.measured_bytes
    return {"size": found.size, "plain": found.unoptimised_size, "confirmed": found.confirmed, "peak": peak}


@pytest.mark.slow
def test_the_largest_batch_of_a_saved_model_runs():
    pytest.importorskip("tensorflow")
    found = on_arena(saved, 200)
    assert found["confirmed"]
    assert found["size"] > found["plain"] > 0
    assert 12 << 20 < found["peak"] <= 16 << 20


def unmeasured():
    import tensorflow as tf

    import tfswap

    weight = tf.Variable(tf.ones([64, 64]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ weight) @ weight))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    found = tfswap.max_batch(step, tf.ones([64, 64]), memory_limit="1MiB", multiple_of=256)
    return [found.size, found.confirmed, str(found)]


def test_where_the_allocator_reports_no_peak_nothing_is_confirmed():
    pytest.importorskip("tensorflow")
    size, confirmed, reported = last_json(run_forked(unmeasured))
    assert size > 0
    assert not confirmed
    assert "planned; no run has measured it" in reported


def test_the_run_that_confirms_has_what_the_size_was_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its host memory and its disk above all: with more of them a larger size would seem to run."""
    tf = pytest.importorskip("tensorflow")
    weight = tf.Variable(tf.ones([64, 64]))

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ weight) @ weight))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    asked: list[Options] = []

    class Asked(OptimizedFunction):
        def __init__(self, function: Any, request: Request, on_exceeded: str):
            asked.append(request.options)
            super().__init__(function, request, on_exceeded)

    monkeypatch.setattr(max_batch_module, "OptimizedFunction", Asked)
    given = {"tactics": ["swap"], "host_memory_limit": 4 << 20, "spill_dir": tmp_path, "spill_limit": "8MiB"}
    assert max_batch(step, tf.ones([64, 64]), memory_limit="1MiB", multiple_of=256, **given).size > 0
    assert asked == [Options(("swap",), 4 << 20, Spill(str(tmp_path), 8 << 20))]
