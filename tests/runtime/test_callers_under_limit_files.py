"""Limits in files for loaded models, Keras and functions taken by get_concrete_function; what has no share waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import on_arena, start_python

import tfswap
from tfswap.errors import TfswapError
from tfswap.frontends import cli

MIB = 1 << 20
THREADS = {"TF_NUM_INTEROP_THREADS": "1"}


def test_functions_taken_from_a_step_read_the_file_before_each_call(tmp_path: Path):
    limit = tmp_path / "limit"
    limit.write_text("300MiB")

    def program():
        import tensorflow as tf
        from nets import Net, batch

        step = tfswap.optimize(tf.function(Net(layers=4).step), memory_limit=f"file:{limit}")
        taken, x = step.get_concrete_function(batch()), batch()
        seen = []
        for text in ("300MiB", "200MiB", "400MiB"):
            limit.write_text(text)
            taken(x)
            seen.append(step.report().memory_limit_bytes)
        return seen

    assert on_arena(program, **THREADS) == [300 * MIB, 200 * MIB, 400 * MIB]


def test_keras_reads_the_file_before_each_batch(tmp_path: Path):
    limit = tmp_path / "limit"
    limit.write_text("300MiB")

    def program():
        from keras_programs import dense, dense_data

        model = tfswap.keras.optimize(dense(), memory_limit=f"file:{limit}")
        x, y = dense_data()
        seen = []
        for text in ("300MiB", "200MiB"):
            limit.write_text(text)
            model.train_on_batch(x[:64], y[:64])
            seen.append(tfswap.keras.report(model).memory_limit_bytes)
            model.fit(x, y, batch_size=64, epochs=1, verbose=0)
            seen.append(tfswap.keras.report(model).memory_limit_bytes)
        return seen

    assert on_arena(program, **THREADS) == [300 * MIB, 300 * MIB, 200 * MIB, 200 * MIB]


def test_a_loaded_model_reads_the_file_before_each_call_of_a_step_or_a_signature(tmp_path: Path):
    limit = tmp_path / "limit"
    limit.write_text("300MiB")

    def program():
        import saved_models
        from saved_models import batch_of

        model = str(tmp_path / "model")
        saved_models.save("plain", model)
        tfswap.optimize_graph(model, tmp_path / "smaller", memory_limit="75%", batch_size=512)
        loaded = tfswap.load(tmp_path / "smaller", memory_limit=f"file:{limit}")
        step, signature = loaded.train_step, loaded.signatures["train"]
        x, y = batch_of(512)
        taken = step.get_concrete_function(x, y)
        seen = []
        for text, call in (
            ("300MiB", lambda: step(x, y)),
            ("200MiB", lambda: step(x, y)),
            ("100MiB", lambda: signature(x=x, y=y)),
            ("200MiB", lambda: step(x, y)),  # at which it was before the signature ran
            ("250MiB", lambda: taken(x, y)),
        ):
            limit.write_text(text)
            call()
            seen.append(step.report().memory_limit_bytes)
        step.memory_limit = "150MiB"
        step(x, y)
        return [*seen, step.report().memory_limit_bytes]

    found = on_arena(program, **THREADS)
    assert found == [each * MIB for each in (300, 200, 100, 200, 250, 150)]


def test_models_in_files_are_planned_for_one_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "limit").write_text("1GiB")
    with pytest.raises(TfswapError, match=r"memory_limit is the file .*limit, and .* planned for one limit"):
        tfswap.optimize_graph(tmp_path / "model", tmp_path / "smaller", memory_limit=f"file:{tmp_path}/limit")
    assert cli.main(["analyze", str(tmp_path), f"--memory_limit=file:{tmp_path}/limit"]) == cli.USAGE
    assert "a command plans for one limit" in capsys.readouterr().err


def test_a_process_that_gets_no_share_waits_and_is_refused(tmp_path: Path):
    budget = tmp_path / "budget"
    budget.write_text("budget 300MiB\n")

    def holding():
        import os
        import signal

        from tfswap.support.shared_budget import Leases

        leases = Leases(lambda: os.open(f"{budget}.leases", os.O_RDWR | os.O_CREAT, 0o600))
        share = leases.update(300 * MIB, floor_bytes=0, release_to=None, take=True)
        print(share.granted_bytes, flush=True)
        signal.pause()

    holder = start_python(holding)
    assert holder.stdout is not None and int(holder.stdout.readline()) == 300 * MIB

    def program():
        import os
        import time
        from unittest import mock

        import tensorflow as tf
        from nets import Net, batch

        from tfswap.runtime import elastic_limit

        step, x = tfswap.optimize(tf.function(Net(layers=4).step), memory_limit=f"file:{budget}"), batch()
        with mock.patch.object(elastic_limit, "WAIT_S", 0.5), pytest.raises(tfswap.InfeasibleMemoryLimit) as refused:
            began = time.monotonic()
            step(x)
        waited = time.monotonic() - began
        os.kill(int(holder_id), 9)
        step(x)  # what the other had is free
        return [str(refused.value), waited, step.report().memory_limit_bytes]

    holder_id = str(holder.pid)
    try:
        refused, waited, limit = on_arena(program, **THREADS)
    finally:
        holder.kill()
        holder.communicate()
    assert "have given up no more" in refused and "raise the budget" in refused
    assert waited >= 0.5
    assert limit == 300 * MIB
