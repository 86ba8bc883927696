"""How planning and rewriting grow with depth, up to 10,000 convolutions; and very deep nets on a machine of 12 GiB.

    python benchmarks/scale.py                              # 50 to 2,500 layers; half an hour on a quiet core
    python benchmarks/scale.py --layers 50 152 500 --json scale.json
    python benchmarks/scale.py --layers 10001               # the stretch: about 740,000 nodes, 20 GiB
    python benchmarks/scale.py --simulate 1517 2500         # at ImageNet size on a described K40c

The table: bottleneck ResNets on small images (`planning_time.deep_resnet`, three convolutions a block), each traced in
a process of its own, then imported, analysed, planned for `--limit`, rewritten and exported as `tfswap.optimize` does
it; nothing runs. Times are CPU seconds of the whole process, TensorFlow's tracing included: all of these run on one
core, and other work on the machine changes CPU seconds little. Grappler, whose work TensorFlow otherwise does at the
first call, stands next to the total. "MiB more" is how far the process's peak of physical memory grew past what it held
after tracing, which "traced" gives; with Grappler's copies of the graph. Checked: for the largest, the plan takes under
`--plan_s`, planning and rewriting together less than tracing, and `--more_gib` at most; from each size to the next the
total grows no faster than n log n, with a fifth for noise. Exit status 1 where that does not hold.

The simulation: ResNets as SuperNeurons has them (PPoPP'18: stages of 6, 32, n and 6 bottleneck blocks, 224x224,
batch 16), with batch normalisation and momentum, planned for a Tesla K40c of 12 GB with 64 GB of host memory
(`tfswap.simulate(device="k40c")`). No weight is ever allocated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import planning_time
from peers import resident_bytes

from tfswap.support import progress

MIB = 2**20
LAYERS = (50, 152, 500, 1001, 1517, 2500)
STAGE_WIDTHS = (64, 128, 256, 512)
NOISE = 1.2


def plan_one(layers: int, limit: str) -> dict[str, Any]:
    """Figures of one depth, in this process. First and last layer count, though these nets are their blocks alone."""
    import tfswap.ops

    assert tfswap.ops.status().loaded  # built and loaded before the clock starts
    blocks = round((layers - 2) / 3)
    step, arguments = planning_time.deep_resnet(blocks)
    started = time.process_time()
    concrete = step.get_concrete_function(*arguments)
    tracing_s = time.process_time() - started
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before = resident_bytes("VmRSS")
    stages, nodes = planning_time.staged(concrete, arguments, limit, clock=time.process_time)
    return {
        "layers": layers,
        "convolutions": 3 * blocks,
        "nodes": nodes,
        "tracing_s": tracing_s,
        "stages_s": stages,
        "total_s": sum(stages[stage] for stage in planning_time.STAGES),
        "traced_mib": before / MIB,
        "more_mib": (resident_bytes("VmHWM") - before) / MIB,
    }


def supernet(layers: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A deep ResNet at ImageNet size, to be traced only: its variables have no values."""
    import tensorflow as tf
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    counts = (6, 32, round((layers - 2) / 3) - 44, 6)
    weights: list[Any] = []

    def weight(*shape: int) -> Any:
        weights.append(UninitializedVariable(trainable=True, shape=shape, dtype=tf.float32))
        return weights[-1]

    def convolution(size: int, inner: int, outer: int) -> tuple[Any, Any, Any]:
        return weight(size, size, inner, outer), weight(outer), weight(outer)

    def applied(h: Any, made: tuple[Any, Any, Any], stride: int = 1) -> Any:
        kernel, scale, offset = made
        h = tf.nn.conv2d(h, kernel, stride, "SAME")
        return tf.raw_ops.FusedBatchNormV3(
            x=h, scale=scale, offset=offset, mean=tf.zeros([0]), variance=tf.zeros([0]), is_training=True
        ).y

    stem, blocks, inner = convolution(7, 3, 64), [], 64
    for stage, (count, width) in enumerate(zip(counts, STAGE_WIDTHS, strict=True)):
        for i in range(count):
            stride = 2 if stage and not i else 1
            shortcut = None if i else convolution(1, inner, 4 * width)
            three = convolution(1, inner, width), convolution(3, width, width), convolution(1, width, 4 * width)
            blocks.append((three, shortcut, stride))
            inner = 4 * width
    head = weight(inner, 1000)
    slots = [UninitializedVariable(trainable=False, shape=w.shape, dtype=tf.float32) for w in weights]

    @tf.function
    def train_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.nn.max_pool2d(tf.nn.relu(applied(x, stem, 2)), 3, 2, "SAME")
            for (first, second, third), shortcut, stride in blocks:
                kept = h if shortcut is None else applied(h, shortcut, stride)
                h = tf.nn.relu(applied(h, first, stride))
                h = tf.nn.relu(applied(h, second))
                h = tf.nn.relu(applied(h, third) + kept)
            logits = tf.reduce_mean(h, [1, 2]) @ head
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        for w, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            tf.raw_ops.ResourceApplyMomentum(var=w.handle, accum=slot.handle, lr=1e-2, grad=gradient, momentum=0.9)
        return loss

    return train_step, (tf.TensorSpec([batch, 224, 224, 3]), tf.TensorSpec([batch], tf.int32))


def simulate_one(layers: int, batch: int, device: str) -> dict[str, Any]:
    """The ends of the curve of memory against time, in this process."""
    import tfswap

    step, specs = supernet(layers, batch)
    curve = tfswap.simulate(step, *specs, device=device, limits=2)
    fitting = [point for point in curve.points if curve.fits(point)]
    fastest = min(fitting, key=lambda point: point.step_s) if fitting else None
    return {
        "layers": layers,
        "nodes": len(step.get_concrete_function(*specs).graph.get_operations()),
        "memory_mib": (curve.memory_bytes or 0) / MIB,
        "baseline_mib": curve.baseline_peak_bytes / MIB,
        "baseline_s": curve.baseline_s,
        "floor_mib": curve.floor_bytes / MIB,
        "fits": curve.feasible,
        "step_s": fastest.step_s if fastest else None,
        "host_mib": fastest.host_bytes / MIB if fastest else None,
        "machine": curve.machine,
    }


def spawn(*child: str) -> dict[str, Any]:
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0", "TFSWAP_PLAN_CACHE": "off"}
    command = [sys.executable, __file__, *child]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(child)}: a run failed\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(layers: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    stages = planning_time.STAGES
    print(f"{'':<7}{'':>8}{'':>9}{'CPU seconds':>14}{'':>{13 * len(stages)}}{'MiB':>14}")
    print(f"{'layers':<7}{'convs':>8}{'nodes':>9}{'tracing':>9}{'':>5}" + "".join(f"{s:>17}" for s in stages), end="")
    print(f"{'total':>9}{planning_time.GRAPPLER:>10}{'traced':>9}{'more':>7}")
    rows: list[dict[str, Any]] = []
    for one in progress.over("depths", sorted(layers)):
        row = spawn("--child=plan", f"--layers={one}", f"--limit={args.limit}")
        s = row["stages_s"]
        row["broken"] = []
        if one == max(layers):
            row["broken"] += ["the plan takes too long"] * (s["plan"] > args.plan_s)
            row["broken"] += ["longer than tracing"] * (row["total_s"] > row["tracing_s"])
            row["broken"] += ["more memory"] * (row["more_mib"] > args.more_gib * 1024)
        if rows:
            small, large = (r["nodes"] * math.log(r["nodes"]) for r in (rows[-1], row))
            row["growth"] = row["total_s"] / rows[-1]["total_s"] / (large / small)
            row["broken"] += ["faster than n log n"] * (row["growth"] > NOISE)
        rows.append(row)
        line = f"{one:<7}{row['convolutions']:>8}{row['nodes']:>9}{row['tracing_s']:>9.1f}{'':>5}"
        line += "".join(f"{s[stage]:>17.1f}" for stage in stages)
        line += f"{row['total_s']:>9.1f}{s[planning_time.GRAPPLER]:>10.1f}"
        line += f"{row['traced_mib']:>9.0f}{row['more_mib']:>7.0f}  {'; '.join(row['broken'])}"
        print(line, flush=True)
    return rows


def simulated(layers: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for one in progress.over("depths", layers):
        row = spawn("--child=simulate", f"--simulate={one}", f"--batch={args.batch}", f"--device={args.device}")
        rows.append(row)
        fits = f"fits: {row['step_s']:.1f} s a step, {row['host_mib']:.0f} MiB on the host" if row["fits"] else "NO"
        print(
            f"{one} layers, batch {args.batch}, {row['nodes']} nodes, on {row['machine']}, "
            f"{row['memory_mib']:.0f} MiB: unoptimised {row['baseline_mib']:.0f} MiB and {row['baseline_s']:.1f} s; "
            f"floor {row['floor_mib']:.0f} MiB; {fits}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS, help="weighted layers of the table's nets")
    parser.add_argument("--limit", default="60%", help="share of the planned unoptimised peak")
    parser.add_argument("--plan_s", type=float, default=60, help="seconds that the planner may take")
    parser.add_argument("--more_gib", type=float, default=4, help="memory that planning and rewriting may take")
    parser.add_argument("--simulate", type=int, nargs="*", default=(), help="these depths at ImageNet size instead")
    parser.add_argument("--batch", type=int, default=16, help="images, of the simulation")
    parser.add_argument("--device", default="k40c", help="of the simulation, as tfswap.simulate knows it")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", choices=["plan", "simulate"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == "plan":
        print(json.dumps(plan_one(args.layers[0], args.limit)))
        return 0
    if args.child == "simulate":
        print(json.dumps(simulate_one(args.simulate[0], args.batch, args.device)))
        return 0
    rows = simulated(args.simulate, args) if args.simulate else table(args.layers, args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row.get("fits", True) and not row.get("broken") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
