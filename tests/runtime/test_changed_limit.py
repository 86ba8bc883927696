"""A limit that is changed between two steps: no new trace, the same values, and each step within its own limit."""

from __future__ import annotations

from typing import Any

import pytest
from processes import on_arena
from step_peaks import measuring

pytest.importorskip("tensorflow")

ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}
ROOM_BYTES = 2 << 20
"""For another batch, and for constants of other functions."""


def measured(step: Any, x: Any) -> tuple[list[bytes], int]:
    """The bits of a step's result, and the arena's peak."""
    from nets import bits

    peaks: list[int] = []
    with measuring(peaks):
        result = bits(step(x))
    return result, peaks[0]


class Twins:
    """A step under a limit, and the same step without."""

    def __init__(self) -> None:
        import tensorflow as tf
        from nets import Net

        import tfswap

        self.net, self.twin = Net(layers=4), Net(layers=4)
        self.step = tfswap.optimize(tf.function(self.net.step), memory_limit="300%")
        self.reference = tf.function(self.twin.step)
        self.same: list[bool] = []
        self.limits: list[int] = []

    def run(self, x: Any) -> Any:
        """Both steps on a batch; returns the report."""
        from nets import bits

        result, peak = measured(self.step, x)
        self.same.append(result == bits(self.reference(x)) and bits(self.net.weights) == bits(self.twin.weights))
        limit = self.step.plan().limit_bytes
        assert peak <= limit, f"{peak} of {limit}"
        self.limits.append(limit)
        return self.step.report()

    def warmed_up(self, x: Any) -> Any:
        """The report once all functions are made, whose constants count in the floor."""
        self.run(x)
        self.step.memory_limit = "60%"
        return self.run(x)


def test_each_step_keeps_the_limit_that_it_has_at_its_call():
    def program():
        from nets import batch

        twins, x = Twins(), batch()
        report = twins.warmed_up(x)
        floor, high = report.floor_bytes, report.baseline_peak_bytes
        asked = [int(0.8 * high), floor, "70%", "300%", (floor + high) // 2]
        for limit in asked:
            twins.step.memory_limit = limit
            twins.run(x)
            twins.run(x)
        asked[2:4] = [int(0.7 * high), 3 * high]
        return [twins.same, twins.limits[2:], asked, high, twins.step.experimental_get_tracing_count()]

    same, limits, asked, high, traces = on_arena(program, **ONE_THREAD)
    assert all(same)
    assert traces == 1
    assert limits[::2] == limits[1::2]
    for limit, wanted in zip(limits[::2], asked, strict=True):
        assert limit == pytest.approx(wanted, abs=high // 50)


def test_an_impossible_limit_is_refused_at_the_call_and_nothing_has_run():
    def program():
        from nets import batch, bits

        import tfswap

        twins, x = Twins(), batch()
        floor = twins.warmed_up(x).floor_bytes
        twins.step.memory_limit = floor // 2
        before, refused = bits(twins.net.weights), []
        for _ in range(2):
            try:
                twins.step(x)
            except tfswap.InfeasibleMemoryLimit as error:
                refused.append(error.limit_bytes == floor // 2 and error.floor_bytes <= floor)
        untouched = bits(twins.net.weights) == before
        twins.step.memory_limit = floor
        twins.run(x)
        return [twins.same, refused, untouched]

    same, refused, untouched = on_arena(program, **ONE_THREAD)
    assert all(same)
    assert refused == [True, True]
    assert untouched


def test_methods_steps_inside_of_functions_and_other_sizes_follow():
    def program():
        import tensorflow as tf
        from nets import Net, batch

        import tfswap

        class Model:
            def __init__(self):
                self.net = Net(layers=4)

            @tf.function
            def traced(self, x):
                return self.net.step(x)

            step = tfswap.optimize(traced, memory_limit="300%")

        model, x, peaks = Model(), batch(), []
        model.step(x)
        low = model.step.report().floor_bytes + ROOM_BYTES
        Model.step.memory_limit = low
        peaks.append((measured(model.step, x)[1], low))

        twins = Twins()
        low = twins.warmed_up(x).floor_bytes + ROOM_BYTES
        outer = tf.function(lambda x: twins.step(x) + 1.0)
        outer(x), twins.reference(x)
        twins.step.memory_limit = low
        peaks.append((measured(outer, x)[1], low))
        twins.reference(x)

        for limit, rows in (("300%", 700), (low, 700), (low, 1024)):
            twins.step.memory_limit = limit
            twins.run(batch(rows))
        return [twins.same, peaks]

    same, peaks = on_arena(program, **ONE_THREAD)
    assert all(same)
    for peak, limit in peaks:
        assert peak <= limit


def test_what_is_no_limit_is_refused_and_changes_nothing():
    def program():
        import tensorflow as tf
        from nets import batch

        import tfswap

        twins, x = Twins(), batch()
        twins.run(x)
        fixed = tfswap.optimize(tf.function(twins.net.step), plan=twins.step.plan())
        refused = 0
        for step, wrong in ((twins.step, "sixty"), (twins.step, -5), (twins.step, "0%"), (twins.step, 1.5), (fixed, 9)):
            try:
                step.memory_limit = wrong
            except tfswap.TfswapError:
                refused += 1
        twins.run(x)
        return [twins.same, refused, twins.step.memory_limit]

    same, refused, limit = on_arena(program, **ONE_THREAD)
    assert all(same)
    assert refused == 5
    assert limit == "300%"
