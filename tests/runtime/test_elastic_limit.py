"""Limits in files, and budgets that processes share: what each step may have, and what all have together."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import Forked, on_arena

from tfswap.ir.permits import TENSOR_TACTICS

pytest.importorskip("tensorflow")

ARENA = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "512", "TF_NUM_INTEROP_THREADS": "1"}
HANGS_S = 120
"""Processes that have not come so far by then never do."""
MIB = 1 << 20


def test_a_file_changes_the_limit_between_two_steps(tmp_path: Path) -> None:
    path = str(tmp_path / "limit")

    def program():
        import tensorflow as tf
        from nets import Net, batch, bits

        import tfswap

        def write(text):
            Path(path + ".new").write_text(text)
            os.replace(path + ".new", path)

        write("300%\n")
        net, twin, x = Net(layers=4), Net(layers=4), batch()
        step = tfswap.optimize(tf.function(net.step), memory_limit=f"file:{path}", tactics=TENSOR_TACTICS)
        reference = tf.function(twin.step)
        outer = tf.function(lambda x: step(x) + 0.0)
        seen, same = [], []

        def run(called):
            same.append(bits(called(x)) == bits(reference(x)))
            seen.append(step.plan().limit_bytes)

        for called, text in ((step, "300%\n"), (outer, "300%\n"), (step, "60%\n"), (outer, "60%\n")):
            write(text)  # all functions are made, whose constants count in the floor
            run(called)
        floor, high = step.report().floor_bytes + MIB, step.report().baseline_peak_bytes
        for text in (f"{floor}\n", "", "no size\n", "60", "70%"):
            write(text)
            run(step)
        write(f"{floor}\n")
        run(outer)
        os.remove(path)
        run(step)
        step.memory_limit = 2 * high
        write("60%\n")
        run(step)
        return [same, seen, floor, high, step.experimental_get_tracing_count()]

    same, seen, floor, high, traces = on_arena(program, TF_NUM_INTEROP_THREADS="1")
    assert all(same)
    assert traces == 1
    assert seen[4:8] == [floor] * 4  # what is damaged or written in part changes nothing
    assert seen[8] == pytest.approx(0.7 * high, rel=0.02)
    assert seen[9:11] == [floor, floor]  # inside of a function; without a file
    assert seen[11] == 2 * high  # an assigned limit replaces the file


def test_the_environment_names_a_file_for_programs_that_do_not(tmp_path: Path) -> None:
    (tmp_path / "limit").write_text("123MiB")

    def program():
        import tensorflow as tf
        from nets import Net, batch

        import tfswap

        step = tfswap.optimize(tf.function(Net(layers=2).step), memory_limit="60%")
        step(batch())
        refused = ""
        os.environ["TFSWAP_LIMIT_FILE"] += ".missing"
        try:
            tfswap.optimize(tf.function(Net(layers=2).step))
        except tfswap.TfswapError as error:
            refused = str(error)
        return [step.memory_limit, step.plan().limit_bytes, refused]

    limit, planned, refused = on_arena(program, TFSWAP_LIMIT_FILE=str(tmp_path / "limit"))
    assert limit == "123MiB"
    assert planned == 123 * MIB
    assert "limit.missing" in refused


def sharing(folder: str, name: str, rows: int = 1024) -> None:
    """Train under the budget until there is a file NAME.stop, and log what the arena has: a line for each period, with
    its begin, its end, the peak in it, and the limit.
    """
    import tensorflow as tf
    from nets import Net, batch

    import tfswap

    step = tfswap.optimize(tf.function(Net(layers=4).step), memory_limit=f"file:{folder}/budget")
    follow = type(step).follow
    x, begins = batch(rows), []

    def mark():
        now = time.monotonic()
        peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        if begins:
            log.write(json.dumps([begins[-1], now, peak, step.memory_limit]) + "\n")
            log.flush()
        begins.append(now)

    def following(self, limit):
        mark()  # a call waits for its share until here
        follow(self, limit)

    type(step).follow = following
    with open(f"{folder}/{name}", "w") as log:
        while not os.path.exists(f"{folder}/{name}.stop"):
            try:
                step(x)
            except tfswap.InfeasibleMemoryLimit as error:
                Path(folder, f"{name}.refused").write_text(f"{error.floor_bytes} {error.limit_bytes} {error}")
                return
            mark()


class Sharing:
    """Processes that share a budget in a folder."""

    def __init__(self, folder: Path, budget_bytes: int):
        self.folder, self.budget_bytes = folder, budget_bytes
        (folder / "budget").write_text(f"budget {budget_bytes}\n")
        self.processes: dict[str, Forked] = {}

    def start(self, name: str, rows: int = 1024) -> None:
        folder = str(self.folder)

        def program():
            sharing(folder, name, rows)

        own = self.folder / f"{name}.process"
        own.mkdir()
        self.processes[name] = Forked(program, ARENA, own)

    def stop(self, name: str) -> None:
        (self.folder / f"{name}.stop").touch()
        self.processes[name].process.join(HANGS_S)
        self.processes[name].done()

    def rows(self, name: str) -> list[list[Any]]:
        path = self.folder / name
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be written in part
        return [json.loads(line) for line in lines]

    def limit(self, name: str) -> int:
        return self.rows(name)[-1][3]

    def reach(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds."""
        end = time.monotonic() + HANGS_S
        while not condition():
            for name, each in self.processes.items():
                assert each.process.exitcode in (None, 0, -signal.SIGKILL), f"{name}: {each.err.read_text()}"
            assert time.monotonic() < end, {name: self.rows(name)[-3:] for name in self.processes}
            time.sleep(0.02)

    def running(self, name: str) -> None:
        self.reach(lambda: len(self.rows(name)) > 5)

    def most_together(self) -> int:
        """The highest sum, over all moments, of the peaks of the periods that hold it."""
        changes = []
        for name in self.processes:
            for begin, end, peak, _ in self.rows(name):
                changes += [(begin, 1, peak), (end, 0, -peak)]
        total, most = 0, 0
        for _, _, change in sorted(changes):
            total += change
            most = max(most, total)
        return most


def needs(rows: int = 1024) -> tuple[int, int]:
    """The floor of a step as `sharing` trains it, and its unoptimised peak."""

    def program():
        import tensorflow as tf
        from nets import Net, batch

        import tfswap

        step = tfswap.optimize(tf.function(Net(layers=4).step), memory_limit="300%")
        step(batch(rows))
        step.memory_limit = "70%"
        step(batch(rows))
        return [step.report().floor_bytes, step.report().baseline_peak_bytes]

    floor, high = on_arena(program, TF_NUM_INTEROP_THREADS="1")
    return floor, high


def test_peaks_of_processes_that_join_leave_and_die_stay_within_their_budget(tmp_path: Path) -> None:
    floor, _ = needs()
    shared = Sharing(tmp_path, 3 * (floor + MIB // 4))
    whole = shared.budget_bytes
    try:
        shared.start("first")
        shared.running("first")
        assert shared.limit("first") == whole
        shared.start("second")
        shared.running("second")
        shared.start("third")
        shared.running("third")
        shared.reach(lambda: all(shared.limit(name) == whole // 3 for name in shared.processes))
        shared.stop("second")
        shared.reach(lambda: shared.limit("first") == shared.limit("third") == whole // 2)
        shared.processes["first"].process.kill()
        shared.processes["first"].process.join()
        shared.reach(lambda: shared.limit("third") == whole)
        shared.stop("third")
    finally:
        for each in shared.processes.values():
            each.process.kill()
    for name in shared.processes:
        assert all(peak <= limit for _, _, peak, limit in shared.rows(name)[2:])
    assert floor < shared.most_together() <= whole


@pytest.mark.slow
def test_a_process_whose_floor_is_not_free_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    floor, _ = needs()
    shared = Sharing(tmp_path, floor + MIB // 4)
    try:
        shared.start("first")
        shared.running("first")
        shared.start("second")
        shared.processes["second"].process.join(HANGS_S)
        shared.processes["second"].done()
        refused_floor, free, message = (tmp_path / "second.refused").read_text().split(" ", 2)
        assert int(free) < int(refused_floor)
        assert refused_floor in message
        assert free in message
        assert shared.rows("second") == [] or max(row[2] for row in shared.rows("second")) < floor
        shared.reach(lambda: shared.limit("first") == shared.budget_bytes)
        shared.stop("first")
    finally:
        for each in shared.processes.values():
            each.process.kill()
    assert shared.most_together() <= shared.budget_bytes


@pytest.mark.slow
def test_threads_share_the_share_of_their_process(tmp_path: Path) -> None:
    path = str(tmp_path / "budget")

    def program():
        import threading

        import tensorflow as tf
        from nets import Net, batch, bits

        import tfswap
        from tfswap.support.limit_file import limit_file

        Path(path).write_text(f"budget {64 * MIB}\n")
        nets, twins, x = [Net(layers=3), Net(layers=3)], [Net(layers=3), Net(layers=3)], batch()
        steps = [tfswap.optimize(tf.function(net.step), memory_limit=f"file:{path}") for net in nets]
        for twin in twins:
            reference = tf.function(twin.step)
            for _ in range(12):
                reference(x)
        faults = []

        def train(step):
            try:
                for number in range(12):
                    step(x)
                    if number % 4 == 3:
                        Path(path).write_text(f"budget {(60 - number) * MIB}\n")
            except BaseException as error:
                faults.append(repr(error))

        threads = [threading.Thread(target=train, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for step in steps:
            step(x)
        granted = limit_file(path).leases.granted_bytes
        weights = [bits(net.weights) for net in nets]
        for twin in twins:
            tf.function(twin.step)(x)
        return [faults, granted, [s.memory_limit for s in steps], weights == [bits(twin.weights) for twin in twins]]

    faults, granted, limits, same = on_arena(program, TF_NUM_INTEROP_THREADS="1")
    assert faults == []
    assert {granted, *limits} == {49 * MIB}
    assert same


@pytest.mark.slow
def test_a_step_too_large_for_the_share_leaves_the_other_steps_theirs(tmp_path: Path) -> None:
    path = str(tmp_path / "budget")

    def program():
        import tensorflow as tf
        from nets import Net, batch

        import tfswap
        from tfswap.support.limit_file import limit_file

        x, large = batch(), batch(16384)
        Path(path).write_text(f"budget {20 * MIB}\n")
        small = tfswap.optimize(tf.function(Net(layers=4).step), memory_limit=f"file:{path}")
        other = tfswap.optimize(tf.function(Net(layers=4).step), memory_limit=f"file:{path}")
        refused = []
        small(x)
        for _ in range(2):
            try:
                other(large)
            except tfswap.InfeasibleMemoryLimit as error:
                refused.append(error.floor_bytes > 20 * MIB)
            small(x)
        return [refused, small.memory_limit, limit_file(path).leases.granted_bytes]

    assert on_arena(program, TF_NUM_INTEROP_THREADS="1") == [[True, True], 20 * MIB, 20 * MIB]
