"""Swapped tensors on disk: `spill_dir=`, for tensors beyond `host_memory_limit`."""

from __future__ import annotations

import re
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")

import os
import resource
import time

import tensorflow as tf
from nets import Net, as_traced, batch, bits, recurrent, recurrent_cell, unoptimised
from processes import Forked, on_arena, run_forked
from swap_copies import eventually

import tfswap
import tfswap.ops as ops
from tfswap.native.load import load
from tfswap.planner.host_tiers import STAGING_BYTES

MIB = 2**20
HOST = STAGING_BYTES + 3 * MIB
ROWS = 4096  # 2 MiB a feature map


def optimized(net, host=HOST, **options):
    options = {"memory_limit": "60%", "tactics": ("swap",), "host_memory_limit": host, **options}
    return tfswap.optimize(tf.function(net.step), **options)


def expected(function, count, without=unoptimised):
    # Bits of the losses of these steps without tfswap; their peak is reset.
    made = [bits(without(function, batch(ROWS, n))) for n in range(count)]
    tf.config.experimental.reset_memory_stats("CPU:0")
    return made


def peak():
    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def reported(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("no error was raised")


def run(code, **env):
    return on_arena(code, 1024, **env)


def test_what_has_no_room_in_host_memory_goes_to_disk_and_comes_back(tmp_path):
    def program():
        folder = str(tmp_path)
        plain, net = Net(8), Net(8)
        everything = optimized(Net(8), None)
        everything(batch(ROWS))
        swapped = everything.plan().host_bytes
        del everything

        losses = expected(tf.function(plain.step), 4)
        step = optimized(net, spill_dir=folder)
        for n, loss in enumerate(losses):
            assert bits(step(batch(ROWS, n))) == loss
            assert os.listdir(folder) == []
        assert bits(net.weights) == bits(plain.weights)

        plan, report, stats = step.plan(), step.report(), step.stats()
        assert swapped > 3 * (HOST - STAGING_BYTES), swapped
        assert 0 < plan.host_bytes <= HOST - STAGING_BYTES
        assert plan.host_bytes + plan.disk_bytes > 0.9 * swapped
        there = {a.tensor: a.nbytes for a in plan.evictions if a.disk and a.out is not None}
        made = step.get_concrete_function(batch(ROWS)).graph.get_operations()
        assert {op.inputs[0].name for op in made if op.type == "Tfswap>SwapOut" and op.get_attr("disk")} == set(there)
        assert stats.disk_out_bytes == sum(there.values()) > 0, (stats, there)
        assert stats.disk_in_bytes == sum(a.nbytes for a in plan.evictions if a.disk)
        assert stats.out_bytes == sum(a.nbytes for a in plan.evictions if not a.disk and a.out is not None)
        assert 0 < stats.disk_peak_bytes <= plan.disk_bytes and stats.pool_peak_bytes <= plan.host_bytes
        total = ops.stats()
        assert total.pool_reserved_bytes <= HOST and total.disk_reserved_bytes >= plan.disk_bytes
        assert peak() <= plan.limit_bytes

        assert report.disk_bytes == plan.disk_bytes and any(
            line.startswith("disk ") for line in str(report).splitlines()
        )
        assert all(("on disk" in row.reason) == (row.name in there) for row in report.swapped)
        assert tfswap.Plan.from_json(plan.to_json()) == plan
        links = (f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd"))
        mine = [name for link in links if os.path.lexists(link) and (name := os.readlink(link)).startswith(folder)]
        assert len(mine) == 1 and mine[0].endswith("(deleted)"), mine
        del step, report, made
        import gc

        gc.collect()
        assert (ops.stats().disk_reserved_bytes, ops.stats().pool_reserved_bytes) == (0, 0)
        return 0

    run(program)


def test_a_slow_disk_is_waited_for(tmp_path):
    def program():
        losses = expected(tf.function(Net(8).step), 2)
        step = optimized(Net(8), spill_dir=str(tmp_path))
        assert bits(step(batch(ROWS, 0))) == losses[0]
        ops.configure(disk_bandwidth_bytes_per_s=40e6)
        assert bits(step(batch(ROWS, 1))) == losses[1]
        stats = step.stats()
        assert stats.copying_s >= (stats.disk_out_bytes + stats.disk_in_bytes) / 40e6
        assert stats.stalled_s > 0  # how long depends on the kernels, which a busy machine makes slower than any disk
        assert peak() <= step.plan().limit_bytes
        assert ops.configuration().disk_bandwidth_bytes_per_s == 40e6
        return 0

    run(program)


def test_what_goes_to_disk_may_be_compressed(tmp_path):
    def program():
        losses = expected(tf.function(Net(8).step), 4)
        net = Net(8)
        step = optimized(net, spill_dir=str(tmp_path))
        ops.configure(disk_bandwidth_bytes_per_s=100e6)
        moved = []
        for n, compressed in enumerate((False, True, True, False)):
            assert ops.configure(disk_compression=compressed).disk_compression == compressed
            assert bits(step(batch(ROWS, n))) == losses[n]
            stats = step.stats()
            assert stats.copying_s >= (stats.disk_written_bytes + stats.disk_read_bytes) / 100e6
            assert stats.disk_written_bytes == stats.disk_read_bytes  # each is read once
            moved.append(stats.disk_out_bytes)
            share = stats.disk_written_bytes / stats.disk_out_bytes
            assert share < 0.8 if compressed else share == 1, share  # half of a ReLU's values are zeros
        plan = step.plan()
        assert len(set(moved)) == 1 and moved[0] > 0
        assert peak() <= plan.limit_bytes and ops.stats().pool_reserved_bytes <= HOST
        assert ops.stats().disk_written_bytes < ops.stats().disk_out_bytes
        return 0

    run(program)


def test_a_disk_that_is_described_as_slow_gets_less():
    def program():
        import dataclasses

        from tfswap.analysis.cost import Costs
        from tfswap.compiler.compiler import Optimizer
        from tfswap.compiler.options import Options, Spill
        from tfswap.device import machine
        from tfswap.importers.function import import_function

        device = machine.current_device()[1]
        graph = import_function(tf.function(Net(8).step).get_concrete_function(tf.TensorSpec([ROWS, 128])))

        somewhere = Spill("/somewhere")

        def planned(rate, spill=somewhere, limit="60%"):
            costs = Costs.of(device)
            costs = dataclasses.replace(costs, rates=dataclasses.replace(costs.rates, disk_bytes_per_s=rate))
            options = Options(("swap", "recompute"), HOST, spill)
            return Optimizer(graph, device, options, costs=costs).plan(limit)

        fast, slow = planned(10e9), planned(1e6)
        assert fast.disk_bytes > 0
        assert slow.disk_bytes < fast.disk_bytes  # kernels run again instead
        assert slow.seconds > fast.seconds
        assert planned(10e9, None).disk_bytes == 0
        little = planned(10e9, Spill("/somewhere", fast.disk_bytes // 2))
        assert 0 < little.disk_bytes <= fast.disk_bytes // 2
        assert "2.0 MiB on disk" in reported(
            tfswap.InfeasibleMemoryLimit, lambda: planned(10e9, Spill("/somewhere", 2 * MIB), "20%")
        )
        refused = reported(tfswap.InvalidModel, lambda: Optimizer(graph, device, Options(("swap",))).rewrite(fast))
        assert "on disk, and spill_dir is not given" in refused, refused
        return 0

    run(program)


def test_a_disk_that_can_not_be_used_is_reported_before_the_step_runs(tmp_path):
    def program():
        folder = str(tmp_path)
        net = Net(8)
        before = bits(net.weights)
        error = reported(tfswap.TfswapError, lambda: optimized(net, spill_dir=f"{folder}/none")(batch(ROWS)))
        why = "No such file or directory. Give a folder"
        assert f"step: tfswap can't make a file in spill_dir={folder}/none: {why}" in error, error
        assert bits(net.weights) == before
        error = reported(tfswap.TfswapError, lambda: optimized(net, spill_dir="/proc")(batch(ROWS)))
        assert "spill_dir=/proc" in error, error

        # Full: no file may be larger than this.
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, resource.RLIM_INFINITY))
        error = reported(tfswap.TfswapError, lambda: optimized(net, spill_dir=folder)(batch(ROWS)))
        assert (
            f"no room in spill_dir={folder} for node 'step'" in error and "File too large. Make room there" in error
        ), error
        assert bits(net.weights) == before and ops.stats().pool_in_use_bytes == 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        optimized(net, spill_dir=folder)(batch(ROWS))
        assert bits(net.weights) != before
        return 0

    run(program)


def test_a_disk_that_fails_in_the_middle_costs_that_step_only(tmp_path):
    def program():
        folder = str(tmp_path)
        net = Net(8)
        losses = expected(tf.function(Net(8).step), 5)
        step = optimized(net, spill_dir=folder)
        for n in range(2):
            assert bits(step(batch(ROWS, n))) == losses[n]
        for n in range(2, 5):
            before = bits(net.weights)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            error = reported(tf.errors.InternalError, lambda: step(batch(ROWS)))
            assert f"Writing to the spill file in {folder} failed: File too large. Make room there" in error, error
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            deadline = time.monotonic() + 60
            while ops.stats().disk_in_use_bytes:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert bits(net.weights) == before
            assert bits(step(batch(ROWS, n))) == losses[n]
        assert peak() <= step.plan().limit_bytes
        return 0

    run(program)


def test_a_file_that_was_rewritten_spills_where_it_is_loaded(tmp_path):
    def program():
        folder, disk = str(tmp_path), str(tmp_path / "disk")

        class Model(tf.Module):
            def __init__(self):
                self.net = Net(8)
                self.weights = self.net.weights

            @tf.function(input_signature=[tf.TensorSpec([ROWS, 128])])
            def train_step(self, x):
                return self.net.step(x)

        tf.saved_model.save(Model(), folder + "/model")
        tfswap.optimize_graph(
            folder + "/model",
            folder + "/made",
            memory_limit="60%",
            tactics=("swap",),
            host_memory_limit=HOST,
            spill_dir=disk,
        )
        assert disk in Path(folder, "made", "README.txt").read_text()
        loaded = tf.saved_model.load(folder + "/made")
        error = reported(tf.errors.ResourceExhaustedError, lambda: loaded.train_step(batch(ROWS)))
        assert f"can't make a file in spill_dir={disk}" in error, error
        os.mkdir(disk)
        loaded, plain = tf.saved_model.load(folder + "/made"), Net(8)
        for weight, other in zip(plain.weights, loaded.weights, strict=True):
            weight.assign(other)
        ops.reset_stats()
        assert bits(loaded.train_step(batch(ROWS))) == bits(as_traced(tf.function(plain.step), batch(ROWS)))
        assert ops.stats().disk_out_bytes > 0 and ops.stats().pool_reserved_bytes <= HOST
        return 0

    run(program)


def test_what_loops_save_spills_too(tmp_path):
    def program():
        one, other = recurrent_cell(), recurrent_cell()
        step = tfswap.optimize(
            tf.function(recurrent(one)),
            memory_limit="60%",
            host_memory_limit=HOST,
            spill_dir=str(tmp_path),
            tactics=("swap",),
        )
        for n, loss in enumerate(expected(tf.function(recurrent(other)), 3, as_traced)):
            assert bits(step(batch(ROWS, n))) == loss
        assert step.plan().accumulators and step.plan().disk_bytes > 0
        assert step.stats().disk_out_bytes > 0 and ops.stats().pool_reserved_bytes <= HOST
        assert peak() <= step.plan().limit_bytes
        return 0

    run(program)


def test_of_what_loops_save_the_first_goes_to_disk_since_it_is_needed_last(tmp_path):
    def program():
        one, other = recurrent_cell(), recurrent_cell()
        step = tfswap.optimize(
            tf.function(recurrent(one)),
            memory_limit="60%",
            host_memory_limit=STAGING_BYTES + 15 * MIB,
            spill_dir=str(tmp_path),
            tactics=("swap",),
        )
        reference = tf.function(recurrent(other))
        losses = [bits(as_traced(reference, batch(ROWS, n))) for n in range(3)]
        assert bits(step(batch(ROWS, 0))) == losses[0]
        plan, stats = step.plan(), step.stats()
        assert plan.accumulators and 0 < plan.saved_disk_bytes <= plan.disk_bytes
        assert stats.out_bytes > 0 and plan.saved_disk_bytes <= stats.disk_out_bytes < plan.saved_disk_bytes + 2 * MIB
        for n in (1, 2):  # in each step anew
            held = ops.stats().pool_in_use_bytes
            ops.configure(disk_bandwidth_bytes_per_s=1000.0)
            found = []

            def called(n, found):
                return found.append(bits(step(batch(ROWS, n))))

            thread = threading.Thread(target=called, args=(n, found), daemon=True)
            thread.start()
            assert eventually(lambda: ops.stats().disk_in_use_bytes > 0)
            time.sleep(0.1)  # the iteration's end waits for its copies
            assert (ops.stats().pool_in_use_bytes, step.stats().out_bytes) == (held, 0), ops.stats()
            ops.configure(disk_bandwidth_bytes_per_s=None)
            thread.join()
            assert found == [losses[n]]
            assert step.stats().disk_out_bytes == stats.disk_out_bytes
        return 0

    run(program)


def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    folder, output = tmp_path / "spilled", tmp_path / "output"
    folder.mkdir()
    output.mkdir()

    def spilled():
        step = optimized(Net(8), spill_dir=str(folder))
        step(batch(ROWS))
        ops.configure(disk_bandwidth_bytes_per_s=1e5)
        threading.Thread(target=step, args=(batch(ROWS),), daemon=True).start()
        while not ops.stats().disk_in_use_bytes:
            time.sleep(0.001)
        print("spilled", flush=True)
        time.sleep(1000)

    program = Forked(
        spilled,
        {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "1024"},
        output,
    )
    try:
        assert eventually(lambda: program.out.read_text() == "spilled\n" or program.process.exitcode is not None)
        held = subprocess.run(["ls", "-l", f"/proc/{program.process.pid}/fd"], capture_output=True, text=True).stdout
        assert re.search(rf"{re.escape(str(folder))}/.*\(deleted\)", held), program.err.read_text()
    finally:
        program.process.kill()
        program.process.join()
    assert list(folder.iterdir()) == []


def test_a_profile_measures_the_disk(tmp_path):
    def program():
        ops.configure(disk_bandwidth_bytes_per_s=64e6)
        net = Net(2)
        measured = tfswap.profile(tf.function(net.step), batch(64), steps=1, spill_dir=str(tmp_path))
        assert 1e6 < measured.rates.disk_bytes_per_s <= 64e6, measured.rates
        assert ops.stats().disk_reserved_bytes == 0
        plain = tfswap.profile(tf.function(net.step), batch(64), steps=1)
        assert plain.rates.disk_bytes_per_s == 1e9
        assert "spill_dir=/none" in reported(
            tfswap.TfswapError, lambda: tfswap.profile(tf.function(net.step), batch(64), steps=1, spill_dir="/none")
        )
        return 0

    run(program)


def test_arguments():
    def program():
        import tensorflow as tf

        import tfswap
        from tfswap.planner.host_tiers import STAGING_BYTES

        def reported(**options):
            try:
                tfswap.optimize(tf.function(lambda: 1), memory_limit="1GiB", **options)
            except tfswap.TfswapError as error:
                return str(error)
            raise AssertionError

        assert "spill_dir is not given" in reported(spill_limit="1GiB")
        assert "give the path of a folder" in reported(spill_dir="")
        assert "give the path of a folder" in reported(spill_dir=5)
        assert "spill_limit" in reported(spill_dir="/tmp", spill_limit="much")
        assert f"by way of buffers that take {STAGING_BYTES}" in reported(spill_dir="/tmp", host_memory_limit="1MiB")

    run_forked(program)


def test_the_staging_that_is_planned_is_what_there_is():
    assert load().c.tfswap_staging_bytes() == STAGING_BYTES
