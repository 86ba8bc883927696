"""Programs that do not import tfswap: rescue of steps that run out of memory, and sessions of TensorFlow 1."""

from __future__ import annotations

import contextlib
import os
from typing import Any
from unittest import mock

import pytest
from processes import on_arena
from slow import slow
from unmodified_process import begin

CAPPED = "72"
"""MiB of an arena in which a step runs out of memory."""


@pytest.mark.parametrize(("at", "steps"), [(0, 5), *slow((3, 5), (120, 200))])
def test_a_step_that_runs_out_of_memory_is_run_again_with_the_bits_of_a_run_that_never_did(at: int, steps: int) -> None:
    def trained() -> Any:
        import keras
        import tensorflow as tf

        from tfswap.frontends.unmodified import summary

        if os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == CAPPED:
            begin()
        keras.utils.set_random_seed(1)
        layers = [
            layer for _ in range(10) for layer in (keras.layers.Dense(256, "tanh"), keras.layers.BatchNormalization())
        ]
        model = keras.Sequential([keras.Input([256]), *layers])
        calls, generator = tf.Variable(0.0), tf.random.Generator.from_seed(3)

        @tf.function(input_signature=[tf.TensorSpec([None, 256])])
        def train_step(x: tf.Tensor) -> tf.Tensor:
            calls.assign_add(1.0)  # before the step runs out of memory
            noise = generator.normal([256]) + tf.random.truncated_normal([256])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.nn.dropout(x + noise, 0.1), training=True) ** 2)
            for weight, gradient in zip(
                model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
            ):
                weight.assign_sub(0.1 * gradient)
            return loss

        ballast, losses = [], []
        for i in range(steps):
            if i == at:
                ballast.append(tf.ones([28 << 18]))
            rows = 300 if i % 3 == 1 else 2048
            losses.append(float(train_step(tf.random.stateless_normal([rows, 256], seed=(i, 2)))))
        weights = [weight.numpy().tolist() for weight in model.variables]
        found = summary.text().splitlines()
        return {"values": [losses, weights, float(calls), generator.state.numpy().tolist()], "text": found}

    capped, uncapped = on_arena(trained, mib=int(CAPPED)), on_arena(trained, mib=1024)
    assert capped["values"] == uncapped["values"]
    assert uncapped["text"] == []
    assert capped["text"][2].split()[:3] == [str(steps - at), "train_step", "CPU:0"]


@pytest.mark.slow
def test_fit_that_runs_out_of_memory_goes_on_with_the_bits_of_a_run_that_never_did() -> None:
    def trained() -> Any:
        import keras
        import numpy as np
        import tensorflow as tf

        from tfswap.frontends.unmodified import summary

        if os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == CAPPED:
            begin()
        keras.utils.set_random_seed(1)
        layers = [
            layer
            for _ in range(8)
            for layer in (keras.layers.Dense(256, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1))
        ]
        model = keras.Sequential([keras.Input([256]), *layers])
        model.compile(keras.optimizers.Adam(1e-3), "mse", jit_compile=False)
        ballast, losses = [], []

        class Takes(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                if batch == 120:
                    ballast.extend(tf.ones([1 << 18]) for _ in range(28))

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                losses.append(float(logs["loss"]))

        batches = tf.data.Dataset.range(200).map(lambda i: tf.random.stateless_normal([2048, 256], [i, 2]))
        model.fit(batches.map(lambda x: (x, x)), callbacks=[Takes()], verbose=0, shuffle=False)
        found = [np.asarray(variable).tolist() for variable in (*model.variables, *model.optimizer.variables)]
        return {"values": [losses, found], "text": summary.text().splitlines()}

    capped, uncapped = on_arena(trained, mib=int(CAPPED)), on_arena(trained, mib=1024)
    assert capped["values"] == uncapped["values"]
    assert uncapped["text"] == []
    assert int(capped["text"][2].split()[0]) in range(1, 81)


@pytest.mark.parametrize(
    ("kind", "at", "steps"),
    [
        ("resource", 3, 8),
        *slow(("reference", 0, 8), ("monitored", 4, 8), *((kind, 120, 200) for kind in ("resource", "monitored"))),
    ],
)
def test_a_session_s_step_that_runs_out_of_memory_is_run_again(kind: str, at: int, steps: int) -> None:
    def trained() -> Any:
        from session_steps import until_it_dies

        from tfswap.frontends.unmodified import summary

        if os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] == CAPPED:
            begin()
        return {"values": until_it_dies(kind, at, steps), "text": summary.text().splitlines()}

    capped, uncapped = on_arena(trained, mib=int(CAPPED)), on_arena(trained, mib=1024)
    assert capped["values"] == uncapped["values"]
    assert uncapped["text"] == []
    rows = [line.split() for line in capped["text"][2:-1]]
    assert steps - at <= sum(int(row[0]) for row in rows) <= steps  # peaks differ by run: it may die before
    assert len(rows) == 2


@pytest.mark.parametrize("options", [{}, {"memory_limit": "40MiB"}])
def test_batches_that_a_step_takes_from_an_iterator_are_taken_first(options: dict[str, Any]) -> None:
    def trained() -> Any:
        import tensorflow as tf

        from tfswap.frontends.unmodified import summary

        if os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"] != "1024":
            begin(**options)
        weights = [tf.Variable(0.1 * tf.random.stateless_normal([64, 64], (i, 1))) for i in range(16)]
        rows = tf.data.Dataset.range(2500).map(lambda i: tf.random.stateless_normal([64, 64], (i, 2)))
        batches = iter(rows.unbatch().batch(16384).take(3))

        @tf.function
        def train_step(rate: tf.Tensor) -> dict[str, tf.Tensor]:
            h = next(batches)
            with tf.GradientTape() as tape:
                for weight in weights:
                    h = tf.nn.tanh(h @ weight)
                loss = tf.reduce_mean(h * h)
            for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(rate * gradient)
            return {"loss": loss}

        losses = [float(train_step(tf.constant(0.1))["loss"]) for _ in range(3)]
        with contextlib.suppress(tf.errors.OutOfRangeError):
            losses.append(float(train_step(tf.constant(0.1))["loss"]))
        values = [losses, [weight.numpy().tolist() for weight in weights]]
        return {"values": values, "text": summary.text().splitlines()}

    capped, uncapped = on_arena(trained, mib=52), on_arena(trained, mib=1024)
    assert capped["values"] == uncapped["values"]
    assert len(capped["values"][0]) == 3
    assert capped["text"][2].split()[:2] == ["3", "train_step"]


def test_a_call_is_known_to_fit_for_the_sizes_that_have_run() -> None:
    def program() -> Any:
        import tensorflow as tf

        from tfswap.frontends.unmodified.functions import VERDICT

        begin()
        weight = tf.Variable(tf.ones([256, 256]))

        @tf.function(input_signature=[tf.TensorSpec([None, 256])])
        def train_step(x: tf.Tensor) -> None:
            weight.assign_add(tf.matmul(x, x, transpose_a=True))

        small, large = tf.ones([16, 256]), tf.ones([4096, 256])
        train_step(small)
        verdict = vars(train_step.get_concrete_function())[VERDICT]
        shapes = [(tuple(x.shape),) for x in (small, large)]
        room = verdict.rescue._room
        found, held = [room.fits(given) for given in shapes], list[Any]()
        while tf.config.experimental.get_memory_info("CPU:0")["current"] <= room._most[shapes[0]]["CPU:0"]:
            held.append(tf.ones([1 << 15]))
        return [*found, room.fits(shapes[0])]

    assert on_arena(program, mib=64) == [True, False, False]


def test_runs_of_sessions_are_planned_in_the_program_s_own_graph() -> None:
    def program() -> Any:
        import tensorflow as tf
        from session_steps import branched, trained

        from tfswap.frontends.unmodified import summary

        def peak() -> int:
            found = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            tf.config.experimental.reset_memory_stats("CPU:0")
            return found

        plain = [trained(resource=resource) for resource in (False, True)]
        peaks = [peak()]
        begin(memory_limit="8MiB")
        planned = [trained(resource=resource) for resource in (False, True)]
        tf.compat.v1.disable_control_flow_v2()
        branched()
        return {"same": plain == planned, "text": summary.text(), "peaks": [*peaks, peak()]}

    found = on_arena(program, mib=64)
    assert found["same"]
    assert found["peaks"][1] <= 8 << 20 < found["peaks"][0]
    *planned, _, as_it_was = found["text"].splitlines()
    assert [line.split()[0] for line in planned[2:]] == ["4", "2"]
    assert "branched" in as_it_was
    assert "TensorFlow 1 conditional" in as_it_was


@pytest.mark.parametrize(("program", "limit"), [("decayed", "11MiB"), ("decayed", "18MiB"), ("keeping", "12MiB")])
def test_the_peak_of_a_session_s_step_is_the_planned_one(program: str, limit: str) -> None:
    """In 11 MiB tensors are swapped, and in 18 MiB kernels run concurrently. What a program keeps is in the arena of
    its next run, whose peak is higher by that.
    """

    def values() -> Any:
        import session_steps

        if program == "decayed":
            return [session_steps.decayed(resource=resource) for resource in (False, True)]
        return session_steps.keeping()

    def planned() -> Any:
        import tensorflow as tf

        from tfswap.frontends.unmodified import summary

        begin(memory_limit=limit)
        found = values()
        (row,) = summary._rows.values()
        for function in row.functions:
            row.read(function)
        (figures,) = row.devices.values()
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        return {"values": found, "planned": figures.planned_bytes, "measured": figures.measured_bytes, "peak": peak}

    def plain() -> Any:
        from tfswap.exporters.function import memory_optimizer_off

        with memory_optimizer_off():
            return values()

    found = on_arena(planned, mib=64)
    assert found["values"] == on_arena(plain, mib=64)
    assert found["planned"] == found["measured"] == found["peak"]


@pytest.mark.parametrize(
    ("options", "mib", "drops", "monitored"),
    [
        ({"memory_limit": "10MiB"}, 64, True, False),
        *slow(({"memory_limit": "10MiB"}, 64, False, True), ({}, 12, True, False)),
    ],
)
def test_runs_of_sessions_without_gradients_are_planned(
    options: dict[str, Any], mib: int, drops: bool, monitored: bool
) -> None:
    """Where there is no room for them; and where they draw from the step's generators."""

    def program() -> Any:
        from session_steps import evaluated

        from tfswap.frontends.unmodified import summary

        begin(**options)
        found = evaluated(drops=drops, monitored=monitored)
        return {**found, "rows": [line.split() for line in summary.text().splitlines()[2:-1]]}

    def plain() -> Any:
        from session_steps import evaluated

        return evaluated(drops=drops, monitored=monitored)

    found, uncapped = on_arena(program, mib=mib), on_arena(plain, mib=64)
    assert found["values"] == uncapped["values"]
    assert found["peak"] <= (10 if options else mib) << 20 < uncapped["peak"]
    calls = {row[3]: row[0] for row in found["rows"]}
    assert calls["evaluation:0"] == "3"
    assert len(calls) == (5 if drops else 4)  # 100 rows have room as they are, where they draw nothing


def test_a_session_s_step_that_passed_its_limit_is_planned_again_with_more_room() -> None:
    def program() -> Any:
        from session_steps import twice

        from tfswap.frontends.unmodified import session_steps as sessions

        plain = twice()
        begin(memory_limit="8MiB")
        margins, peaks = list[int](), [(8 << 20) + 4096, 1]
        made, note = sessions.SessionStep._made, sessions.SessionStep._note

        def planned(self: Any, *args: Any) -> Any:
            margins.append(self._margin_bytes)
            return made(self, *args)

        def noted(self: Any, form: Any, _: Any) -> None:
            """The first run passes the limit."""
            nothing, peak = (sessions.arena.MemoryInfo(0, nbytes) for nbytes in (0, peaks.pop(0)))
            with mock.patch.object(sessions.arena, "memory_info", lambda _: peak):
                note(self, form, nothing)

        with (
            mock.patch.object(sessions.SessionStep, "_made", planned),
            mock.patch.object(sessions.SessionStep, "_note", noted),
        ):
            return {"same": twice() == plain, "margins": margins}

    assert on_arena(program, mib=64) == {"same": True, "margins": [0, 4096]}
