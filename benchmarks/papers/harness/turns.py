"""Forms of one training step, each in a process of its own, that take turns.

Every form is a process that keeps running, on TensorFlow's BFC allocator over the CPU's arena, which starts as one free
region as a GPU's does. They take a step each, round by round, so that whatever else the machine does slows all alike: a
ratio of times is the median over the rounds of two times of the same round, and its spread their quartiles. Peaks are
the allocator's own (`get_memory_info`), the highest of all steps, the first included, which is where TensorFlow makes
its kernels; next to it the lowest of any step, since an order that is free has another peak each time.

Not handled: what lies outside of the arena (host memory of swapped tensors, which the plan reports).
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tfswap.support import progress

MIB = 2**20
TACTICS = ("swap", "recompute", "encode")
FLOOR = "floor"
"""A limit: the smallest that the planner reaches."""
ABOVE_FLOOR = 1.005
"""A floor is named by a refusal; constants may lie elsewhere in the arena when the step is then planned."""
COMMAND = Path(__file__).parents[2] / "headlines.py"


class Form(NamedTuple):
    """How a step is run.

    Attributes:
        label: what it is called.
        how: "unoptimised", "memory optimizer off", "Grappler off", "recompute_grad" or "tfswap".
        limit: bytes; a share of the measured peak of the first form, below 1; FLOOR; or None for all of the arena.
        tactics, solver: as tfswap's options.
        edit: what is changed of the plan, of ablation.EDITS; "" for nothing.
        cap: the arena's size over the limit, where it is to be hard limited.
        link: bytes per second of each direction that copies are throttled to, or None.
        profile: the file of measured times that it is planned with, or "".
        peak_of: the label of a form before it whose measured peak is the limit, or "".
    """

    label: str
    how: str = "tfswap"
    limit: float | str | None = FLOOR
    tactics: tuple[str, ...] = TACTICS
    solver: str = "default"
    edit: str = ""
    cap: float | None = None
    link: float | None = None
    profile: str = ""
    peak_of: str = ""


UNOPTIMISED = Form("unoptimised", "unoptimised")
REFERENCE = Form("memory optimizer off", "memory optimizer off")
WITHOUT_GRAPPLER = Form("Grappler off", "Grappler off")
REFERENCES = frozenset((REFERENCE.how, WITHOUT_GRAPPLER.how))
"""What tfswap's bits are those of: the second of steps that it plans as they were traced."""
CHECKPOINTS = Form("recompute_grad", "recompute_grad")


class Took(NamedTuple):
    """What one step took; CPU seconds of all threads together."""

    clock_s: float
    cpu_s: float


def environment(arena_mib: int, onednn: bool) -> dict[str, str]:
    """Of a process with such an arena."""
    return os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(arena_mib),
        "TF_ENABLE_ONEDNN_OPTS": str(int(onednn)),
        "TFSWAP_PLAN_CACHE": "off",
    }


class Stalls(NamedTuple):
    """Seconds that a step waited for copies out to end (back-pressure), for copies in, and made copies itself."""

    out_s: float
    in_s: float
    own_s: float


class Child:
    """A process that takes a step when asked to, and reports it in a line of JSON.

    Attributes:
        label: what it is called, in messages too.
        reported: what it said of itself when it was ready.
    """

    def __init__(self, label: str, command: Sequence[str], folder: Path, env: Mapping[str, str]):
        self.label = label
        self._errors = folder / f"{label}.txt"
        pipe = subprocess.PIPE
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        self.reported: dict[str, Any] = self._read()

    def ask(self) -> Any:
        """Have it take a step; what it reports of that."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout
        while line := self._process.stdout.readline():
            if line.startswith(("{", "[")):
                return json.loads(line)
        raise RuntimeError(f"{self.label}: the process ended\n{self._errors.read_text()[-3000:]}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Running(Child):
    """A process with one form of a step.

    Attributes:
        form: which one.
        reported: what it said of itself after its first steps, and how many those were; {"fits": False} where they did
            not fit.
        took: what each step took that counts.
        stalls: what each of these waited for copies; only of tfswap's.
        peaks: the allocator's, of the steps before it reported, and of each step after.
        losses: of all steps but those before it reported.
    """

    def __init__(self, net: str, size: dict[str, Any], form: Form, folder: Path, *, arena_mib: int, onednn: bool):
        self.form = form
        self.took: list[Took] = []
        self.stalls: list[Stalls] = []
        self.losses: list[float] = []
        spec = json.dumps({"net": net, "size": size, "form": form._asdict(), "arena_mib": arena_mib})
        command = [sys.executable, str(COMMAND), f"--child={spec}"]
        super().__init__(form.label, command, folder, environment(arena_mib, onednn))
        self.peaks: list[int] = [self.reported.get("peak_bytes", 0)]

    @property
    def fits(self) -> bool:
        return self.reported["fits"]

    @property
    def peak_bytes(self) -> int:
        """The highest so far."""
        return max(self.peaks)

    def step(self, *, counts: bool) -> None:
        """Take a step, whose time counts or does not; where it does not fit, though the first has, that is reported."""
        said = self.ask()
        if isinstance(said, dict):
            self.reported |= said
            return
        clock_s, cpu_s, peak_bytes, loss, stalls = said
        self.peaks.append(peak_bytes)
        self.losses.append(loss)
        if counts:
            self.took.append(Took(clock_s, cpu_s))
            if stalls:
                self.stalls.append(Stalls(*stalls))


def compare(
    net: str,
    size: dict[str, Any],
    forms: Sequence[Form],
    *,
    rounds: int,
    arena_mib: int = 8000,
    onednn: bool = False,
    alone: bool = False,
) -> list[dict[str, Any]]:
    """A line for each form: its peak, and its time over that of the first form.

    Args:
        net, size: of nets.NETS, and what it is called with.
        rounds: steps that count.
        alone: run the forms one after the other, for steps of which several do not fit the machine; ratios are then
            of medians.
    """
    lines: list[Running] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for form in forms:
                if form.peak_of:
                    form = form._replace(limit=next(one for one in lines if one.form.label == form.peak_of).peak_bytes)
                if isinstance(form.limit, float):
                    form = form._replace(limit=int(form.limit * lines[0].peak_bytes))
                capped = form.cap is not None and isinstance(form.limit, int)
                own_mib = int(form.cap * form.limit / MIB) if capped else arena_mib
                lines.append(Running(net, size, form, Path(folder), arena_mib=own_mib, onednn=onednn))
                if lines[-1].fits:
                    lines[-1].step(counts=False)
                    for _ in range(rounds if alone else 0):
                        lines[-1].step(counts=True)
                if alone:
                    lines[-1].close()
            fitting = [one for one in lines if one.fits]
            for n in progress.over(f"rounds of {net}", range(0 if alone else rounds)):
                first = n % len(fitting)  # none always follows the same one
                for one in fitting[first:] + fitting[:first]:
                    one.step(counts=True)
        finally:
            for one in lines:
                one.close()
    right = next((one for one in lines if one.form.how in REFERENCES and one.fits), lines[0])
    made = [_line(one, lines[0], right, asked) for one, asked in zip(lines, forms, strict=True)]
    for line, one in zip(made, lines, strict=True):
        others = (other for other in lines if other is not one and other.fits and one.fits)
        line["same_losses_as"] = [other.form.label for other in others if _same(one, other)]
    return made


def _same(one: Running, other: Running) -> bool:
    """Whether all steps that both reported have the same losses, to the bit."""
    return all(map(float.__eq__, *_of_same_steps(one, other)))


def _of_same_steps(one: Running, other: Running) -> tuple[list[float], list[float]]:
    """The losses of each, from the first step that both reported."""
    ahead = other.reported["steps"] - one.reported["steps"]
    return one.losses[max(0, ahead) :], other.losses[max(0, -ahead) :]


def reported_by(spec: dict[str, Any], arena_mib: int = 8000, *, onednn: bool = False) -> Any:
    """What another process of headlines.py prints last, as JSON."""
    command = [sys.executable, str(COMMAND), f"--child={json.dumps(spec)}"]
    done = subprocess.run(command, env=environment(arena_mib, onednn), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{spec}: the process failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def written_by(script: Path, *arguments: str) -> Any:
    """The figures that another benchmark writes, which is called with `--json`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures.json")
        command = [sys.executable, str(script), *arguments, "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not path.exists():
            raise RuntimeError(f"{script.name} wrote no figures\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
        return json.loads(path.read_text())


def attempt(
    net: str, size: dict[str, Any], form: Form, arena_mib: int, steps: int = 1, *, onednn: bool = False
) -> dict[str, Any]:
    """What a form says of itself in an arena of this size, after `steps` steps more than the first."""
    with tempfile.TemporaryDirectory() as folder:
        one = Running(net, size, form, Path(folder), arena_mib=arena_mib, onednn=onednn)
        for _ in range(steps):
            if one.fits:
                one.step(counts=False)
        one.close()
    return one.reported | {"peak_bytes": one.peak_bytes, "size": size, "how": form.how}


def was_refused(reported: dict[str, Any]) -> bool:
    """Whether what did not fit was refused: a step that was planned, and then ran out of memory, reports its peak."""
    return "floor_bytes" in reported and "planned_bytes" not in reported


def _line(one: Running, base: Running, right: Running, asked: Form) -> dict[str, Any]:
    """Of one form: its times over those of `base`, its losses against those of `right`."""
    asked = asked._replace(profile=Path(asked.profile).name)  # its folder is gone
    peaks = {"peak_bytes": one.peak_bytes, "lowest_peak_bytes": min(one.peaks)}
    line = asked._asdict() | one.reported | peaks | {"kept": kept(one)}
    if not one.fits or not base.fits:
        return line
    pairs = list(zip(one.took, base.took, strict=True))
    for clock in Took._fields:
        ratios = [getattr(a, clock) / getattr(b, clock) for a, b in pairs]
        line[f"{clock[:-2]}_ratio"] = statistics.median(ratios)
        line[f"{clock[:-2]}_spread"] = quartiles(ratios)
    line["took_s"] = one.took
    line["clock_s"] = statistics.median(t.clock_s for t in one.took)
    if one.stalls:
        line["stalls_s"] = [statistics.median(column) for column in zip(*one.stalls, strict=True)]
    losses = zip(*_of_same_steps(one, right), strict=False)
    line["loss_off"] = max(abs(a - b) / (abs(b) or 1.0) for a, b in losses)
    return line


def quartiles(values: Iterable[float]) -> list[float]:
    """The lower and the upper one."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


def kept(one: Running) -> bool | None:
    """Whether the limit was kept; None where there is none."""
    return one.peak_bytes <= one.reported["limit_bytes"] if "limit_bytes" in one.reported else None


def child(spec: dict[str, Any]) -> None:
    """One form in this process: reports its figures, then a step and its time for each line of input."""
    import tensorflow as tf
    from papers.ablation import AFTER

    form = Form(**spec["form"])
    if form.how == WITHOUT_GRAPPLER.how:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    wrap = {"wrap": tf.recompute_grad} if form.how == "recompute_grad" else {}
    made, arguments = settled(spec["net"], spec["size"] | wrap, spec["arena_mib"])
    step: Any = tf.function(made)
    tf.config.experimental.reset_memory_stats("CPU:0")
    started = time.perf_counter()
    reported: dict[str, Any] = {"fits": True, "steps": 1}
    try:
        if form.how == "tfswap":
            step = under_limit(step, arguments, form, reported)
        else:
            step = _repeatable(step) if form.how == REFERENCE.how else step
            step(*arguments)
    except tf.errors.ResourceExhaustedError:
        reported["fits"] = False
    if reported["fits"] and form.how == "tfswap":
        report = step.report()
        reported |= {"planned_bytes": report.planned_peak_bytes, "predicted_ratio": report.time_ratio}
        reported |= {
            "swapped": len(report.swapped),
            "recomputed": len(report.recomputed),
            "encoded": len(report.encoded),
        }
        reported |= {
            "reruns": report.reruns,
            "host_bytes": report.host_bytes,
            "baseline_bytes": report.baseline_peak_bytes,
        }
        reported |= {"persistent_bytes": report.persistent_bytes, "floor_bytes": report.floor_bytes}
        reported |= {"limit_bytes": report.memory_limit_bytes, "working_set_bytes": report.working_set_bytes}
        reported["all_bytes"] = sum(row.nbytes for row in (*report.rows, *report.others))
    reported |= {"first_s": time.perf_counter() - started, "peak_bytes": _peak_bytes()}
    print(json.dumps(reported), flush=True)
    after = AFTER.get(form.edit, lambda: None)
    for _ in sys.stdin:
        stalled = _stalls() if form.how == "tfswap" else []
        tf.config.experimental.reset_memory_stats("CPU:0")
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            loss = float(step(*arguments).numpy())
        except tf.errors.ResourceExhaustedError:
            print(json.dumps({"fits": False}), flush=True)
            return
        took = Took(time.perf_counter() - started, time.process_time() - cpu_started)
        stalls = [now - before for now, before in zip(_stalls(), stalled, strict=True)] if stalled else []
        print(json.dumps([*took, _peak_bytes(), loss, stalls]), flush=True)
        after()


def _stalls() -> Stalls:
    """So far, in this process."""
    import tfswap.ops

    stats = tfswap.ops.stats()
    return Stalls(stats.release_stall_s, stats.await_stall_s, stats.inline_copy_s)


def settled(net: str, size: dict[str, Any], arena_mib: int) -> tuple[Any, list[Any]]:
    """A net's step and its arguments, in an arena that starts as one free region."""
    import tensorflow as tf
    from papers.harness.nets import NETS

    slab = tf.raw_ops.Empty(shape=[arena_mib - 2, MIB], dtype=tf.uint8)
    del slab
    made, arguments = NETS[net](**size)
    # Made anew, they lie next to the variables, as a batch does that comes when the arena is at rest: not behind the
    # hole that what made them has left.
    given = [each.numpy() for each in arguments]
    del arguments
    gc.collect()
    return made, [tf.constant(each) for each in given]


def _peak_bytes() -> int:
    import tensorflow as tf

    return tf.config.experimental.get_memory_info("CPU:0")["peak"]


def _repeatable(step: Any) -> Any:
    """The step that tfswap's bits are those of."""
    from tfswap.exporters.function import memory_optimizer_off

    def call(*arguments: Any) -> Any:
        with memory_optimizer_off():
            return step(*arguments)

    return call


def under_limit(step: Any, arguments: Sequence[Any], form: Form, reported: dict[str, Any]) -> Any:
    """The step under the form's limit, called once; {"fits": False} is reported where the floor is above it."""
    import dataclasses

    from papers.ablation import EDITS

    import tfswap.ops
    from tfswap.compiler.request import check
    from tfswap.frontends.function import OptimizedFunction

    tfswap.ops.configure(bandwidth_bytes_per_s=form.link)

    def optimized(limit: int | None, plan: Any = None) -> Any:
        request = check(limit, form.tactics, None, plan, "optimize", form.profile or None)
        options = dataclasses.replace(request.options, solver=form.solver)  # the baselines have no public option
        made = OptimizedFunction(step, dataclasses.replace(request, options=options), "warn")
        made(*arguments)
        return made

    limit: Any = form.limit
    try:
        if limit == FLOOR:
            optimized(1)
    except tfswap.InfeasibleMemoryLimit as error:
        limit = int(error.floor_bytes * ABOVE_FLOOR)
    if limit is not None:
        reported["limit_bytes"] = limit
    try:
        made = optimized(limit)
        if form.edit:
            reported["steps"] = 2
            plan = EDITS[form.edit](made.plan())
            del made  # its constants would lie in the arena
            return optimized(limit, plan)
        return made
    except tfswap.InfeasibleMemoryLimit as error:
        reported |= {"fits": False, "floor_bytes": error.floor_bytes}
        return lambda *_: None
