"""Variables at home on disk, where host memory has no room for all: the same values within the limit of host memory."""

from __future__ import annotations

import hashlib
import os
import re
import resource
from pathlib import Path

import pytest
import tensorflow as tf
from keras_net import KerasNet
from processes import Forked, on_arena
from step_peaks import measuring
from swap_copies import eventually

import tfswap
import tfswap.ops as ops
from tfswap.exporters.function import memory_optimizer_off
from tfswap.planner.host_tiers import STAGING_BYTES

WIDTH, LAYERS = 256, 4
NBYTES = 4 * WIDTH * WIDTH
STATE_BYTES = 3 * LAYERS * NBYTES
LIMIT = int(0.4 * STATE_BYTES)
HOST = STAGING_BYTES + int(0.4 * STATE_BYTES)


class Net(KerasNet):
    """Dense layers with Adam."""

    def __init__(self, folder: str, **limits):
        with tfswap.scope(**limits):
            tf.keras.utils.set_random_seed(1)
            dense = [tf.keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS)]
            self.model = tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense])
            self.optimizer = tf.keras.optimizers.Adam()
            self.optimizer.build(self.model.trainable_variables)
        self.folder = folder
        self.x = tf.random.stateless_normal([32, WIDTH], (1, 2))

    def digest(self):
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in self.state)).hexdigest()

    def between(self, call):
        """Read, assign, and save and restore variables between two steps."""
        if call == 1:
            self.digest()
        elif call == 2:
            for v in self.state[-4:]:
                v.assign(v * 0.99)
        elif call == 3:
            checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)
            checkpoint.restore(checkpoint.write(f"{self.folder}/saved"))


def optimized(net, limit=LIMIT, host=HOST, **options):
    options = {"host_memory_limit": host, "spill_dir": net.folder, **options}
    return tfswap.optimize(tf.function(net.train), memory_limit=limit, **options)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses and the digest of a net that is trained without a limit."""
    folder = str(tmp_path_factory.mktemp("plain"))

    def program():
        net = Net(folder)
        step, losses = tf.function(net.train), []
        for call in range(5):
            net.between(call)
            with memory_optimizer_off():
                losses.append(float(step(net.x)))
        return [losses, net.digest()]

    return on_arena(program)


def trained(net, step, steps=5):
    """The same of one with limits, and what they took."""
    losses, peaks, planned, reserved, disk = [], [], [], [], []
    for call in range(steps):
        net.between(call)
        ops.reset_stats()
        with measuring(peaks):
            losses.append(float(step(net.x)))
        planned.append(step.report().planned_peak_bytes)
        stats = ops.stats()
        reserved.append(stats.pool_reserved_bytes)
        disk.append([stats.disk_out_bytes, stats.disk_in_bytes])
    rows = {row.name: row for row in step.report().variables}
    return {
        "result": [losses, net.digest()],
        "peaks": peaks,
        "planned": planned,
        "reserved": reserved,
        "disk": disk,
        "on_disk": len(step.plan().on_disk),
        "in_memory": len(step.plan().at_home) - len(step.plan().on_disk),
        "sliced": step.plan().slice_bytes,
        "slots": [row.home for name, row in rows.items() if "adam/" in name and row.home],
        "weights": [row.home for name, row in rows.items() if "adam/" not in name and row.home],
        "moved": sum(row.cost_bytes for row in rows.values() if row.home == "disk"),
        "text": str(step.report()),
        "files": [name for name in os.listdir(net.folder) if not name.startswith("saved")],
    }


def check(found, plain):
    assert found["result"] == plain
    assert found["peaks"][0] == found["planned"][0] <= LIMIT
    quiet = [0, 1, 4]  # in the others, what was assigned is in the arena at first
    assert all(found["peaks"][call] <= found["planned"][call] <= LIMIT for call in quiet), found
    assert max(found["reserved"]) <= HOST, found["reserved"]
    assert found["on_disk"] and not found["files"]


def test_what_has_no_room_in_host_memory_is_at_home_on_disk(tmp_path, plain) -> None:
    folder = str(tmp_path)

    def program():
        net = Net(folder, host_memory_limit=HOST, spill_dir=folder)
        made = ops.stats()
        found = trained(net, optimized(net))
        return {**found, "made": [made.pool_reserved_bytes, made.disk_in_use_bytes]}

    found = on_arena(program)
    check(found, plain)
    assert found["made"][0] <= HOST and found["made"][1] > STATE_BYTES / 2
    assert found["in_memory"] and "disk" in found["slots"]
    assert found["slots"].count("disk") > 2 * found["weights"].count("disk"), "those that are copied least go first"
    assert found["disk"][0] == found["disk"][4] and sum(found["disk"][4]) == found["moved"] > 0
    assert "on disk" in found["text"]


@pytest.mark.slow
def test_variables_that_were_made_in_host_memory_go_to_disk(tmp_path, plain) -> None:
    folder = str(tmp_path)

    def program():
        net = Net(folder)
        made = ops.stats().home_bytes
        return {**trained(net, optimized(net)), "made": made}

    found = on_arena(program)
    check(found, plain)
    assert found["made"] >= STATE_BYTES


@pytest.mark.slow
def test_updates_in_slices_are_stored_on_disk(tmp_path, plain) -> None:
    folder = str(tmp_path)

    def program():
        net = Net(folder, host_memory_limit=STAGING_BYTES, spill_dir=folder)
        step = optimized(net, 2 * NBYTES, STAGING_BYTES)
        return trained(net, step)

    found = on_arena(program)
    check(found, plain)
    assert found["sliced"] and not found["in_memory"]
    assert max(found["reserved"]) <= STAGING_BYTES + 256


def test_a_full_disk_is_reported_before_the_step(tmp_path) -> None:
    folder = str(tmp_path)

    def refused(call):
        try:
            call()
        except (tf.errors.ResourceExhaustedError, tfswap.TfswapError) as error:
            return str(error)
        return ""

    def program():
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * NBYTES, unlimited[1]))
        texts = [refused(lambda: Net(folder, host_memory_limit=HOST, spill_dir=folder))]
        net = Net(folder)
        before, step = net.digest(), optimized(net)
        texts.append(refused(lambda: step(net.x)))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        same = net.digest() == before
        step(net.x)
        return {"texts": texts, "same": same, "on_disk": len(step.plan().on_disk)}

    found = on_arena(program)
    for text in found["texts"]:
        assert f"no room in spill_dir={folder}" in text and "File too large. Make room there" in text, text
    assert found["same"] and found["on_disk"]


@pytest.mark.slow
def test_a_slow_disk_is_waited_for(tmp_path, plain) -> None:
    folder, slow_bytes_per_s = str(tmp_path), 40e6

    def program():
        net = Net(folder, host_memory_limit=HOST, spill_dir=folder)
        ops.configure(disk_bandwidth_bytes_per_s=slow_bytes_per_s)
        step = optimized(net)
        found = trained(net, step)
        stats = step.stats()
        ops.configure(disk_bandwidth_bytes_per_s=None)
        copied = (stats.disk_out_bytes + stats.disk_in_bytes) / slow_bytes_per_s
        return {**found, "copied": copied, "copying": stats.copying_s, "stalled": stats.stalled_s}

    found = on_arena(program)
    check(found, plain)
    assert found["copying"] >= found["copied"] > 0 and found["stalled"] > 0


def test_without_a_folder_the_refusal_names_it(tmp_path) -> None:
    def program():
        net = Net("")
        try:
            tfswap.optimize(tf.function(net.train), memory_limit=2 * NBYTES, host_memory_limit=NBYTES)(net.x)
        except tfswap.InfeasibleMemoryLimit as error:
            return str(error)
        return ""

    assert "give spill_dir=" in on_arena(program)


def test_a_process_that_is_killed_leaves_no_homes(tmp_path) -> None:
    folder, output = tmp_path / "disk", tmp_path / "output"
    folder.mkdir()
    output.mkdir()

    def training():
        net = Net(str(folder), host_memory_limit=HOST, spill_dir=str(folder))
        step = optimized(net)
        step(net.x)
        print("trains", flush=True)
        while True:
            step(net.x)

    arena = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512"}
    program = Forked(training, arena, output)
    try:
        assert eventually(lambda: program.out.read_text() == "trains\n" or program.process.exitcode is not None)
        links = Path(f"/proc/{program.process.pid}/fd").iterdir()
        held = [name for link in links if re.match(re.escape(str(folder)), name := os.readlink(link))]
        assert held and all(name.endswith("(deleted)") for name in held), program.err.read_text()
    finally:
        program.process.kill()
        program.process.join()
    assert list(folder.iterdir()) == []
