"""`host_memory_limit`: the limit of the host pool, in the process that planned and where a file is loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

import gc

import tensorflow as tf
from nets import LIMIT, Net, batch
from processes import last_json, run_forked

import tfswap
import tfswap.ops as ops

MIB = 2**20
UNLIMITED = 2**64 - 1


def limit():
    return ops.stats().pool_limit_bytes


def optimized(host_memory_limit, net=None):
    step = tf.function((net or Net()).step)
    return tfswap.optimize(step, memory_limit=LIMIT, host_memory_limit=host_memory_limit)


def run(code):
    return last_json(run_forked(code))


def test_the_pool_may_take_what_its_functions_may_together():
    def program():
        found = [limit()]
        one, two = optimized(5 * MIB), optimized(6 * MIB)
        one(batch())
        found.append(limit())
        two(batch())
        one(batch(2048))  # another size, the same function
        found.append(limit())
        assert ops.stats().pool_reserved_bytes <= limit()
        free = optimized(None)
        free(batch())
        found.append(limit())
        del free, two
        gc.collect()
        found.append(limit())
        del one
        gc.collect()
        found.append(limit())
        return [n if n == UNLIMITED else n // MIB for n in found]

    found = run(program)
    assert found == [2**64 - 1, 5, 11, 2**64 - 1, 5, 2**64 - 1]


def test_a_limit_is_used_up_and_not_passed():
    def program():
        host = optimized(None)
        host(batch())
        host_bytes = host.plan().host_bytes
        del host
        gc.collect()
        ops.configure(host_memory_limit=0)  # gives back what is held
        ops.configure(host_memory_limit=None)
        ops.reset_stats()
        step = optimized(host_bytes)
        for _ in range(3):
            step(batch())
        stats = ops.stats()
        return [host_bytes, stats.pool_reserved_bytes, stats.pool_peak_bytes, stats.out_copies]

    plan, reserved, peak, steps = run(program)
    assert 0 < peak <= reserved <= plan
    assert steps > 0


def test_a_process_that_may_take_less_refuses_the_step_before_it_runs():
    def program():
        net = Net()
        step = optimized(None, net)
        before = [w.numpy().tobytes() for w in net.weights]
        ops.configure(host_memory_limit=MIB)
        try:
            step(batch())
            reported = ""
        except tfswap.TfswapError as error:
            reported = str(error)
        kept = before == [w.numpy().tobytes() for w in net.weights]
        ops.configure(host_memory_limit=None)
        step(batch())
        return [reported, kept, before != [w.numpy().tobytes() for w in net.weights]]

    reported, kept, ran = run(program)
    assert (
        "host memory" in reported and "host_memory_limit=1048576" in reported and "Raise host_memory_limit=" in reported
    )
    assert kept and ran


class Model(tf.Module):
    def __init__(self):
        self.net = Net()
        self.weights = self.net.weights

    @tf.function(input_signature=[tf.TensorSpec([1024, 128])])
    def train_step(self, x):
        return self.net.step(x)


def saved(folder):
    tf.saved_model.save(Model(), f"{folder}/model")
    tfswap.optimize_graph(f"{folder}/model", f"{folder}/made", memory_limit=LIMIT, host_memory_limit=16 * MIB)


def loaded(folder, allowed):
    model = tf.saved_model.load(f"{folder}/made")
    before = limit()
    if allowed:
        ops.configure(host_memory_limit=allowed)
    try:
        for _ in range(2):
            model.train_step(batch())
        reported = ""
    except tf.errors.ResourceExhaustedError as error:
        reported = error.message
    return [before, limit(), reported, ops.stats().pool_reserved_bytes]


def test_a_file_carries_its_limit(tmp_path):
    run_forked(lambda: saved(tmp_path))
    assert "16.0 MiB of host memory (host_memory_limit)" in (tmp_path / "made" / "README.txt").read_text()
    before, after, reported, reserved = run(lambda: loaded(tmp_path, None))
    assert (before, after, reported) == (2**64 - 1, 16 * 2**20, "")
    assert 0 < reserved <= after
    # A process of which less is wanted says so, and what to do.
    _, after, reported, reserved = run(lambda: loaded(tmp_path, MIB))
    assert (
        "has no host memory" in reported
        and "of a limit of 1048576" in reported
        and "Raise host_memory_limit=" in reported
    )
    assert reserved <= after == 2**20
