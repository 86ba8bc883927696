"""How deep, how wide, or with what batch, a network trains under a memory cap: TensorFlow as it is, and with tfswap.

    python benchmarks/depth.py                          # a cap of 192 MiB; 20 times the depth that fits unoptimised
    python benchmarks/depth.py --cap_mib 512 --times 20 50
    python benchmarks/depth.py --cap_mib 256 --blocks 1000   # 3,000 convolutions, 10^4 layers; a quarter of an hour
    python benchmarks/depth.py --kind wide --cap_mib 256     # the widest Wide-ResNet-28 that fits, both ways
    python benchmarks/depth.py --kind seq2seq --cap_mib 200 --times 1 30    # batches of 400 steps with attention
    python benchmarks/depth.py --json depth.json

Deep: bottleneck ResNets on small images, in plain TensorFlow with momentum (`planning_time.deep_resnet`), by number of
blocks. Wide: Wide-ResNets of 28 layers (Zagoruyko and Komodakis 2016) on 16 images of 32x32, with momentum, by their
multiplier. Seq2seq: a GRU encoder and decoder of 128 with additive attention over 400 steps, looped (seq2seq.py), by
batch. Each try is a process of its own, whose CPU arena is TensorFlow's BFC allocator, hard limited to the cap and
settled as one region, as a GPU's is: what does not fit ends in ResourceExhaustedError. The greatest size that fits
unoptimised is found first, by doubling and bisection; then the same steps, decorated, are tried at multiples of it or,
for the wide ones, searched in the same way. A try trains `--steps` steps; the losses of both are compared at the size
that both reach.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 2**20
WIDE_LAYERS = 28
SIZES = {"deep": "blocks", "wide": "width", "seq2seq": "batch"}
"""What the sizes are, by kind."""


def wide_resnet(multiplier: int) -> tuple[Any, tuple[Any, ...]]:
    """A Wide-ResNet of basic blocks, in plain TensorFlow, with momentum."""
    import tensorflow as tf

    kernels: list[Any] = []

    def kernel(size: int, inner: int, outer: int) -> Any:
        scale = (2 / (size * size * inner)) ** 0.5
        value = scale * tf.random.stateless_normal([size, size, inner, outer], seed=(len(kernels), 7))
        kernels.append(tf.Variable(value))
        return kernels[-1]

    def active(h: Any) -> Any:
        mean, variance = tf.nn.moments(h, [0, 1, 2])
        return tf.nn.relu((h - mean) * tf.math.rsqrt(variance + 1e-3))

    stem, blocks, inner = kernel(3, 3, 16), [], 16
    for stage in range(3):
        outer = 16 * multiplier << stage
        for i in range((WIDE_LAYERS - 4) // 6):
            shortcut = None if i else kernel(1, inner, outer)
            blocks.append((kernel(3, inner, outer), kernel(3, outer, outer), shortcut, 2 if stage and not i else 1))
            inner = outer
    slots = [tf.Variable(tf.zeros_like(k)) for k in kernels]

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = tf.nn.conv2d(x, stem, 1, "SAME")
            for first, second, shortcut, stride in blocks:
                kept = h if shortcut is None else tf.nn.conv2d(active(h), shortcut, stride, "SAME")
                h = tf.nn.conv2d(active(h), first, stride, "SAME")
                h = tf.nn.conv2d(active(h), second, 1, "SAME") + kept
            loss = tf.reduce_mean(tf.reduce_mean(active(h), [1, 2]) ** 2)
        for one, slot, gradient in zip(kernels, slots, tape.gradient(loss, kernels), strict=True):
            slot.assign(0.9 * slot + gradient)
            one.assign_sub(1e-3 * slot)
        return loss

    return step, (tf.zeros([16, 32, 32, 3]),)


def build(kind: str, size: int) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments."""
    import tensorflow as tf
    from planning_time import deep_resnet
    from seq2seq import seq2seq

    if kind == "seq2seq":
        step, arguments = seq2seq(size)
        return tf.function(step), arguments
    step, (like,) = (wide_resnet if kind == "wide" else deep_resnet)(size)
    return step, (like + tf.random.stateless_normal(like.shape, seed=(1, 2)),)


def child(kind: str, size: int, optimised: bool, steps: int, cap_mib: int) -> dict[str, Any]:
    """One try in this process."""
    import tensorflow as tf

    slab = tf.raw_ops.Empty(shape=[cap_mib - 2, MIB], dtype=tf.uint8)
    del slab
    tf.config.experimental.reset_memory_stats("CPU:0")
    found: dict[str, Any] = {"kind": kind, "size": size, "optimised": optimised}
    try:
        return found | trained(*build(kind, size), optimised, steps)
    except tf.errors.ResourceExhaustedError:
        return found | {"fits": False}


def trained(step: Any, arguments: tuple[Any, ...], optimised: bool, steps: int) -> dict[str, Any]:
    """Figures of some steps. Raises ResourceExhaustedError where they do not fit, but says it of a refusal."""
    import tensorflow as tf

    begin = time.perf_counter()
    operations = step.get_concrete_function(*arguments).graph.get_operations()
    found: dict[str, Any] = {"nodes": len(operations), "tracing_s": time.perf_counter() - begin}
    found["convolutions"] = sum(op.type == "Conv2D" for op in operations)
    if optimised:
        import tfswap

        step = tfswap.optimize(step)
    times, losses = [], []
    try:
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(float(step(*arguments).numpy()))
            times.append(time.perf_counter() - begin)
    except Exception as error:
        floor = getattr(error, "floor_bytes", None)
        if floor is None:
            raise
        return found | {"fits": False, "floor_mib": floor / MIB}
    rest = times[1:] or times
    found |= {"fits": True, "first_s": times[0], "step_s": statistics.median(rest), "steps_s": rest, "losses": losses}
    found["peak_mib"] = tf.config.experimental.get_memory_info("CPU:0")["peak"] / MIB
    found["resident_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if optimised:
        report = step.report()
        found |= {
            "swapped": len(report.swapped),
            "recomputed": len(report.recomputed),
            "reruns": report.reruns,
            "predicted_ratio": report.time_ratio,
        }
        found |= {"baseline_mib": report.baseline_peak_bytes / MIB, "host_mib": report.host_bytes / MIB}
    return found


def attempt(size: int, optimised: bool, args: argparse.Namespace) -> dict[str, Any]:
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(args.cap_mib),
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TFSWAP_PLAN_CACHE": "off",
    }
    command = [sys.executable, __file__, "--child", str(int(optimised)), "--blocks", str(size)]
    command += ["--steps", str(args.steps), "--cap_mib", str(args.cap_mib), "--kind", args.kind]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"size {size}: a run failed\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    line = f"{'tfswap' if optimised else 'unoptimised':<12}{size:>7}"
    if "nodes" in found:
        line += f"{found['convolutions']:>8}{found['nodes']:>9}"
    if found["fits"]:
        line += f"{found['peak_mib']:>9.1f}{found['first_s']:>9.1f}{found['step_s']:>9.2f}"
        if optimised:
            line += (
                f"   of {found['baseline_mib']:.0f} MiB; {found['swapped']} swapped, {found['reruns']} kernels again"
            )
    else:
        line += "   out of memory" + (f"; floor {found['floor_mib']:.0f} MiB" if "floor_mib" in found else "")
    print(line, flush=True)
    return found


def search(optimised: bool, start: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tries from `start` on, the largest that fits last."""
    tries = [attempt(start, optimised, args)]
    while tries[-1]["fits"]:
        tries.append(attempt(2 * tries[-1]["size"], optimised, args))
    fits, fails = tries[-2]["size"] if len(tries) > 1 else 0, tries[-1]["size"]
    while fails - fits > 1:
        tries.append(attempt((fits + fails) // 2, optimised, args))
        if tries[-1]["fits"]:
            fits = tries[-1]["size"]
        else:
            fails = tries[-1]["size"]
    return sorted(tries, key=lambda t: (t["fits"], t["size"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap_mib", type=int, default=192, help="the arena's size")
    parser.add_argument("--times", type=int, nargs="*", default=[1, 20], help="multiples of the unoptimised depth")
    parser.add_argument("--kind", choices=SIZES, default="deep")
    parser.add_argument("--blocks", type=int, help="this size, both ways, and no search")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(child(args.kind, args.blocks, bool(args.child), args.steps, args.cap_mib)))
        return 0
    size = SIZES[args.kind]
    print(f"{'':<12}{size:>7}{'convs':>8}{'nodes':>9}{'peak MiB':>9}{'first s':>9}{'step s':>9}", flush=True)
    if args.blocks:
        rows = [attempt(args.blocks, optimised, args) for optimised in (False, True)]
        held = rows[-1]["fits"]
    else:
        rows = search(False, 1, args)
        base = rows[-1]
        if not base["fits"]:
            parser.exit(1, "not even size 1 fits unoptimised: raise --cap_mib\n")
        if args.kind == "wide":
            rows += search(True, base["size"], args)
            held = rows[-1]["fits"]
        else:
            rows += [attempt(times * base["size"], True, args) for times in args.times]
            held = all(row["fits"] for row in rows if row["optimised"])
        for row in rows:
            if row["size"] == base["size"] and row["fits"] and row["optimised"]:
                off = max(abs(a / b - 1) for a, b in zip(row["losses"], base["losses"], strict=True))
                reported = f"differ by {off:.0e}: Grappler rewrites the unoptimised step" if off else "are the same"
                print(f"losses at size {row['size']} {reported}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
