"""What else makes a step smaller, and what does it cost? tfswap compared with it, at the same measured peak.

    python benchmarks/peers.py                                   # two transformers and two ResNets, half an hour
    python benchmarks/peers.py transformer --rounds 30 --json peers.json
    python benchmarks/peers.py resnet --only "recompute_grad" "accumulate 2"
    python benchmarks/peers.py --only "accumulate 2" xla --close     # also with all tactics and close values
    python benchmarks/peers.py transformer --together 0.5        # two tools in one step, at half of the memory

One training step in plain TensorFlow, with the same weights, as

    unoptimised         as TensorFlow runs it by default
    recompute_grad      every block wrapped in tf.recompute_grad
    RematScope          every block a Keras layer made in keras.RematScope, mode "full"
    grappler recompute  Grappler's memory optimizer set to RECOMPUTATION_HEURISTICS in a ConfigProto
    grappler swap       the same, SWAPPING_HEURISTICS
    grappler both       the same, HEURISTICS
    xla                 jit_compile=True
    xla blocks          jit_compile=True on each block alone
    accumulate 2, 4     gradients summed over 2 or 4 micro-batches, a call for each, then one update
    two devices         half of the blocks on another device, with gradients and updates, by hand: a worker process on
                        the same cores; the larger of the two peaks counts, and the CPU time of both

and, for each of these, with tfswap and a memory_limit of the peak that it was measured at. Where that is below tfswap's
floor, the floor is what tfswap gets.

With --together SHARE, the variants are those that tfswap can be used with in one step, and each is measured as it is
and with tfswap around it, under a memory_limit of that share of the unoptimised step's peak; tfswap alone is one more.

Each variant is a process that keeps running, with TensorFlow's BFC allocator over its CPU's arena. After a warm-up they
take turns, one step each, so that whatever else the machine does slows all alike; ratios are medians over the rounds of
two times taken in the same round: by the clock, and by CPU time, which other work on the machine changes little.
"peak" is the arena's (get_memory_info) over all steps, the first included. XLA takes its temporaries from the arena
too; "resident" is there to see what lies outside of it: how far the process grew, in physical memory and at most, from
before the model was there to the steps after the warm-up (XLA's compiler, tfswap's host memory and its planner are in
that). "values" compares all variables after three steps with the unoptimised step's: as TensorFlow runs it, and
without Grappler's memory optimizer.

Kernels are oneDNN's, TensorFlow's default on CPUs with instructions for neural nets; TF_ENABLE_ONEDNN_OPTS=0 leaves
them out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from papers.harness.peer_nets import (
    MODELS,
    Model,
    accumulating,
    make_step,
    rematerialised,
    update,
)
from papers.harness.turns import Child

from tfswap.ir.permits import KNOWN_TACTICS
from tfswap.support import progress

MIB = 2**20
ARENA_MIB = 4000
CHECKED_STEPS = 3
KERNELS = {"TF_ENABLE_ONEDNN_OPTS": "1"}
REFERENCES = ("unoptimised", "memory optimizer off")
MEMORY_OPTIMIZERS = {
    "grappler recompute": "RECOMPUTATION_HEURISTICS",
    "grappler swap": "SWAPPING_HEURISTICS",
    "grappler both": "HEURISTICS",
}
PARTS = {"accumulate 2": 2, "accumulate 4": 4}
TWO = "two devices"
PEERS = ("recompute_grad", "RematScope", *MEMORY_OPTIMIZERS, "xla", *PARTS, TWO)
ALONE = "tfswap"
CLOSE = "tfswap, close values"
"""With all tactics: kernels in slices, and blocks that XLA compiles."""
COMBINED = ("recompute_grad", "xla blocks", *PARTS)
"""What tfswap can be used with in one step. A step that is one XLA program has nothing for tfswap to plan."""


class Took(NamedTuple):
    """What one step took."""

    wall_s: float
    cpu_s: float  # of all threads together


class SecondDevice:
    """Another process, whose CPU is a device of this one's."""

    def __init__(self) -> None:
        import tensorflow as tf

        with socket.socket() as one, socket.socket() as two:
            for each in (one, two):
                each.bind(("localhost", 0))
            cluster = {"worker": [f"localhost:{each.getsockname()[1]}" for each in (one, two)]}
        command = [sys.executable, __file__, f"--child={json.dumps(cluster)}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.used()
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(cluster), job_name="worker", task_index=0)
        self.names = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in (0, 1)]

    def used(self) -> tuple[int, float]:
        """Its allocator's peak and CPU seconds since it was asked last; the first are reported when it is ready."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        peak_bytes, cpu_s = json.loads(self._process.stdout.readline())
        return peak_bytes, cpu_s

    @staticmethod
    def serve(cluster: dict[str, list[str]]) -> None:
        """Be that process, for as long as there is input."""
        import tensorflow as tf

        slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, MIB], dtype=tf.uint8)
        del slab
        server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name="worker", task_index=1)
        cpu_s = time.process_time()
        for _ in sys.stdin:
            now_s = time.process_time()
            print(json.dumps([tf.config.experimental.get_memory_info("CPU:0")["peak"], now_s - cpu_s]), flush=True)
            cpu_s = now_s
            tf.config.experimental.reset_memory_stats("CPU:0")
        del server


def halved(name: str, devices: Sequence[str]) -> tuple[Model, Callable[[Any, Any], Any]]:
    """A model whose blocks are on two devices, half and half, and its step."""
    import tensorflow as tf

    values = [v.numpy() for v in MODELS[name]().variables]
    layers = len(MODELS[name]().blocks)
    nets = []
    for device, count in zip(devices, (layers // 2, layers - layers // 2), strict=True):
        with tf.device(device):
            nets.append(MODELS[name](layers=count))
    first, second = (net.blocks for net in nets)
    own = [net.variables for net in nets]
    arguments, loss_of = (nets[0].arguments[0], nets[1].arguments[1]), nets[0].loss_of
    variables = [v for one in own for v in one]
    for mine, value in zip(variables, values, strict=True):
        mine.assign(value)
    slots = []
    for device, one in zip(devices, own, strict=True):
        with tf.device(device):
            slots.append([tf.Variable(tf.zeros_like(v)) for v in one])

    def step(x: Any, y: Any) -> Any:
        with tf.device(devices[0]), tf.GradientTape() as tape:
            h = x
            for block in first:
                h = block(h)
        with tf.device(devices[1]):
            with tf.GradientTape() as inner:
                between = h
                inner.watch(between)
                for block in second:
                    h = block(h)
                loss = loss_of(h, y)
            *gradients, back = inner.gradient(loss, [*own[1], between])
            update(own[1], slots[1], gradients)
        with tf.device(devices[0]):
            update(own[0], slots[0], tape.gradient(between, own[0], output_gradients=back))
        return loss

    return Model(variables, [*first, *second], loss_of, arguments), step


def grappler_with(memory_optimization: str) -> None:
    """From now on this process's functions go through Grappler's memory optimizer; TF 2's public options lack it."""
    from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
    from tensorflow.python.eager import context

    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.memory_optimization = rewriter_config_pb2.RewriterConfig.MemOptType.Value(memory_optimization)
    # What it recomputes for are nodes in this name scope: by default that of tf.gradients, not of GradientTape.
    options.memory_optimizer_target_node_name_scope = "gradient_tape/"
    context.context().function_call_options = context.FunctionCallOptions(config_proto=config)


def added_by_grappler(first_call: Callable[[], Any]) -> int:
    """Nodes of the memory optimizer in the graphs that TensorFlow makes at a function's first call."""
    from tensorflow.python.eager import context

    context.context().enable_run_metadata()
    first_call()
    graphs = context.context().export_run_metadata().function_graphs
    context.context().disable_run_metadata()
    made = re.compile(r"(^|/)(Recomputed|swap_in_|swap_out_)")
    return sum(bool(made.search(n.name)) for g in graphs for n in g.post_optimization_graph.node)


def resident_bytes(key: str) -> int:
    """A line of /proc/self/status: VmRSS, what is in physical memory; VmHWM, the most that was."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].removesuffix("kB")) * 1024


def step_of(variant: str, model: Any) -> Any:
    """The function of a variant on one device."""
    import tensorflow as tf

    if variant in PARTS:
        return accumulating(model, PARTS[variant])
    if variant == "recompute_grad":
        return tf.function(make_step(model, tf.recompute_grad))
    if variant == "RematScope":
        return tf.function(make_step(model, rematerialised))
    if variant == "xla":
        return tf.function(make_step(model), jit_compile=True)
    if variant == "xla blocks":
        return tf.function(make_step(model, functools.cache(functools.partial(tf.function, jit_compile=True))))
    return tf.function(make_step(model))


def child(name: str, variant: str, limit_bytes: int, values: Path) -> None:
    """One variant in this process: warms up, reports its figures, then a step and its time for each line of input."""
    import numpy as np
    import tensorflow as tf

    slab = tf.raw_ops.Empty(shape=[ARENA_MIB - 2, MIB], dtype=tf.uint8)
    del slab
    before = resident_bytes("VmRSS")
    second = SecondDevice() if variant == TWO else None
    model, nets = (MODELS[name](), None) if second is None else halved(name, second.names)
    reported: dict[str, Any] = {}
    scope: Any = contextlib.nullcontext()
    step = step_of(variant, model) if nets is None else tf.function(nets)
    if variant in MEMORY_OPTIMIZERS:
        grappler_with(MEMORY_OPTIMIZERS[variant])
    if variant == "memory optimizer off":
        from tfswap.exporters.function import memory_optimizer_off

        scope = memory_optimizer_off()
    tf.config.experimental.reset_memory_stats("CPU:0")
    if second:
        second.used()  # what it took to make the model is not the step's
    most = 0
    with scope:
        started = time.perf_counter()
        if limit_bytes:
            options = {"tactics": KNOWN_TACTICS, "values": "close"} if variant == CLOSE else {}
            step = under_limit(step, limit_bytes, model, reported, options)
        elif variant in MEMORY_OPTIMIZERS:
            reported["added_nodes"] = added_by_grappler(lambda: step(*model.arguments))
        else:
            step(*model.arguments)
        reported["first_s"] = time.perf_counter() - started
        for _ in range(CHECKED_STEPS - 1):
            step(*model.arguments)
        np.savez(values, *(v.numpy() for v in model.variables))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        step(*model.arguments)
        if second:
            most, _ = second.used()
        print(json.dumps(reported), flush=True)
        for _ in sys.stdin:
            started, cpu_started = time.perf_counter(), time.process_time()
            step(*model.arguments).numpy()
            took = Took(time.perf_counter() - started, time.process_time() - cpu_started)
            peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
            if second:
                there, cpu_s = second.used()
                most = max(most, there)
                peak, took = max(peak, most), took._replace(cpu_s=took.cpu_s + cpu_s)
            print(json.dumps([*took, peak, resident_bytes("VmHWM") - before]), flush=True)


def under_limit(step: Any, limit_bytes: int, model: Model, reported: dict[str, Any], options: Mapping[str, Any]) -> Any:
    """`step` under this limit, or under its floor, and called once."""
    import tfswap

    reported["asked_bytes"] = limit_bytes
    while True:
        made = tfswap.optimize(step, memory_limit=limit_bytes, **options)
        try:
            made(*model.arguments)
            break
        except tfswap.InfeasibleMemoryLimit as error:
            # Where XLA's memory is measured again, the floor can be a little higher again.
            limit_bytes = max(error.floor_bytes, int(1.02 * limit_bytes))
    report = made.report()
    reported |= {"limit_bytes": report.memory_limit_bytes, "predicted_ratio": report.time_ratio}
    reported |= {"swapped": len(report.swapped), "reruns": report.reruns, "host_bytes": report.host_bytes}
    return made


class Running(Child):
    """A process that takes a step when asked to.

    Attributes:
        took: what each step took that counts.
        peak_bytes, resident_bytes: its latest figures.
        reported: what it said of itself when it had warmed up.
    """

    def __init__(self, label: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]):
        super().__init__(label, command, folder, os.environ | environment)
        self.took: list[Took] = []
        self.peak_bytes = self.resident_bytes = 0

    def step(self) -> Took:
        wall_s, cpu_s, self.peak_bytes, self.resident_bytes = self.ask()
        return Took(wall_s, cpu_s)


class Variant(Running):
    """A step in one of TensorFlow's variants, or with a limit, with tfswap around it.

    Attributes:
        values: the file of what the variables are after CHECKED_STEPS.
    """

    def __init__(self, model: str, variant: str, folder: Path, limit_bytes: int = 0, label: str = ""):
        label = label or variant
        self.values = folder / f"{model} {label}.npz"
        environment = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(ARENA_MIB),
            "TFSWAP_PLAN_CACHE": "off",
        }
        command = [sys.executable, __file__, model, f"--child={variant}"]
        command += [f"--limit_bytes={limit_bytes}", f"--values={self.values}"]
        super().__init__(label, command, folder, KERNELS | os.environ | environment)


def take_turns(running: Sequence[Running], rounds: int, title: str) -> None:
    """A step each, round by round."""
    for round_ in progress.over(title, range(rounds + 1)):
        first = round_ % len(running)  # none always follows the same one
        for one in (*running[first:], *running[:first]):
            took = one.step()
            if round_:  # the first is a warm-up
                one.took.append(took)


def difference(one: Path, other: Path) -> float:
    """The largest difference of any variable, over that variable's largest value; 0.0 for the same bits."""
    import numpy as np

    with np.load(one) as a, np.load(other) as b:
        return max(float(abs(a[k] - b[k]).max() / abs(b[k]).max()) for k in a.files)


def compare(model: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All variants of one model: a row each."""
    peers = [p for p in PEERS if p in args.only] if args.only else list(PEERS)
    running = [Variant(model, variant, folder) for variant in (*REFERENCES, *peers)]
    pairs: list[tuple[Variant, Variant]] = []
    for peer in running:
        peer.step()
        if peer.label != "memory optimizer off":
            for variant in (ALONE, CLOSE) if args.close else (ALONE,):
                label = f"{variant} as {peer.label}"
                pairs.append((peer, Variant(model, variant, folder, peer.peak_bytes, label)))
    running += [ours for _, ours in pairs]
    take_turns(running, args.rounds, f"rounds of {model}")
    for variant in running:
        variant.close()
    rows = [row_of(variant, running[:2]) for variant in running]
    for peer, ours in pairs:
        row = rows[running.index(ours)]
        row["over_peer"] = ratios(ours, peer)
        row["limit_kept"] = ours.peak_bytes <= ours.reported["limit_bytes"]
        row["at_peers_peak"] = ours.peak_bytes <= peer.peak_bytes
    show(model, rows)
    return rows


def together(model: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Each of COMBINED with and without tfswap, at one share of the unoptimised peak: a row each.

    All but the first start two at a time: how long that takes is not compared.
    """
    references = [Variant(model, variant, folder) for variant in REFERENCES]
    references[0].step()
    limit_bytes = int(args.together * references[0].peak_bytes)
    peers = ("xla", *COMBINED)
    with ThreadPoolExecutor(2) as starting:
        alone = [starting.submit(Variant, model, peer, folder) for peer in peers]
        ours = [
            starting.submit(Variant, model, variant, folder, limit_bytes, label)
            for variant, label in ((ALONE, ALONE), *((peer, f"{ALONE}, {peer}") for peer in COMBINED))
        ]
    running = [*references, *(one.result() for one in (*alone, *ours))]
    take_turns(running, args.rounds, f"rounds of {model}")
    for variant in running:
        variant.close()
    rows = [row_of(variant, references) | {"asked_bytes": limit_bytes} for variant in running]
    for row in rows:
        row.pop("first_s", None)
        if "limit_bytes" in row:
            row["limit_kept"] = row["peak_bytes"] <= row["limit_bytes"]
    show(model, rows)
    return rows


def ratios(one: Running, other: Running) -> list[float]:
    """Of wall and of CPU time: the medians over the rounds of one's over the other's."""
    pairs = list(zip(one.took, other.took, strict=True))
    return [statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs) for clock in Took._fields]


def row_of(variant: Variant, references: Sequence[Variant]) -> dict[str, Any]:
    differs = [difference(variant.values, r.values) for r in references]
    return {
        "label": variant.label,
        "peak_bytes": variant.peak_bytes,
        "resident_bytes": variant.resident_bytes,
        "took_s": variant.took,
        "over_unoptimised": ratios(variant, references[0]),
        "differs": dict(zip(REFERENCES, differs, strict=True)),
    } | variant.reported


def show(model: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"{model}, medians of {len(rows[0]['took_s'])} rounds; the machine's load is {os.getloadavg()[0]:.1f}")
    print(f"{'':<36}{'MiB':>14}{'':>10}{'over unoptimised':>18}{'over the peer':>15}")
    print(f"{'':<36}{'peak':>7}{'resident':>9}{'step s':>8}{'wall':>10}{'CPU':>8}{'wall':>8}{'CPU':>7}  values")
    for row in rows:
        line = f"{row['label']:<36}{row['peak_bytes'] / MIB:>7.1f}{row['resident_bytes'] / MIB:>9.0f}"
        line += f"{statistics.median(t.wall_s for t in row['took_s']):>8.3f}"
        line += "{:>10.2f}{:>8.2f}".format(*row["over_unoptimised"])
        line += "{:>8.2f}{:>7.2f}  ".format(*row["over_peer"]) if "over_peer" in row else f"{'':>17}"
        same = [name for name, off in row["differs"].items() if not off]
        line += f"as {' and '.join(same)}" if same else f"off by {min(row['differs'].values()):.0e}"
        if "added_nodes" in row:
            line += f"; Grappler added {row['added_nodes']} nodes"
        if "limit_kept" in row:
            line += f"; {row['swapped']} swapped, {row['reruns']} again"
            line += "" if row["limit_kept"] else "; LIMIT BROKEN"
            at_floor = row["limit_bytes"] > row["asked_bytes"]
            line += f"; at its floor, {row['limit_bytes'] / MIB:.1f} MiB" if at_floor else ""
        print(line, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--only", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; all by default")
    parser.add_argument("--rounds", type=int, default=15, help="steps that each variant takes, in turns")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument(
        "--together", type=float, metavar="SHARE", help="two tools in one step, at this share of the unoptimised peak"
    )
    parser.add_argument("--close", action="store_true", help='tfswap also with all tactics and values="close"')
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--limit_bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--values", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for given, known in ((args.models, MODELS), (args.only or (), PEERS)):
        if unknown := [one for one in given if one not in known]:
            parser.error(f"{unknown[0]!r} is not known; there are {', '.join(known)}")
    if args.child and args.child.startswith("{"):
        SecondDevice.serve(json.loads(args.child))
        return 0
    if args.child:
        child(args.models[0], args.child, args.limit_bytes, args.values)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measure = together if args.together else compare
        found = {model: measure(model, args, Path(folder)) for model in args.models or MODELS}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    kept = all(row.get("limit_kept", True) for rows in found.values() for row in rows)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
